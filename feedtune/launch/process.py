"""The driver's handle on a guarded command."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from feedtune.launch import leftovers, reaper
from feedtune.launch.boot import BootFolder
from feedtune.launch.policy import WritePolicy
from shard_tools.errors import BadInput, Missing

TIERS = ("overlay", "python+landlock", "python")
_CODE = (
    "import sys; sys.path.append(sys.argv[1]); from feedtune.launch.guardian import main; main(sys.argv[2:])"
)
_START_SECONDS = 60.0
_END_SECONDS = 60.0


class GuardedProcess:
    """A command that runs under a write guard and ends with its driver, however that ends.

    Made by `start`. `kill` must be called at the end, also after `poll` returned a code: programs
    left in the background and the scratch folder live until then.
    """

    def __init__(self, guardian: subprocess.Popen[bytes], run_id: str, folders: Sequence[str]) -> None:
        self.pid = 0
        self.tier = ""
        self.notes: list[str] = []
        self.upper: Path | None = None
        self._guardian = guardian
        self._folders = folders
        self._mark = b"FEEDTUNE_RUN_ID=" + os.fsencode(run_id)
        self._since = time.time()
        self._code: int | None = None
        self._scratch = ""
        self._buffer = b""
        self._open = True
        self._lock = threading.RLock()
        self._ended = False

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        run_id: str,
        policy: WritePolicy,
        tier: str = "auto",
        boot: BootFolder | None = None,
        number: int = 1,
    ) -> GuardedProcess:
        """Start a command under guard.

        Args:
            command: program and arguments; the program is looked up on ``env``'s PATH.
            env: the whole environment; FEEDTUNE_RUN_ID is added.
            cwd: where to start it.
            log: file that stdout and stderr are appended to; stdin is /dev/null.
            run_id: marks every process of the tree; unique to this run.
            policy: what may be written for real.
            tier: ``overlay``, ``python+landlock``, ``python``, or ``auto`` for the first that works.
            boot: start-up folder; made here and removed with the command.
            number: which start of the command it is, for the start-up folder.

        Raises:
            BadInput: the command cannot be executed, ``cwd`` is no folder, the tier is unknown.
            Missing: the tier that was asked for does not work on this machine.
        """
        if not command:
            raise BadInput("no command to start", "put it after --, as in: feedtune tune -- python train.py")
        if not cwd.is_dir():
            raise BadInput(f"{cwd}: the working folder does not exist")
        if tier not in ("auto", *TIERS):
            raise BadInput(f"write guard {tier!r} is unknown: choose auto, {', '.join(TIERS)}")
        log.touch(mode=0o600)
        folders = [str(boot.path.absolute())] if boot is not None else []
        process = cls(_start_guardian(log, folders), run_id, folders)
        try:
            if boot is not None:
                boot.set_start(number)  # after the guardian, which removes it whatever happens to us
            process._send(
                command=list(command),
                env={**env, "FEEDTUNE_RUN_ID": run_id},
                cwd=str(cwd.absolute()),
                log=str(log.absolute()),
                run_id=run_id,
                policy=asdict(policy),
                tier=tier,
                boot=folders[0] if folders else None,
                driver=os.getpid(),
            )
            process._await_start(command)
        except BaseException:
            process.kill()
            raise
        return process

    def poll(self) -> int | None:
        """The command's exit code (negative: the signal that ended it), None while it runs."""
        with self._lock:
            while self._code is None and (event := self._event(0.0)) is not None:
                self._take(event)
            if self._code is None and not self._open and not self._ended:
                # The guardian was killed: the command died with it.
                self.kill()
                self.notes.append("the guardian process was killed from outside; everything was ended")
            return self._code

    def kill(self) -> None:
        """End the whole tree, remove scratch and start-up folder; nothing is left when this returns."""
        with self._lock:
            if self._ended:
                return
            with contextlib.suppress(OSError):
                assert self._guardian.stdin is not None
                self._guardian.stdin.close()
            self._drain(_END_SECONDS)
            if self._guardian.wait() != 0:
                self._clean_up_alone()
            if self._code is None:
                self._code = -signal.SIGKILL
            self._ended = True  # not before, so that a call that was interrupted can be made again
            assert self._guardian.stdout is not None
            self._guardian.stdout.close()

    def __enter__(self) -> GuardedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _send(self, **request: Any) -> None:
        assert self._guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a guardian that could not start tells nothing
            self._guardian.stdin.write(json.dumps(request).encode() + b"\n")
            self._guardian.stdin.flush()

    def _await_start(self, command: Sequence[str]) -> None:
        event = self._event(_START_SECONDS)
        if event is None:
            raise Missing("the guardian process did not start the command", "see the end of the command log")
        if event["event"] == "failed":
            _raise_failed(event, command)
        self.pid, self.tier, self.notes = event["pid"], event["tier"], event["notes"]
        self.upper, self._scratch = Path(event["upper"]), event["scratch"]

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "exit":
            self._code = event["code"]
        elif event["event"] == "gone":
            if event["left"]:
                self.notes.append(f"processes that could not be killed: {event['left']}")
            if event["scratch_left"]:
                self.notes.append(f"{self._scratch}: could not be removed whole")

    def _event(self, seconds: float) -> dict[str, Any] | None:
        """The next event, None if none comes in time or the guardian is gone."""
        assert self._guardian.stdout is not None
        handle = self._guardian.stdout.fileno()
        while b"\n" not in self._buffer:
            if not self._open or not select.select([handle], [], [], seconds)[0]:
                return None
            piece = os.read(handle, 1 << 16)
            self._open = bool(piece)
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def _drain(self, seconds: float) -> None:
        """Take events until the guardian ends; a guardian that hangs is killed."""
        while (event := self._event(seconds)) is not None:
            self._take(event)
        if self._open:
            self._guardian.kill()

    def _clean_up_alone(self) -> None:
        """What the guardian would have done, for a guardian that was killed."""
        killed = reaper.kill_tree(self._guardian.pid, self._mark, seconds=_END_SECONDS, reap=lambda: None)
        noted = set().union(*map(leftovers.noted_workers, self._folders))
        leftovers.remove_leftovers(killed.pids | {self.pid} | noted, killed.held, self._since)
        for folder in (self._scratch, *self._folders):
            leftovers.remove_tree(folder)


def _start_guardian(log: Path, folders: Sequence[str]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, root, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            cwd="/",
        )


def _raise_failed(event: Mapping[str, Any], command: Sequence[str]) -> None:
    if event["kind"] == "CannotStart":
        raise BadInput(
            f"{command[0]}: cannot be started ({event['what']})",
            "check its name, PATH and execute permission; a script needs a #! line or its interpreter first",
        )
    raise Missing(
        f"no write guard works here: {event['what']}",
        "run on a machine that allows mount namespaces, or choose another --guard",
    )
