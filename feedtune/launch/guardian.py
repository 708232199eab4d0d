"""The guardian: starts the command under guard, watches the driver, ends everything with it.

Runs in a process and session of its own, as ``python -I -S -c ...`` with nothing but the standard
library. Talks JSON lines: one request on stdin (which then stays open: its end is the driver's
end), events on stdout: ``started``, ``failed``, ``exit``, ``gone``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from feedtune.launch import leftovers, reaper, spawn, syscalls

KILL_SECONDS = 20.0
# Until the end: a Ctrl-C in the terminal is the driver's to answer.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


def main(folders: Sequence[str] = ()) -> None:
    """Serve one command from start to end.

    Args:
        folders: removed at the end, however it comes. They are named when this process is started, not
            in the request: a driver that is killed in between has filled them already.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve(folders)
    finally:
        for folder in folders:
            leftovers.remove_tree(folder)


def _serve(folders: Sequence[str]) -> None:
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    request = json.loads(_read_line(0))
    mark = b"FEEDTUNE_RUN_ID=" + os.fsencode(request["run_id"])
    since = time.time()
    wake = _wake_on_child()
    try:
        started = spawn.start(request)
    except (spawn.GuardRefused, spawn.CannotStart) as error:
        _tell(event="failed", kind=type(error).__name__, what=str(error))
        return
    _tell(
        event="started", pid=started.pid, tier=started.tier, notes=started.notes, upper=started.upper,
        scratch=started.scratch.path,
    )  # fmt: skip
    watcher = _Watcher(started.pid, wake, request["driver"])
    watcher.until_driver_ends()
    killed = reaper.kill_tree(os.getpid(), mark, seconds=KILL_SECONDS, reap=watcher.reap)
    noted = set().union(*map(leftovers.noted_workers, folders))
    leftovers.remove_leftovers(killed.pids | watcher.seen | noted, killed.held | watcher.held, since)
    clean = started.scratch.remove()
    _tell(event="gone", killed=len(killed.pids), left=killed.left, scratch_left=not clean)


def _read_line(handle: int) -> str:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(handle, 1 << 16)
        if not piece:
            sys.exit(0)
        data += piece
    return data.decode("utf-8", "surrogateescape")


def _tell(**event: Any) -> None:
    # Nobody may listen any more; the clean-up goes on all the same.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(event).encode() + b"\n")


def _wake_on_child() -> int:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


class _Watcher:
    """Collects dead children and tells of the command's end, until the driver is gone."""

    SCAN_SECONDS = 1.0

    def __init__(self, pid: int, wake: int, driver: int) -> None:
        self.pid = pid
        self.seen: set[int] = {pid}
        self.held: set[str] = set()
        self._new: set[int] = set()
        self._wake = wake
        self._driver = driver

    def until_driver_ends(self) -> None:
        """Return when the driver closes its pipe or ends in any way."""
        handles: list[int] = [0, self._wake]
        # A fork of the driver may hold the pipe open after its death.
        try:
            handles.append(os.pidfd_open(self._driver))
        except ProcessLookupError:
            return  # it is dead already
        except (OSError, AttributeError):
            pass  # an old kernel: the pipe has to do
        while True:
            ready, _, _ = select.select(handles, [], [], self.SCAN_SECONDS)
            if 0 in ready and not os.read(0, 4096):
                return
            if len(handles) > 2 and handles[2] in ready:
                return
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self.reap()  # now and then without a wake-up, too: whoever started feedtune may block SIGCHLD
            self._look()

    def _look(self) -> None:
        """Remember the pids of the tree, and what they name: it outlives those that end by themselves."""
        waiting = [os.getpid()]
        alive: set[int] = set()
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        found = [int(word) for word in file.read().split()]
                    waiting += found
                    alive |= set(found)
        new = alive - self.seen
        for pid in new | self._new:  # twice: at first it may not have come to its exec
            self.held |= leftovers.named_by(pid)
        self._new = new
        self.seen |= new

    def reap(self) -> None:
        """Collect all dead children; tell the driver if the command is one of them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.seen.add(pid)
            if pid == self.pid:
                _tell(event="exit", code=os.waitstatus_to_exitcode(status))
