"""A map-style dataset over a pack of either format."""

from __future__ import annotations

import bisect
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from torch.utils.data import Dataset
except ImportError as error:
    from shard_tools.errors import Missing

    raise Missing("shard_tools.read needs torch", "pip install torch") from error

from shard_tools.manifest import ShardIndex, read_manifest
from shard_tools.manifest.index import HEADER
from shard_tools.plan import member_ext
from shard_tools.read.decode import DecodeError, Decoder, decoder
from shard_tools.read.files import FilePool, LmdbFile, TarFile
from shard_tools.records import Manifest, Sample

if TYPE_CHECKING:
    import numpy

# One for the whole process: LMDB does not let the same file be opened twice in one.
_INDEXES: FilePool[ShardIndex] = FilePool(ShardIndex)
_TARS: FilePool[TarFile] = FilePool(TarFile)
_ENVIRONMENTS: FilePool[LmdbFile] = FilePool(LmdbFile)


class ShardDataset(Dataset[tuple[Any, int]]):
    """Samples of a pack by number: ``dataset[i] == (data, label_index)``.

    Args:
        path: folder that ``shard-tools pack`` wrote, in either format.
        decode: None gives the payload bytes; ``"pillow"`` an RGB image; ``"simplejpeg"`` a uint8 array of
            height x width x 3; a function is called with the bytes. It must be picklable for workers that are
            spawned.

    Attributes:
        classes: class names; a label index is a position in it, -1 is a sample without a label.
        manifest: what the pack consists of.

    Raises:
        BadInput: there is no finished pack, or no such decoder.
        BadAnswer: manifest, index or shard is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], decode: str | Decoder | None = None) -> None:
        # An absolute path: a worker may start in another folder.
        self.path = Path(path).absolute()
        self.manifest: Manifest = read_manifest(self.path)
        self._decode = decoder(decode)
        self._firsts = [shard.first for shard in self.manifest.shards]
        self._indexes = [(self.path / shard.index, shard.index_digest) for shard in self.manifest.shards]
        self._shards = [(self.path / shard.name, shard.digest) for shard in self.manifest.shards]

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their indexes."""
        return self.manifest.classes

    def __len__(self) -> int:
        return self.manifest.samples

    def __getitem__(self, number: int) -> tuple[Any, int]:
        place = self._place(number)
        return self._decoded(place, *self._read([place])[0])

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Any, int]]:
        """Read a batch at once, in the order of the file, and give it back in the order asked for."""
        places = [self._place(number) for number in numbers]
        order = sorted(range(len(places)), key=places.__getitem__)
        found = self._read([places[position] for position in order])
        batch: list[Any] = [None] * len(places)
        for position, (data, label) in zip(order, found, strict=True):
            batch[position] = self._decoded(places[position], data, label)
        return batch

    def record(self, number: int) -> Sample:
        """What is known about a sample: original path, label, size and digest."""
        place = self._place(number)
        with _INDEXES.here().lock:
            shard, row_number = self._find(place)
            row = _INDEXES.get(self._indexes[shard])[row_number]
        label = self.classes[row.label_index] if row.label_index >= 0 else None
        parts = {member_ext(row.path): row.path}
        return Sample(place, row.path, label, row.label_index, parts, row.length, row.digest.hex())

    def labels(self) -> numpy.ndarray[Any, Any]:
        """Label indexes of all samples: int32, one a sample; reads the indexes, not the shards."""
        import numpy as np

        row = np.dtype([("before", "V40"), ("label", "<i4"), ("after", "V4")])
        counts = [shard.samples for shard in self.manifest.shards]
        columns = [
            np.fromfile(path, dtype=row, count=count, offset=HEADER.size)["label"]
            for (path, _), count in zip(self._indexes, counts, strict=True)
        ]
        return np.concatenate(columns)

    def _place(self, number: int) -> int:
        """A sample number, counted from the end when negative; also from numpy and torch integers."""
        place = operator.index(number)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return place

    def _find(self, place: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._firsts, place) - 1
        return shard, place - self._firsts[shard]

    def _read(self, places: Sequence[int]) -> list[tuple[bytes, int]]:
        """Payload and label index of samples."""
        files: FilePool[Any] = _TARS if self.manifest.format == "wds" else _ENVIRONMENTS
        found = []
        with _INDEXES.here().lock, files.here().lock:
            for place in places:
                shard, row = self._find(place)
                offset, length, label = _INDEXES.get(self._indexes[shard]).location(row)
                found.append((files.get(self._shards[shard]).payload(offset, length), label))
        return found

    def _decoded(self, place: int, data: bytes, label: int) -> tuple[Any, int]:
        if self._decode is None:
            return data, label
        try:
            return self._decode(data), label
        except DecodeError as error:
            path = self.record(place).path
            raise DecodeError(f"sample {place} ({path}) of {self.path}: {error}") from error
