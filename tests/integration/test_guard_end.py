"""However the driver ends, nothing of the trial is left: no process, no shared memory, no scratch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tuning import unlocked_scratch

from feedtune.launch.boot import BootFolder
from feedtune.launch.policy import default_policy
from feedtune.launch.process import GuardedProcess
from shard_tools.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import json, os, sys, time
from pathlib import Path
from feedtune.launch.boot import BootFolder
from feedtune.launch.policy import default_policy
from feedtune.launch.process import GuardedProcess
a = json.loads(sys.argv[1])
cwd = Path(a["cwd"])
p = GuardedProcess.start(a["command"], env=dict(os.environ), cwd=cwd, log=Path(a["log"]), run_id=a["run_id"],
    policy=default_policy(a["command"], cwd, os.environ, [Path(a["run"])]), tier=a["tier"])
print(json.dumps(dict(upper=str(p.upper), pid=p.pid)), flush=True)
while True:
    p.poll()
    time.sleep(0.02)
"""

# A launcher whose workers are in sessions of their own, a double-forked daemon without the run's
# variable, a process that keeps making short-lived children, and shared memory under torch's name.
TREE = r"""
import os, subprocess, sys, time
shm = "/dev/shm/torch_%d_1_%s" % (os.getpid(), sys.argv[1])
open(shm, "w").write("x" * 4096)
sleeper = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
for _ in range(2): subprocess.Popen(sleeper, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, sleeper, {"PATH": os.environ["PATH"]})
    os._exit(0)
os.wait()
if os.fork() == 0:
    while True:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(1)
            os._exit(0)
        os.wait()
if len(sys.argv) > 3: open("started-" + sys.argv[1], "w")
open(os.path.join(sys.argv[2], "started"), "w")
time.sleep(600)
"""


def alive(mark: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in command and state not in "ZX":
                found.append(f"{name} {command!r}")
    return found


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


class Trial:
    """A driver in a process of its own, with a tree below it."""

    def __init__(self, folder: Path, tier: str) -> None:
        self.cwd, self.run = folder / "project", folder / "run"
        self.cwd.mkdir()
        self.run.mkdir()
        self.mark = uuid.uuid4().hex
        self.tier = tier
        self.driver: subprocess.Popen[str] | None = None
        (self.cwd / "tree.py").write_text(TREE)

    def start(self, shell: str, **options: object) -> None:
        request = {
            "command": ["bash", "-c", shell], "cwd": str(self.cwd), "log": str(self.run / "log"),
            "run": str(self.run), "run_id": self.mark, "tier": self.tier,
        }  # fmt: skip
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(request)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, **options,
        )  # type: ignore[call-overload]  # fmt: skip

    def scratch(self) -> Path:
        assert self.driver is not None
        assert self.driver.stdout is not None
        return Path(json.loads(self.driver.stdout.readline())["upper"])

    def chain(self) -> str:
        # The other tiers redirect in the hook, which this program does not have.
        writes = "writes" if self.tier == "overlay" else ""
        return f"{sys.executable} tree.py {self.mark} {self.run} {writes}; touch {self.run}/ran_on"

    def nothing_left(self) -> bool:
        return not alive(self.mark) and not list(Path("/dev/shm").glob(f"*{self.mark}*"))

    def close(self) -> None:
        if self.driver is not None:
            self.driver.kill()
            self.driver.wait()
            assert self.driver.stdout is not None
            self.driver.stdout.close()


@pytest.fixture
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    made = Trial(tmp_path, getattr(request, "param", "overlay"))
    yield made
    made.close()


@pytest.mark.parametrize("trial", ["overlay", "python+landlock", "python"], indirect=True)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_tree_ends_with_its_driver(trial: Trial, end: signal.Signals) -> None:
    trial.start(trial.chain())
    upper = trial.scratch()
    assert wait_for((trial.run / "started").exists, 20), (trial.run / "log").read_text()
    assert alive(trial.mark)
    assert list(Path("/dev/shm").glob(f"*{trial.mark}*"))
    assert trial.driver is not None
    trial.driver.send_signal(end)
    assert wait_for(lambda: trial.nothing_left() and not upper.parents[1].exists(), 5), alive(trial.mark)
    assert not (trial.run / "ran_on").exists()
    assert sorted(os.listdir(trial.cwd)) == ["tree.py"]


