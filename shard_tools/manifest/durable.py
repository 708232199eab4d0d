"""Files that appear under their name only when they are whole and on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shard_tools.errors import BadInput, Missing, ToolError

TEMPORARY = ".tmp"


def target_error(path: str | Path, error: OSError) -> ToolError:
    """The error to show for a destination file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Missing(
            f"the disk is full while writing {path}",
            "free space and run the same command again: finished shards are kept",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Missing(
            f"{path} may not be written: {error.strerror}", "choose a folder that you may write to"
        )
    return BadInput(f"{path} cannot be written: {error.strerror}", "check the disk it lies on")


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all bytes: a call may take fewer than it is given, above all on a disk that fills up."""
    done = os.write(handle, data)
    while done < len(data):
        done += os.write(handle, memoryview(data)[done:])


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is not made durable yet.

    Raises:
        ToolError: the disk is full or may not be written.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(handle, data)
        finally:
            os.close(handle)
    except OSError as error:
        raise target_error(path, error) from error


def settle(path: Path) -> None:
    """Make ``NAME.tmp`` durable, then give it its name.

    Raises:
        ToolError: the disk is full or failing.
    """
    temporary = f"{path}{TEMPORARY}"
    try:
        sync_path(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise target_error(path, error) from error


def sync_path(path: str | Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
