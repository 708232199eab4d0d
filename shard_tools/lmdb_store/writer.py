"""Write an LMDB shard: keys in order, small transactions, and a map that grows when it is full."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import xxhash

from shard_tools.errors import BadAnswer
from shard_tools.lmdb_store.value import part_head
from shard_tools.manifest import TEMPORARY, index_bytes, target_error, write_file
from shard_tools.plan import ShardPlan, label_block, member_ext, sample_json
from shard_tools.records import Entry, ShardInfo
from shard_tools.scan import SourceReader

# A transaction ends after this many bytes: what has to be done again when the map is full.
TRANSACTION_BYTES = 64 * 2**20
# Pages for the tree above the leaves, freed pages between transactions, and the two meta pages.
_MAP_FACTOR = 1.25
_MAP_SPARE = 2**20

Row = tuple[int, int, bytes, str, int]


def write_shard(shard: ShardPlan, folder: Path, map_bytes: int | None = None) -> ShardInfo:
    """Write a shard and its index into ``folder`` under temporary names (``NAME.tmp``), not durable yet.

    Args:
        shard: what to write.
        folder: where to write it.
        map_bytes: first size of the memory map; None takes it from the plan. It grows when it is full.

    Raises:
        ToolError: a source file cannot be read or has changed, or the disk is full.
    """
    import lmdb

    path = folder / (shard.name + TEMPORARY)
    path.unlink(missing_ok=True)
    size = map_bytes or int(shard.planned_bytes * _MAP_FACTOR) + _MAP_SPARE
    try:
        env = lmdb.open(
            str(path), map_size=_whole_pages(size), subdir=False, lock=False, sync=False, **_format_09()
        )
        try:
            rows = _write_samples(env, shard)
            used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        finally:
            env.close()
        # Nothing lies behind the last page; a short file also tells truncation from a full one.
        os.truncate(path, max(used, 1))
    except lmdb.Error as error:
        raise target_error(path, _os_error(error, path, shard.planned_bytes)) from error
    except OSError as error:
        raise target_error(path, error) from error
    index = index_bytes(shard.first, rows)
    write_file(folder / (shard.index_name + TEMPORARY), index)
    classes, entropy = shard.label_mix()
    return ShardInfo(
        name=shard.name,
        index=shard.index_name,
        first=shard.first,
        samples=len(rows),
        bytes=path.stat().st_size,
        payload_bytes=sum(row[1] for row in rows),
        digest=_file_digest(path),
        index_digest=xxhash.xxh3_128_hexdigest(index),
        classes=classes,
        label_entropy_bits=entropy,
    )


def _format_09() -> dict[str, Any]:
    """The argument that asks for the 0.9 format, where the binding knows more than one."""
    import lmdb

    return {"lib_version": 0} if int(lmdb.__version__.partition(".")[0]) >= 2 else {}


def _os_error(error: Any, path: Path, planned_bytes: int) -> OSError:
    """What stopped LMDB; it reports the short write of a disk that has filled up as an I/O error."""
    code = getattr(error, "code", 0)
    if code == errno.EIO:
        status = os.statvfs(path.parent)
        if status.f_bavail * status.f_frsize < planned_bytes:
            code = errno.ENOSPC
    return OSError(code if code > 0 else errno.EIO, str(error))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        return xxhash.xxh3_128_hexdigest(view)


def _write_samples(env: Any, shard: ShardPlan) -> list[Row]:
    """Write transaction after transaction; one that meets a full map is done again on a larger one."""
    import lmdb

    rows: list[Row] = []
    buffer = bytearray(2**20)
    with SourceReader(shard.root) as source:
        while len(rows) < len(shard.entries):
            try:
                with env.begin(write=True) as txn:
                    fresh, buffer = _transaction(txn, shard, len(rows), source, buffer)
            except lmdb.MapFullError:
                env.set_mapsize(_whole_pages(env.info()["map_size"] * 2))
                continue
            rows += fresh
    return rows


def _transaction(
    txn: Any, shard: ShardPlan, start: int, source: SourceReader, buffer: bytearray
) -> tuple[list[Row], bytearray]:
    """Put samples from ``start`` on until the transaction is large enough; returns rows and buffer."""
    rows: list[Row] = []
    done = 0
    for position in range(start, len(shard.entries)):
        entry = shard.entries[position]
        number = shard.first + position
        value, begin, label_index, buffer = _value(shard, entry, source, buffer)
        digest = xxhash.xxh3_128_digest(value[begin : begin + entry.size])
        # False means that nothing was stored: the key exists, or is smaller than the last one.
        if not txn.put(number.to_bytes(8, "big"), value, append=True, overwrite=False):
            raise BadAnswer(
                f"LMDB refused key {number} of {shard.name}", "this is a defect: please report it"
            )
        rows.append((number, entry.size, digest, entry.path, label_index))
        done += len(value)
        if done >= TRANSACTION_BYTES:
            break
    return rows, buffer


def _value(
    shard: ShardPlan, entry: Entry, source: SourceReader, buffer: bytearray
) -> tuple[memoryview, int, int, bytearray]:
    """Lay a value out: (value, where the payload begins, label index, the buffer, grown if needed)."""
    label, label_index = shard.label(entry)
    ext = member_ext(entry.path)
    text = sample_json(entry.path, label, label_index, ext)
    block = label_block(label_index)
    head = part_head(ext.encode("ascii"), entry.size)
    tail = b"".join((part_head(b"cls", len(block)), block, part_head(b"json", len(text)), text))
    start, end = len(head), len(head) + entry.size
    if end + len(tail) + 1 > len(buffer):
        buffer = bytearray(max(end + len(tail) + 1, 2 * len(buffer)))
    view = memoryview(buffer)
    view[:start] = head
    source.read_into(entry, view[start:])
    view[end : end + len(tail)] = tail
    return view[: end + len(tail)], start, label_index, buffer