@pytest.mark.parametrize(
    "at", [0.0, 0.03, 0.08, 0.2, "random", pytest.param("random again", marks=pytest.mark.slow)]
)
def test_a_driver_killed_at_any_moment_leaves_nothing(trial: Trial, at: float | str) -> None:
    before = unlocked_scratch()
    trial.start(trial.chain())
    pause = random.uniform(0, 0.6) if isinstance(at, str) else at
    time.sleep(pause)
    assert trial.driver is not None
    trial.driver.kill()
    trial.driver.wait()
    assert wait_for(lambda: trial.nothing_left() and not unlocked_scratch() - before, 5), (
        pause,
        alive(trial.mark),
    )
    time.sleep(0.3)
    assert trial.nothing_left()
    assert not (trial.run / "ran_on").exists()
    assert sorted(os.listdir(trial.cwd)) == ["tree.py"]


def test_ctrl_c_in_the_terminal_reaches_the_driver_only(trial: Trial) -> None:
    """The foreground group gets SIGINT; the tree ends because the driver does, from the top."""
    trial.start(trial.chain(), start_new_session=True)
    trial.scratch()
    assert wait_for((trial.run / "started").exists, 20)
    assert trial.driver is not None
    os.killpg(trial.driver.pid, signal.SIGINT)
    assert wait_for(trial.nothing_left, 5), alive(trial.mark)
    assert not (trial.run / "ran_on").exists()
    assert "KeyboardInterrupt" not in (trial.run / "log").read_text()


def started(folder: Path, command: list[str], **options: Any) -> GuardedProcess:
    (folder / "run").mkdir(exist_ok=True)
    env = dict(os.environ)
    policy = default_policy(command, folder, env, [folder / "run"])
    return GuardedProcess.start(
        command,
        env=env,
        cwd=folder,
        log=folder / "run" / "log",
        run_id=uuid.uuid4().hex,
        policy=policy,
        **options,
    )


def test_exit_codes_and_output(tmp_path: Path) -> None:
    for shell, code in (("echo out; echo err >&2; exit 7", 7), ("kill -TERM $$", -15), ("cat; exit 0", 0)):
        with started(tmp_path, ["sh", "-c", shell]) as process:
            assert wait_for(lambda process=process: process.poll() is not None, 10)
            assert process.poll() == code
    assert (tmp_path / "run" / "log").read_text() == "out\nerr\n"


