"""Sampler of the training's processes: states, CPU time, waits, reads and memory of each."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from feedtune.beside.base import SLOW_S, Row, Rows, Turns, Value, read_text
from feedtune.beside.procfs import (
    PAGE_BYTES,
    TICKS_A_SECOND,
    parse_io,
    parse_pss,
    parse_schedstat,
    parse_stat,
)
from feedtune.beside.tree import Process, ProcessTree, Role
from feedtune.machine import parse_allowed_cpus, parse_nofile

_DETAIL_SHARE = 0.001  # of one core, for each kind of slow read of all processes together
_LIMITS_S = 60.0  # limits and affinity are set once, if at all
_ALL_AT_ONCE = 64  # with more processes, counters of each worker are read every second tick, and so on


class ProcessSampler:
    """Reads every process of the command's tree."""

    name = "processes"
    columns: Mapping[str, tuple[str, ...]] = {
        "process": (
            "state", "user_s", "system_s", "minor_faults", "major_faults", "threads", "rss_bytes",
            "main_cpu_s", "main_delay_s", "read_bytes", "write_bytes", "rchar_bytes",
        ),
        "process_start": ("parent", "role", "rank", "comm", "started_s"),
        "process_end": (),
        "process_descriptors": ("open",),
        "process_limits": ("nofile", "cores"),
        "process_memory": ("pss_bytes",),
        "thread": ("name", "cpu_s", "delay_s"),
        "processes_left_out": ("count",),
    }  # fmt: skip

    def __init__(self, root_pid: int | None, root: Path, run: Path | None, most_open: int) -> None:
        self.root_pid = root_pid
        self._proc = str(root / "proc")
        self._tree = ProcessTree(root, run, most_open)
        self._known: dict[int, tuple[str, tuple[Role, int | None]]] = {}
        self._roles: dict[int, tuple[Role, int | None]] = {}
        self._turns = (
            (Turns("process_descriptors", _DETAIL_SHARE, SLOW_S), self._read_descriptors),
            (Turns("process_limits", _DETAIL_SHARE, _LIMITS_S), self._read_limits),
            (Turns("process_memory", _DETAIL_SHARE, SLOW_S), self._read_memory),
        )
        self._ticks = 0
        # Start times count from boot, on a clock that goes on while the machine sleeps.
        self._boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()

    def prepare(self) -> str | None:
        """There is ``/proc``; the command may come later."""
        if not os.path.exists(f"{self._proc}/self/stat"):
            return f"{self._proc}/self/stat cannot be read"
        return None

    def sample(self, now_s: float) -> Rows:
        """One row a process; starts, ends and changes of part in rows of their own."""
        rows: Rows = {"process": [], "process_start": [], "process_end": []}
        full = self._tree.grow(() if self.root_pid is None else (self.root_pid,), now_s)
        if self.root_pid is not None:
            if self.root_pid not in self._tree.members:
                rows["note"] = [[self.name, f"there is no process {self.root_pid}"]]
            self.root_pid = None  # once is enough: after its end another process may get the number
        self._ticks += 1
        stride = 1 + len(self._tree.members) // _ALL_AT_ONCE
        for number, process in enumerate(list(self._tree.members.values())):
            row = self._read(process)
            if row is None:
                rows["process_end"].append([str(process.pid)])
                self._forget(process)
            else:
                if (self._ticks + number) % stride == 0 or not process.is_worker:
                    row += _counters(process)
                rows["process"].append(row)
        rows["process_start"] = self._changed(full)
        rows.update(self._details(now_s))
        rows["thread"] = [row for process in self._tree.members.values() for row in _threads(process)]
        if full and self._tree.left_out:
            rows["processes_left_out"] = [["", self._tree.left_out]]
        return rows

    def close(self) -> None:
        """Close the processes' files."""
        self._tree.close()

    def _read(self, process: Process) -> Row | None:
        text = process.stat_file.read_part()
        if not text:
            return None
        stat = parse_stat(text)
        if stat.start_ticks != process.stat.start_ticks:  # another process has got its pid
            return None
        process.stat = stat
        return [
            str(process.pid),
            stat.state,
            stat.user_ticks / TICKS_A_SECOND,
            stat.system_ticks / TICKS_A_SECOND,
            stat.minor_faults,
            stat.major_faults,
            stat.threads,
            stat.rss_pages * PAGE_BYTES,
        ]

    def _changed(self, full: bool) -> list[Row]:
        """Who is new, or plays another part than before; parts are looked at anew where names changed."""
        members = self._tree.members
        if full:
            for process in members.values():
                self._tree.look_closer(process)
        names_stand = all(
            pid in self._known and self._known[pid][0] == p.stat.comm for pid, p in members.items()
        )
        if names_stand and not full:
            return []
        rows: list[Row] = []
        for pid, role in self._tree.roles().items():
            stat = members[pid].stat
            if self._known.get(pid) != (stat.comm, role):
                self._known[pid] = (stat.comm, role)
                started_s = round(stat.start_ticks / TICKS_A_SECOND - self._boot_s, 2)
                rows.append([str(pid), str(stat.parent), role[0], role[1], stat.comm, started_s])
        return rows

    def _details(self, now_s: float) -> Rows:
        """What is slow to read, of those processes whose turn it is.

        ``smaps_rollup`` walks all page tables (tens of milliseconds for a large process), hence a limit on
        its share: where memory is large, a round takes longer than ten seconds.
        """
        rows: Rows = {}
        for turn, read in self._turns:
            rows[turn.source] = []
            for pid in turn.due(self._tree.members, now_s):
                with turn.spend(pid, now_s):
                    rows[turn.source].append([str(pid), *read(pid)])
        return rows

    def _read_descriptors(self, pid: int) -> Row:
        return [_count_descriptors(f"{self._proc}/{pid}")]

    def _read_limits(self, pid: int) -> Row:
        _, nofile = parse_nofile(read_text(f"{self._proc}/{pid}/limits"))
        return [nofile, parse_allowed_cpus(read_text(f"{self._proc}/{pid}/status"))]

    def _read_memory(self, pid: int) -> Row:
        return [parse_pss(read_text(f"{self._proc}/{pid}/smaps_rollup"))]

    def _forget(self, process: Process) -> None:
        self._tree.drop(process)
        self._known.pop(process.pid, None)
        for turn, _ in self._turns:
            turn.forget(process.pid)


def _counters(process: Process) -> Row:
    """Time of the main thread on and without a CPU, and bytes read and written."""
    scheduled = process.schedstat.read_part()
    row: Row = [round(value, 3) for value in parse_schedstat(scheduled)] if scheduled else [None, None]
    counted = process.io.read_part()
    if counted:  # other users' processes keep it from us
        io = parse_io(counted)
        row += [io.get("read_bytes"), io.get("write_bytes"), io.get("rchar")]
    return row


def _count_descriptors(folder: str) -> Value:
    """Open descriptors: newer kernels give their number as the folder's size, older ones list them."""
    try:
        return os.stat(f"{folder}/fd").st_size or len(os.listdir(f"{folder}/fd"))
    except OSError:
        return None


def _threads(process: Process) -> list[Row]:
    rows: list[Row] = []
    for thread, file in list(process.threads.items()):
        text = file.read_part()
        if text:
            rows.append(
                [f"{process.pid}/{thread}", "pin", *(round(value, 3) for value in parse_schedstat(text))]
            )
        else:
            del process.threads[thread]
    return rows
