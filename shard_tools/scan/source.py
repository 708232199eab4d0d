"""Read source files as the scan saw them: a file that has changed since is an error, not a short sample."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shard_tools.errors import BadInput, Missing, ToolError
from shard_tools.records import Entry


def source_error(path: str | Path, error: OSError) -> ToolError:
    """The error to show for a source file that cannot be read."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return BadInput(f"{path} may not be read", "change its permissions, or move it out of the folder")
    if error.errno == errno.ENOENT:
        return BadInput(f"{path} has gone since the scan", "run the command again on a folder at rest")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Missing("too many open files", "raise the limit with `ulimit -n`, or use fewer workers")
    return BadInput(f"{path} cannot be read: {error.strerror}", "check the disk it lies on")


class SourceReader:
    """Reads files of one source folder into memory that the caller owns."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._name = root

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._root)

    def read_into(self, entry: Entry, room: memoryview) -> None:
        """Read one whole file into ``room``, which must hold one byte more than the file's size.

        The byte more tells a file that has grown without a further system call.

        Raises:
            ToolError: the file cannot be read, or its size is not the scan's.
        """
        size = entry.size
        try:
            handle = os.open(entry.path, os.O_RDONLY, dir_fd=self._root)
            try:
                got = os.readv(handle, [room[: size + 1]])
                while got < size:
                    more = os.readv(handle, [room[got : size + 1]])
                    if not more:
                        break
                    got += more
            finally:
                os.close(handle)
        except OSError as error:
            raise source_error(self._name / entry.path, error) from error
        if got != size:
            raise self._changed(entry)

    def chunks(self, entry: Entry, room: memoryview) -> Iterator[memoryview]:
        """Yield a file of any size in pieces that lie in ``room`` until the next piece is asked for.

        Raises:
            ToolError: the file cannot be read, or its size is not the scan's.
        """
        left = entry.size
        try:
            handle = os.open(entry.path, os.O_RDONLY, dir_fd=self._root)
            try:
                while got := os.readv(handle, [room]):
                    left -= got
                    if left < 0:
                        raise self._changed(entry)
                    yield room[:got]
            finally:
                os.close(handle)
        except OSError as error:
            raise source_error(self._name / entry.path, error) from error
        if left:
            raise self._changed(entry)

    def _changed(self, entry: Entry) -> BadInput:
        return BadInput(
            f"{self._name / entry.path} has changed its size since the scan",
            "run the command again when nothing writes to the folder",
        )