def test_kill_is_complete_and_can_be_repeated(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = started(
        tmp_path, ["sh", "-c", f"sleep 600 & setsid sh -c 'sleep 600; : {mark}' & wait; : {mark}"]
    )
    assert wait_for(lambda: len(alive(mark)) >= 2, 10)
    upper = process.upper
    assert upper is not None
    assert upper.exists()
    process.kill()
    assert not alive(mark)
    assert not upper.exists()
    process.kill()
    assert process.poll() == -signal.SIGKILL


def test_programs_left_in_the_background_end_too(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = started(tmp_path, ["sh", "-c", f"setsid sh -c 'sleep 600; : {mark}' & exit 0"])
    assert wait_for(lambda: process.poll() == 0, 10)
    assert alive(mark)
    process.kill()
    assert not alive(mark)


def test_signals_are_not_ignored_in_the_command(tmp_path: Path) -> None:
    code = "import signal; print([signal.getsignal(s) is signal.SIG_IGN for s in (1, 2, 3, 15)], flush=True)"
    with started(tmp_path, [sys.executable, "-c", code]) as process:
        assert wait_for(lambda: process.poll() == 0, 10)
    assert (tmp_path / "run" / "log").read_text() == "[False, False, False, False]\n"


def test_a_command_that_signals_its_group_does_not_reach_the_guardian(tmp_path: Path) -> None:
    with started(tmp_path, ["sh", "-c", "kill -KILL 0"]) as process:
        assert wait_for(lambda: process.poll() is not None, 10)
        assert process.poll() == -signal.SIGKILL
        assert not process.notes


def test_a_guardian_killed_from_outside_takes_the_tree_along(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = started(tmp_path, ["sh", "-c", f"setsid sh -c 'sleep 600; : {mark}' & sleep 600; : {mark}"])
    assert wait_for(lambda: len(alive(mark)) >= 2, 10)
    upper = process.upper
    assert upper is not None
    process._guardian.kill()
    assert wait_for(lambda: process.poll() is not None, 10)
    assert not alive(mark)
    assert not upper.parents[1].exists()
    assert any("guardian" in note for note in process.notes)


@pytest.mark.parametrize(
    "command", [["no-such-program-anywhere"], ["./not-executable"], ["./folder"], ["./text"], []]
)
def test_a_command_that_cannot_be_started_is_bad_input(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("echo hi\n")
    (tmp_path / "text").chmod(0o755)
    before = unlocked_scratch()
    with pytest.raises(BadInput, match=command[0] if command else "no command"):
        started(tmp_path, command)
    assert unlocked_scratch() <= before


def test_a_missing_working_folder_is_bad_input(tmp_path: Path) -> None:
    policy = default_policy(["true"], tmp_path, {}, [])
    with pytest.raises(BadInput, match="working folder"):
        GuardedProcess.start(
            ["true"], env={}, cwd=tmp_path / "missing", log=tmp_path / "log", run_id="x", policy=policy
        )


def test_an_unknown_tier_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"magic.*overlay"):
        started(tmp_path, ["true"], tier="magic")


def test_a_process_that_carries_the_runs_mark_ends_wherever_it_stands(tmp_path: Path) -> None:
    """Started by a daemon outside of the tree, on the command's behalf; another run's is left alone."""
    policy = default_policy(["sleep"], tmp_path, {}, [])
    mark, sleeper = uuid.uuid4().hex, [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(sleeper, env={**os.environ, "FEEDTUNE_RUN_ID": mark}, start_new_session=True)
    other = subprocess.Popen(sleeper, env={**os.environ, "FEEDTUNE_RUN_ID": mark[::-1]})
    try:
        process = GuardedProcess.start(
            ["sleep", "600"], env=os.environ, cwd=tmp_path, log=tmp_path / "log", run_id=mark, policy=policy
        )
        process.kill()
        assert ours.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for left in (ours, other):
            left.kill()
            left.wait()


@pytest.mark.parametrize("who", ["driver", "guardian"])
def test_the_start_up_folder_ends_with_the_command(tmp_path: Path, who: str) -> None:
    """It holds the token: also where one of the two that know of it is killed."""
    boot = BootFolder(tmp_path / "run" / "boot", "abc", {"token": "s3cr3t"})
    process = started(tmp_path, ["sleep", "600"], boot=boot, number=3)
    assert '"start": 3' in (boot.path / "config.json").read_text()
    if who == "guardian":
        process._guardian.kill()
    process.kill()
    assert not boot.path.exists()


def test_the_start_up_folder_of_a_command_that_cannot_be_started_goes(tmp_path: Path) -> None:
    boot = BootFolder(tmp_path / "run" / "boot", "abc", {"token": "s3cr3t"})
    with pytest.raises(BadInput, match="no-such-program"):
        started(tmp_path, ["no-such-program"], boot=boot)
    assert not boot.path.exists()


def test_a_log_folder_of_a_launcher_that_has_ended_goes(tmp_path: Path) -> None:
    """Only its ranks name it, and they are gone when the end comes."""
    folder = Path(tempfile.mkdtemp(prefix="torchelastic_"))
    other = Path(tempfile.mkdtemp(prefix="torchelastic_"))
    try:
        rank = f"TORCHELASTIC_ERROR_FILE={folder}/0/error.json sleep 2.5"
        process = started(tmp_path, ["sh", "-c", rank])
        assert wait_for(lambda: process.poll() is not None, 20)
        process.kill()
        assert not folder.exists()
        assert other.exists()
    finally:
        other.rmdir()


def test_other_shared_memory_stays(tmp_path: Path) -> None:
    """A data set in /dev/shm that the training maps is nobody's leftover."""
    data = Path(f"/dev/shm/psm_{uuid.uuid4().hex}")
    data.write_bytes(b"x" * 4096)
    os.utime(data)
    time.sleep(1.2)
    code = (
        f"import mmap, time; f = open('{data}', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); time.sleep(600)"
    )
    try:
        process = started(tmp_path, [sys.executable, "-c", code])
        time.sleep(0.3)
        process.kill()
        assert data.exists()
    finally:
        data.unlink()
