"""Prove that a pack is whole: every digest, key and label, and on request every byte against the source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from shard_tools.errors import BadAnswer, ToolError
from shard_tools.manifest import MANIFEST_NAME, IndexRow, ShardIndex, read_manifest
from shard_tools.plan import label_block, member_ext, sample_json
from shard_tools.plan.stored import StoredSample
from shard_tools.records import Manifest, ShardInfo, label_of
from shard_tools.scan import SourceReader, Walk, walk

PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what, in which file of the pack, and with which sample or source file."""

    what: str
    file: str
    sample: int | None = None
    path: str | None = None


@dataclass
class Verification:
    """Outcome of a verification.

    Attributes:
        samples: samples whose payload was read and hashed.
        payload_bytes: their bytes.
        shards: shards looked at.
        compared: samples compared with their source file; None when no source was named.
        problems: what is wrong; none means that the pack is whole.
    """

    samples: int = 0
    payload_bytes: int = 0
    shards: int = 0
    compared: int | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def identical(self) -> bool:
        """Whether a source was compared, and its files lie in the pack byte for byte, and no others."""
        return self.compared is not None and self.whole


def verify(
    folder: Path, against: Path | None = None, on_samples: Callable[[int], None] | None = None
) -> Verification:
    """Read a whole pack and check it.

    Args:
        folder: the pack.
        against: source folder to compare with, or None.
        on_samples: called with the number of samples of each shard that is done.

    Raises:
        BadInput: there is no pack, or no such source folder.
    """
    result = Verification()
    found = walk(against) if against is not None else None
    try:
        manifest = read_manifest(folder)
    except BadAnswer as error:
        result.problems.append(Problem(error.what, MANIFEST_NAME))
        return result
    source = _Source(found) if found is not None else None
    try:
        for info in manifest.shards:
            _Shard(folder, manifest, info, source, result).check()
            result.shards += 1
            if on_samples:
                on_samples(info.samples)
        _check_totals(folder, manifest, result)
        if source is not None:
            result.compared = source.compared
            result.problems += source.left_over()
    finally:
        if source is not None:
            source.close()
    return result


def _check_totals(folder: Path, manifest: Manifest, result: Verification) -> None:
    expected = {MANIFEST_NAME}
    first = 0
    for info in manifest.shards:
        expected |= {info.name, info.index}
        if info.first != first:
            result.problems.append(Problem(f"begins with sample {info.first}, not {first}", info.name))
        first += info.samples
    if first != manifest.samples:
        result.problems.append(Problem(f"counts {manifest.samples}, its shards {first}", MANIFEST_NAME))
    extra = sorted(set(os.listdir(folder)) - expected)
    result.problems += [Problem("does not belong to this pack", name) for name in extra]


class _Source:
    """The source folder while it is compared: which files were met, and their digests."""

    def __init__(self, found: Walk) -> None:
        self.entries = {entry.path: entry for entry in found.files}
        self.unreadable = found.unreadable
        self.compared = 0
        self._reader = SourceReader(found.root)
        self._room = memoryview(bytearray(PIECE_BYTES))

    def compare(self, path: str, digest: bytes) -> str | None:
        """What is wrong with a sample of this path and digest; None if the source file is the same."""
        entry = self.entries.pop(path, None)
        if entry is None:
            return "is not in the source, or twice in the pack"
        self.compared += 1
        hashed = xxhash.xxh3_128()
        try:
            for piece in self._reader.chunks(entry, self._room):
                hashed.update(piece)
        except ToolError as error:
            return error.what
        return None if hashed.digest() == digest else "differs from the source"

    def left_over(self) -> list[Problem]:
        missing = [Problem("is missing from the pack", "", path=path) for path in sorted(self.entries)]
        return missing + [Problem("may not be read in the source", "", path=path) for path in self.unreadable]

    def close(self) -> None:
        self._reader.close()


