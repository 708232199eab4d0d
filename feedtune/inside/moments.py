"""Moments of a step: stamps of the host's clock, or events on a GPU's stream that are read later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Optional, Protocol


class Moments(Protocol):
    """Where stamps come from. A stamp is opaque; ``None`` stands for one that could not be taken."""

    device: bool  # stamps lie on a device's timeline
    trains: Optional[int]  # the device whose parameters are optimized, as far as it is known
    foreign: int  # edges that came from another stream or thread than the one that trains

    def stamp(self, instead: Any = None) -> Any:
        """This moment; ``instead`` is a stamp that nothing else holds, and that this one replaces."""

    def step_edge(self) -> Any:
        """This moment, in the loop that asks for batches."""

    def optimizer_stepped(self, optimizer: Any) -> Any:
        """This moment, after an optimizer's step."""

    def optimizes(self, optimizer: Any) -> None:
        """An optimizer has stepped inside a backward, on a thread of autograd's."""

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
    trains: Optional[int] = None
    foreign = 0

    def stamp(self, _: Optional[float] = None) -> float:
        """This moment."""
        return time.monotonic()

    step_edge = optimizer_stepped = stamp

    def optimizes(self, _: Any) -> None:
        """There is one host."""

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

    They lie on the device whose parameters are optimized: to touch another one would take memory there for a
    context. Edges of steps lie on the stream of the latest optimizer step. Where the loop asks for batches
    from another stream or thread, as prefetchers do, what the device does meanwhile says nothing of its
    waiting: the edge is ``None``, and the step has no times.
    """

    device = True

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        # The handle of a device's current stream; the stream itself takes 40 times as long.
        self._handle_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _handle_of)
        self.trains: Optional[int] = None
        self._streams: dict[int, Any] = {}  # by their handles
        self._free: list[Any] = []
        self._training: Any = None  # the stream
        self._thread: Optional[int] = None
        self.foreign = 0

    def stamp(self, instead: Any = None) -> Any:
        """An event on the current stream; ``None`` while a graph is captured, which would swallow it."""
        device = self.trains
        if device is None or self._cuda.is_current_stream_capturing():
            return None
        event = instead or self._event()
        event.record(self._current(device))
        return event

    def _event(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:  # not asked for before: another thread may take the last one meanwhile
            return self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap

    def _current(self, device: Any) -> Any:
        """The current stream of the device; the same object for the same stream."""
        handle = self._handle_of(device)
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = self._cuda.current_stream(device)
        return found

    def step_edge(self) -> Any:
        """An event on the stream that trains, if this is it."""
        if self._training is not None and not self._here():
            self.foreign += 1
            return None
        return self.stamp()

    def _here(self) -> bool:
        """Whether this is the thread, and its stream, that trains."""
        return self._thread == threading.get_ident() and self._current(self.trains) is self._training

    def optimizer_stepped(self, optimizer: Any) -> Any:
        """An event, and which device, stream and thread train."""
        self.optimizes(optimizer)
        self._training = self._current(self.trains)
        self._thread = threading.get_ident()
        return self.stamp()

    def optimizes(self, optimizer: Any) -> None:
        """Which device trains; the thread and its stream are autograd's."""
        device = _device_of(optimizer)
        if device != self.trains:
            self.trains = device
            self._training = None
            self._streams.clear()
            self._free.clear()

    def passed(self, stamp: Any) -> bool:
        """Whether the device has come past it."""
        return stamp is None or bool(stamp.query())

    def offsets(self, begin: Any) -> Callable[[Any], Optional[float]]:
        """Seconds after ``begin`` on the device's timeline."""

        def at(stamp: Any) -> Optional[float]:
            try:
                return None if stamp is None or begin is None else float(begin.elapsed_time(stamp)) / 1e3
            except (RuntimeError, ValueError):  # not passed, or of another device
                return None

        return at

    def last_of(self, buckets: list[list[Any]], end: Any) -> Any:
        """The event of the last bucket: collectives of one group end in order."""
        return buckets[-1][1] or end

    def release(self, step: Any) -> None:
        """Events of a step are free, but for its end, with which the next one begins."""
        pairs = [*step.buckets, *step.collections, *step.others, step.copies or ()]
        found = [
            step.begin,
            step.got,
            step.backward,
            step.optimized,
            *(event for pair in pairs for event in pair),
        ]
        found += [event for kind, *both in step.syncs if kind != "gradients" for event in both]
        self._free += [event for event in found if event is not None]


def _handle_of(device: int) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def _device_of(optimizer: Any) -> int:
    """The GPU that holds what is optimized; of what lies on the host, the current one."""
    import torch

    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parameter = next(parameters, None)
    if parameter is not None and parameter.is_cuda:
        return int(parameter.device.index)
    return torch.cuda.current_device()
