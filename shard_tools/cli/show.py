"""What the commands of this package print for a person."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

LISTED = 10


def table(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        line(f"{name:<{width}}  {value}")


def listing(title: str, names: Sequence[str]) -> None:
    """Print a title with its count and the first few names, one a line; nothing for none."""
    if not names:
        return
    line(f"{title}: {len(names):,}")
    for name in names[:LISTED]:
        line(f"  {name}")
    if len(names) > LISTED:
        line(f"  ... and {len(names) - LISTED:,} more (--json lists all)")


def line(text: str) -> None:
    """Print one line; bytes of file names that are no UTF-8, and control characters, are shown escaped."""
    safe = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    print(safe.encode(encoding, "backslashreplace").decode(encoding))


def quoted(path: Path) -> str:
    """A path as it can be pasted into a shell."""
    import shlex

    return shlex.quote(str(path))
