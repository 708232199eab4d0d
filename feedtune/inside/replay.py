"""Cached batches: what the loop sees when data is free."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

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


_UNEVEN = 0.05  # spread of elements a batch
_WANTED_UNEVEN = 50


class Kept(NamedTuple):
    """One batch of a cache: the step it came in, its clone, tensor elements, samples."""

    step: int
    batch: Any
    elements: int
    samples: int


class Cache:
    """Clones of batches that the loop was given; what they may take together is bounded.

    Args:
        wanted: number of whole batches to keep.
        max_bytes: bound of their size in this process.
    """

    def __init__(self, wanted: int, max_bytes: int) -> None:
        self.wanted = wanted
        self.max_bytes = max_bytes
        self._kept: list[Kept] = []
        self._bytes = 0
        self._offered = 0
        self._closed = False  # no room for another one

    def offer(self, batch: Any, elements: int, size: int) -> None:
        """Keep a clone, unless the cache is full."""
        step, self._offered = self._offered, self._offered + 1
        if not self.missing:
            return
        if self._kept and self._bytes + size > self.max_bytes:
            self._closed = True
            return
        found = tensors(batch)
        lead = found[0].shape[0] if found and found[0].ndim else 0
        self._kept.append(Kept(step, map_tensors(batch, lambda t: t.detach().clone()), elements, lead))
        self._bytes += size

    @property
    def missing(self) -> int:
        """Whole batches that are still wanted and have room."""
        sizes = [kept.elements for kept in self.whole()]
        # Uneven batches (token lengths): more of them, so that their mean stands for the data's.
        uneven = sizes and max(sizes) > (1 + _UNEVEN) * min(sizes)
        wanted = max(self.wanted, _WANTED_UNEVEN) if uneven else self.wanted
        return 0 if self._closed else max(0, wanted - len(sizes))

    def whole(self) -> list[Kept]:
        """All but partial batches: where most have one number of samples, smaller ones end an epoch."""
        if not self._kept:
            return []
        usual, times = Counter(kept.samples for kept in self._kept).most_common(1)[0]
        least = usual if 2 * times > len(self._kept) else 0
        return [kept for kept in self._kept if kept.samples >= least]


class Player:
    """Replays cached batches: batch ``j`` is the same step on every rank.

    The containers are rebuilt for each step. A loop that changes its batch in place (``sub_``,
    ``requires_grad_``) would change the cache, so a first clone tells whether it does; from then on
    every replay is a clone, and the time it takes is recorded.

    Args:
        cache: what to replay.
        pinned: from pinned memory.
        steps: those of its steps that every rank has kept; by default all.
    """

    def __init__(self, cache: Cache, pinned: bool, steps: Collection[int] = ()) -> None:
        self._pinned = pinned
        kept = [one for one in cache.whole() if one.step in steps or not steps]
        self._batches = [
            map_tensors(one.batch, torch.Tensor.pin_memory) if pinned else one.batch for one in kept
        ]
        self.sizes = [one.elements for one in kept]
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
