"""From the steps that ``feedtune run`` has recorded to what each rank and the job spent their time on.

A record's wait lies between asking for a batch and getting it; what follows, until the next batch is asked
for, is the step's own work, unless a tag says that it held something else (evaluation, a save, the seam
between two epochs). Rates and waits come from the steps between such pauses, measured as blocks are: a
turnover of the queue after each pause is left out, the first batch of an iteration always.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from feedtune.analysis.blocks import MIN_PERIODS, clean_stretches
from feedtune.analysis.pacing import warmup_steps

PAUSES = {
    "eval": "evaluation", "save": "saves", "eval_save": "evaluation and saves", "epoch": "between epochs",
    "restart": "data begun anew",
}  # fmt: skip


class StepSeen(NamedTuple):
    """One step of one rank, from that rank's clock.

    Attributes:
        step: number of the batch in the rank's training, from 0.
        enter_s: the loop asked for the batch (monotonic seconds).
        return_s: the loop got it.
        tag: what the time before ``enter_s`` held besides training (a key of ``PAUSES``), or ``None``.
        made_s: for the first batch of an iteration, how long making the iterator took; else ``None``.
        parts: what else was seen of the step (``feedtune.analysis.align`` has the keys); ``None``: nothing.
    """

    step: int
    enter_s: float
    return_s: float
    tag: str | None = None
    made_s: float | None = None
    parts: Mapping[str, Any] | None = None

    @property
    def wait_s(self) -> float:
        """Seconds that the loop waited for this batch."""
        return self.return_s - self.enter_s


@dataclass(frozen=True)
class Waits:
    """Waiting in ``next()`` over whole steps, in seconds; ``share`` is of these steps' time."""

    share: float
    median_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True)
class Counted:
    """Something that is counted apart: how often, and how long in all."""

    count: int
    seconds: float


@dataclass(frozen=True)
class Figures:
    """What a rank, or the job, did.

    Attributes:
        steps: recorded steps.
        seconds: from asking for the first batch to getting the last.
        measured_steps: steps that rate and waits come from, whole worker cycles between two pauses.
        measured_s: their time.
        settled: a full turnover of the workers' queue was left out after each pause; where pauses come
            faster than that, or steps are few, a queue that they have filled flatters the rate.
        waits: waiting in the measured steps; ``None`` without any, or where it was not the loop that waited.
        first: first batches of iterations, the making of the iterator included.
        excluded: stretches by tag, each less the median work of a step and the making of an iterator.
    """

    steps: int
    seconds: float
    measured_steps: int
    measured_s: float
    settled: bool
    waits: Waits | None
    first: Counted
    excluded: dict[str, Counted] = field(default_factory=dict)

    @property
    def pauses(self) -> dict[str, float]:
        """Seconds of what keeps coming between the steps: pauses by tag, ``first`` batches but for one."""
        found = {tag: counted.seconds for tag, counted in self.excluded.items()}
        again = self.first.seconds * (1 - 1 / self.first.count) if self.first.count else 0.0
        return {**found, "first": again}

    @property
    def rate(self) -> float | None:
        """Steps a second, pauses and first batches left out."""
        return self.measured_steps / self.measured_s if self.measured_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {**asdict(self), "rate": self.rate}


@dataclass(frozen=True)
class Chosen:
    """Steps that every rank has, at the same positions, and which of them are measured.

    Attributes:
        steps: their numbers, in order.
        ranks: of every rank the records of these steps.
        pauses: positions before which some rank did something else, or lines are missing.
        stretches: measured positions ``(begin, end)``, each after a warm-up; the last step is in none, since
            it has no end.
        cycle: each is a multiple of this long.
        settled: as ``Figures.settled``.
    """

    steps: Sequence[int]
    ranks: Mapping[int, Sequence[StepSeen]]
    pauses: Sequence[int]
    stretches: Sequence[tuple[int, int]]
    cycle: int
    settled: bool

    @property
    def measured(self) -> list[int]:
        """Measured positions."""
        return [place for begin, end in self.stretches for place in range(begin, end)]


