"""Sampler of pressure stall information: time in which tasks waited for CPU, disk or memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from feedtune.beside.base import KernelFile, Row, Rows
from feedtune.beside.cgroups import cgroup_folders

_KINDS = ("cpu", "io", "memory")


def parse_pressure(text: str) -> tuple[float | None, float | None]:
    r"""Seconds since boot in which some, and in which all, tasks waited; older kernels lack cpu's ``full``.

    >>> parse_pressure("some avg10=6.89 avg60=8.59 avg300=12.16 total=5835689628\n"
    ...                "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    (5835.689628, 0.0)
    >>> parse_pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n")
    (0.25, None)
    """
    found = dict(re.findall(r"^(some|full) .*total=(\d+)$", text, re.MULTILINE))
    some_s, full_s = (int(found[name]) / 1e6 if name in found else None for name in ("some", "full"))
    return some_s, full_s


class PressureSampler:
    """Reads ``/proc/pressure`` and, under cgroup v2, the same of the command's own cgroup."""

    name = "pressure"
    columns: Mapping[str, tuple[str, ...]] = {"pressure": ("some_s", "full_s")}

    def __init__(self, root: Path, pid: int | None = None) -> None:
        self._root = root
        self._pid = pid
        self._files: dict[str, KernelFile] = {}

    def prepare(self) -> str | None:
        """The kernel measures pressure, and lets us read it (``psi=1``)."""
        self.follow(self._pid)
        if any(file.read() for file in self._files.values()):
            return None
        return "/proc/pressure cannot be read: the kernel does not measure it, or was started without psi=1"

    def follow(self, pid: int | None) -> None:
        """Read the cgroup of this process, too."""
        self.close()
        self._pid = pid
        paths = {kind: self._root / "proc/pressure" / kind for kind in _KINDS}
        for folder in cgroup_folders(self._root, pid, "")[:1]:
            paths |= {f"cgroup/{kind}": folder / f"{kind}.pressure" for kind in _KINDS}
        self._files = {name: KernelFile(str(path)) for name, path in paths.items() if path.exists()}

    def sample(self, now_s: float) -> Rows:  # noqa: ARG002  # the protocol's
        """Seconds of waiting since boot, or since the cgroup was made."""
        rows: list[Row] = []
        for name, file in self._files.items():
            some_s, full_s = parse_pressure((file.read_part() or b"").decode(errors="replace"))
            if some_s is not None:
                rows.append([name, some_s, full_s])
        return {"pressure": rows}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
