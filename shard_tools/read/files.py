"""Open files of shards: opened when first needed, a bounded number, and anew in every process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from shard_tools.errors import BadAnswer
from shard_tools.lmdb_store import open_environment, payload_span

OPEN_FILES = 64
Key = tuple[Path, str]


class Closable(Protocol):
    """What a pool holds."""

    def close(self) -> None:
        """Let go of the file."""


Item = TypeVar("Item", bound=Closable)


class FilePool(Generic[Item]):
    """The most recently used files of this process, opened by one function of their path.

    A key is a path and a digest, so that a pack that replaces another is not read from old files.

    A process that was forked closes what it inherited and opens its own: LMDB asks for that, and a lock that
    another thread held while the process was forked is replaced too.
    """

    def __init__(self, opener: Callable[[Path], Item], limit: int = OPEN_FILES) -> None:
        self._opener = opener
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._open: OrderedDict[Key, Item] = OrderedDict()

    def get(self, key: Key) -> Item:
        """The open file of a key; to be used with ``lock`` held."""
        item = self._open.get(key)
        if item is not None:
            self._open.move_to_end(key)
            return item
        while len(self._open) >= self._limit:
            self._open.popitem(last=False)[1].close()
        item = self._open[key] = self._opener(key[0])
        return item

    def here(self) -> FilePool[Item]:
        """This pool, made this process's own; call it before the lock is taken."""
        if os.getpid() != self._pid:
            inherited = list(self._open.values())
            self._reset()
            for item in inherited:
                item.close()
        return self

    def close(self) -> None:
        """Close all files of the pool."""
        with self.here().lock:
            for item in self._open.values():
                item.close()
            self._open.clear()


class TarFile:
    """A tar shard, read at offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def payload(self, offset: int, length: int) -> bytes:
        """The bytes at an offset.

        Raises:
            BadAnswer: the file ends before.
        """
        data = os.pread(self._handle, length, offset)
        while len(data) < length:
            more = os.pread(self._handle, length - len(data), offset + len(data))
            if not more:
                what = f"{self.path} ends before byte {offset + length}"
                raise BadAnswer(what, "run `shard-tools verify`")
            data += more
        return data

    def close(self) -> None:
        """Close the file; closing it twice does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            os.close(self._handle)


class LmdbFile:
    """An LMDB shard, read by key; each read has its own transaction, so threads share no state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._env: Any = open_environment(path)

    def payload(self, key: int, length: int) -> bytes:
        """The payload of a key.

        Raises:
            BadAnswer: there is no such key, or its payload has another length.
        """
        with self._env.begin(buffers=True) as txn:
            value = txn.get(key.to_bytes(8, "big"))
            if value is None:
                raise BadAnswer(f"{self.path} lacks sample {key}", "run `shard-tools verify`")
            start, end = payload_span(value)
            if end - start != length:
                raise BadAnswer(f"{self.path}: sample {key} is damaged", "run `shard-tools verify`")
            return bytes(value[start:end])

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
