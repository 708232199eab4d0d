"""Facts of the machine that bound the search: cores, memory, shared memory, descriptors, GPUs.

Bounds come from what this process may use, never from what the host owns: a container with a quota of
4 CPUs on a host of 12 gets 4. Every path under ``/proc``, ``/sys`` and ``/dev`` goes through one root.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver lists it, in the order of the bus addresses."""

    model: str
    uuid: str | None
    bus: str


@dataclass(frozen=True)
class Machine:
    """What this process may use of the machine; ``None`` means not measured (or, for a quota, none set).

    ``cores`` is the affinity mask within the cgroup quota, rounded up to whole cores. ``ram_bytes`` and
    ``ram_available_bytes`` are the host's figures, or the tightest cgroup's where that is lower.
    ``gpus`` are those of the driver; ``cuda_visible_devices`` is the variable as set, ``None`` if unset.
    """

    hostname: str
    kernel: str
    python: str
    cpu_model: str
    cores: int
    affinity_cores: int
    cpu_quota: float | None
    ram_bytes: int | None
    ram_available_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    nofile_soft: int | None
    nofile_hard: int | None
    gpus: tuple[Gpu, ...]
    cuda_visible_devices: str | None

    @property
    def gpu_count(self) -> int:
        """GPUs that a CUDA process started now would see."""
        return count_visible(self.cuda_visible_devices, [gpu.uuid or "" for gpu in self.gpus])

    def as_dict(self) -> dict[str, Any]:
        """The facts as JSON-ready values, with ``gpu_count`` added."""
        facts = asdict(self)
        facts["gpus"] = [asdict(gpu) for gpu in self.gpus]
        return {**facts, "gpu_count": self.gpu_count}


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the facts; a file that is missing makes its fact ``None`` and never an error.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` are looked up.
    """
    status, meminfo = _read(root / "proc/self/status"), _read(root / "proc/meminfo")
    groups = Cgroups(root)
    affinity = parse_allowed_cpus(status) or len(os.sched_getaffinity(0))
    quota = groups.cpu_quota()
    memory = parse_meminfo(meminfo)
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    for limit, used in groups.memory():
        total = limit if total is None else min(total, limit)
        available = max(0, limit - used) if available is None else min(available, max(0, limit - used))
    shm_total, shm_free = _space(root / "dev/shm")
    soft, hard = parse_nofile(_read(root / "proc/self/limits"))
    return Machine(
        hostname=_read(root / "proc/sys/kernel/hostname").strip(),
        kernel=_read(root / "proc/sys/kernel/osrelease").strip(),
        python=platform.python_version(),
        cpu_model=parse_cpu_model(_read(root / "proc/cpuinfo")) or platform.machine(),
        cores=cores_within(affinity, quota),
        affinity_cores=affinity,
        cpu_quota=quota,
        ram_bytes=total,
        ram_available_bytes=available,
        shm_bytes=shm_total,
        shm_free_bytes=shm_free,
        nofile_soft=soft,
        nofile_hard=hard,
        gpus=_read_gpus(root),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def cores_within(affinity: int, quota: float | None) -> int:
    """Whole cores that the mask and the quota (CPUs, ``None`` = no quota) leave; at least one."""
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def parse_allowed_cpus(status: str) -> int | None:
    r"""Count the CPUs of the affinity mask in ``/proc/self/status``; ``None`` if it names none.

    A sample: ``Cpus_allowed_list:\t0-3,8``, which is 5 CPUs.
    """
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    if match is None:
        return None
    ends = [part.split("-") for part in match.group(1).split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from ``/proc/meminfo``.

    A sample: ``MemTotal:       24669424 kB``, one line a name; counts without ``kB`` are left out.
    """
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def parse_cpu_model(cpuinfo: str) -> str | None:
    r"""The model of the first CPU in ``/proc/cpuinfo``; ``None`` on architectures that name none.

    A sample: ``model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz``.
    """
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else None


def parse_nofile(limits: str) -> tuple[int | None, int | None]:
    """Soft and hard limit of open descriptors in ``/proc/self/limits``.

    A sample: ``Max open files            1024                 1048576              files``.
    """
    match = re.search(r"^Max open files\s+(\d+)\s+(\d+)", limits, re.MULTILINE)
    return (int(match.group(1)), int(match.group(2))) if match else (None, None)


def parse_cgroup_paths(text: str) -> dict[str, str]:
    r"""Path of this process in each hierarchy from ``/proc/self/cgroup``; the key of v2 is ``""``.

    A sample with v1 and v2 side by side: ``4:memory:/job/step\n2:cpu,cpuacct:/job\n0::/init.scope``
    gives ``{"memory": "/job/step", "cpu": "/job", "cpuacct": "/job", "": "/init.scope"}``.
    """
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def parse_cgroup_mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Mount point and mounted root of each hierarchy from ``/proc/self/mountinfo``; the key of v2 is ``""``.

    A sample: ``29 31 0:26 /docker/ab /sys/fs/cgroup/cpu ro,relatime - cgroup cgroup rw,cpu,cpuacct`` gives
    ``("/sys/fs/cgroup/cpu", "/docker/ab")`` for ``cpu`` and for ``cpuacct``. The first mount of each counts.
    """
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        names = [""] if kind[0] == "cgroup2" else kind[-1].split(",")
        for name in set(names) - {"rw", "ro"}:
            mounts.setdefault(name, (fields[4], fields[3]))
    return mounts


def parse_cpu_max(text: str) -> float | None:
    """CPUs that a v2 ``cpu.max`` allows: ``400000 100000`` is 4.0, ``max 100000`` is ``None``."""
    fields = text.split()
    if not fields or not fields[0].isdigit():
        return None
    return int(fields[0]) / (int(fields[1]) if len(fields) > 1 else 100_000)


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """CPUs that v1's ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` allow; a quota of ``-1`` is ``None``."""
    if not quota.strip().isdigit() or not period.strip().isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def parse_memory_limit(text: str) -> int | None:
    """Bytes of v2's ``memory.max`` or v1's ``memory.limit_in_bytes``; ``None`` for no limit.

    Samples: ``17179869184``; without a limit ``max`` (v2) or ``9223372036854771712`` (v1).
    """
    text = text.strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def parse_inactive_file(memory_stat: str) -> int:
    """Bytes of page cache that can be dropped at once, from a cgroup's ``memory.stat``; 0 if not listed.

    A sample of v2: ``inactive_file 40960``; v1 adds the sum over children: ``total_inactive_file 40960``.
    """
    found = dict(re.findall(r"^(total_inactive_file|inactive_file) (\d+)$", memory_stat, re.MULTILINE))
    return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)


def parse_gpu(information: str, bus: str) -> Gpu:
    r"""One GPU from ``/proc/driver/nvidia/gpus/<bus>/information``.

    A sample: ``Model: \t\t NVIDIA H200\nIRQ:   \t\t 230\nGPU UUID: \t GPU-5b6a2d53-...``.
    """
    fields = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", information, re.MULTILINE))
    uuid = fields.get("GPU UUID", "")
    return Gpu(fields.get("Model") or "unknown", uuid if uuid.startswith("GPU-") else None, bus)


def count_visible(variable: str | None, uuids: list[str]) -> int:
    """GPUs left by ``CUDA_VISIBLE_DEVICES``; like CUDA, it stops at the first entry that names none.

    ``None`` (unset) leaves all; ``""`` and ``"-1"`` none; ``"1,0"`` two; a UUID may be shortened.
    """
    if variable is None:
        return len(uuids)
    count = 0
    for entry in variable.split(","):
        entry = entry.strip()
        by_number = entry.isdigit() and int(entry) < len(uuids)
        by_uuid = entry.startswith("GPU-") and any(uuid.startswith(entry) for uuid in uuids)
        if not (by_number or by_uuid or entry.startswith("MIG-")):
            break
        count += 1
    return count


class Cgroups:
    """The cgroup folders of a process, from its own up to the mount point.

    Args:
        root: where ``proc`` and ``sys`` are looked up.
        pid: the process; ``None`` for this one.
    """

    def __init__(self, root: Path, pid: int | None = None) -> None:
        self._root = root
        self.paths = parse_cgroup_paths(_read(root / f"proc/{pid or 'self'}/cgroup"))
        self._mounts = parse_cgroup_mounts(_read(root / "proc/self/mountinfo"))

    def folders(self, controller: str) -> Iterator[Path]:
        """A limit of any ancestor binds too, so all of them are walked; some may not exist here."""
        if controller not in self._mounts:
            return
        point, mounted = self._mounts[controller]
        top = self._root / point.lstrip("/")
        path = PurePosixPath(self.paths.get(controller, "/"))
        # In a container without a cgroup namespace the path is the host's while only a part is mounted.
        below = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        folder = top if ".." in below.parts else top / below.relative_to("/" if below.is_absolute() else ".")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top

    def cpu_quota(self) -> float | None:
        """The tightest quota in CPUs over both versions and all ancestors."""
        quotas = [parse_cpu_max(_read(folder / "cpu.max")) for folder in self.folders("")]
        quotas += [
            parse_cfs_quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
            for folder in self.folders("cpu")
        ]
        return min((quota for quota in quotas if quota is not None), default=None)

    def memory(self) -> Iterator[tuple[int, int]]:
        """Limit and bytes in use (without cache that can go) of each cgroup that has a limit."""
        for controller, limit_name, used_name in (
            ("", "memory.max", "memory.current"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            for folder in self.folders(controller):
                limit = parse_memory_limit(_read(folder / limit_name))
                if limit is not None:
                    used = int(_read(folder / used_name).strip() or 0)
                    yield limit, max(0, used - parse_inactive_file(_read(folder / "memory.stat")))


def _read_gpus(root: Path) -> tuple[Gpu, ...]:
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return tuple(parse_gpu(_read(file), file.parent.name) for file in files)


def _space(folder: Path) -> tuple[int | None, int | None]:
    """Total and free bytes of the file system under ``folder``."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _read(path: Path) -> str:
    """Text of a small kernel file; empty where this machine has no such file, or keeps it from us."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
