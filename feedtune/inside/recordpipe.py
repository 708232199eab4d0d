"""How a rank hands lines to the driver: a pipe that it opens for a moment, and never waits for.

A file of the run folder can lie on a network that hangs; writing to it would stop the training. Nothing
stays open between two calls, so workers inherit nothing; no thread is needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from .linefiles import LineFiles

PIPE = "records.pipe"  # in the run folder; most often a link to the one in memory
PREFIX = "feedtune-pipe-"  # of the folder in memory
MOST_LINE = select.PIPE_BUF  # so much is written whole or not at all, whoever else writes
_LATER = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class RecordPipe:
    """The pipe of a driver on this machine.

    Attributes:
        gone: the driver reads no more, and never will.

    Args:
        path: where it lies, links followed: nothing of the run folder is touched from then on.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.gone = False

    def write(self, lines: Sequence[str]) -> int:
        """Hand on as many of these lines as fit without waiting; how many did. Raises nothing."""
        written = 0
        try:
            target = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                with _without_sigpipe():
                    for count, chunk in _chunks(lines):
                        os.write(target, chunk)
                        written += count
            finally:
                os.close(target)
        except OSError as error:
            self.gone = error.errno not in _LATER
            if error.errno == errno.ENXIO:
                clear(self.path)  # the driver was killed
        return written


class RecordFiles:
    """Where no pipe leads to the driver (another machine, a container): the run folder's files themselves.

    Args:
        folder: the run folder.
    """

    gone = False

    def __init__(self, folder: str) -> None:
        self._files = LineFiles(folder)

    def write(self, lines: Sequence[str]) -> int:
        """Append these lines; how many there were.

        Raises:
            OSError: the folder cannot be written.
        """
        failed = self._files.append(line.encode() for line in lines)
        if failed is not None:
            raise failed
        return len(lines)


def clear(path: str) -> None:
    """Remove a pipe and its folder, if it lies in memory: both would stay until the machine restarts."""
    folder = os.path.dirname(path)
    if os.path.basename(folder).startswith(PREFIX):
        for remove, what in ((os.unlink, path), (os.rmdir, folder)):
            with contextlib.suppress(OSError):  # somebody was faster
                remove(what)


def reach(folder: str) -> Optional[RecordPipe]:
    """The pipe that a driver reads, if it can be reached from here."""
    try:
        path = os.path.realpath(os.path.join(folder, PIPE))
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return None
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # ENXIO: whoever reads it is elsewhere
    except OSError:
        return None
    return RecordPipe(path)


def _chunks(lines: Iterable[str]) -> Iterator[tuple[int, bytes]]:
    """``(how many, their bytes)``: as many whole lines each time as the pipe takes at once."""
    chosen: list[str] = []
    size = 0
    for line in lines:
        if size + len(line) > MOST_LINE:
            yield len(chosen), "".join(chosen).encode()
            chosen, size = [], 0
        chosen.append(line)
        size += len(line)
    if chosen:
        yield len(chosen), "".join(chosen).encode()


@contextlib.contextmanager
def _without_sigpipe() -> Iterator[None]:
    """A reader that is gone costs an error and not the process, whatever the script has set for SIGPIPE."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    except BrokenPipeError:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
