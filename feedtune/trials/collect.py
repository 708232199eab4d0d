"""Records of the ranks, from a pipe that none of them ever waits for into the run folder's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from feedtune.inside.linefiles import LineFiles
from feedtune.inside.recordpipe import PIPE, PREFIX, clear

_ROOM = 1 << 20  # of the pipe, where that much is allowed
_MOST_REST = 1 << 16  # bytes without an end of line that no rank can have written
_LAST_READS = 256  # a process that the command leaves behind may go on writing
_PATIENCE_S = 10.0  # for a run folder that does not answer
_OLD_S = 60.0  # a younger pipe without a reader is one that is being made


class Collector:
    """Reads the pipe in a thread of its own, from ``start`` to ``stop``; neither raises.

    The pipe lies in memory and the run folder holds a link to it: opening it in a folder on a network that
    hangs would stop a rank as surely as writing a file there. The thread takes over the signals that are
    blocked where it is started: start it inside of ``Foreground``.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self.error: str | None = None
        self._link = run / PIPE
        self._files = LineFiles(str(run))
        self._folder: Path | None = None
        self._pipe: int | None = None
        self._rest = b""
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def thinned(self) -> int:
        """Lines left out to keep files small."""
        return self._files.thinned

    @property
    def lost(self) -> int:
        """Lines that could not be written; ``error`` says why."""
        return self._files.lost

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Make the pipe and read it; where none can be made, ranks write files themselves."""
        self.open()
        if self._pipe is not None:
            self._thread = threading.Thread(target=self._read_on, name="records", daemon=True)
            self._thread.start()

    def open(self) -> None:
        """Make the pipe and hold it open."""
        try:
            path = self._make()
            # For both, so that it never ends and never breaks, whoever else comes and goes.
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            self._remove()
            return
        with contextlib.suppress(OSError):  # the user has many pipes; it works with less
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _ROOM)

    def _make(self) -> Path:
        for base in ("/dev/shm", tempfile.gettempdir()):
            sweep(base)
            with contextlib.suppress(OSError):
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
                path = self._folder / PIPE
                os.mkfifo(path, 0o600)
                self._link.symlink_to(path)
                return path
            self._remove()
        os.mkfifo(self._link, 0o600)
        return self._link

    def collect(self) -> int:
        """Take down what is in the pipe now, at most one reading of it; how many bytes."""
        assert self._pipe is not None
        try:
            data = os.read(self._pipe, _ROOM)
        except BlockingIOError:
            return 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_REST:
            self._rest = b""
        failed = self._files.append(line + b"\n" for line in lines if line)
        if failed is not None:
            self.error = failed.strerror or str(failed)
        return len(data)

    def _read_on(self) -> None:
        poll = select.poll()
        assert self._pipe is not None
        poll.register(self._pipe, select.POLLIN)
        try:
            while not self._stopping:
                poll.poll()
                self.collect()
            for _ in range(_LAST_READS):
                if not self.collect():
                    break
        except Exception as error:  # noqa: BLE001  # told in the note; the command goes on
            self.error = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Take down what is left, and remove the pipe."""
        self._remove()
        if self._pipe is None:
            return
        if self._thread is not None:
            self._stopping = True
            with contextlib.suppress(BlockingIOError):  # full: it is awake
                os.write(self._pipe, b"\n")
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                self.error = "the run folder does not answer"
                return
        os.close(self._pipe)
        self._pipe = None

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._link.unlink()
        if self._folder is not None:
            clear(str(self._folder / PIPE))
            self._folder = None


def sweep(base: str) -> None:
    """Remove this user's pipes in a folder that nobody reads: drivers were killed, and no rank was left."""
    for folder in Path(base).glob(f"{PREFIX}*"):
        pipe = folder / PIPE
        try:
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S:
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):
                clear(str(pipe))
