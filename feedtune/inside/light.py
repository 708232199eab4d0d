"""What is remembered of loaders that are only watched: nothing that keeps one, or its data, alive."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import zip_longest
from typing import Any

from .identity import Watch, length_of
from .meter import WorkerMeter
from .runtime import STEPS_TO_TRUST
from .stepfile import Row
from .watched import Iteration

EARLY = 1024  # steps kept of each loader until it is known whether it trains


class LightWatch(Watch):
    """A loader identity that holds no dataset, and its latest steps while it is not known to train."""

    def __init__(self, key: tuple[Any, ...], dataset: Any, number: int) -> None:
        self._dataset: weakref.ref[Any] | None = None
        super().__init__(key, dataset, number)
        self.about: dict[str, Any] = {}
        self.early: deque[Row] = deque(maxlen=EARLY)
        self.last_s = float("-inf")  # when it last delivered a batch
        self.iterations = 0
        self.first_s = 0.0  # seconds that first batches took, the iterator's making included
        self.seen_at = 0  # the training loader's steps when this one last delivered
        self.alone = 0  # training steps with this loader since then
        self._meter: WorkerMeter | None = None  # of the latest iteration
        self._made: list[tuple[int, float]] = []  # by the workers of those before

    def adopt(self, dataset: Any) -> None:
        """Remember which dataset it is, and of what kind."""
        self._kind = (type(dataset), length_of(dataset))
        try:
            self._dataset = weakref.ref(dataset)
        except TypeError:  # a list
            self._dataset = None

    def reads_like(self, dataset: Any) -> bool:
        """Whether a dataset is the known one, which may have grown, or one of its kind."""
        if self._dataset is not None and self._dataset() is dataset:
            return True
        return self._kind == (type(dataset), length_of(dataset))

    def count_in(self, meter: WorkerMeter | None) -> None:
        """An iteration begins, whose workers count in this meter."""
        if meter is not self._meter:
            self._made = self._made_so_far()
            self._meter = meter

    def _made_so_far(self) -> list[tuple[int, float]]:
        """Batches of each worker, and the seconds that they took in it."""
        now = [] if self._meter is None else [(one.batches, one.fetch_s) for one in self._meter.read()]
        both = zip_longest(self._made, now, fillvalue=(0, 0.0))
        return [(batches + more, seconds + longer) for (batches, seconds), (more, longer) in both]

    @property
    def supply_s(self) -> float | None:
        """Seconds a batch that the workers need (``feedtune.analysis.workers``); ``None``: not measured."""
        each = [seconds / batches for batches, seconds in self._made_so_far() if batches]
        return max(each) / len(each) if each else None

    def summary(self) -> dict[str, Any]:
        """What is said of a loader that is not the recorded one."""
        return {
            "site": self.place,
            **{name: self.about.get(name) for name in ("dataset", "num_workers", "persistent_workers")},
            "trains": self.trained >= STEPS_TO_TRUST,
            "batches": self.batches,
            "iterations": self.iterations,
            "wait_s": round(self.wait_s, 6),
            "first_s": round(self.first_s, 6),
            "supply_s": self.supply_s,
        }


class Pass(Iteration):
    """One iteration, as noted in torch's iterator."""

    watch: LightWatch

    def __init__(self, watch: LightWatch, made_s: float, meter: WorkerMeter | None) -> None:
        super().__init__(watch)
        self.made_s = made_s
        self.meter = meter  # of the iterator's workers


class Sight:
    """A loader for ``describe``: as ``Watched`` shows it, without anything in its way."""

    def __init__(self, loader: Any, watch: Watch) -> None:
        self.loader = loader
        self.watch = watch

    def feed(self) -> Any:
        """Something with an ``epoch_length``; ``None`` for iterable data."""
        from torch.utils.data import IterableDataset

        return None if isinstance(self.loader.dataset, IterableDataset) else self

    @property
    def epoch_length(self) -> int | None:
        """Batches of an epoch."""
        return length_of(self.loader._index_sampler)
