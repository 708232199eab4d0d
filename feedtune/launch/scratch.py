"""Where redirected writes land: a private folder outside everything that is protected.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence

from feedtune.launch.leftovers import remove_tree
from feedtune.launch.mounts import below

# A checkpoint of a small model fits; with less, another folder comes first.
ROOM_BYTES = 1 << 30
PREFIX = "feedtune-scratch-"
_LOCK = "lock"


def candidates(env: Mapping[str, str], policy: Mapping[str, Sequence[str]]) -> list[str]:
    """Folders to try, best first: on a disk with room, outside of what is protected; memory last."""
    names = ["/var/tmp", "/tmp", *policy["writable"], env.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
    usable = [name for name in names if name and os.access(name, os.W_OK | os.X_OK) and os.path.isdir(name)]

    def rank(name: str) -> tuple[bool, bool, bool]:
        room = os.statvfs(name)
        inside = any(name == folder or below(name, folder) for folder in policy["protect"])
        return name == "/dev/shm", room.f_bavail * room.f_frsize < ROOM_BYTES, inside

    return sorted(dict.fromkeys(usable), key=rank)


class Scratch:
    """A scratch folder, locked for as long as its guardian lives."""

    def __init__(self, base: str) -> None:
        # Locked before it has its name: a sweep must not take it for an abandoned one.
        fresh = os.path.realpath(tempfile.mkdtemp(prefix=".feedtune-new-", dir=base))
        self._lock = os.open(os.path.join(fresh, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = os.path.join(os.path.dirname(fresh), PREFIX + os.path.basename(fresh).rpartition("-")[2])
        os.rename(fresh, self.path)

    def inner(self) -> str:
        """A fresh empty folder inside."""
        return tempfile.mkdtemp(dir=self.path)

    def remove(self) -> bool:
        """Remove it; False if something stays."""
        gone = remove_tree(self.path)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        return gone


def sweep(base: str) -> int:
    """Remove this user's scratch folders whose guardian is gone; how many went.

    Only a SIGKILL of guardian and driver at once leaves one behind.
    """
    count = 0
    for entry in os.scandir(base):
        if not entry.name.startswith(PREFIX) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            continue
        with contextlib.suppress(OSError):
            lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                count += remove_tree(entry.path)
            finally:
                os.close(lock)
    return count
