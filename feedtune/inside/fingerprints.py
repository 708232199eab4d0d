"""Fingerprints of the first samples of each worker: iterable data that is not split repeats them.

An IterableDataset runs in every worker. One that does not ask ``get_worker_info()`` yields the same samples
in each of them, and an epoch delivers every sample once a worker. The rate goes up, the training does not.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from .replay import tensors

SAMPLES = 64  # of each worker
_BYTES = 1 << 16  # of each tensor of a sample
_SLOT = struct.Struct(f"=q{SAMPLES}Q")


def size(workers: int) -> int:
    """Bytes of shared memory for so many workers."""
    return workers * _SLOT.size


class Fingerprints:
    """A worker's own marks, written into memory that it shares with the main process.

    Args:
        memory: the shared memory.
        offset: where the worker's part of it begins.
    """

    def __init__(self, memory: Any, offset: int) -> None:
        self._memory = memory
        self._offset = offset
        self._found: list[int] = []

    def see(self, batch: Any) -> None:
        """Take the samples of a batch, until there are enough."""
        if len(self._found) < SAMPLES:
            self._found += of(batch)
            marks = self._found[:SAMPLES]
            _SLOT.pack_into(self._memory, self._offset, len(marks), *marks, *[0] * (SAMPLES - len(marks)))


def of(batch: Any) -> list[int]:
    """One number a sample: of all tensors of a batch whose first dimension has the batch's length."""
    import torch

    found = [t for t in tensors(batch) if t.dim() and t.device.type == "cpu" and t.layout == torch.strided]
    length = len(found[0]) if found else 0
    rows = [t for t in found if len(t) == length]
    return [_of_sample(row[i] for row in rows) for i in range(min(length, SAMPLES))]


def _of_sample(parts: Iterator[Any]) -> int:
    mark, length = 0, 0
    for part in parts:
        flat = part.detach().reshape(-1)
        count = min(flat.numel() * flat.element_size(), _BYTES)
        mark = zlib.crc32(ctypes.string_at(flat.data_ptr(), count) if count else b"", mark)
        length += count
    return (length & 0xFFFFFFFF) << 32 | mark


def repeated(memory: Any, workers: int) -> tuple[int, int] | None:
    """``(samples, repeated)``: how many first samples, and how many of them more than one worker yielded.

    Returns:
        ``None`` where it cannot be told: one worker, no tensors, or samples that repeat within a worker.
    """
    each: list[set[int]] = []
    count = 0
    for worker in range(workers):
        known, *marks = _SLOT.unpack_from(memory, worker * _SLOT.size)
        if known:
            each.append(set(marks[:known]))
            count += known
    distinct = sum(map(len, each))
    if len(each) < 2 or distinct < 0.9 * count:
        return None
    return count, distinct - len(set().union(*each))
