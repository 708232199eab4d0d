"""Where redirected writes land: a private folder outside everything that is protected.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence

from feedtune.launch.mounts import below
from feedtune.launch.reaper import remove_tree

PREFIX = "feedtune-scratch-"
_LOCK = "lock"


def candidates(env: Mapping[str, str]) -> list[str]:
    """Folders to try, best first: on a disk, kept out of what programs use."""
    names = ["/var/tmp", "/tmp", env.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
    return [name for name in names if name and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK)]


def ordered(env: Mapping[str, str], protect: Sequence[str]) -> list[str]:
    """The candidates, those inside a protected folder after the others, memory last."""
    found = candidates(env)
    return sorted(
        found, key=lambda name: (name == "/dev/shm", any(name == p or below(name, p) for p in protect))
    )


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
