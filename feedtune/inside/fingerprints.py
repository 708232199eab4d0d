"""Fingerprints of the first samples of each worker: iterable data that is not split repeats them.

An IterableDataset runs in every worker. One that does not ask ``get_worker_info()`` yields the same samples
in each of them, and an epoch delivers every sample once a worker. The rate goes up, the training does not.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .replay import tensors

SAMPLES = 64  # of each worker
_BYTES = 1 << 16  # of each tensor of a sample
_BY_CHANCE = 3  # a few values repeat between workers about as often as within each
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
        self._batches = 0

    def see(self, batch: Any) -> None:
        """Take the samples of a batch, until there are enough or so many batches had none."""
        if len(self._found) >= SAMPLES or self._batches >= SAMPLES:
            return
        self._batches += 1
        try:
            self._found += of(batch)
        except (RuntimeError, TypeError, ValueError):  # a tensor of a class of its own, without memory
            self._batches = SAMPLES
            self._found = []
        marks = self._found[:SAMPLES]
        _SLOT.pack_into(self._memory, self._offset, len(marks), *marks, *[0] * (SAMPLES - len(marks)))


def of(batch: Any) -> list[int]:
    """One number a sample: of all tensors of a batch that are as long as most of them are."""
    import torch

    found = [t for t in tensors(batch) if t.dim() and t.device.type == "cpu" and t.layout == torch.strided]
    lengths = Counter(len(t) for t in found if len(t))
    length = lengths.most_common(1)[0][0] if lengths else 0
    rows = [t.detach() for t in found if len(t) == length]
    return [_of_sample(row[i] for row in rows) for i in range(min(length, SAMPLES))]


def _of_sample(parts: Iterable[Any]) -> int:
    mark, length = 0, 0
    for part in parts:
        while part.dim() > 1 and part.numel() > _BYTES and not part.is_contiguous():
            part = part[0]  # the whole would be copied
        flat = part.reshape(-1)[:_BYTES] if part.is_contiguous() else part[:_BYTES].reshape(-1)
        flat = flat.contiguous()  # flattening one dimension copies nothing, and bytes are read in a row
        count = min(flat.numel() * flat.element_size(), _BYTES)
        mark = zlib.crc32(ctypes.string_at(flat.data_ptr(), count) if count else b"", mark)
        length += count
    return (length & 0xFFFFFFFF) << 32 | mark


def repeated(memory: Any, workers: int) -> tuple[int, int] | None:
    """``(samples, repeated)``: how many first samples, and how many of them more than one worker yielded.

    Returns:
        ``None`` where it cannot be told: one worker, no tensors, or samples that repeat within a worker.
    """
    each: list[Counter[int]] = []
    for worker in range(workers):
        known, *marks = _SLOT.unpack_from(memory, worker * _SLOT.size)
        if known:
            each.append(Counter(marks[:known]))
    counts = [sum(found.values()) for found in each]
    total, distinct = sum(counts), sum(map(len, each))
    if len(each) < 2 or distinct < 0.9 * total:
        return None
    within, inside = sum(map(_equal_pairs, each)), sum(n * (n - 1) // 2 for n in counts)
    between = _equal_pairs(sum(each, Counter())) - within
    outside = total * (total - 1) // 2 - inside
    if within and between * inside <= _BY_CHANCE * within * outside:
        return total, 0
    return total, distinct - len(set().union(*each))


def _equal_pairs(found: Counter[int]) -> int:
    return sum(n * (n - 1) // 2 for n in found.values())
