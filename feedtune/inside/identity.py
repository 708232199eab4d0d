"""Which loaders are one: where they were made, what they read, how they sample."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from . import snapshot

_PASSING = ("number", "trained", "optimizer_steps", "open_files", "nofile", "cuda")


class Watch:
    """What is known of one loader identity, over all loader objects that share it."""

    def __init__(self, key: tuple[Any, ...], dataset: Any, number: int) -> None:
        self.key = key
        self.number = number
        self.loaders: list[weakref.ref[Any]] = []
        self.base_files: Counter[str] = Counter()  # open before any fetch
        self.adopt(dataset)
        self.batches = 0
        self.trained = 0  # gaps between its batches in which an optimizer stepped
        self.wait_s = 0.0
        self.passed = False

    @property
    def place(self) -> str:
        """Where the loader was made, as ``FILE:LINE``; empty where that was not seen."""
        site = self.key[0]
        return f"{site[0][0]}:{site[0][1]}" if site else ""

    def is_one(self, known: Any) -> bool:
        """Whether this is the loader that an earlier start of the script has trained with."""
        return bool(known) and [self.number, self.place] == known

    def adopt(self, dataset: Any) -> None:
        """Take the dataset in its present state for the blocks to come."""
        self.dataset = dataset
        self.snapshot = snapshot.take(dataset)

    def reads_like(self, dataset: Any) -> bool:
        """Whether a dataset may be this loader's own, made anew."""
        return same_kind(self.dataset, dataset)

    def has_other_than(self, loader: Any) -> bool:
        """Whether a loader of this identity, other than the one given, is still alive."""
        return any(found is not None and found is not loader for found in (ref() for ref in self.loaders))


def shape_of(loader: Any) -> tuple[Any, ...]:
    """Where a loader was made, its sampler's type and its batch size; with the dataset, its identity."""
    return (
        loader.__dict__.get("_feedtune_site"),
        type(loader.sampler).__name__,
        repr(getattr(loader.batch_sampler, "batch_size", loader.batch_size)),
    )


def same_kind(one: Any, other: Any) -> bool:
    """Datasets of one class and one length, or without any: a function may make them anew each epoch."""
    return type(one) is type(other) and length_of(one) == length_of(other)


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def batch_size_of(loader: Any) -> int | None:
    """Samples a batch; ``None`` where batches have sizes of their own."""
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    try:
        return None if size is None else int(size)
    except (TypeError, ValueError):
        return None  # a batch sampler of the script's own with batches of its own sizes


def lasting(described: dict[str, Any]) -> dict[str, Any]:
    """A loader's description less what is of that moment only, or of no use without the process."""
    return {name: value for name, value in described.items() if name not in _PASSING}
