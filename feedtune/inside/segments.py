"""Shared memory that ended workers leave behind.

With the sharing strategy ``file_system`` a batch lies in a file of /dev/shm that its receiver opens by
name. What a block's workers had in flight at its end nobody opens any more, and torch frees it when the
whole training ends: block after block it would fill /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

_SHM = "/dev/shm"


def unlink_undelivered(pids: Iterable[int]) -> list[str]:
    """Remove segments of ended workers, those that this process has opened excepted.

    Returns:
        The names that went.
    """
    prefixes = tuple(f"torch_{pid}_" for pid in pids)
    found = [name for name in os.listdir(_SHM) if name.startswith(prefixes)] if prefixes else []
    if not found:
        return []
    with open("/proc/self/maps", errors="replace") as file:
        opened = {line.rstrip("\n").rpartition("/")[2] for line in file if _SHM in line}
    gone = [name for name in found if name not in opened]
    for name in gone:
        with contextlib.suppress(OSError):  # torch has freed it meanwhile
            os.unlink(os.path.join(_SHM, name))
    return gone
