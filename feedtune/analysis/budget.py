"""What a step's time goes to, for each rank and for the job (METHODS sections 1 and 3).

A rank's parts are plain sums over its measured steps, so that they add up to its step. The job's are taken
round by round: its data wait is what the round would be shorter if no rank had waited for data, max_r A -
max_r (A - S); straggle is what the last rank works longer than the median of the others, max_r (A - S) -
median (A - S); copies, compute and collection are those of that median rank, in the same round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from feedtune.analysis.align import Timeline
from feedtune.analysis.means import Means, job_means, rank_means
from feedtune.analysis.policy import POLICY
from feedtune.analysis.stats import MIN_STRETCHES, mean_half_width

_STRETCHES = 10  # whose means give the uncertainty
_ROUNDING = 1e-6

FLAGS = {
    "inconsistent": "the parts add up to more than the step",
    "unsettled": "full queues flatter the data wait: too few steps between pauses for them to turn over",
    "waits_unseen": "waiting for data was not measured, so compute is not known, and straggle includes it",
    "backward_unseen": "no backward was seen, so compute and rest are not known",
    "syncs_unseen": "where ranks wait for each other was not seen: compute includes these waits",
    "syncs_differ": "the ranks waited at different points, so their waits cannot be told from compute",
    "ranks_missing": "some ranks left no record: waiting for them counts as communication",
}


@dataclass(frozen=True)
class Parts:
    """Seconds of a mean step, or half widths of their 95 % intervals; ``None``: not seen.

    Attributes:
        data_wait_s: starvation S; of a job, what its steps would be shorter without.
        h2d_s: copies of the batch to the device.
        compute_s: from the batch's arrival to the end of backward and optimizer, less the other parts in it.
        communication_s: what even the last rank waits at sync points.
        straggle_s: what a rank waits there for slower ones; of a job, the last one's work beyond the median.
        stall_s: garbage collection.
        rest_s: of the step; negative where parts contradict each other. Of a job also what passes because
            ranks leave the same exchange at different times.
    """

    data_wait_s: float | None = None
    h2d_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    straggle_s: float | None = None
    stall_s: float | None = None
    rest_s: float | None = None


@dataclass(frozen=True)
class Budget:
    """A mean step of a rank or of the job.

    Attributes:
        steps: measured steps.
        step_s: mean seconds of a step; of a job, on its slowest rank; ``None`` without measured steps.
        parts: what they went to.
        half_widths: of the parts' 95 % intervals, from the means of at least five consecutive stretches.
        hidden_s: waiting in ``next()`` behind queued GPU work, which costs nothing; ``None`` without a GPU.
        flags: what limits the figures; keys of ``FLAGS``.
    """

    steps: int
    step_s: float | None
    parts: Parts
    half_widths: Parts
    hidden_s: float | None
    flags: tuple[str, ...]

    @property
    def shares(self) -> dict[str, float | None]:
        """Shares of the step, by the parts' names less their unit."""
        values = asdict(self.parts)
        return {
            name.removesuffix("_s"): None if value is None or not self.step_s else value / self.step_s
            for name, value in values.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The budget as JSON."""
        return {**asdict(self), "shares": self.shares, "flags": list(self.flags)}


@dataclass(frozen=True)
class TrainingBudget:
    """Budgets of the job and of each rank, over the same steps.

    Attributes:
        job: of the job.
        ranks: of each rank.
        left_out: steps left out, since ranks had different sync points there or one lacks its record.
        data_at_least_s: where waits for other ranks are not seen: what every rank waited for data in the same
            step; the job loses at least that.
    """

    job: Budget
    ranks: Mapping[int, Budget]
    left_out: int
    data_at_least_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """The budgets as JSON."""
        return {
            "job": self.job.as_dict(),
            "ranks": {str(rank): budget.as_dict() for rank, budget in sorted(self.ranks.items())},
            "left_out": self.left_out,
            "data_at_least_s": self.data_at_least_s,
        }


def measure_budget(timeline: Timeline) -> TrainingBudget:
    """Budgets of the job and its ranks over the measured steps."""
    ranks = {rank: _measured(timeline, rank_means(timeline, rank), rank) for rank in sorted(timeline.ranks)}
    job = ranks[min(ranks)] if timeline.alone else _measured(timeline, job_means(timeline), None)
    at_least = None
    if timeline.waits_seen and not timeline.synced and 1 < timeline.world == len(ranks) and timeline.measured:
        steps = timeline.ranks.values()
        shortest = (min(of[place].data_s for of in steps) for place in timeline.measured)
        at_least = timeline.mean(shortest, timeline.measured)
    return TrainingBudget(job, ranks, timeline.left_out, at_least)


def _measured(timeline: Timeline, means: Means, rank: int | None) -> Budget:
    places = timeline.measured
    if not places:
        return Budget(0, None, Parts(), Parts(), None, _flags(timeline, Parts(), None))
    step_s, parts = means(places)
    found = [means(group)[1] for group in _stretches(timeline)]
    known = {name: [v for group in found if (v := group[name]) is not None] for name in parts}
    halves = {name: None if parts[name] is None else mean_half_width(known[name]) for name in parts}
    measured, hidden_s = Parts(**parts), None
    hidden = [timeline.ranks[rank][place].hidden_s for place in places] if rank is not None else []
    if any(one is not None for one in hidden):
        hidden_s = timeline.mean((one or 0.0 for one in hidden), places)
    flags = _flags(timeline, measured, step_s)
    return Budget(len(places), step_s, measured, Parts(**halves), hidden_s, flags)


def _stretches(timeline: Timeline) -> list[list[int]]:
    """About ten consecutive stretches of whole worker cycles, which stand for as many steps each.

    Fewer than five are none.
    """
    places, cycle, weights = timeline.measured, timeline.cycle, timeline.weights
    for wanted in (_STRETCHES, MIN_STRETCHES):
        least = sum(weights[place] for place in places) / wanted
        found: list[list[int]] = [[]]
        held = 0.0
        for at in range(0, len(places) - cycle + 1, cycle):
            found[-1] += places[at : at + cycle]
            held += sum(weights[place] for place in places[at : at + cycle])
            if held > least * (1 - _ROUNDING):
                found.append([])
                held = 0.0
        if len(found) > MIN_STRETCHES:
            return found[:-1]
    return []


def _flags(timeline: Timeline, parts: Parts, step_s: float | None) -> tuple[str, ...]:
    several = not timeline.alone
    unseen = several and not timeline.synced
    said = {
        "inconsistent": (parts.rest_s or 0.0) < -POLICY.inconsistent * (step_s or 0.0),
        "unsettled": not timeline.settled,
        "waits_unseen": step_s is not None and not timeline.waits_seen,
        "backward_unseen": step_s is not None and timeline.waits_seen and parts.compute_s is None,
        "syncs_unseen": unseen and not timeline.mismatched,
        "syncs_differ": unseen and timeline.mismatched,
        "ranks_missing": timeline.synced and len(timeline.ranks) < timeline.world,
    }
    return tuple(name for name, true in said.items() if true)
