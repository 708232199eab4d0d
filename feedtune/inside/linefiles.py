"""Files of recorded lines that stay small however long a training runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Optional

_NAME = re.compile(rb"(steps|workers)\.rank\d+(\.\d+)?")


class LineFile:
    """One file, which grows with the logarithm of what it is given.

    After each ``change_bytes`` it keeps one stretch of consecutive steps in 2, 4, 8, ...: steps that follow
    each other are what can be measured, so a stretch is kept or left out whole. The stretches of a sparser
    file are also those of a denser one, so that files of several ranks have steps in common.

    Args:
        path: where it lies; that of steps is there already, since a rank has claimed it.
    """

    stretch = 1024
    change_bytes = 32 << 20
    most_bytes = 512 << 20

    def __init__(self, path: str) -> None:
        self.path = path
        self.thinned = 0
        self.lost = 0
        self._numbered = os.path.basename(path).startswith("steps.")
        self._flags = os.O_WRONLY | os.O_APPEND | (0 if self._numbered else os.O_CREAT)
        self._count = 0
        self._size = 0
        self._since = 0
        self._one_in = 1
        self._stretch = -1
        self._keeps = True

    def append(self, lines: Iterable[bytes]) -> None:
        """Take some lines down; whole ones only, whatever happens.

        Raises:
            OSError: they could not be written, and are counted as lost.
        """
        kept = [line for line in lines if self._keep(line)]
        if not kept:
            return
        try:
            _append(self.path, self._flags, b"".join(kept))
        except OSError:
            self.lost += len(kept)
            raise

    def _keep(self, line: bytes) -> bool:
        try:
            number = int(line[1 : line.index(b",")]) if self._numbered else self._count
        except ValueError:
            self.lost += 1
            return False
        self._count += 1
        stretch = number // self.stretch
        if stretch != self._stretch:
            self._stretch = stretch
            if self._since >= self.change_bytes:
                self._since = 0
                self._one_in *= 2
            self._keeps = stretch % self._one_in == 0
        if not self._keeps or self._size + len(line) > self.most_bytes:
            self.thinned += 1
            return False
        self._size += len(line)
        self._since += len(line)
        return True


def private(path: str, flags: int) -> int:
    """An opener: what is written to the run folder is its user's alone."""
    return os.open(path, flags, 0o600)


def _append(path: str, flags: int, data: bytes) -> None:
    target = private(path, flags)
    try:
        size = os.fstat(target).st_size
        try:
            while data:
                data = data[os.write(target, data) :]
        except OSError:
            with contextlib.suppress(OSError):  # no half line before the next one
                os.ftruncate(target, size)
            raise
    finally:
        os.close(target)


class LineFiles:
    """The files of a run folder; each line starts with the name of its own and a tab: ``steps.rank0.2``.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[bytes, LineFile] = {}
        self._garbled = 0

    @property
    def thinned(self) -> int:
        """Lines left out to keep files small."""
        return sum(file.thinned for file in self._files.values())

    @property
    def lost(self) -> int:
        """Lines that could not be written, or not be understood."""
        return self._garbled + sum(file.lost for file in self._files.values())

    def append(self, lines: Iterable[bytes]) -> Optional[OSError]:
        """Take lines down, each in its file; what went wrong with one of these, if anything did."""
        found: dict[bytes, list[bytes]] = {}
        for line in lines:
            name, _, text = line.partition(b"\t")
            found.setdefault(name, []).append(text)
        failed = None
        for name, texts in found.items():
            file = self._files.get(name)
            if file is None:
                if not _NAME.fullmatch(name):
                    self._garbled += len(texts)
                    continue
                path = os.path.join(self._folder, f"{name.decode()}.jsonl")
                file = self._files[name] = LineFile(path)
            try:
                file.append(texts)
            except OSError as error:
                failed = error
        return failed
