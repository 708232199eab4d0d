"""Write a tar shard: one reused buffer that files are read into and that is written in large pieces."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from shard_tools.manifest import TEMPORARY, index_bytes, target_error, write_all, write_file
from shard_tools.plan import ShardPlan, label_block, member_ext, sample_json
from shard_tools.plan.layout import TAR_END
from shard_tools.plan.members import BLOCK, padded
from shard_tools.records import Entry, ShardInfo
from shard_tools.scan import SourceReader
from shard_tools.tar_store.header import file_header, header

# Small enough to stay in the processor's cache between reading, hashing and writing.
BUFFER_BYTES = 2**20
_ZEROS = bytes(BLOCK)

Row = tuple[int, int, bytes, str, int]


class _Output:
    """An archive being written: what is in the buffer, what is in the file, and the digest of it all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view = memoryview(bytearray(BUFFER_BYTES))
        self.used = 0
        self.flushed = 0
        self.digest = xxhash.xxh3_128()
        try:
            self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise target_error(path, error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Write past the buffer, which must be empty."""
        self.digest.update(data)
        try:
            write_all(self.handle, data)
        except OSError as error:
            raise target_error(self.path, error) from error
        self.flushed += len(data)

    def flush(self) -> None:
        if self.used:
            self.write(self.view[: self.used])
            self.used = 0


def write_shard(shard: ShardPlan, folder: Path) -> ShardInfo:
    """Write a shard and its index into ``folder`` under temporary names (``NAME.tmp``), not durable yet.

    Raises:
        ToolError: a source file cannot be read or has changed, or the disk is full.
    """
    out = _Output(folder / (shard.name + TEMPORARY))
    try:
        with SourceReader(shard.root) as source:
            rows = _write_samples(shard, source, out)
        out.flush()
        out.write(bytes(TAR_END))
    finally:
        os.close(out.handle)
    index = index_bytes(shard.first, rows)
    write_file(folder / (shard.index_name + TEMPORARY), index)
    classes, entropy = shard.label_mix()
    return ShardInfo(
        name=shard.name,
        index=shard.index_name,
        first=shard.first,
        samples=len(rows),
        bytes=out.flushed,
        payload_bytes=sum(row[1] for row in rows),
        digest=out.digest.hexdigest(),
        index_digest=xxhash.xxh3_128_hexdigest(index),
        classes=classes,
        label_entropy_bits=entropy,
    )


def _write_samples(shard: ShardPlan, source: SourceReader, out: _Output) -> list[Row]:
    rows: list[Row] = []
    labels: dict[int, bytes] = {}
    for number, entry in enumerate(shard.entries, shard.first):
        label, label_index = shard.label(entry)
        ext = member_ext(entry.path)
        key = b"%09d." % number
        text = sample_json(entry.path, label, label_index, ext)
        block = labels.get(label_index)
        if block is None:
            block = labels[label_index] = label_block(label_index).ljust(BLOCK, b"\0")
        tail = b"".join(
            (
                header(key + b"cls", len(block.rstrip(b"\0"))),
                block,
                header(key + b"json", len(text)),
                text,
                _ZEROS[: -len(text) % BLOCK],
            )
        )
        head = file_header(key + ext.encode("ascii"), entry.size)
        add = _add if len(head) + padded(entry.size) + len(tail) < BUFFER_BYTES else _add_large
        offset, digest = add(out, source, entry, head, tail)
        rows.append((offset, entry.size, digest, entry.path, label_index))
    return rows


def _add(out: _Output, source: SourceReader, entry: Entry, head: bytes, tail: bytes) -> tuple[int, bytes]:
    """Add a sample that fits into the buffer; returns where its payload lies and its digest."""
    size = entry.size
    gap = -size % BLOCK
    if out.used + BLOCK + size + gap + len(tail) >= BUFFER_BYTES:
        out.flush()
    view = out.view
    start = out.used + BLOCK
    view[out.used : start] = head
    source.read_into(entry, view[start:])
    end = start + size
    digest = xxhash.xxh3_128_digest(view[start:end])
    view[end : end + gap] = _ZEROS[:gap]
    end += gap
    out.used = end + len(tail)
    view[end : out.used] = tail
    return out.flushed + start, digest


def _add_large(
    out: _Output, source: SourceReader, entry: Entry, head: bytes, tail: bytes
) -> tuple[int, bytes]:
    """Add a sample of any size, piece by piece."""
    out.flush()
    out.write(head)
    offset = out.flushed
    digest = xxhash.xxh3_128()
    for piece in source.chunks(entry, out.view):
        digest.update(piece)
        out.write(piece)
    out.write(_ZEROS[: -entry.size % BLOCK] + tail)
    return offset, digest.digest()
