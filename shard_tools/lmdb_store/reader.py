"""Read LMDB shards: read-only and without a lock file, so that any number of processes may read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
