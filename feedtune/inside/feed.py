"""The index iterator of a map-style loader, alive across blocks and epochs.

A block that ends has handed out batches of indices which its workers never delivered. They return to
the front, so that every block reads data that no earlier block has warmed in the page cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class RecordedSampler:
    """Stands in for the index sampler of a loader that is only watched: same batches, each one remembered."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.feed: Feed | None = None  # the latest iteration

    def __iter__(self) -> Iterator[Any]:
        self.feed = Feed(self.sampler, endless=False)
        return self.feed

    def __len__(self) -> int:
        return len(self.sampler)


class Feed:
    """Hands out index batches and remembers which of them are in flight.

    Args:
        sampler: the loader's own index sampler.
        endless: start the sampler again where it ends, so that workers run on across an epoch's seam.
    """

    def __init__(self, sampler: Any, endless: bool) -> None:
        self.sampler = sampler
        self.endless = endless
        self.handed = 0
        self.delivered = 0
        self.epoch_ends: deque[int] = deque()  # values of ``handed`` at which an epoch ended
        self._iterator = iter(sampler)
        self._returned: deque[Any] = deque()
        self._in_flight: dict[int, Any] = {}  # by task number of the present loader iterator
        self._task = 0

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        item = self._returned.popleft() if self._returned else self._draw()
        self._in_flight[self._task] = item
        self._task += 1
        self.handed += 1
        return item

    def _draw(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            if not self.endless:
                raise
        self.epoch_ends.append(self.handed)
        self._iterator = iter(self.sampler)
        return next(self._iterator)  # an empty second pass ends the feed: a one-shot sampler

    def deliver(self, iterator: Any = None) -> None:
        """A batch has reached the loop: the oldest in flight, or any one where order is off.

        Args:
            iterator: the loader iterator that delivered it.
        """
        self.delivered += 1
        if getattr(iterator, "_in_order", True) or not hasattr(iterator, "_task_info"):
            del self._in_flight[next(iter(self._in_flight))]  # tasks are numbered as they are handed out
            return
        waiting = iterator._task_info  # what the iterator itself still owes
        self._in_flight = {task: item for task, item in self._in_flight.items() if task in waiting}

    def give_back(self) -> None:
        """What is in flight will not be delivered: it returns to the front, in order."""
        self._returned.extendleft(self._in_flight[task] for task in sorted(self._in_flight, reverse=True))
        self.handed -= len(self._in_flight)
        self._in_flight.clear()
        self._task = 0

    @property
    def epoch_length(self) -> int | None:
        """Batches of one epoch, or ``None`` where the sampler cannot tell beforehand."""
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def at_epoch_end(self) -> bool:
        """Whether the loop has got the last batch of an epoch; asked once for each end."""
        if self.epoch_ends and self.delivered >= self.epoch_ends[0]:
            self.epoch_ends.popleft()
            return True
        return False
