"""End a whole process tree, from the top. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from feedtune.launch import leftovers


@dataclass(frozen=True)
class Process:
    """A row of the process table."""

    pid: int
    parent: int
    state: str


def parse_stat(text: str) -> Process:
    """A process from the text of /proc/PID/stat; the name may hold spaces and brackets.

    >>> parse_stat("71 (a) b) S 1 71 71 0 -1")
    Process(pid=71, parent=1, state='S')
    """
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(int(head.split(" ", 1)[0]), int(fields[1]), fields[0])


def process_table() -> dict[int, Process]:
    """Every process that can be seen now."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # It may end while we look.
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
                process = parse_stat(file.read())
                table[process.pid] = process
    return table


def carries(pid: int, mark: bytes) -> bool:
    """Whether the process was started with ``mark`` (``NAME=value``) in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def ancestors(pid: int, table: dict[int, Process]) -> set[int]:
    """The process and everything above it."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return found


def members(root: int, mark: bytes) -> list[int]:
    """Living descendants of ``root`` and processes that carry ``mark``, parents before children.

    ``root`` itself and its ancestors are never among them.
    """
    table = process_table()
    spared = ancestors(root, table) | {os.getpid(), 0, 1}
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    order: list[int] = []
    tops = [*children.get(root, ()), *(pid for pid in table if pid not in spared and carries(pid, mark))]
    seen = set(spared)
    while tops:
        following: list[int] = []
        for pid in tops:
            if pid not in seen:
                seen.add(pid)
                order.append(pid)
                following += children.get(pid, ())
        tops = following
    return [pid for pid in order if table[pid].state not in "ZX"]


@dataclass
class Killed:
    """What an end brought: who was killed, which paths they held, who would not die."""

    pids: set[int] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    left: list[int] = field(default_factory=list)


def kill_tree(root: int, mark: bytes, *, seconds: float, reap: Callable[[], None]) -> Killed:
    """SIGKILL every member of the tree until none is left.

    All are stopped first, from the top: a shell must not see its launcher die and go on with the
    next command, and a process that is making children cannot outrun the walk.

    Args:
        root: the process whose descendants end (its subreaper, so that orphans count).
        mark: ``NAME=value`` in the environment of processes that belong to the tree.
        seconds: give up after this long (processes in an uninterruptible wait).
        reap: called between rounds to collect dead children.
    """
    result = Killed()
    until = time.monotonic() + seconds
    while True:
        frozen = _freeze(root, mark, until)
        if not frozen:
            break
        result.held |= leftovers.held_by(frozen)
        for pid in frozen:
            _send(pid, signal.SIGKILL)
        result.pids |= set(frozen)
        reap()
        if time.monotonic() > until:
            result.left = members(root, mark)
            break
        time.sleep(0.005)
    reap()
    return result


def _freeze(root: int, mark: bytes, until: float) -> list[int]:
    order: list[int] = []
    seen: set[int] = set()
    while True:
        fresh = [pid for pid in members(root, mark) if pid not in seen]
        if not fresh:
            return order
        for pid in fresh:
            _send(pid, signal.SIGSTOP)
        order += fresh
        seen |= set(fresh)
        if time.monotonic() > until:
            return order


def _send(pid: int, number: int) -> None:
    # Gone already, or (set-uid programs) not ours to signal: the next walk counts who is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
