"""What a training step spends its time on, taken down while it runs, without ever waiting for a device.

A step lasts from asking for one batch to asking for the next. Moments in it are stamps: of the host's clock,
or events on the GPU's stream, whose times are read later, once the device has passed them. On a GPU the
stretch between the events at entry and exit of ``next()`` is exposed starvation: the device had nothing left
to do. A wait behind queued work leaves it at zero.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Optional

from .moments import HostMoments, Moments

_MOST_PENDING = 256  # steps that wait to be taken, or for a device that is behind
_TAKEN = 64  # so many are worth taking
MOST_SYNCS = 64  # points of one step where ranks wait for each other
_MOST_BUCKETS = 32  # of a step whose waits are kept one by one
_MOST_SPANS = 8  # collections of garbage, or waits for other loaders, of one step that are kept one by one
_SHORT_S = 1e-3  # one that takes less is added to the one before
_MOST_OPEN = 4096  # of one backward; ranks that have left a join go on reducing without one


class Step:
    """Stamps of one step, and the row that it will be written with."""

    __slots__ = (
        "ahead_s",
        "asked",
        "backward",
        "begin",
        "bucket_bytes",
        "buckets",
        "collections",
        "copies",
        "depth",
        "elements",
        "end",
        "got",
        "gradient",
        "host_s",
        "open",
        "optimized",
        "others",
        "ready",
        "row",
        "syncs",
        "waits",
    )

    def __init__(self, begin: Any, waits: Optional[int]) -> None:
        self.begin = begin
        self.waits = waits  # batches that were ready
        self.got: Any = None
        self.end: Any = None
        self.row: tuple[Any, ...] = ()
        self.copies: Optional[list[Any]] = None  # first begin, last end if there was one
        self.backward: Any = None  # end of the last one
        self.optimized: Any = None
        self.syncs: list[tuple[str, Any, Any]] = []
        self.buckets: list[list[Any]] = []  # [ready, reduced] of each bucket
        self.open: list[list[Any]] = []  # those of the backward that runs now
        self.ready: Any = None  # first bucket
        self.gradient: Any = None  # the latest of the backward that runs now, where there are no buckets
        self.host_s: Optional[float] = None  # when the host went on from the latest broadcast of buffers
        self.ahead_s: Optional[float] = None  # from there to the first bucket
        self.bucket_bytes = 0
        self.depth = 0  # of backwards inside each other, as reentrant checkpoints make them
        self.collections: list[list[Any]] = []  # [begin, end] of each collection of garbage
        self.others: list[list[Any]] = []  # [begin, end] of each wait for another loader's batch
        self.asked: Any = None  # begin of the one that runs now
        self.elements: Optional[int] = None


class StepClock:
    """Stamps the steps of one rank.

    Everything that is called from the training loop only appends; ``take`` gives the steps that are known
    by now, in order, each with its parts (see ``parts_of``).
    """

    def __init__(self) -> None:
        self.moments: Moments = HostMoments()
        self.step: Optional[Step] = None
        self.thread: Optional[int] = None  # that trains
        self.copied = False  # a tensor was copied to the device in a step
        self.rests = False  # steps are not taken down now
        self.lost = 0  # steps whose events were given up
        self.crowded = 0  # steps with more sync points than are kept
        self.hooks = 0  # communication hooks of the script that run now: what they wait for is gradients
        self.backwards = 0  # that run now, on any thread
        self._pending: deque[Step] = deque()

    def begin(self, ready: Optional[int] = None, full: bool = True) -> None:
        """The loop asks for a batch: the running step ends, the next one begins.

        Args:
            ready: batches that wait for the loop.
            full: take the next one down; else there will be nothing but its row.
        """
        before = self.step
        stamp = self.moments.step_edge() if full or before is not None else None
        self.step = Step(stamp, ready) if full else None
        self.rests = not full
        if self.thread is None:
            self.thread = threading.get_ident()
        if before is not None and before.row:
            before.end = stamp
            self._gradients_reduced(before, stamp)
            self._keep(before)

    def _keep(self, step: Step) -> None:
        self._pending.append(step)
        if len(self._pending) > _MOST_PENDING:
            self._pending[0].end = None
            self.lost += 1

    def returned(self, row: tuple[Any, ...], elements: Optional[int] = None) -> None:
        """The loop has its batch; ``row`` is what the step will be written with."""
        step = self.step
        if step is None:
            step = Step(None, None)
            if self.rests:
                step.row = row
                self._keep(step)
                return
            self.step = step  # seen for the first time at the end of a fetch
        step.got = self.moments.step_edge()
        step.row = row
        step.elements = elements

    def drop(self) -> None:
        """What runs now is no step that counts: it will not be written."""
        self.step, self.rests = None, False

    def take(self, at_end: bool = False) -> list[tuple[tuple[Any, ...], Optional[dict[str, Any]]]]:
        """Rows and parts of the steps that are known by now.

        Args:
            at_end: give the rest up, too: their parts are ``None``, as those of the running step.
        """
        found: list[tuple[tuple[Any, ...], Optional[dict[str, Any]]]] = []
        pending, moments = self._pending, self.moments
        while pending:
            step = pending[0]
            known = step.end is not None and moments.passed(step.end)
            if not known and step.end is not None and not at_end:
                break  # the device is behind
            pending.popleft()
            found.append((step.row, parts_of(step, moments) if known else None))
            moments.release(step)
        if at_end and self.step is not None and self.step.row:
            found.append((self.step.row, None))
            self.step = None
        return found

    @property
    def waiting(self) -> int:
        """Steps that have ended and were not taken."""
        return len(self._pending)

    @property
    def known(self) -> int:
        """Steps that were not taken, the running one included once it has its batch."""
        return len(self._pending) + bool(self.step is not None and self.step.row)

    @property
    def full(self) -> bool:
        """Whether it is time to take steps.

        Code that runs in every step finds the processor's caches cold there, and takes ten times as long as
        the same code that runs for many steps at once.
        """
        return len(self._pending) >= _TAKEN

    # What follows is called by the taps on torch, from the training's threads.

    def mine(self) -> bool:
        """Whether a step runs, and this is the thread that trains."""
        return self.step is not None and self.thread == threading.get_ident()

    def backward_begins(self) -> bool:
        """``torch.autograd.backward`` is called; whether that is this step's."""
        step = self.step
        if step is None or not self.mine():
            return False
        step.depth += 1
        if step.depth == 1 and step.open:  # of a backward that was not seen
            self._gradients_reduced(step, self.moments.stamp())
        return True

    def backward_ends(self) -> None:
        """It has returned: on a host all buckets are reduced."""
        step = self.step
        if step is None or not step.depth:
            return
        step.depth -= 1
        if step.depth == 0:
            step.backward = stamp = self.moments.stamp()
            self._gradients_reduced(step, stamp)

    def _gradients_reduced(self, step: Step, stamp: Any) -> None:
        """The last bucket of a backward, or its last gradient: there the ranks wait for each other."""
        buckets, step.open = step.open, []
        step.buckets += buckets
        gradient, step.gradient = step.gradient, None
        if buckets:
            self._met(step, "gradients", buckets[-1][0], self.moments.last_of(buckets, stamp))
        elif gradient is not None:
            self._met(step, "gradients", gradient, stamp)

    def _met(self, step: Step, kind: str, arrive: Any, leave: Any) -> None:
        """A point where ranks wait for each other."""
        if len(step.syncs) < MOST_SYNCS:
            step.syncs.append((kind, arrive, leave))
        elif len(step.syncs) == MOST_SYNCS:
            step.syncs.append((kind, None, None))  # from here on nothing is known
            self.crowded += 1

    def gradient_ready(self) -> bool:
        """A gradient is there, in a backward that returns once all are reduced.

        Returns:
            Whether somebody has to tell when that is: the first one of a backward that is not seen.
        """
        step = self.step
        if step is None:
            return False
        first = step.gradient is None and not step.depth
        step.gradient = self.moments.stamp()
        return first

    def gradients_reduced(self) -> None:
        """A backward that was not seen ends."""
        step = self.step
        if step is not None and not step.depth:
            self._gradients_reduced(step, self.moments.stamp())

    def bucket_ready(self, size: int) -> Optional[list[Any]]:
        """A gradient bucket is ready to be reduced: its entry, whose second place waits for the end."""
        step = self.step
        if step is None or len(step.open) >= _MOST_OPEN:
            return None
        entry = [self.moments.stamp(), None]
        if step.ready is None:
            step.ready = entry[0]
            if step.host_s is not None:
                step.ahead_s = time.monotonic() - step.host_s
        step.bucket_bytes += size
        step.open.append(entry)
        return entry

    def bucket_reduced(self, entry: list[Any]) -> None:
        """The bucket of an entry is reduced on all ranks."""
        entry[1] = self.moments.stamp()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer's step has ended; inside a backward it may run on a thread of autograd's."""
        thread, step = threading.get_ident(), self.step
        if self.backwards and thread != self.thread:
            self.moments.optimizes(optimizer)
            if step is not None:
                step.optimized = self.moments.stamp()
            return
        self.thread = thread
        if step is None:
            return
        step.optimized = stamp = self.moments.optimizer_stepped(optimizer)
        if not step.depth:  # of a backward that was not seen
            self._gradients_reduced(step, stamp)

    def waited(self, kind: str, arrive: Any) -> None:
        """This rank has waited for others since ``arrive``, a stamp."""
        step = self.step
        if step is not None:
            self._met(step, kind, arrive, self.moments.stamp())
            if kind == "buffers" and self.moments.device:
                step.host_s = time.monotonic()

    def copy_begins(self) -> bool:
        """A tensor may be copied to the device now; whether that is this step's."""
        step = self.step
        if step is None or not self.mine():
            return False
        if step.copies is None:
            step.copies = [None, None]
        if step.copies[1] is None:
            step.copies[0] = self.moments.stamp(step.copies[0])
        return True

    def copy_ends(self) -> None:
        """It was."""
        step = self.step
        if step is not None and step.copies is not None:
            self.copied = True
            step.copies[1] = self.moments.stamp(step.copies[1])

    def collection_begins(self, young: bool = False) -> Any:
        """Python collects garbage: a stamp; ``None`` in ``next()``, where it is part of the wait.

        On a GPU the stretch between two events is what the device idled meanwhile. Collections of the
        youngest generation are too short for that, and of another thread's stream nothing is known.
        """
        if self.step is None or not self.step.row or self.step.asked is not None:
            return None
        if self.moments.device and (young or not (self.mine() or self.backwards)):
            return None
        return self.moments.stamp()

    def collection_ends(self, begin: Any) -> None:
        """It has, since ``begin``."""
        step = self.step
        if step is None or begin is None:
            return
        self._add(step.collections, begin, self.moments.stamp())

    def _add(self, kept: list[list[Any]], begin: Any, end: Any) -> None:
        """Keep a span; on a host short ones, and those that are too many, make the one before longer."""
        if kept and not self.moments.device and (len(kept) >= _MOST_SPANS or end - begin < _SHORT_S):
            kept[-1][1] += end - begin
        elif len(kept) < _MOST_SPANS:
            kept.append([begin, end])

    def other_asked(self) -> None:
        """The loop asks another loader, too, for a batch of this step."""
        step = self.step
        if step is not None and step.row and self.mine():
            step.asked = self.moments.step_edge()

    def other_returned(self) -> None:
        """It has it, or has come to the loader's end."""
        step = self.step
        if step is None or step.asked is None or not self.mine():
            return
        begin, step.asked = step.asked, None
        self._add(step.others, begin, self.moments.step_edge())


