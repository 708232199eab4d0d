"""The rounds that ranks run together, from one point at which all wait for all to the next.

Ranks wait for each other at sync points. Clocks of ranks are never compared: between two sync points each
rank has an interval of its own timeline, from the moment it left one to the moment it arrived at the next
(METHODS section 1, generalized). Inside a round may be points of DDP's broadcast of buffers, where the others
wait for rank 0 only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

BUFFERS = "buffers"  # the one kind of sync point where not all wait for all


class Sync(NamedTuple):
    """A point where a rank waited for others; offsets from the step's begin, in seconds."""

    kind: str
    arrive_s: float
    leave_s: float

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to leaving."""
        return max(0.0, self.leave_s - self.arrive_s)


class RankStep(NamedTuple):
    """One step of one rank on that rank's timeline.

    Attributes:
        begin_s: when it began; only differences within a stretch mean something.
        length_s: until the next step began.
        wait_s: for its batch, starvation S: the loop, or the GPU, had nothing to do; ``None``: not measured.
        hidden_s: waiting in ``next()`` behind work that the GPU had queued already; ``None`` without a GPU.
        copy_s: host-to-device copies of the batch.
        end_s: offset of the later one of the last backward's and the last optimizer step's end.
        collections: begin and seconds of each collection of garbage; ``None`` where nothing but the wait was
            recorded.
        syncs: sync points in order; ``None`` where one of their times is missing.
        elements: of the batch.
        others: begin and seconds of each wait for a batch of another loader, which is S, too.
    """

    begin_s: float
    length_s: float
    wait_s: float | None
    hidden_s: float | None
    copy_s: float | None
    end_s: float | None
    collections: tuple[tuple[float, float], ...] | None
    syncs: tuple[Sync, ...] | None
    elements: int | None
    others: tuple[tuple[float, float], ...] = ()

    @property
    def data_s(self) -> float:
        """S, of all loaders."""
        return (self.wait_s or 0.0) + sum(seconds for _, seconds in self.others)

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """Kinds of its sync points, in order; ``None`` where one of their times is missing."""
        return None if self.syncs is None else tuple(point.kind for point in self.syncs)


class Work(NamedTuple):
    """An interval A of one rank between two sync points, and what it holds, in seconds.

    ``wait_s`` is S, ``copy_s`` H, ``gc_s`` G; ``busy_s`` lies between a batch's arrival and the end of its
    step's backward or optimizer, H included, G and waits for other loaders not. ``elements``: of its batches;
    ``None``: unknown.
    """

    seconds: float
    wait_s: float
    copy_s: float
    gc_s: float
    busy_s: float
    elements: int | None

    def less(self, data: bool, gc: bool) -> float:
        """Its seconds without waiting for data, without garbage collection, or without both."""
        return self.seconds - self.wait_s * data - self.gc_s * gc


@dataclass(frozen=True)
class Round:
    """What the ranks did between two points at which all wait for all.

    Attributes:
        begin: position of the step in which it began.
        end: and of that in which it ended.
        joins: for each of its sync points, whether all ranks waited for all there, or for rank 0 only.
        works: each rank's intervals, one a sync point.
    """

    begin: int
    end: int
    joins: tuple[bool, ...]
    works: Mapping[int, tuple[Work, ...]]

    @property
    def steps(self) -> int:
        """Steps that passed from its begin to its end."""
        return self.end - self.begin

    def passage(self, less_data: bool = False, less_gc: bool = False) -> float:
        """Seconds until the last rank arrives at the round's end, waits for each other included.

        With one sync point this is max_r A, with ``less_data`` max_r (A - S), with both max_r (A - S - G).
        """
        at = dict.fromkeys(self.works, 0.0)
        for number, joins in enumerate(self.joins):
            for rank, works in self.works.items():
                at[rank] += works[number].less(less_data, less_gc)
            if joins:
                at = dict.fromkeys(at, max(at.values()))
            elif 0 in at:
                at = {rank: max(seconds, at[0]) for rank, seconds in at.items()}
        return max(at.values())

    def path(self, rank: int, less_data: bool = False, less_gc: bool = False) -> float:
        """Seconds that a rank was on its own way, waits for other ranks left out."""
        return sum(work.less(less_data, less_gc) for work in self.works[rank])

    def elements(self, rank: int) -> int | None:
        """Of the batches of a rank."""
        found = [work.elements for work in self.works[rank]]
        return None if None in found else sum(one for one in found if one is not None)


class RoundLoss(NamedTuple):
    """What a round lost, and which rank was last; seconds.

    ``last`` is argmax_r A, ``last_at_work`` argmax_r (A - S - G), ``collector`` argmax_r G; ``uneven_s`` is
    the part of ``data_wait_s`` that the last rank waited beyond the median of the others; ``straggle_s`` is
    what it worked beyond their median, ``unlevel_s`` beyond the mean of all: what the same work, spread
    evenly, would save. ``stall_s`` is what all would have saved if none had collected garbage,
    ``uneven_gc_s`` what the one that did so longest collected beyond the median of the others.
    """

    round: Round
    data_wait_s: float
    uneven_s: float
    straggle_s: float
    unlevel_s: float
    h2d_s: float
    compute_s: float
    stall_s: float
    uneven_gc_s: float
    last: int
    last_at_work: int
    collector: int


def lose(one: Round) -> RoundLoss:
    """Losses of a round of at least two ranks."""
    paths = {rank: one.path(rank) for rank in sorted(one.works)}
    works = {rank: one.path(rank, less_data=True, less_gc=True) for rank in paths}
    waits = {rank: paths[rank] - one.path(rank, less_data=True) for rank in paths}
    collections = {rank: paths[rank] - one.path(rank, less_gc=True) for rank in paths}
    last = max(paths, key=paths.__getitem__)
    last_at_work = max(works, key=works.__getitem__)
    collector = max(collections, key=collections.__getitem__)
    without_data, bare_s = one.passage(less_data=True), one.passage(less_data=True, less_gc=True)
    data_wait_s = max(0.0, one.passage() - without_data)
    others = sorted((rank for rank in works if rank != last_at_work), key=works.__getitem__)
    middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
    typical = [work for rank in middle for work in one.works[rank]]
    copy_s = sum(work.copy_s for work in typical) / len(middle)
    busy_s = sum(work.busy_s for work in typical) / len(middle)
    return RoundLoss(
        one,
        data_wait_s,
        max(0.0, data_wait_s - median(wait for rank, wait in waits.items() if rank != last)),
        max(0.0, bare_s - fmean(works[rank] for rank in middle)),
        max(0.0, bare_s - fmean(works.values())),
        copy_s,
        max(0.0, busy_s - copy_s),
        max(0.0, without_data - bare_s),
        collections[collector] - median(gc_s for rank, gc_s in collections.items() if rank != collector),
        last,
        last_at_work,
        collector,
    )


class _Walker:
    """One rank on its way from one sync point to the next."""

    def __init__(self) -> None:
        self.leave_s = 0.0
        self._busy: list[tuple[float, float]] = []  # from a batch's arrival to the end of its step's work
        self._collections: list[tuple[float, float]] = []  # of garbage, begin and end
        self._others: list[tuple[float, float]] = []  # waits for other loaders
        self._restart()

    def _restart(self) -> None:
        self._wait_s = self._copy_s = 0.0
        self._elements: int | None = 0

    def enter(self, step: RankStep) -> None:
        """A step begins; its batch arrives before its first sync point."""
        wait_s = step.wait_s or 0.0
        self._wait_s += wait_s
        self._copy_s += step.copy_s or 0.0
        self._collections += _placed(step.collections or (), step.begin_s)
        self._others += _placed(step.others, step.begin_s)
        if self._elements is not None:
            self._elements = None if step.elements is None else self._elements + step.elements
        if step.end_s is not None:
            self._busy.append((step.begin_s + wait_s, step.begin_s + step.end_s))

    def reach(self, begin_s: float, point: Sync) -> Work:
        """Come to a sync point of the step that began then, and leave it."""
        before = self.leave_s
        arrive_s = max(before, begin_s + point.arrive_s)
        gc_s = overlap(self._collections, before, arrive_s)
        busy = [(max(b, before), min(e, arrive_s)) for b, e in self._busy]
        idle = self._collections + self._others
        busy_s = sum(max(0.0, e - b - overlap(idle, b, e)) for b, e in busy)
        wait_s = min(self._wait_s + overlap(self._others, before, arrive_s), arrive_s - before - gc_s)
        work = Work(arrive_s - before, wait_s, self._copy_s, gc_s, busy_s, self._elements)
        self.leave_s = max(arrive_s, begin_s + point.leave_s)
        self._busy = [(b, e) for b, e in self._busy if e > self.leave_s]
        self._collections = [(b, e) for b, e in self._collections if e > self.leave_s]
        self._others = [(b, e) for b, e in self._others if e > self.leave_s]
        self._restart()
        return work


def _placed(spans: Iterable[tuple[float, float]], begin_s: float) -> list[tuple[float, float]]:
    """Begin and end of the spans of a step that began then."""
    return [(begin_s + begin, begin_s + begin + seconds) for begin, seconds in spans]


def overlap(spans: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Seconds of the spans that lie between two moments."""
    return sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in spans)


