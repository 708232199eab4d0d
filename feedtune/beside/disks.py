"""Sampler of block devices: operations, bytes, waiting time and what is in flight."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from feedtune.beside.base import KernelFile, Row, Rows

SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device's own are


def parse_diskstats(text: str) -> dict[str, Row]:
    r"""By device: reads, bytes and seconds read, the same of writes, in flight, busy seconds.

    >>> parse_diskstats("   254       0 vda 984800 52427 28103130 1176228 1500613 2623489 233561792 1084153 "
    ...                 "2 525148 2405649 0 0 0 0 0 0\n")["vda"]
    [984800, 14388802560, 1176.228, 1500613, 119583637504, 1084.153, 2, 525.148]
    """
    found: dict[str, Row] = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 14:
            continue
        reads, _, read_sectors, read_ms, writes, _, written_sectors, write_ms, flying, busy_ms = map(
            int, fields[3:13]
        )
        found[fields[2]] = [
            reads,
            read_sectors * SECTOR_BYTES,
            read_ms / 1e3,
            writes,
            written_sectors * SECTOR_BYTES,
            write_ms / 1e3,
            flying,
            busy_ms / 1e3,
        ]
    return found


class DiskSampler:
    """Reads ``/proc/diskstats`` for whole devices that are backed by hardware.

    Partitions and stacked devices (loop, zram, dm, md) count what the device below counts already. Where
    ``/sys/block`` does not say (a container), every name but those of stacked devices is taken.
    ``read_s / reads`` over a stretch is the mean time that a read took (await).
    """

    name = "disks"
    columns: Mapping[str, tuple[str, ...]] = {
        "disk": (
            "reads", "read_bytes", "read_s", "writes", "write_bytes", "write_s", "in_flight", "busy_s",
        ),
    }  # fmt: skip

    def __init__(self, root: Path) -> None:
        self._file = KernelFile(str(root / "proc/diskstats"))
        self._block = root / "sys/block"
        self._real: dict[str, bool] = {}

    def prepare(self) -> str | None:
        """There are figures, and a device of our own."""
        text = self._file.read()
        if text is None:
            return "/proc/diskstats cannot be read"
        if not any(map(self._is_real, parse_diskstats(text.decode(errors="replace")))):
            return "/proc/diskstats names no device that is backed by hardware"
        return None

    def sample(self, now_s: float) -> Rows:  # noqa: ARG002  # the protocol's
        """Counts since boot, and operations in flight now."""
        disks = parse_diskstats((self._file.read() or b"").decode(errors="replace"))
        return {"disk": [[name, *row] for name, row in disks.items() if self._is_real(name)]}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _is_real(self, name: str) -> bool:
        if name not in self._real:
            if os.path.isdir(self._block):
                self._real[name] = os.path.exists(self._block / name.replace("/", "!") / "device")
            else:
                self._real[name] = not name.startswith(("loop", "ram", "zram", "dm-", "md", "sr", "fd"))
        return self._real[name]
