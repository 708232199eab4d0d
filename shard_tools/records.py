"""What the rooms of this package hand to each other: samples, shards and the manifest of a finished pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Entry(NamedTuple):
    """One source file: path relative to the root, size in bytes, and when it was last changed."""

    path: str
    size: int
    mtime_ns: int


def label_of(path: str) -> str | None:
    """Class label of a path, its first folder: ``label_of("cat/x/1.jpg") == "cat"``; None without one."""
    head, slash, _ = path.partition("/")
    return head if slash else None


@dataclass(frozen=True)
class Sample:
    """One training example as it lies in a pack.

    Attributes:
        number: position in the whole pack, which is also its key (nine digits in a tar, ``>Q`` in LMDB).
        path: original path relative to the source folder; bytes that are no UTF-8 are surrogate escapes.
        label: class name (the first folder of the path); None for a file that lies in no folder.
        label_index: position of the label in the sorted class names; -1 without a label.
        parts: member extension -> original relative path of the file it holds.
        size: payload bytes.
        digest: xxh3-128 of the payload, 32 hexadecimal digits.
    """

    number: int
    path: str
    label: str | None
    label_index: int
    parts: dict[str, str]
    size: int
    digest: str


@dataclass(frozen=True)
class ShardInfo:
    """One finished shard: a row of the manifest.

    Attributes:
        name: file name of the shard.
        index: file name of its offset index.
        first: number of its first sample; its samples are numbered without gaps.
        samples: how many samples it holds.
        bytes: size of the shard file.
        payload_bytes: bytes of the source files in it.
        digest: xxh3-128 of the shard file.
        index_digest: xxh3-128 of the index file.
        classes: how many classes occur in it.
        label_entropy_bits: Shannon entropy of its labels in bits; 0 means one class only.
    """

    name: str
    index: str
    first: int
    samples: int
    bytes: int
    payload_bytes: int
    digest: str
    index_digest: str
    classes: int
    label_entropy_bits: float


@dataclass(frozen=True)
class Manifest:
    """What a finished pack consists of; holds no time, host or worker count, so reruns are byte-identical.

    Attributes:
        format: ``"wds"`` or ``"lmdb"``.
        samples: samples in all shards.
        payload_bytes: bytes of the source files.
        bytes: bytes of the shard files.
        shard_size: the largest shard size asked for, in bytes.
        seed: seed of the shuffle; None when the samples lie in the order of their paths.
        classes: class names, sorted; a label index is a position in it.
        shards: the shards in the order of their numbers.
    """

    format: str
    samples: int
    payload_bytes: int
    bytes: int
    shard_size: int
    seed: int | None
    classes: tuple[str, ...]
    shards: tuple[ShardInfo, ...]
