"""Cached batches: what the loop sees when data is free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild the containers of a batch with ``change`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list:
        return [map_tensors(item, change) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, (list, Mapping)) or hasattr(value, "__dict__"):
        return _rebuild_object(value, change)
    return value


def _rebuild_object(value: Any, change: Callable[[Any], Any]) -> Any:
    """Batches of a class of their own (BatchEncoding, a dataclass, PackedSequence-likes)."""
    import copy

    twin = copy.copy(value)
    if isinstance(value, list):
        twin[:] = [map_tensors(item, change) for item in value]
        return twin
    attributes = getattr(twin, "__dict__", None)
    if attributes is not None:
        for name, item in list(attributes.items()):
            attributes[name] = map_tensors(item, change)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            twin[key] = map_tensors(item, change)
    return twin


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in a fixed order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


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
        self.batches: list[Any] = []
        self.sizes: list[int] = []
        self._bytes = 0
        self._lead = 0  # samples of a full batch

    def offer(self, batch: Any, elements: int, size: int) -> None:
        """Keep a clone, unless the cache is full or the batch is a partial one (an epoch's last)."""
        if len(self.batches) >= self.wanted or (self.batches and self._bytes + size > self.max_bytes):
            return
        found = tensors(batch)
        lead = found[0].shape[0] if found and found[0].ndim else 0
        if lead < self._lead:
            return
        self._lead = lead
        self.batches.append(map_tensors(batch, lambda t: t.detach().clone()))
        self.sizes.append(elements)
        self._bytes += size
        if max(self.sizes) > 1.05 * min(self.sizes):
            # Uneven batches (token lengths): more of them, so that their mean stands for the data's.
            self.wanted = max(self.wanted, 50)


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
