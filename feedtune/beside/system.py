"""Sampler of the whole host: how busy its CPUs are, memory and dirty pages, shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from feedtune.beside.base import SLOW_S, KernelFile, Pace, Row, Rows
from feedtune.beside.procfs import TICKS_A_SECOND
from feedtune.machine import parse_meminfo

_STAT_SHARE = 0.002  # reading /proc/stat takes milliseconds on hosts with hundreds of CPUs
_MEMORY = ("MemTotal", "MemAvailable", "Cached", "Dirty", "Writeback", "Shmem", "SwapFree")


def parse_cpus(text: str) -> dict[str, list[float]]:
    r"""Seconds in user, nice, system, idle, iowait, irq, softirq, steal of all CPUs (``""``) and of each.

    >>> parse_cpus("cpu  200 0 100 1000 50 0 0 3\ncpu1 100 0 50 500 25 0 0 2\nintr 9\n")["1"]
    [1.0, 0.0, 0.5, 5.0, 0.25, 0.0, 0.0, 0.02]
    """
    found = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break
        name, *ticks = line.split()
        found[name[3:]] = [int(tick) / TICKS_A_SECOND for tick in ticks[:8]]
    return found


def parse_running(text: str) -> tuple[int | None, int | None]:
    r"""Threads that run or could, and those that wait for a disk, from the end of ``/proc/stat``.

    >>> parse_running("ctxt 1990473\nbtime 1062191376\nprocesses 2915\nprocs_running 3\nprocs_blocked 1\n")
    (3, 1)
    """
    fields = dict(line.split(" ", 1) for line in text[-512:].splitlines() if line.count(" ") == 1)
    numbers = (fields.get("procs_running"), fields.get("procs_blocked"))
    running, blocked = (int(number) if number else None for number in numbers)
    return running, blocked


class SystemSampler:
    """Reads ``/proc/stat``, ``/proc/meminfo`` and the use of ``/dev/shm``."""

    name = "system"
    columns: Mapping[str, tuple[str, ...]] = {
        "cpu": (
            "user_s", "nice_s", "system_s", "idle_s", "iowait_s", "irq_s", "softirq_s", "steal_s",
            "running", "blocked",
        ),
        "core": ("busy_s", "idle_s"),
        "memory": (
            "total_bytes", "available_bytes", "cached_bytes", "dirty_bytes", "writeback_bytes",
            "shmem_bytes", "swap_free_bytes",
        ),
        "shm": ("total_bytes", "free_bytes"),
    }  # fmt: skip

    def __init__(self, root: Path) -> None:
        self._stat = KernelFile(str(root / "proc/stat"))
        self._meminfo = KernelFile(str(root / "proc/meminfo"))
        self._shm = root / "dev/shm"
        self._pace = Pace(_STAT_SHARE)
        self._cores_due_s = 0.0

    def prepare(self) -> str | None:
        """At least one of the files can be read."""
        if self._stat.read() or self._meminfo.read():
            return None
        return "neither /proc/stat nor /proc/meminfo can be read"

    def sample(self, now_s: float) -> Rows:
        """CPU seconds since boot, bytes now; single cores every ten seconds."""
        rows: Rows = {}
        if self._pace.due("stat", now_s):
            with self._pace.spend("stat", now_s):
                rows.update(self._cpus(now_s))
        memory = parse_meminfo((self._meminfo.read() or b"").decode(errors="replace"))
        if memory:
            rows["memory"] = [["", *(memory.get(name) for name in _MEMORY)]]
        try:
            space = os.statvfs(self._shm)
            rows["shm"] = [["", space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize]]
        except OSError:
            pass
        return rows

    def close(self) -> None:
        """Close the files."""
        self._stat.close()
        self._meminfo.close()

    def _cpus(self, now_s: float) -> Rows:
        text = (self._stat.read() or b"").decode(errors="replace")
        cpus = parse_cpus(text)
        rows: Rows = {}
        if "" in cpus:
            rows["cpu"] = [["", *cpus.pop(""), *parse_running(text)]]
        if now_s >= self._cores_due_s:
            self._cores_due_s = now_s + SLOW_S
            rows["core"] = [_core(name, seconds) for name, seconds in cpus.items()]
        return rows


def _core(name: str, seconds: list[float]) -> Row:
    """Waiting for a disk is idle time of a core."""
    idle_s = sum(seconds[3:5])
    return [name, round(sum(seconds) - idle_s, 2), round(idle_s, 2)]
