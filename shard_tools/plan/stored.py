"""A sample as both stores give it back."""

from __future__ import annotations

from typing import NamedTuple


class StoredSample(NamedTuple):
    """One sample as it lies in a shard.

    Attributes:
        number: its key.
        parts: member extension -> data, in the order they lie in; the payload is the first.
        offset: where the payload begins in a tar, or the key in LMDB: what the index says.
    """

    number: int
    parts: dict[str, bytes]
    offset: int
