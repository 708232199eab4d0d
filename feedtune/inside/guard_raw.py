"""The file system as it is, beneath everything that the write guard changes. Standard library, Python 3.9."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import types

_COPY_PIECE = 1 << 24

# The functions as they are before anything is wrapped.
raw = types.SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
raw.open_file = open


def lexists(path: str) -> bool:
    """os.path.lexists on the file system as it is."""
    try:
        raw.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def isdir(path: str) -> bool:
    """os.path.isdir on the file system as it is."""
    try:
        return stat.S_ISDIR(raw.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def makedirs(path: str) -> None:
    """os.makedirs on the file system as it is; what exists is fine."""
    if not isdir(path):
        makedirs(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            raw.mkdir(path, 0o700)


def copy_file(
    source: str, target: str, found: os.stat_result, contents: bool = True, keep: bool = False
) -> None:
    """Copy a regular file, mode and times included, on the file system as it is.

    Under a temporary name first, so that no other process sees half a file. With ``keep`` a target that
    another process has made meanwhile stays: it may have been written to already.
    """
    fresh = "%s.feedtune-%d-%d" % (target, raw.getpid(), threading.get_ident())
    reader = raw.open(source, os.O_RDONLY | os.O_CLOEXEC) if contents else -1
    writer = raw.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        while contents and raw.sendfile(writer, reader, None, _COPY_PIECE):
            pass
        raw.fchmod(writer, stat.S_IMODE(found.st_mode))
        raw.utime(writer, ns=(found.st_atime_ns, found.st_mtime_ns))
    finally:
        raw.close(writer)
        if contents:
            raw.close(reader)
    if keep:
        with contextlib.suppress(OSError):  # it is there, or this file system has no hard links
            raw.link(fresh, target)
        if lexists(target):
            raw.unlink(fresh)
            return
    raw.rename(fresh, target)
