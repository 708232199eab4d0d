"""How long a worker takes for a batch, measured in the worker: what bounds the rate of a block."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any

from . import fingerprints
from .meter import WorkerMeter
from .stack_signal import arm


class WorkerClock:
    """Counts of all workers of one block; usable where workers are forked.

    Args:
        workers: number of workers.
        init: the loader's own ``worker_init_fn``, called first.
        folder: where a worker that hangs writes its stack.
        marked: remember the first samples of each worker.
    """

    def __init__(self, workers: int, init: Callable[[int], Any] | None, folder: str, marked: bool) -> None:
        self.meter = WorkerMeter(workers)
        self._marks = mmap.mmap(-1, fingerprints.size(workers)) if marked else None
        self._init = init
        self._folder = folder

    def __call__(self, worker: int) -> None:
        """Stands in for ``worker_init_fn``: runs in each worker before its first fetch."""
        arm(self._folder)
        if self._init is not None:
            self._init(worker)
        see = None
        if self._marks is not None:
            see = fingerprints.Fingerprints(self._marks, fingerprints.size(worker)).see
        self.meter.install(worker, see)

    def read(self) -> tuple[int, float]:
        """``(batches, seconds)`` of all workers so far."""
        totals = self.meter.read()
        return sum(one.batches for one in totals), sum(one.fetch_s for one in totals)

    def repeated(self) -> tuple[int, int] | None:
        """Of the first samples: how many, and how many more than one worker has yielded."""
        return None if self._marks is None else fingerprints.repeated(self._marks, self.meter.workers)


def ready(iterator: Any) -> int | None:
    """Batches that wait to be delivered; ``None`` without workers.

    One that came before its turn has left the queue, and is kept by the iterator.
    """
    own = iterator.__dict__
    queue, tasks = own.get("_data_queue"), own.get("_task_info", ())
    if queue is None:
        return None
    early = 0
    if len(tasks) > own.get("_tasks_outstanding", 0):
        early = sum(len(task) == 2 for task in tasks.values())
    try:
        return early + int(queue.qsize())
    except (NotImplementedError, OSError):  # closed, or a system that cannot tell
        return None


def forks(loader: Any) -> bool:
    """Whether the loader's workers will be forked from this process."""
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else start_method()
    return bool(method == "fork")


def start_method() -> str:
    """How this process starts others.

    Asked outright, multiprocessing would settle for its default, and the script could no longer choose.
    """
    import multiprocessing

    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def can_be_imported() -> bool:
    """Whether the script does nothing when a spawned worker imports it: it looks at ``__name__`` somewhere.

    One that does not would train in each such worker, too.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return True  # -c, or an interpreter that is embedded: nothing is imported again
    try:
        with open(file, "rb") as source:
            return b"__name__" in source.read()
    except OSError:
        return False
