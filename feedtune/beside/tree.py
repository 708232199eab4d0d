"""The processes of a training: who belongs to the command, and which part each plays."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from feedtune.beside.base import SLOW_S, KernelFile
from feedtune.beside.procfs import Stat, parse_rank, parse_stat

Role = Literal["main", "worker", "helper"]
WORKER_NAME = "pt_data_worker"  # what torch calls a worker's main thread; the kernel cuts at 15 characters
PIN_NAME = b"pt_data_pin"
_MOST_PROCESSES = 1024
_FILES_EACH = 4  # stat, schedstat, io and children stay open


@dataclass
class Process:
    """A process of the tree, with its files, which stay open."""

    pid: int
    stat: Stat
    stat_file: KernelFile
    schedstat: KernelFile
    io: KernelFile
    children: KernelFile
    rank_env: int | None = None
    threads: dict[int, KernelFile] = field(default_factory=dict)  # schedstat of those that pin memory
    looks: dict[int, int] = field(default_factory=dict)  # how often each thread's name was read

    @property
    def is_worker(self) -> bool:
        """Whether it is a DataLoader's worker."""
        return self.stat.comm.startswith(WORKER_NAME)

    def close(self) -> None:
        """Close its files."""
        for file in (self.stat_file, self.schedstat, self.io, self.children, *self.threads.values()):
            file.close()


@dataclass(frozen=True)
class Seen:
    """What the part of a process is judged by."""

    pid: int
    parent: int
    start: int
    comm: str
    rank_env: int | None


def assign_roles(seen: Iterable[Seen], claimed: Mapping[int, int]) -> dict[int, tuple[Role, int | None]]:
    """Part and rank of each process.

    Args:
        seen: all processes of the tree.
        claimed: pid -> rank of those that the hook knows to train.

    A worker is known by its name, a training process by the hook's word, by its workers, or as the oldest
    process in whose environment a launcher has put that rank.

    >>> torchrun, rank, worker = (Seen(1, 0, 5, "torchrun", None), Seen(2, 1, 6, "python", 0),
    ...                           Seen(3, 2, 7, "pt_data_worker", 0))
    >>> assign_roles([torchrun, rank, worker], {})
    {1: ('helper', None), 2: ('main', 0), 3: ('worker', 0)}
    """
    by_pid = {p.pid: p for p in seen}
    workers = {p.pid for p in by_pid.values() if p.comm.startswith(WORKER_NAME)}
    mains: dict[int, int | None] = {pid: rank for pid, rank in claimed.items() if pid in by_pid}
    for pid in workers:
        parent = by_pid[pid].parent
        if parent in by_pid and parent not in workers and parent not in mains:
            mains[parent] = by_pid[parent].rank_env
    taken = set(mains.values())
    kin = set(mains).union(*(_ancestors(pid, by_pid) for pid in mains))
    for process in sorted(by_pid.values(), key=lambda p: (p.start, p.pid)):
        rank = process.rank_env
        if rank is None or rank in taken or process.pid in workers | kin:
            continue
        if not _ancestors(process.pid, by_pid) & mains.keys():  # helpers inherit their rank's environment
            mains[process.pid] = rank
            taken.add(rank)
    roles: dict[int, tuple[Role, int | None]] = {}
    for pid, process in by_pid.items():
        if pid in mains:
            roles[pid] = ("main", mains[pid])
        elif pid in workers:
            roles[pid] = ("worker", mains.get(process.parent, process.rank_env))
        else:
            roles[pid] = ("helper", None)
    return roles


def _ancestors(pid: int, by_pid: Mapping[int, Seen]) -> set[int]:
    found: set[int] = set()
    while (pid := by_pid[pid].parent) in by_pid and pid not in found:
        found.add(pid)
    return found