class _Shard:
    """The check of one shard."""

    def __init__(
        self, folder: Path, manifest: Manifest, info: ShardInfo, source: _Source | None, result: Verification
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.info = info
        self.source = source
        self.result = result
        self.classes = {name: index for index, name in enumerate(manifest.classes)}

    def problem(self, what: str, sample: int | None = None, path: str | None = None) -> None:
        self.result.problems.append(Problem(what, self.info.name, sample, path))

    def check(self) -> None:
        """Check the index, the shard's digest, and sample after sample."""
        index = self._open_index()
        try:
            intact = self._check_file()
            if intact is None:
                return
            if not intact and self.manifest.format == "lmdb":
                self._name_damaged(index)
                return
            self._check_samples(index)
        except BadAnswer as error:
            self.problem(error.what.removeprefix(f"{self.folder}{os.sep}"))
        finally:
            if index is not None:
                index.close()

    def _open_index(self) -> ShardIndex | None:
        path = self.folder / self.info.index
        problems = self.result.problems
        try:
            if _digest(path) != self.info.index_digest:
                problems.append(Problem("the index is damaged: its digest is wrong", self.info.index))
                return None
            return ShardIndex(path)
        except FileNotFoundError:
            problems.append(Problem("is missing", self.info.index))
        except (BadAnswer, OSError) as error:
            problems.append(Problem(str(error), self.info.index))
        return None

    def _check_file(self) -> bool | None:
        """Whether the shard has the size and digest of the manifest; None if there is nothing to read."""
        path = self.folder / self.info.name
        try:
            size = path.stat().st_size
            digest = _digest(path)
        except FileNotFoundError:
            self.problem("is missing")
            return None
        except OSError as error:
            self.problem(f"cannot be read: {error.strerror}")
            return None
        if size != self.info.bytes:
            self.problem(f"has {size} bytes, not {self.info.bytes}")
        elif digest != self.info.digest:
            self.problem("is damaged: its digest is wrong")
        else:
            return True
        return False

    def _check_samples(self, index: ShardIndex | None) -> None:
        expected = self.info.first
        seen: set[int] = set()
        payload = 0
        for stored in self._stored():
            if stored.number in seen:
                self.problem("opens again: its parts do not stand together", stored.number)
                continue
            seen.add(stored.number)
            if stored.number != expected:
                self.problem(f"stands where sample {expected} should", stored.number)
            expected = stored.number + 1
            row_number = stored.number - self.info.first
            known = index is not None and 0 <= row_number < len(index)
            payload += self._check_sample(stored, index[row_number] if index is not None and known else None)
        if len(seen) != self.info.samples:
            self.problem(f"holds {len(seen)} samples, not {self.info.samples}")
        if index is not None and len(index) != self.info.samples:
            self.problem(f"has an index of {len(index)} samples, not {self.info.samples}")
        if payload != self.info.payload_bytes:
            self.problem(f"holds {payload} payload bytes, not {self.info.payload_bytes}")

    def _name_damaged(self, index: ShardIndex | None) -> None:
        from shard_tools.lmdb_store import wrong_payloads

        if index is None:
            return
        digests = {self.info.first + number: row.digest for number, row in enumerate(index)}
        for number in wrong_payloads(self.folder / self.info.name, digests):
            known = number in digests
            path = index[number - self.info.first].path if known else None
            self.problem("is damaged: its payload's digest is wrong", number, path)
        if self.source is not None:
            for row in index:
                self.source.entries.pop(
                    row.path, None
                )  # the shard is reported; its files are not missing too

    def _stored(self) -> Iterator[StoredSample]:
        if self.manifest.format == "wds":
            from shard_tools.tar_store import read_shard
        else:
            from shard_tools.lmdb_store import read_shard
        return read_shard(self.folder / self.info.name)

    def _check_sample(self, stored: StoredSample, row: IndexRow | None) -> int:
        """Check one sample; returns its payload bytes."""
        ext, data = next(iter(stored.parts.items()))
        digest = xxhash.xxh3_128_digest(data)
        self.result.samples += 1
        self.result.payload_bytes += len(data)
        if row is None:
            self.problem("has no row in the index", stored.number)
            return len(data)
        wrong = self._compare(stored, row, ext, digest, len(data))
        if wrong is None and self.source is not None:
            wrong = self.source.compare(row.path, digest)
        elif self.source is not None:
            self.source.entries.pop(row.path, None)  # reported once, and not as missing too
        if wrong is not None:
            self.problem(wrong, stored.number, row.path)
        return len(data)

    def _compare(self, stored: StoredSample, row: IndexRow, ext: str, digest: bytes, size: int) -> str | None:
        label = label_of(row.path)
        label_index = -1 if label is None else self.classes.get(label, -2)
        if (size, digest) != (row.length, row.digest):
            return "is damaged: its payload's digest is wrong"
        if stored.offset != row.offset:
            return f"lies at {stored.offset}, the index says {row.offset}"
        if ext != member_ext(row.path):
            return f"has the extension {ext}"
        if row.label_index != label_index or stored.parts.get("cls") != label_block(label_index):
            return "has another label than its path"
        if stored.parts.get("json") != sample_json(row.path, label, label_index, ext):
            return "has a damaged .json"
        return "has parts that are not its own" if len(stored.parts) != 3 else None


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
