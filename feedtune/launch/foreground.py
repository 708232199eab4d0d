"""The user's command in the foreground, as a shell runs it: its terminal, its signals, its exit code."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from shard_tools.errors import BadInput

_FORWARDED = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip
# Python ignores these in itself, and what is ignored stays so in a command.
RESET = (signal.SIGPIPE, signal.SIGXFSZ)


def find_program(command: Sequence[str], example: str) -> str:
    """The program of a command, looked up on PATH.

    Args:
        command: program and arguments.
        example: how to type it, for the error message.

    Raises:
        BadInput: no command, or no program of that name that can be executed.
    """
    if not command or not command[0].strip():
        what = "the command's first word is empty" if command else "no command to start"
        raise BadInput(what, f"put it behind --: {example}")
    program = shutil.which(command[0])
    if program is None and len(command) == 1 and len(command[0].split()) > 1:
        raise BadInput(
            f"{command[0]}: no such program: this is one word",
            f"a line with several words needs a shell: bash -c {shlex.quote(command[0])}",
        )
    if program is None:
        raise BadInput(
            f"{command[0]}: no such program, or it cannot be executed",
            "check its name, PATH and execute permission; a script needs its interpreter in front",
        )
    return program


def cannot_start(command: Sequence[str], error: OSError) -> BadInput:
    """The error for a program that is there and still does not start."""
    return BadInput(
        f"{command[0]}: cannot be started ({error.strerror})",
        "a script needs a #! line or its interpreter in front",
    )


class Foreground:
    """Runs commands and hands on the signals that reach this process alone.

    Signals are kept back while it is held, so that none ends feedtune and leaves its command behind, or
    without a result after the command's end; those that were on the way then are dropped.
    """

    def __init__(self) -> None:
        self._held = False
        self._before: set[int | signal.Signals] = set()

    def hold(self) -> None:
        """Keep signals back from now on: until it is left, or to the end of the process."""
        if self._held:
            return
        self._held = True
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
        self._child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __enter__(self) -> Foreground:
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while signal.sigtimedwait(_FORWARDED | {signal.SIGCHLD}, 0) is not None:
            pass
        if self._child_handler is not None:
            signal.signal(signal.SIGCHLD, self._child_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        self._held = False

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: Path | None = None,
        started: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Run a command to its end.

        Args:
            command: program and arguments; the program is looked up on PATH.
            env: its whole environment.
            stdout: a file for its standard output; by default it has ours, as the rest.
            started: called with its process id once it runs.

        Returns:
            Its exit code; 128 and the signal's number where a signal ended it.

        Raises:
            BadInput: it cannot be started.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        actions = [] if stdout is None else [(os.POSIX_SPAWN_OPEN, 1, os.fspath(stdout), flags, 0o600)]
        try:
            pid = os.posix_spawnp(
                command[0],
                list(command),
                dict(env),
                file_actions=actions,
                setsigmask=self._before,
                setsigdef=RESET,
            )
        except OSError as error:
            raise cannot_start(command, error) from error
        started(pid)
        code = os.waitstatus_to_exitcode(self._wait(pid))
        return code if code >= 0 else 128 - code

    def _wait(self, pid: int) -> int:
        while True:
            found = signal.sigwaitinfo(_FORWARDED | {signal.SIGCHLD})
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            # The kernel's own (Ctrl-C, a closed terminal) reach the whole foreground group, the command too.
            if found.si_signo != signal.SIGCHLD and found.si_code <= 0:
                os.kill(pid, found.si_signo)
