"""Loaders with other settings over the same data: shallow copies, so that subclasses keep working."""

from __future__ import annotations

import copy
import signal
from typing import Any

from .applied import changes
from .feed import Feed
from .meter import Totals
from .probe import WorkerClock, forks, ready
from .segments import unlink_undelivered
from .stack_signal import forget


def make_copy(loader: Any, settings: dict[str, Any], feed: Feed | None, dataset: Any) -> Any:
    """A shallow copy of a loader with changed settings.

    Args:
        loader: the loader as the user made it.
        settings: names and values of ``LoaderSettings``.
        feed: what hands out the index batches; ``None`` for iterable data.
        dataset: the dataset to read, in the state before the first fetch.
    """
    twin = copy.copy(loader)
    values = {
        **changes(loader, settings),
        "dataset": dataset,
        "persistent_workers": False,  # the iterator lives as long as the block; it needs no second life
        "_iterator": None,
        # Each block would repeat torch's warning on worker counts; the driver has its own bounds.
        "check_worker_number_rationality": lambda: None,
    }
    if feed is not None:
        values["batch_sampler" if loader.batch_sampler is not None else "sampler"] = feed
    twin.__dict__.update(values)
    return twin


def shut_down(iterator: Any) -> None:
    """End the workers of a loader iterator, if it has any, and free what they had in flight.

    Spawned workers of torch 2.13 abort now and then as they end, when a thread of theirs still sends a
    batch. They have done what they were asked by then: it is no failure.
    """
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is None:
        return
    workers = getattr(iterator, "_workers", ())
    try:
        stop()
    except RuntimeError:  # from torch's handler of SIGCHLD; the other workers are ended nevertheless
        if all(worker.exitcode != -signal.SIGABRT for worker in workers):
            raise
    finally:
        unlink_undelivered(worker.pid for worker in workers)


def private_bytes(pid: int) -> int:
    """Memory that a process shares with nobody; 0 where it cannot be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            rows = [line.split() for line in file if line.startswith("Private_")]
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows) * 1024


class Source:
    """Batches of one block from real workers: starts them, counts what they deliver, ends them."""

    def __init__(
        self,
        loader_class: Any,
        loader: Any,
        settings: dict[str, Any],
        feed: Feed | None,
        dataset: Any,
        folder: str,
    ) -> None:
        self._loader = make_copy(loader, settings, feed, dataset)
        self._clock: WorkerClock | None = None
        self._clock_start = (0, 0.0)
        if settings["num_workers"] and forks(self._loader):
            self._clock = WorkerClock(settings["num_workers"], loader.worker_init_fn, folder, feed is None)
            self._loader.__dict__["worker_init_fn"] = self._clock
        self._folder = folder
        self._feed = feed
        self._cls = loader_class
        self._iterator: Any = None
        self.worker_bytes: int | None = None  # largest private memory of a worker, once they have ended

    def next(self) -> Any:
        """The next batch; ``StopIteration`` where an epoch of iterable data ends.

        The workers start with the first call, and again after the end of iterable data.
        """
        if self._iterator is None:
            self._iterator = self._cls._get_iterator(self._loader)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.close()
            raise
        if self._feed is not None:
            self._feed.deliver(self._iterator)
        return batch

    def ready(self) -> int | None:
        """Batches that wait to be delivered; ``None`` without workers, and before they start."""
        return None if self._iterator is None else ready(self._iterator)

    def measure_from_here(self) -> None:
        """The warm-up is over: worker times count from now on."""
        if self._clock is not None:
            self._clock_start = self._clock.read()

    def worker_seconds(self) -> float | None:
        """Mean time of a batch in a worker since the warm-up; ``None`` where it was not measured."""
        if self._clock is None:
            return None
        batches, seconds = self._clock.read()
        count = batches - self._clock_start[0]
        return (seconds - self._clock_start[1]) / count if count else None

    def worker_totals(self) -> list[Totals] | None:
        """What each worker has done since its start; ``None`` where it was not measured."""
        return None if self._clock is None else self._clock.meter.read()

    def repeated(self) -> tuple[int, int] | None:
        """Of the first samples of iterable data: how many, and how many more than one worker has yielded."""
        return None if self._clock is None else self._clock.repeated()

    def close(self) -> None:
        """End the workers; what they had in flight returns to the feed."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            workers = getattr(iterator, "_workers", ())
            self.worker_bytes = max((private_bytes(worker.pid) for worker in workers), default=None)
            shut_down(iterator)
            forget(self._folder, [worker.pid for worker in workers])
        if self._feed is not None:
            self._feed.give_back()