def parts_of(step: Step, moments: Moments) -> dict[str, Any]:
    """The parts of a step that has ended, as they are written; absent: not seen.

    Keys: ``t`` and ``s`` duration and exposed starvation on the GPU's timeline, ``h`` host-to-device
    copies, ``b`` end of the last backward, ``o`` end of the optimizer's step, ``y`` points where ranks wait
    for each other ``[kind, arrive, leave]``, ``r`` first bucket ready, ``w`` waits of the buckets, ``v``
    their bytes, ``a`` what a GPU's host took from the broadcast of buffers to ``r``, ``c`` begin and
    duration of each collection of garbage in turn, ``d`` the same of waits for other loaders' batches (on a
    GPU, exposed), ``q`` batches ready, ``n`` elements of the batch. Times in seconds; ``b``, ``o``, ``y``,
    ``r`` and the begins in ``c`` and ``d`` from the step's begin.
    """
    parts: dict[str, Any] = {}
    at = moments.offsets(step.begin)
    if moments.device and step.begin is not None:
        parts["t"] = at(step.end)
        parts["s"] = at(step.got)
    others = _spans(step.others, at)
    if step.copies is not None and step.copies[1] is not None:
        begin, end = at(step.copies[0]), at(step.copies[1])
        if begin is not None and end is not None:
            parts["h"] = end - begin - sum(seconds for asked, seconds in others if begin <= asked < end)
    if step.backward is not None:
        parts["b"] = at(step.backward)
    if step.optimized is not None:
        parts["o"] = at(step.optimized)
    if step.syncs:
        parts["y"] = [[kind, at(arrive), at(leave)] for kind, arrive, leave in step.syncs]
    if step.buckets:
        parts["r"] = at(step.ready)
        kept = step.buckets[: _MOST_BUCKETS - 1] + step.buckets[_MOST_BUCKETS - 1 :][-1:]
        parts["w"] = [_between(at(ready), at(reduced)) for ready, reduced in kept]
        parts["v"] = step.bucket_bytes
        parts["a"] = step.ahead_s
    for name, spans in (("c", _spans(step.collections, at)), ("d", others)):
        parts[name] = [value for span in spans for value in span] or None
    parts["q"] = step.waits
    parts["n"] = step.elements
    return {name: value for name, value in parts.items() if value is not None}


def _spans(spans: list[list[Any]], at: Callable[[Any], Optional[float]]) -> list[tuple[float, float]]:
    """Begin and seconds of each span whose times are known."""
    times = [(at(begin), at(end)) for begin, end in spans]
    return [(begin, end - begin) for begin, end in times if begin is not None and end is not None]


def _between(begin: Optional[float], end: Optional[float]) -> Optional[float]:
    return None if begin is None or end is None else end - begin


def collect_gc(clock: StepClock) -> Any:
    """A callback for ``gc.callbacks`` that tells the clock when collections begin and end."""
    begun: list[Any] = [None]

    def watch(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = clock.collection_begins(young=about["generation"] == 0)
        else:
            clock.collection_ends(begun[0])

    return watch
