"""The shard plan: an order of the samples, cut where the next one would exceed the shard size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import xxhash

from shard_tools.errors import BadInput
from shard_tools.plan.members import label_block, member_ext, page_bytes, sample_json, tar_bytes, value_bytes
from shard_tools.records import Entry, label_of

TAR_END = 1024
LMDB_MAX_VALUE = 2**32 - 1
MAX_SAMPLES = 10**9
# Raise when the bytes that a plan leads to change, so that no half-done pack goes on in another form.
PLAN_VERSION = 1
SUFFIXES = {"wds": "tar", "lmdb": "lmdb"}


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write: its samples in order, and what their labels are called."""

    number: int
    first: int
    root: Path
    suffix: str
    entries: Sequence[Entry]
    planned_bytes: int
    class_index: dict[str, int]

    @property
    def name(self) -> str:
        """File name of the shard."""
        return f"shard-{self.number:06d}.{self.suffix}"

    @property
    def index_name(self) -> str:
        """File name of its offset index."""
        return f"shard-{self.number:06d}.index"

    def label(self, entry: Entry) -> tuple[str | None, int]:
        """Class name and index of a sample; ``(None, -1)`` without a label."""
        name = label_of(entry.path)
        return name, -1 if name is None else self.class_index[name]

    def label_mix(self) -> tuple[int, float]:
        """How many classes occur, and the Shannon entropy of the labels in bits."""
        counts = Counter(label_of(entry.path) for entry in self.entries)
        total = len(self.entries)
        entropy = -sum(n / total * math.log2(n / total) for n in counts.values())
        return len(counts), round(entropy, 4) + 0.0


@dataclass(frozen=True)
class Plan:
    """All shards of a pack.

    Attributes:
        root: source folder.
        format: ``"wds"`` or ``"lmdb"``.
        shard_size: largest shard in bytes; one sample that is larger has a shard of its own.
        seed: seed of the order; None for the order of the paths.
        entries: all samples in pack order; the position is the sample's number.
        cuts: first sample of each shard, then the number of samples.
        shard_bytes: planned bytes of each shard.
        classes: class names, sorted.
    """

    root: Path
    format: str
    shard_size: int
    seed: int | None
    entries: list[Entry]
    cuts: list[int]
    shard_bytes: list[int]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shard_bytes)

    @cached_property
    def _class_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes)}

    def shard(self, number: int) -> ShardPlan:
        """The plan of one shard."""
        first, last = self.cuts[number], self.cuts[number + 1]
        return ShardPlan(
            number, first, self.root, SUFFIXES[self.format], self.entries[first:last],
            self.shard_bytes[number], self._class_index,
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Digest of all that decides the shards' bytes; a half-done pack goes on under the same only."""
        digest = xxhash.xxh3_128(
            repr((PLAN_VERSION, self.format, self.shard_size, self.seed, self.cuts)).encode()
        )
        for path, size, mtime_ns in self.entries:
            digest.update(b"%d %d " % (size, mtime_ns) + path.encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()


def shuffled(entries: Sequence[Entry], seed: int) -> list[Entry]:
    """Entries in a seeded random order: sorted by a hash of seed and path.

    The order depends on nothing but seed and paths, and adding a file moves no other two.
    """
    digest = xxhash.xxh3_64_intdigest
    salt = seed & 0xFFFF_FFFF_FFFF_FFFF

    def place(entry: Entry) -> tuple[int, str]:
        return digest(entry.path.encode("utf-8", "surrogateescape"), salt), entry.path

    return sorted(entries, key=place)


def make_plan(root: Path, entries: Sequence[Entry], form: str, shard_size: int, seed: int | None) -> Plan:
    """Order the samples and cut them into shards, headers and padding counted.

    Args:
        root: source folder.
        entries: its files.
        form: ``"wds"`` or ``"lmdb"``.
        shard_size: largest size of a shard in bytes.
        seed: seed of the shuffle; None keeps the order of the paths.

    Raises:
        BadInput: no files, an unknown format, more samples than nine digits number, or a file over 4 GiB for
            LMDB.
    """
    if form not in SUFFIXES:
        raise BadInput(f"'{form}' is no shard format", "use --format wds or --format lmdb")
    if not entries:
        raise BadInput(f"there are no files in {root}", "name the folder that holds the files")
    if len(entries) > MAX_SAMPLES:
        raise BadInput(f"{len(entries):,} files are more than one pack numbers", "pack the folder in parts")
    order = list(entries) if seed is None else shuffled(entries, seed)
    classes = tuple(sorted({label for entry in entries if (label := label_of(entry.path)) is not None}))
    index = {name: number for number, name in enumerate(classes)}
    cost = _tar_cost if form == "wds" else _lmdb_cost
    costs = []
    for entry in order:
        label = label_of(entry.path)
        costs.append(cost(entry, label, -1 if label is None else index[label]))
    cuts = _cut(costs, shard_size)
    shard_bytes = [sum(costs[start:end]) + TAR_END for start, end in pairwise(cuts)]
    return Plan(root, form, shard_size, seed, order, cuts, shard_bytes, classes)


def _cut(costs: Sequence[int], shard_size: int) -> list[int]:
    """Where each shard begins, then the number of samples: few shards, of nearly equal bytes."""
    room = max(shard_size - TAR_END, 1)
    total = sum(costs)
    target = total / max(1, -(-total // room))
    cuts, used, done = [0], 0, 0
    for number, need in enumerate(costs):
        if used and (used + need > room or done + need / 2 > target * len(cuts)):
            cuts.append(number)
            used = 0
        used += need
        done += need
    return [*cuts, len(costs)]


def _json_size(path: str, label: str | None, label_index: int, ext: str) -> int:
    return len(sample_json(path, label, label_index, ext))


def _tar_cost(entry: Entry, label: str | None, label_index: int) -> int:
    ext = member_ext(entry.path)
    return tar_bytes(entry.size, _json_size(entry.path, label, label_index, ext))


def _lmdb_cost(entry: Entry, label: str | None, label_index: int) -> int:
    ext = member_ext(entry.path)
    json_size = _json_size(entry.path, label, label_index, ext)
    value = value_bytes(entry.size, json_size, ext, len(label_block(label_index)))
    if value > LMDB_MAX_VALUE:
        raise BadInput(f"{entry.path} is larger than an LMDB value can be (4 GiB)", "use --format wds")
    return page_bytes(value)
