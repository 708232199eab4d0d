"""Moments of a step: stamps of the host's clock, or events on a GPU's stream that are read later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Optional, Protocol


class Moments(Protocol):
    """Where stamps come from. A stamp is opaque; ``None`` stands for one that could not be taken."""

    device: bool  # stamps lie on a device's timeline

    def stamp(self) -> Any:
        """This moment."""

    def step_edge(self) -> Any:
        """This moment, in the loop that asks for batches."""

    def optimizer_stepped(self) -> Any:
        """This moment, after an optimizer's step."""

    def passed(self, stamp: Any) -> bool:
        """Whether the device has come past a stamp; never waits for it."""

    def offsets(self, begin: Any) -> Callable[[Any], Optional[float]]:
        """A function from a stamp that has passed to its seconds after ``begin``."""

    def last_of(self, buckets: list[list[Any]], end: Any) -> Any:
        """When the last of buckets ``[ready, reduced]`` was reduced, seen from a backward that ended then."""

    def release(self, step: Any) -> None:
        """A step's stamps are not needed any more."""


class HostMoments:
    """Stamps are seconds of the monotonic clock."""

    device = False

    def stamp(self) -> float:
        """This moment."""
        return time.monotonic()

    step_edge = optimizer_stepped = stamp

    def passed(self, _: Any) -> bool:
        """The host is never behind."""
        return True

    def offsets(self, begin: Optional[float]) -> Callable[[Optional[float]], Optional[float]]:
        """Seconds after ``begin``."""

        def at(stamp: Optional[float]) -> Optional[float]:
            return None if stamp is None or begin is None else stamp - begin

        return at

    def last_of(self, buckets: list[list[Any]], end: float) -> float:
        """The latest of the buckets' ends.

        A future's callback can come late, since it has to wait for the interpreter, but a backward that has
        returned has all its buckets.
        """
        reduced = [bucket[1] for bucket in buckets if bucket[1] is not None]
        return min(end, max(reduced)) if len(reduced) == len(buckets) else end

    def release(self, _: Any) -> None:
        """Nothing is held."""


class CudaMoments:
    """Stamps are CUDA events with timing, recorded on the current stream and used again.

    Edges of steps lie on the stream of the latest optimizer step. Where the loop asks for batches from
    another stream or thread, as prefetchers do, what the device does meanwhile says nothing of its waiting:
    the edge is ``None``, and the step has no times.
    """

    device = True

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._free: list[Any] = []
        self._stream: Any = None
        self._thread: Optional[int] = None
        self.foreign = 0  # edges that came from another stream or thread

    def stamp(self) -> Any:
        """An event on the current stream; ``None`` while a graph is captured, which would swallow it."""
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._event()
        event.record()
        return event

    def _event(self) -> Any:
        if self._free:
            return self._free.pop()
        return self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap

    def step_edge(self) -> Any:
        """An event on the stream that trains, if this is it."""
        stream = self._stream
        if stream is None:
            return self.stamp()
        if self._thread != threading.get_ident() or self._cuda.current_stream() != stream:
            self.foreign += 1
            return None
        return self.stamp()

    def optimizer_stepped(self) -> Any:
        """An event, and which stream and thread train."""
        self._stream = self._cuda.current_stream()
        self._thread = threading.get_ident()
        return self.stamp()

    def passed(self, stamp: Any) -> bool:
        """Whether the device has come past it."""
        return stamp is None or bool(stamp.query())

    def offsets(self, begin: Any) -> Callable[[Any], Optional[float]]:
        """Seconds after ``begin`` on the device's timeline."""

        def at(stamp: Any) -> Optional[float]:
            try:
                passed = stamp is not None and begin is not None and stamp.query()
                return float(begin.elapsed_time(stamp)) / 1e3 if passed else None
            except (RuntimeError, ValueError):  # of another device
                return None

        return at

    def last_of(self, buckets: list[list[Any]], end: Any) -> Any:
        """The event of the last bucket: collectives of one group end in order."""
        return buckets[-1][1] or end

    def release(self, step: Any) -> None:
        """Events of a step are free, but for its end, with which the next one begins."""
        pairs = [*step.buckets, step.copies or (), step.backward or ()]
        found = [step.begin, step.got, step.optimized, *(event for pair in pairs for event in pair)]
        found += [event for kind, *both in step.syncs if kind != "gradients" for event in both]
        self._free += [event for event in found if event is not None]
