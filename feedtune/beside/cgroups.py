"""Sampler of the command's cgroups, v1 and v2: throttling by a CPU quota, memory and its limit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from feedtune.beside.base import SLOW_S, KernelFile, Pace, Row, Rows, read_text
from feedtune.machine import Cgroups, parse_memory_limit

_STAT_SHARE = 0.001  # memory.stat sums over all CPUs
# What a cgroup without a limit and without an ancestor that has one would say says nothing.
_CPU_LIMITS = ("cpu.max", "cpu.cfs_quota_us")


def cgroup_folders(root: Path, pid: int | None, controller: str) -> list[Path]:
    """The cgroup folders of a process, its own first, up to the mount point.

    Args:
        root: where ``proc`` and ``sys`` are looked up.
        pid: the process; ``None`` for this one.
        controller: a v1 controller, or ``""`` for v2.
    """
    groups = Cgroups(root, pid)
    return list(groups.folders(controller)) if controller in groups.paths else []


def parse_cpu_stat(text: str) -> dict[str, float]:
    r"""Periods, throttled periods and throttled seconds; v1 counts nanoseconds, v2 microseconds.

    >>> parse_cpu_stat("nr_periods 100\nnr_throttled 7\nthrottled_time 2500000000\n")
    {'periods': 100, 'throttled': 7, 'throttled_s': 2.5}
    >>> parse_cpu_stat("usage_usec 4000000\nnr_periods 100\nnr_throttled 7\nthrottled_usec 2500000\n")
    {'periods': 100, 'throttled': 7, 'throttled_s': 2.5, 'usage_s': 4.0}
    """
    found = _numbers(text)
    stat: dict[str, float] = {
        name: found[key]
        for name, key in (("periods", "nr_periods"), ("throttled", "nr_throttled"))
        if key in found
    }
    if "throttled_time" in found:
        stat["throttled_s"] = found["throttled_time"] / 1e9
    elif "throttled_usec" in found:
        stat["throttled_s"] = found["throttled_usec"] / 1e6
    if "usage_usec" in found:
        stat["usage_s"] = found["usage_usec"] / 1e6
    return stat


def parse_memory_stat(text: str) -> tuple[int | None, int | None]:
    r"""Bytes of anonymous memory and of page cache that can go at once; v1 has sums over its children.

    >>> parse_memory_stat("anon 8192\nfile 65536\ninactive_file 40960\n")
    (8192, 40960)
    >>> parse_memory_stat("rss 4096\ninactive_file 1\ntotal_rss 8192\ntotal_inactive_file 40960\n")
    (8192, 40960)
    """
    found = _numbers(text)
    anonymous = found.get("anon", found.get("total_rss", found.get("rss")))
    return anonymous, found.get("total_inactive_file", found.get("inactive_file"))


def _numbers(text: str) -> dict[str, int]:
    """Pairs of a name and a number, one a line."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


@dataclass
class _Memory:
    """Files of one memory cgroup; ``events`` counts, by version in its own words."""

    label: str
    folder: Path
    current: KernelFile
    limit: KernelFile
    events: KernelFile
    hits: KernelFile | None  # v1 counts refusals in a file of its own


class CgroupSampler:
    """Reads the command's own cgroups and those ancestors that have a limit, which binds as well."""

    name = "cgroups"
    columns: Mapping[str, tuple[str, ...]] = {
        "cgroup_cpu": ("periods", "throttled", "throttled_s", "usage_s"),
        "cgroup_memory": ("current_bytes", "limit_bytes", "limit_hits", "oom_kills"),
        "cgroup_memory_detail": ("anonymous_bytes", "inactive_file_bytes"),
    }

    def __init__(self, root: Path, pid: int | None = None) -> None:
        self._root = root
        self._pid = pid
        self._cpus: dict[str, KernelFile] = {}
        self._memories: list[_Memory] = []
        self._pace = Pace(_STAT_SHARE, SLOW_S)

    def prepare(self) -> str | None:
        """Some cgroup has figures."""
        self.follow(self._pid)
        if self._cpus or self._memories:
            return None
        return "no cgroup with cpu or memory figures is mounted"

    def follow(self, pid: int | None) -> None:
        """Read the cgroups of this process from now on."""
        self.close()
        self._pid = pid
        self._cpus, self._memories = {}, []
        for controller in ("", "cpu"):
            for place, folder in enumerate(cgroup_folders(self._root, pid, controller)):
                limited = any(read_text(folder / name).strip()[:1].isdigit() for name in _CPU_LIMITS)
                if (folder / "cpu.stat").exists() and (place == 0 or limited):
                    self._cpus[self._label(folder)] = KernelFile(str(folder / "cpu.stat"))
        for controller in ("", "memory"):
            for place, folder in enumerate(cgroup_folders(self._root, pid, controller)):
                self._add_memory(folder, place == 0, v2=not controller)

    def sample(self, now_s: float) -> Rows:
        """Counts since each cgroup was made, bytes now."""
        rows: Rows = {"cgroup_cpu": [], "cgroup_memory": [], "cgroup_memory_detail": []}
        for label, file in self._cpus.items():
            stat = parse_cpu_stat((file.read_part() or b"").decode(errors="replace"))
            if stat:
                rows["cgroup_cpu"].append([label, *map(stat.get, self.columns["cgroup_cpu"])])
        for memory in self._memories:
            row = _memory_row(memory)
            if row:
                rows["cgroup_memory"].append(row)
            if self._pace.due(memory.label, now_s):
                with self._pace.spend(memory.label, now_s):
                    stat_text = read_text(memory.folder / "memory.stat")
                rows["cgroup_memory_detail"].append([memory.label, *parse_memory_stat(stat_text)])
        return rows

    def close(self) -> None:
        """Close the files."""
        for file in self._cpus.values():
            file.close()
        for memory in self._memories:
            for opened in (memory.current, memory.limit, memory.events, memory.hits):
                if opened:
                    opened.close()

    def _label(self, folder: Path) -> str:
        """The folder as it is called on the machine, not below the root that tests redirect."""
        return f"/{folder.relative_to(self._root)}"

    def _add_memory(self, folder: Path, own: bool, v2: bool) -> None:
        names = (
            ("memory.current", "memory.max", "memory.events", None)
            if v2
            else ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "memory.failcnt")
        )
        limited = parse_memory_limit(read_text(folder / names[1])) is not None
        if (folder / names[0]).exists() and (own or limited):
            current, limit, events = (KernelFile(str(folder / name)) for name in names[:3] if name)
            hits = KernelFile(str(folder / names[3])) if names[3] else None
            self._memories.append(_Memory(self._label(folder), folder, current, limit, events, hits))


def _memory_row(memory: _Memory) -> Row | None:
    def text(file: KernelFile) -> str:
        return (file.read_part() or b"").decode(errors="replace")

    current = None
    with contextlib.suppress(ValueError):
        current = int(text(memory.current))
    if current is None:  # the cgroup is gone
        return None
    events = _numbers(text(memory.events))
    hits = events.get("max")
    if memory.hits is not None:
        with contextlib.suppress(ValueError):
            hits = int(text(memory.hits))
    return [memory.label, current, parse_memory_limit(text(memory.limit)), hits, events.get("oom_kill")]
