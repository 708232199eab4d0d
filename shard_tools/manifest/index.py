r"""The offset index ``shard-NNNNNN.index``: a header, rows of fixed width, then the original paths.

All numbers are little-endian. The header has 64 bytes: ``STINDEX\0``, u32 version, u32 bytes a row,
u64 rows, u64 number of the first sample, u64 offset and u64 length of the path table, the rest zero.
A row has 48 bytes:

===  =====  ==================================================================================
at   type   what
===  =====  ==================================================================================
0    u64    where the payload lies: byte offset in a tar, key in LMDB
8    u32    payload length, low word
12   u32    payload length, high word: zero for files under 4 GiB (both together read as one u64)
16   16 B   xxh3-128 of the payload, big-endian as xxhash prints it
32   u64    where its path begins in the path table; it ends where the next one begins
40   i32    label index, -1 without a label
44   u16    number of the part within its sample, 0 = first
46   u16    zero
===  =====  ==================================================================================

The path table holds the paths as the file system has them, bytes without a separator.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shard_tools.errors import BadAnswer, BadInput

MAGIC = b"STINDEX\0"
INDEX_VERSION = 1
HEADER = struct.Struct("<8sIIQQQQ16x")
ROW = struct.Struct("<QQ16sQiHH")


class IndexRow(NamedTuple):
    """One payload: where it lies, how long it is, its xxh3-128, its path, and its label index."""

    offset: int
    length: int
    digest: bytes
    path: str
    label_index: int


def index_bytes(first: int, rows: Sequence[tuple[int, int, bytes, str, int]]) -> bytes:
    """The bytes of an index file.

    Args:
        first: number of the shard's first sample.
        rows: (offset, length, 16-byte digest, path, label index) of each sample in order.
    """
    pack = ROW.pack
    packed, names, at = [], [], 0
    for offset, length, digest, path, label_index in rows:
        packed.append(pack(offset, length, digest, at, label_index, 0, 0))
        name = path.encode("utf-8", "surrogateescape")
        names.append(name)
        at += len(name)
    table = HEADER.size + ROW.size * len(rows)
    header = HEADER.pack(MAGIC, INDEX_VERSION, ROW.size, len(rows), first, table, at)
    return b"".join((header, *packed, *names))


class ShardIndex:
    """A memory-mapped index file: row ``i`` is read when it is asked for, whatever the file's size.

    Raises:
        BadAnswer: the file is no whole index.
        BadInput: a newer version wrote it.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            if size < HEADER.size:
                raise BadAnswer(f"{path} is no whole index: {size} bytes", "run `shard-tools verify`")
            self._map = mmap.mmap(handle, size, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        try:
            self._check(path, size)
        except (BadInput, BadAnswer):
            self._map.close()
            raise

    def _check(self, path: Path, size: int) -> None:
        magic, version, width, rows, first, table, names = HEADER.unpack_from(self._map)
        if magic == MAGIC and version > INDEX_VERSION:
            raise BadInput(f"{path} has index version {version}, this one reads 1", "update the package")
        whole = table == HEADER.size + ROW.size * rows and size == table + names
        if magic != MAGIC or version != INDEX_VERSION or width != ROW.size or not whole:
            raise BadAnswer(f"{path} is no whole index", "run `shard-tools verify`")
        self.rows: int = rows
        self.first: int = first
        self._table: int = table
        self._end: int = size

    def __len__(self) -> int:
        return self.rows

    def location(self, row: int) -> tuple[int, int, int]:
        """(offset, length, label index) of a row: what a read needs, and nothing more."""
        offset, length, _, _, label, _, _ = ROW.unpack_from(self._map, HEADER.size + ROW.size * row)
        return offset, length, label

    def __getitem__(self, row: int) -> IndexRow:
        offset, length, digest, name, label, _, _ = ROW.unpack_from(self._map, HEADER.size + ROW.size * row)
        if row + 1 < self.rows:
            end = self._table + ROW.unpack_from(self._map, HEADER.size + ROW.size * (row + 1))[3]
        else:
            end = self._end
        path = self._map[self._table + name : end].decode("utf-8", "surrogateescape")
        return IndexRow(offset, length, digest, path, label)

    def __iter__(self) -> Iterator[IndexRow]:
        return (self[row] for row in range(self.rows))

    def close(self) -> None:
        """Give the memory map back."""
        self._map.close()