def choose_steps(ranks: Mapping[int, Sequence[StepSeen]], workers: int, prefetch: int | None) -> Chosen:
    """Steps that all ranks have, and the stretches of them to measure.

    A gap in the numbers of any rank's steps counts as a pause: nobody knows what was there.

    Args:
        ranks: steps of every rank, in order.
        workers: of each rank's loader.
        prefetch: its ``prefetch_factor``.
    """
    common = _common(ranks)
    steps = sorted(common)
    chosen = {rank: [one for one in ranks[rank] if one.step in common] for rank in sorted(ranks)}
    pauses = {place for records in chosen.values() for place, one in enumerate(records) if _pauses(one)}
    pauses |= {place for place in range(1, len(steps)) if steps[place] != steps[place - 1] + 1}
    ordered = sorted(pauses - {0})
    cycle = max(1, workers)
    # The last step has no end.
    stretches = clean_stretches(len(steps) - 1, ordered, warmup_steps(workers, prefetch), cycle)
    settled = sum(end - begin for begin, end in stretches) >= MIN_PERIODS * cycle
    if not settled:
        cycle = 1
        stretches = clean_stretches(len(steps) - 1, ordered, 1, cycle)
    return Chosen(steps, chosen, ordered, stretches, cycle, settled)


def measure_steps(
    chosen: Chosen, ranks: Mapping[int, Sequence[StepSeen]], loop_waits: bool = True
) -> Figures:
    """What some of a job's ranks did together; a step of several takes as long as on the slowest.

    Args:
        chosen: the job's steps; those measured are its own for a single rank, too, since others wait while
            one has a pause.
        ranks: steps of these ranks, in order.
        loop_waits: whether ``next()`` was called by the loop itself; a prefetching thread waits for others.
    """
    timed = [chosen.ranks[rank] for rank in ranks]
    seconds = max(
        sum(records[end].enter_s - records[begin].enter_s for begin, end in chosen.stretches)
        for records in timed
    )
    steps = chosen.measured
    waits = [max(records[step].wait_s for records in timed) for step in steps]
    return Figures(
        steps=len(_common(ranks)),
        seconds=max(records[-1].return_s - records[0].enter_s for records in ranks.values()),
        measured_steps=len(steps),
        measured_s=seconds,
        settled=chosen.settled,
        waits=_waits(waits, seconds) if loop_waits else None,
        first=_first(ranks),
        excluded=_excluded(ranks),
    )


def _common(ranks: Mapping[int, Sequence[StepSeen]]) -> set[int]:
    """Numbers of the steps that all of them have."""
    return set.intersection(*({one.step for one in records} for records in ranks.values()))


def _pauses(one: StepSeen) -> bool:
    return one.tag is not None or one.made_s is not None


def _waits(waits: Sequence[float], seconds: float) -> Waits | None:
    if not waits or seconds <= 0:
        return None
    ordered = sorted(waits)
    p95 = ordered[-(-95 * len(ordered) // 100) - 1]  # nearest rank
    return Waits(min(1.0, sum(ordered) / seconds), median(ordered), p95, ordered[-1])


def _first(ranks: Mapping[int, Sequence[StepSeen]]) -> Counted:
    longest: dict[int, float] = {}
    for records in ranks.values():
        for one in records:
            if one.made_s is not None:
                longest[one.step] = max(longest.get(one.step, 0.0), one.made_s + one.wait_s)
    return Counted(len(longest), sum(longest.values()))


def _excluded(ranks: Mapping[int, Sequence[StepSeen]]) -> dict[str, Counted]:
    """Tagged stretches; of ranks that tag the same one, the longest counts, over a gap in the steps none."""
    longest: dict[int, tuple[float, str]] = {}
    for records in ranks.values():
        pairs = [(one, after) for one, after in pairwise(records) if after.step == one.step + 1]
        works = [after.enter_s - one.return_s for one, after in pairs if after.tag is None]
        work = median(works) if works else 0.0
        for one, after in pairs:
            if after.tag is not None:
                gap = after.enter_s - one.return_s - (after.made_s or 0.0) - work
                longest[after.step] = max(longest.get(after.step, (0.0, "")), (max(0.0, gap), after.tag))
    found: dict[str, list[float]] = defaultdict(list)
    for seconds, tag in longest.values():
        found[tag].append(seconds)
    return {tag: Counted(len(times), sum(times)) for tag, times in sorted(found.items())}