class ProcessTree:
    """Finds the living descendants of the command; one whose parent has ended stays a member."""

    def __init__(self, root: Path, run: Path | None, most_open: int) -> None:
        self._proc = str(root / "proc")
        self._run = run
        self._most_open = most_open
        self._walk_due_s = 0.0
        self.members: dict[int, Process] = {}
        self.left_out = 0

    def grow(self, roots: Iterable[int], now_s: float) -> bool:
        """Take in processes that are new; whether all threads were asked (every ten seconds).

        Children of main threads are seen at once; those of other threads at the next full walk, since a
        training process has hundreds of threads.
        """
        full = now_s >= self._walk_due_s
        found = [pid for pid in roots if pid not in self.members]
        scanned = None
        if full:
            self._walk_due_s = now_s + SLOW_S
            self.left_out = 0
            scanned = None if self._lists_children() else self._children_by_scan()
        waiting = list(self.members.values())
        while found or waiting:
            if waiting:
                process = waiting.pop()
                if scanned is not None:
                    found += scanned.get(process.pid, [])
                else:
                    found += self._children(process, full)
                continue
            added = self._add(found.pop())
            if added:
                waiting.append(added)
        return full

    def drop(self, process: Process) -> None:
        """Forget a process that has ended."""
        process.close()
        self.members.pop(process.pid, None)

    def roles(self) -> dict[int, tuple[Role, int | None]]:
        """Part and rank of each member."""
        return assign_roles(
            (
                Seen(p.pid, p.stat.parent, p.stat.start_ticks, p.stat.comm, p.rank_env)
                for p in self.members.values()
            ),
            self._claimed(),
        )

    def look_closer(self, process: Process) -> None:
        """Read again what changes when a process executes another program, and find pinning threads."""
        process.rank_env = self._rank_of(process.pid)
        if process.is_worker or process.stat.threads == 1:
            return
        looks = {thread: process.looks.get(thread, 0) + 1 for thread in self._tasks(process.pid)}
        process.looks = looks
        for thread, times in looks.items():
            if times > 2:  # by the second look it has given itself its name
                continue
            path = f"{self._proc}/{process.pid}/task/{thread}"
            name = KernelFile(f"{path}/comm", False).read_part() or b""
            if thread not in process.threads and name.strip() == PIN_NAME:
                process.threads[thread] = KernelFile(f"{path}/schedstat")

    def close(self) -> None:
        """Close all files."""
        for process in list(self.members.values()):
            self.drop(process)

    def _add(self, pid: int) -> Process | None:
        if pid in self.members:
            return None
        if len(self.members) >= _MOST_PROCESSES:
            self.left_out += 1
            return None
        path = f"{self._proc}/{pid}"
        keep = (len(self.members) + 1) * _FILES_EACH <= self._most_open
        stat_file = KernelFile(f"{path}/stat", keep)
        text = stat_file.read_part()
        if not text:  # it has ended meanwhile
            return None
        schedstat, io, children = (
            KernelFile(f"{path}/{name}", keep) for name in ("schedstat", "io", f"task/{pid}/children")
        )
        rank = self._rank_of(pid)
        process = Process(pid, parse_stat(text), stat_file, schedstat, io, children, rank)
        self.members[pid] = process
        return process

    def _children(self, process: Process, full: bool) -> Iterator[int]:
        alone = process.stat.threads == 1
        if alone or not full:
            if full or not process.is_worker:
                yield from map(int, (process.children.read() or b"").split())
            return
        for thread in self._tasks(process.pid):
            file = KernelFile(f"{self._proc}/{process.pid}/task/{thread}/children", False)
            yield from map(int, (file.read() or b"").split())

    def _tasks(self, pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(f"{self._proc}/{pid}/task")]
        return []

    def _lists_children(self) -> bool:
        """Some kernels are built without ``children``."""
        return any(
            os.path.exists(f"{self._proc}/{p}/task/{p}/children") for p in self.members or (os.getpid(),)
        )

    def _children_by_scan(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for name in os.listdir(self._proc):
            if name.isdigit() and (text := KernelFile(f"{self._proc}/{name}/stat", False).read_part()):
                found.setdefault(parse_stat(text).parent, []).append(int(name))
        return found

    def _rank_of(self, pid: int) -> int | None:
        return parse_rank(KernelFile(f"{self._proc}/{pid}/environ", False).read() or b"")

    def _claimed(self) -> dict[int, int]:
        """Ranks that the hook has written down in the run folder."""
        found: dict[int, int] = {}
        here = socket.gethostname()
        for path in self._run.glob("rank*.json") if self._run else ():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                about = json.loads(path.read_text(encoding="utf-8"))
                if about.get("host", here) == here:
                    found[int(about["pid"])] = int(about["rank"])
        return found
