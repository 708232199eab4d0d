"""What the loop gets while a loader is only watched: its ordinary iterator, with each batch counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import snapshot
from .feed import Feed, RecordedSampler
from .identity import Watch
from .signs import mark
from .swap import shut_down
from .view import View


class Iteration:
    """One pass of a loop over a watched loader: its batches, and in which gaps between them it trained."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.delivered = 0
        self._steps_at_last: int | None = None

    def entered(self, optimizer_steps: int) -> None:
        """The loop asks for the next batch, after so many optimizer steps of the process."""
        if self._steps_at_last is not None and optimizer_steps > self._steps_at_last:
            self.watch.trained += 1

    def returned(self, optimizer_steps: int, wait_s: float) -> None:
        """The loop has got it, after so many seconds."""
        if self.delivered:
            self.watch.wait_s += wait_s  # the first batch pays for starting workers
        self.delivered += 1
        self.watch.batches += 1
        self._steps_at_last = optimizer_steps


class Watched(Iteration):
    """An ordinary loader iterator, with each batch counted; the loop cannot tell the difference."""

    def __init__(self, runtime: Any, watch: Watch, loader: Any, iterate: Callable[[Any], Any]) -> None:
        super().__init__(watch)
        self.runtime = runtime
        self.loader = loader
        self._view: View | None = None
        self._inner = _iterate_recorded(loader, iterate)
        mark(runtime.config["folder"], "iterated")

    def __iter__(self) -> Watched:
        return self

    def __len__(self) -> int:
        return len(self._view) if self._view is not None else len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if self._view is not None:
            return next(self._view)
        runtime = self.runtime
        self.entered(runtime.optimizer_steps)
        if runtime.wants(self.watch):
            self._view = runtime.take_over(self)
            if self._view is not None:
                return next(self._view)
        if runtime.machine is not None and not self.watch.trained and not self.watch.passed:
            runtime.machine.pause("eval")
        start = time.monotonic()
        batch = next(self._inner)
        self.returned(runtime.optimizer_steps, time.monotonic() - start)
        feed = self.feed()
        if feed is not None:
            feed.deliver(self._inner)
        return batch

    def feed(self) -> Feed | None:
        """What the iterator has handed out; ``None`` for iterable data."""
        sampler = getattr(self._inner, "_index_sampler", None)
        return sampler.feed if isinstance(sampler, RecordedSampler) else None

    def stop(self) -> Feed | None:
        """End the original iterator; its undelivered batches are in the feed that is returned.

        Returns:
            The feed of a map-style loader, ``None`` for iterable data.
        """
        feed = self.feed()
        shut_down(self._inner)
        self.loader.__dict__["_iterator"] = None
        self._inner = None
        snapshot.release_lmdb(self.watch.snapshot)
        if feed is None:
            return None
        feed.give_back()
        feed.endless = True
        return feed


def _iterate_recorded(loader: Any, iterate: Callable[[Any], Any]) -> Any:
    """The loader's own iterator, made over an index sampler that remembers what it hands out."""
    from torch.utils.data import IterableDataset

    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    if isinstance(loader.dataset, IterableDataset):
        return iterate(loader)
    original = loader.__dict__[name]
    loader.__dict__[name] = RecordedSampler(original)
    try:
        return iterate(loader)
    finally:
        loader.__dict__[name] = original
