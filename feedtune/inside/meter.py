"""What loader workers do, measured in the workers: the time of a fetch and its parts, and what was read.

Each worker adds up in its own slot of memory that was shared before the fork; nothing is locked and nothing
is sent. Wrapping the dataset instead would break ``isinstance`` and pickling.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

# batches; seconds: fetch, transform, collate, CPU; bytes: rchar, read_bytes of the process
_SLOT = struct.Struct("=qddddqq")
_IO_EVERY_S = 0.25  # between two looks at /proc/self/io
_DEPTH = 4  # datasets around the one that has a transform


class Totals(NamedTuple):
    """What a worker has done since its start.

    Attributes:
        batches: batches that it fetched.
        fetch_s: seconds they took, all of the following included.
        transform_s: of them in the dataset's transform.
        collate_s: of them in the collate function.
        cpu_s: CPU time of the process in ``fetch_s``, of all its threads.
        rchar: bytes that it asked the system for.
        read_bytes: bytes of them that came from a disk, and not from the page cache.
    """

    batches: int
    fetch_s: float
    transform_s: float
    collate_s: float
    cpu_s: float
    rchar: int
    read_bytes: int


class WorkerMeter:
    """Counts of all workers of one iterator; usable where workers are forked.

    Args:
        workers: number of workers.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._memory = mmap.mmap(-1, workers * _SLOT.size)

    def read(self) -> list[Totals]:
        """What each worker has done so far."""
        return [Totals(*_SLOT.unpack_from(self._memory, i * _SLOT.size)) for i in range(self.workers)]

    def install(self, worker: int, seen: Callable[[Any], None] | None = None) -> None:
        """Runs in each worker before its first fetch.

        Args:
            worker: its number.
            seen: called with each batch, outside of what is measured.
        """
        from torch.utils.data._utils import fetch

        parts = _Parts(self._memory, worker * _SLOT.size, seen)
        fetchers: tuple[Any, ...] = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
        for cls in fetchers:
            cls.fetch = parts.timed_fetch(cls.fetch)


class _Parts:
    """The sums of one worker, in that worker."""

    def __init__(self, memory: mmap.mmap, offset: int, seen: Callable[[Any], None] | None) -> None:
        self._memory = memory
        self._offset = offset
        self._seen = seen
        # Iterable data starts its workers anew within a block: they add to what those before them have done.
        before = Totals(*_SLOT.unpack_from(memory, offset))
        self._batches = before.batches
        self._fetch_s, self._transform_s = before.fetch_s, before.transform_s
        self._collate_s, self._cpu_s = before.collate_s, before.cpu_s
        self._io = read_io()
        self._io_before = self._io[0] - before.rchar, self._io[1] - before.read_bytes
        self._io_s = time.monotonic()
        self._transforming = False
        self._known: Any = None  # the fetcher whose parts are timed

    def timed_fetch(self, fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The fetcher's ``fetch``, measured."""

        def timed(fetcher: Any, index: Any) -> Any:
            if fetcher is not self._known:
                self._known = fetcher
                with contextlib.suppress(Exception):  # its parts are not measured, and it works on
                    self._time_parts(fetcher)
            cpu, start = time.process_time(), time.perf_counter()
            batch = fetch(fetcher, index)
            now = time.perf_counter()
            self._fetch_s += now - start
            self._cpu_s += time.process_time() - cpu
            self._batches += 1
            self._write()
            if self._seen is not None:
                self._seen(batch)
            return batch

        return timed

    def _write(self) -> None:
        now = time.monotonic()
        if now - self._io_s > _IO_EVERY_S:
            self._io_s, self._io = now, read_io()
        _SLOT.pack_into(
            self._memory,
            self._offset,
            self._batches,
            self._fetch_s,
            self._transform_s,
            self._collate_s,
            self._cpu_s,
            self._io[0] - self._io_before[0],
            self._io[1] - self._io_before[1],
        )

    def _time_parts(self, fetcher: Any) -> None:
        """Time the collate function in this fetcher, and the transform of its dataset, if it has one."""
        collate = fetcher.collate_fn

        def timed_collate(data: Any) -> Any:
            start = time.perf_counter()
            try:
                return collate(data)
            finally:
                self._collate_s += time.perf_counter() - start

        fetcher.collate_fn = timed_collate
        dataset = fetcher.dataset
        for _ in range(_DEPTH):
            names = getattr(dataset, "__dict__", {})
            for name in ("transform", "transforms"):
                if callable(names.get(name)):
                    self._time_transform(dataset, name)
                    return
            dataset = names.get("dataset")

    def _time_transform(self, dataset: Any, name: str) -> None:
        """A function is replaced; of an object its class's call is, so that it stays what it is."""
        transform = dataset.__dict__[name]
        with contextlib.suppress(AttributeError, TypeError):  # a class of C code, or one that is frozen
            if isinstance(transform, types.FunctionType):
                setattr(dataset, name, self._timed_transform(transform))
            else:
                cls = type(transform)
                cls.__call__ = self._timed_transform(cls.__call__)

    def _timed_transform(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(transform)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._transforming:  # one inside another
                return transform(*args, **kwargs)
            self._transforming = True
            start = time.perf_counter()
            try:
                return transform(*args, **kwargs)
            finally:
                self._transforming = False
                self._transform_s += time.perf_counter() - start

        return timed


def read_io() -> tuple[int, int]:
    """``(rchar, read_bytes)`` of this process; zeros where the system does not tell."""
    try:
        with open("/proc/self/io") as file:
            return parse_io(file.read())
    except (OSError, ValueError, KeyError):
        return 0, 0


def parse_io(text: str) -> tuple[int, int]:
    r"""Bytes asked for, and bytes of them that came from a disk.

    >>> parse_io("rchar: 3980\nwchar: 20\nsyscr: 9\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 0\n")
    (3980, 4096)
    """
    values = dict(line.split(": ", 1) for line in text.splitlines())
    return int(values["rchar"]), int(values["read_bytes"])


class RunMeters:
    """Meters for a process that is only watched: put into its workers by the function that they run.

    Args:
        worker: torch's module of that function.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._next: WorkerMeter | None = None
        loop = worker._worker_loop

        @functools.wraps(loop)
        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            if self._next is not None:
                with contextlib.suppress(Exception):  # what is measured is lost, not the worker
                    self._next.install(args[10])
            return loop(*args, **kwargs)

        self._loop, self._wrapped = loop, _worker_loop
        worker._worker_loop = _worker_loop

    def remove(self) -> None:
        """Workers that start from now on are torch's own."""
        if self._worker._worker_loop is self._wrapped:
            self._worker._worker_loop = self._loop

    @contextlib.contextmanager
    def around(self, meter: WorkerMeter | None) -> Any:
        """Workers that start inside count in this meter."""
        self._next = meter
        try:
            yield meter
        finally:
            self._next = None


def module_of_workers() -> Any:
    """Torch's module with the function that a worker runs."""
    return sys.modules["torch.utils.data._utils.worker"]
