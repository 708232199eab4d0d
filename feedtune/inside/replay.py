"""Cached batches: what the loop sees when data is free."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild the containers of a batch with ``change`` applied to each tensor.

    An object that refers back to itself keeps doing so; classes, numbers and texts stay the same objects.
    """
    return _rebuild(value, change, {})


def _rebuild(value: Any, change: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list:
        return [_rebuild(item, change, done) for item in value]
    if type(value) is dict:
        return {key: _rebuild(item, change, done) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_rebuild(item, change, done) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, type) or (not isinstance(value, (list, Mapping)) and not hasattr(value, "__dict__")):
        return value
    if id(value) not in done:
        _rebuild_object(value, change, done)
    return done[id(value)]


def _rebuild_object(value: Any, change: Callable[[Any], Any], done: dict[int, Any]) -> None:
    """Batches of a class of their own: BatchEncoding, a dataclass, a dict subclass."""
    twin = done[id(value)] = copy.copy(value)
    if isinstance(value, list):
        twin[:] = [_rebuild(item, change, done) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            twin[key] = _rebuild(item, change, done)
    for name, item in list(getattr(twin, "__dict__", {}).items()):
        twin.__dict__[name] = _rebuild(item, change, done)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in a fixed order."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    """A walk that only reads: it runs on every batch."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found, seen)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found, seen)
    elif not isinstance(value, type) and hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))
        for item in value.__dict__.values():
            _collect(item, found, seen)


def measure(batch: Any) -> tuple[int, int, int]:
    """``(elements, bytes, tensors)`` of a batch."""
    found = tensors(batch)
    return (
        sum(t.numel() for t in found),
        sum(t.numel() * t.element_size() for t in found),
        len(found),
    )


class Cache:
    """Clones of batches that the loop was given; what they may take together is bounded.

    Args:
        wanted: number of batches to keep.
        max_bytes: bound of their size in this process.
    """

    def __init__(self, wanted: int, max_bytes: int) -> None:
        self.wanted = wanted
        self.max_bytes = max_bytes
        self._kept: list[tuple[Any, int, int]] = []  # batch, elements, samples
        self._bytes = 0

    def offer(self, batch: Any, elements: int, size: int) -> None:
        """Keep a clone, unless the cache is full."""
        if len(self._kept) >= self.wanted or (self._kept and self._bytes + size > self.max_bytes):
            return
        found = tensors(batch)
        lead = found[0].shape[0] if found and found[0].ndim else 0
        self._kept.append((map_tensors(batch, lambda t: t.detach().clone()), elements, lead))
        self._bytes += size
        sizes = self.sizes
        if max(sizes) > 1.05 * min(sizes):
            # Uneven batches (token lengths): more of them, so that their mean stands for the data's.
            self.wanted = max(self.wanted, 50)

    def _whole(self) -> list[tuple[Any, int, int]]:
        """All but partial batches: where most have one number of samples, smaller ones end an epoch."""
        usual, times = Counter(lead for _, _, lead in self._kept).most_common(1)[0] if self._kept else (0, 0)
        least = usual if 2 * times > len(self._kept) else 0
        return [kept for kept in self._kept if kept[2] >= least]

    @property
    def batches(self) -> list[Any]:
        """The clones."""
        return [batch for batch, _, _ in self._whole()]

    @property
    def sizes(self) -> list[int]:
        """Tensor elements of each."""
        return [elements for _, elements, _ in self._whole()]


class Player:
    """Replays cached batches: batch ``j`` is the same step on every rank.

    The containers are rebuilt for each step. A loop that changes its batch in place (``sub_``,
    ``requires_grad_``) would change the cache, so a first clone tells whether it does; from then on
    every replay is a clone, and the time it takes is recorded.
    """

    def __init__(self, cache: Cache, pinned: bool) -> None:
        self._pinned = pinned
        self._batches = (
            [map_tensors(b, torch.Tensor.pin_memory) for b in cache.batches]
            if pinned
            else list(cache.batches)
        )
        self.sizes = list(cache.sizes)
        self.cloning = False
        self.clone_s = 0.0
        self._handed: list[tuple[torch.Tensor, int, bool]] = []
        self._next = 0

    def next(self) -> tuple[Any, int]:
        """The next batch: ``(batch, elements)``; ``clone_s`` holds what cloning it took."""
        self._look_back()
        number = self._next % len(self._batches)
        self.clone_s = 0.0
        source = self._batches[number]
        if self.cloning or self._next == 0:
            start = time.perf_counter()
            batch = map_tensors(source, self._clone)
            self.clone_s = time.perf_counter() - start
        else:
            batch = map_tensors(source, lambda tensor: tensor)
        self._handed = [(t, t._version, t.requires_grad) for t in tensors(batch)]
        self._next += 1
        return batch, self.sizes[number]

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = tensor.clone()
        return twin.pin_memory() if self._pinned else twin

    def _look_back(self) -> None:
        if self.cloning or not self._handed:
            return
        if any(t._version != version or t.requires_grad != grad for t, version, grad in self._handed):
            self.cloning = True
            if self._next > 1 and len(self._batches) > 1:
                # This one was no clone: what the loop did to it is in the cache now.
                spoilt = (self._next - 1) % len(self._batches)
                del self._batches[spoilt], self.sizes[spoilt]
