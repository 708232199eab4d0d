"""Read LMDB shards: read-only and without a lock file, so that any number of processes may read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from shard_tools.errors import BadAnswer
from shard_tools.lmdb_store.value import split_value
from shard_tools.plan.stored import StoredSample


def open_environment(path: str | Path) -> Any:
    """Open a shard for reading.

    Raises:
        BadAnswer: the file is no LMDB file, or a damaged one.
    """
    import lmdb

    try:
        return lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, create=False, readahead=False, max_dbs=0
        )
    except lmdb.Error as error:
        raise BadAnswer(f"{path} cannot be opened as LMDB: {error}", "run `shard-tools verify`") from error


def read_shard(path: Path) -> Iterator[StoredSample]:
    """Yield the samples of an LMDB shard in the order of their keys.

    Raises:
        BadAnswer: the file is damaged or was not written by this package.
    """
    import lmdb

    env = open_environment(path)
    try:
        with env.begin() as txn, txn.cursor() as cursor:
            for key, value in cursor:
                if len(key) != 8:
                    raise BadAnswer(f"{path}: unknown key {key!r}")
                number = int.from_bytes(key, "big")
                yield StoredSample(number, split_value(value), number)
    except lmdb.Error as error:
        raise BadAnswer(f"{path} is damaged: {error}") from error
    finally:
        env.close()


def wrong_payloads(path: Path, digests: Mapping[int, bytes]) -> list[int]:
    """Numbers of the samples of a damaged shard whose payload is missing or has not the digest it should.

    A damaged tree can crash the library that follows it, so a child process reads the shard; samples that lie
    after such a place are not named.
    """
    answers, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(answers)
            _report_wrong(path, digests, write)
        finally:
            os._exit(0)
    os.close(write)
    with open(answers, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return [int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)]


def _report_wrong(path: Path, digests: Mapping[int, bytes], handle: int) -> None:
    left = dict(digests)
    for sample in read_shard(path):
        payload = next(iter(sample.parts.values()), b"")
        if xxhash.xxh3_128_digest(payload) != left.pop(sample.number, None):
            os.write(handle, sample.number.to_bytes(8, "big"))
    for number in left:
        os.write(handle, number.to_bytes(8, "big"))
