"""The driver's side of a live test: a real control server, and scenarios in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from feedtune.records import BlockPlan, StepRecord
from feedtune.settings import LoaderSettings
from feedtune.trials.server import ControlServer

PATIENCE_S = 60.0  # only a failing test waits so long
HERE = Path(__file__).parent


class Zygote:
    """Starts scenarios."""

    def __init__(self) -> None:
        root = str(HERE.parents[2])
        env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "live_zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def ask(self, request: dict) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def block(settings: LoaderSettings | int, steps: int = 6, kind: str = "candidate", **changes) -> BlockPlan:
    """A block of exactly ``steps`` steps."""
    if isinstance(settings, int):
        settings = LoaderSettings(settings)
    values = {"warmup": 1, "cycle": 1, "min_cycles": steps - 1, "target_s": 0.0, "max_s": 60.0}
    return BlockPlan(0, kind, settings, **{**values, **changes})


class Live:
    """One scenario under the hook."""

    def __init__(self, zygote: Zygote, folder: Path, name: str, rule=lambda *_: 0, **request) -> None:
        self.folder = folder
        self.out = folder / "out.jsonl"
        self.server = ControlServer("secret", rule)
        self.state = self.server.start_state(1)
        self._zygote = zygote
        self._k = 0
        (folder / "boot" / "seen").mkdir(parents=True)
        config = {
            "host": "127.0.0.1",
            "port": self.server.port,
            "token": "secret",
            "records": str(folder),
            "folder": str(folder / "boot"),
            "start": 1,
        }
        self.pid = zygote.ask({"name": name, "out": str(self.out), "config": config, **request})
        self.status: int | None = None

    def hello(self) -> dict:
        self._expect(lambda: bool(self.state.hellos))
        return self.state.hellos[0]

    def run(self, *plans: BlockPlan) -> list[dict]:
        """Run blocks one after the other: what the rank reported of each."""
        results = []
        for plan in plans:
            k = self.begin(plan)
            self._expect(lambda k=k: (k, 0) in self.state.results or bool(self.state.failures))
            if self.state.failures:
                break
            results.append(self.state.results[k, 0])
        return results

    def begin(self, plan: BlockPlan) -> int:
        """Let the rank begin a block, whose number is returned."""
        k, self._k = self._k, self._k + 1
        self.server.publish(BlockPlan(**{**plan.__dict__, "k": k}))
        return k

    def finish(self) -> list[dict]:
        """Say that all is done, wait until the rank has heard it, and end it: all that it logged."""
        self.server.publish_end(self._k)
        self._expect(lambda: bool(self.state.done))
        self.kill()
        return self.log()

    def ended(self) -> int:
        """Wait for the script's own end: the exit code that it has, or would have if it were not kept."""
        if self.status is None:
            deadline = time.monotonic() + PATIENCE_S
            # A process that never connects ends without a word to the server.
            while not self.server.wait(lambda: bool(self.state.left) or self._gone(), 0.1):
                assert time.monotonic() < deadline, self.errors()
            if self.state.left:
                os.kill(self.pid, signal.SIGKILL)
            status = self._zygote.ask({"reap": self.pid})
            self.status = self.state.left.get(0, status)
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = self._zygote.ask({"reap": self.pid})

    def connections(self) -> int:
        """How many processes are connected to the control server."""
        with self.server.locked():
            return len(self.server._open)

    def close(self) -> None:
        self.kill()
        self.server.close()

    def log(self) -> list[dict]:
        if not self.out.exists():
            return []
        text = self.out.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def errors(self) -> str:
        return Path(f"{self.out}.err").read_text()

    def records(self) -> list[tuple[int, StepRecord]]:
        lines = (self.folder / "steps.rank0.jsonl").read_text().splitlines()
        return [(line[0], StepRecord(*line[1:])) for line in map(json.loads, lines)]

    def _expect(self, ready) -> None:
        def look() -> bool:
            return ready() or self._gone()

        self.server.wait(look, PATIENCE_S)
        with self.server.locked():
            assert ready(), f"{self.log()[-3:]}\n{self.errors()}"

    def _gone(self) -> bool:
        """Whether the scenario has ended (a zombie until it is reaped)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return True
        return stat.rpartition(")")[2].split()[0] == "Z"


def bare(zygote: Zygote, folder: Path, name: str, **request) -> list[dict]:
    """What the scenario logs without the hook."""
    out = folder / "bare.jsonl"
    pid = zygote.ask({"name": name, "out": str(out), "config": None, **request})
    status = zygote.ask({"reap": pid})
    assert status == 0, Path(f"{out}.err").read_text()
    return [json.loads(line) for line in out.read_text().splitlines()]
