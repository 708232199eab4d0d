"""Sizes and times as people write and read them; one formatter a unit."""

from __future__ import annotations

import re

from shard_tools.errors import BadInput

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Read a size such as ``64MB`` (10^6), ``1GiB`` (2^30) or ``4096`` as bytes.

    Raises:
        BadInput: the text is no size, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise BadInput(f"'{text}' is not a size", "write it like 64MB, 1GiB or 4096")
    size = int(float(match.group(1)) * factor)
    if size <= 0:
        raise BadInput(f"the size '{text}' is not above zero", "write it like 64MB, 1GiB or 4096")
    return size


def format_bytes(size: float) -> str:
    """Bytes in decimal units with three significant digits: ``format_bytes(153_000_000) == '153 MB'``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_seconds(seconds: float) -> str:
    """A duration: ``'70 µs'``, ``'4.2 ms'``, ``'350 ms'``, ``'4.2 s'``, ``'3 min 05 s'``."""
    if seconds < 0.001:
        return f"{seconds * 1_000_000:.0f} µs"
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def format_count(count: int) -> str:
    """A count with thousands separated: ``'6,900'``."""
    return f"{count:,}"