def rounds_of(run: Sequence[int], steps: Mapping[int, Sequence[RankStep]]) -> Iterable[Round]:
    """Rounds of a stretch without a gap, from the last barrier of the first step that has one.

    Args:
        run: positions, in order.
        steps: of each rank by position; in all of ``run`` the ranks have sync points of the same kinds.
    """
    walkers = {rank: _Walker() for rank in steps}
    began: int | None = None
    works: dict[int, list[Work]] = {rank: [] for rank in steps}
    joins: list[bool] = []
    for place in run:
        here = {rank: of[place] for rank, of in steps.items()}
        for rank, step in here.items():
            walkers[rank].enter(step)
        kinds = next(iter(here.values())).kinds or ()
        last = max((number for number, kind in enumerate(kinds) if kind != BUFFERS), default=-1)
        for number, kind in enumerate(kinds):
            points = {rank: step.syncs[number] for rank, step in here.items() if step.syncs}
            for rank, point in points.items():
                works[rank].append(walkers[rank].reach(here[rank].begin_s, point))
            joins.append(kind != BUFFERS or _all_waited(points, {r: w[-1] for r, w in works.items()}))
            if kind == BUFFERS:
                continue
            if began is not None:
                yield Round(began, place, tuple(joins), {rank: tuple(w) for rank, w in works.items()})
            if began is not None or number == last:
                began = place
            works = {rank: [] for rank in steps}
            joins = []


def _all_waited(points: Mapping[int, Sync], works: Mapping[int, Work]) -> bool:
    """Whether rank 0 waited at a broadcast of its own: large ones go on only once the others are there."""
    if 0 not in points:
        return False
    behind = max(work.seconds for work in works.values()) - works[0].seconds
    waited = points[0].wait_s - min(point.wait_s for point in points.values())
    return behind > 0 and waited > behind / 2
