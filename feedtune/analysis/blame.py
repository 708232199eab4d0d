"""What a training's steps lose time to, and which rank makes it (METHODS sections 1 and 3).

The shares come from the budget's rounds, less lone long steps. Which rank is last is put to the vote of the
rounds in which the ranks lie apart, so that a few long ones do not decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from feedtune.analysis.align import Timeline
from feedtune.analysis.budget import TrainingBudget
from feedtune.analysis.means import job_means, per_step, rank_means, touches
from feedtune.analysis.policy import POLICY
from feedtune.analysis.rounds import RoundLoss, lose
from feedtune.analysis.stats import rank_correlation

_LEAST_ROUNDS = 5  # that have to vote
_MOSTLY = 0.5  # of the steps without a batch that was ready: the workers are what is slow
WAITS = ("data", "imbalance/input")
_LONE_IN = 50  # steps: what comes more often is no exception


@dataclass(frozen=True)
class Culprit:
    """The rank that is last most often.

    Attributes:
        rank: its number.
        votes: share of the rounds with a material imbalance in which it is last.
        rounds: how many those are.
    """

    rank: int
    votes: float
    rounds: int

    @property
    def sure(self) -> bool:
        """It is one rank, and not a different one each time."""
        return self.rounds >= _LEAST_ROUNDS and self.votes >= POLICY.one_culprit


@dataclass(frozen=True)
class Loss:
    """Something that the job's steps lose time to.

    Attributes:
        kind: ``data``, ``imbalance/input``, ``imbalance/compute``, ``imbalance/lengths``, ``imbalance/turns``
            (ranks are late in turns, and not by their batches' sizes), ``communication``, ``sched/gc`` or
            ``rest``.
        seconds: a step.
        share: of the step.
        culprit: the rank that is last, where it is one.
        rho: rank correlation between elements and work, of ``imbalance/lengths``.
        hidden_s: seconds besides, which without this the job would wait for its workers instead.
    """

    kind: str
    seconds: float
    share: float
    culprit: Culprit | None = None
    rho: float | None = None
    hidden_s: float = 0.0


@dataclass(frozen=True)
class Losses:
    """All losses of a training's mean step, largest first.

    Attributes:
        step_s: the mean step that they are shares of.
        found: those above zero, what is hidden included.
        lone: steps that are left out here, since something happened in them once.
        most_s: what a step takes longer than the slowest workers that the job waits for need for it: more is
            not won without faster loading.
    """

    step_s: float
    found: tuple[Loss, ...]
    lone: int
    most_s: float

    def shown(self) -> list[Loss]:
        """The losses with what is hidden of them, largest first."""
        whole = (_lasting(one, one.seconds + one.hidden_s, self.step_s) for one in self.found)
        return sorted(whole, key=lambda one: -one.seconds)


def find_losses(
    timeline: Timeline,
    budget: TrainingBudget,
    supply: Mapping[int, float] | None = None,
    empty: Mapping[int, float] | None = None,
) -> Losses | None:
    """What the job's steps lose time to; ``None`` without measured steps.

    Args:
        timeline: its steps.
        budget: measured from them.
        supply: seconds a step that each rank's workers need when they are never held up
            (``feedtune.analysis.workers``), of several loaders those of the slowest. Where all ranks' loaders
            are about equally slow, the slightly faster ones have full queues while they wait for the slowest:
            only this tells that case from one slow rank.
        empty: of each rank with workers the share of its steps in which no batch was ready. Where that is
            most of them, the job is no faster than these workers without whatever else it loses time to.
    """
    lone = lone_steps(timeline)
    places = [place for place in timeline.measured if place not in lone]
    if not places:
        return None
    rounds = [lose(one) for one in timeline.rounds if not touches(one, lone)] if timeline.synced else []
    means = rank_means(timeline, min(timeline.ranks)) if timeline.alone else job_means(timeline, lone)
    step_s, parts = means(places)
    found = {
        "communication": parts["communication_s"],
        "rest": parts["rest_s"],
    }
    losses = [Loss(kind, value, value / step_s) for kind, value in found.items() if value and value > 0]
    if stall_s := parts["stall_s"]:
        by = _vote(timeline, rounds, "collector", "uneven_gc_s", step_s)
        losses.append(Loss("sched/gc", stall_s, stall_s / step_s, by))
    losses += _data_losses(
        timeline, rounds, parts["data_wait_s"], budget.data_at_least_s, step_s, supply or {}
    )
    losses += _work_losses(timeline, rounds, parts["straggle_s"], step_s)
    bind = [s for rank, s in (supply or {}).items() if (empty or {}).get(rank, 0.0) > _MOSTLY]
    most_s = max(0.0, step_s - max(bind, default=0.0)) if timeline.waits_seen else step_s
    losses = [_beside_workers(one, most_s, step_s) for one in losses]
    losses.sort(key=lambda one: (-one.seconds, -one.hidden_s))
    return Losses(step_s, tuple(losses), len(lone), most_s)


def _beside_workers(loss: Loss, most_s: float, step_s: float) -> Loss:
    """A loss, as far as the job would be faster without it while its workers make what they make now.

    Args:
        loss: as found in the steps, which free of it would wait for data.
        most_s: as of ``Losses``.
        step_s: mean step.
    """
    if loss.kind in WAITS or loss.seconds <= most_s:
        return loss
    return replace(_lasting(loss, most_s, step_s), hidden_s=loss.seconds - most_s)


def _lasting(loss: Loss, seconds: float, step_s: float) -> Loss:
    """The same loss of another length."""
    return replace(loss, seconds=seconds, share=seconds / step_s)


def lone_steps(timeline: Timeline) -> set[int]:
    """Steps that are far longer than all others: something that happened at most once in 50 steps.

    Batches that come in bursts of as many as there are workers make long steps too, but not lone ones.
    """
    lengths = {p: max(of[p].length_s for of in timeline.ranks.values()) for p in timeline.measured}
    longest = sorted(lengths, key=lengths.__getitem__, reverse=True)
    most = len(longest) // max(_LONE_IN, 2 * timeline.cycle)
    # Where one rank is held up, the others' next steps can be the long ones: the same event.
    for count in range(min(2 * most, len(longest) - 1), 0, -1):
        found = set(longest[:count])
        events = sum(place - 1 not in found for place in found)
        if events <= most and lengths[longest[count - 1]] > POLICY.lone_step * lengths[longest[count]]:
            return found
    return set()


def _data_losses(
    timeline: Timeline,
    rounds: Sequence[RoundLoss],
    data_wait_s: float | None,
    at_least_s: float | None,
    step_s: float,
    supply: Mapping[int, float],
) -> list[Loss]:
    """The job's wait for data: what one rank alone makes of it, and the rest, which is all ranks'."""
    if data_wait_s is None:
        return [] if at_least_s is None else [Loss("data", at_least_s, at_least_s / step_s)]
    culprit = _vote(timeline, rounds, "last", "uneven_s", step_s)
    uneven_s = per_step(timeline, rounds, "uneven_s") or 0.0
    if culprit is None or not culprit.sure:
        uneven_s = 0.0
    else:
        others = [seconds for rank, seconds in supply.items() if rank != culprit.rank]
        # With data free for the culprit alone, the job would still be as slow as the others' loaders.
        bound_s = median(others) - (step_s - data_wait_s) if others else 0.0
        uneven_s = max(0.0, min(uneven_s, data_wait_s - bound_s))
    found = [("data", data_wait_s - uneven_s, None), ("imbalance/input", uneven_s, culprit)]
    return [Loss(kind, value, value / step_s, by) for kind, value, by in found if value > 0]


def _work_losses(
    timeline: Timeline, rounds: Sequence[RoundLoss], straggle_s: float | None, step_s: float
) -> list[Loss]:
    """What the last rank works longer than the others: one rank's doing, the batches' sizes', or chance."""
    if not straggle_s:
        return []
    culprit = _vote(timeline, rounds, "last_at_work", "straggle_s", step_s)
    if culprit is not None and culprit.sure:
        return [Loss("imbalance/compute", straggle_s, straggle_s / step_s, culprit)]
    rho = sizes_to_work(rounds)
    if rho is None or rho < POLICY.rho:
        return [Loss("imbalance/turns", straggle_s, straggle_s / step_s, culprit, rho)]
    # Balanced batches would not make the last rank as fast as the others, but all of them alike.
    level_s = per_step(timeline, rounds, "unlevel_s") or 0.0
    return [Loss("imbalance/lengths", level_s, level_s / step_s, culprit, rho)]


def _vote(
    timeline: Timeline, rounds: Sequence[RoundLoss], last: str, by_s: str, step_s: float
) -> Culprit | None:
    """The rank that is last most often.

    Args:
        timeline: whose weights the votes have.
        rounds: they vote where ranks lie apart by a material part of the mean step, and at least half as far
            as on average: where one rank is late now and then, chance decides who is last meanwhile.
        last: name of a round's last rank.
        by_s: name of the seconds by which it is last.
        step_s: mean step.
    """
    least_s = max(POLICY.apart * step_s, (per_step(timeline, rounds, by_s) or 0.0) / 2)
    apart = [one for one in rounds if getattr(one, by_s) > least_s * max(1, one.round.steps)]
    ranks: defaultdict[int, float] = defaultdict(float)
    for one in apart:
        ranks[getattr(one, last)] += timeline.weights[one.round.end]
    if not ranks:
        return None
    rank, votes = min(ranks.items(), key=lambda one: (-one[1], one[0]))
    return Culprit(rank, votes / sum(ranks.values()), len(apart))


def sizes_to_work(rounds: Sequence[RoundLoss]) -> float | None:
    """Spearman's rho, over rounds and ranks, of elements and work beyond the median of the others."""
    sizes: list[float] = []
    works: list[float] = []
    for one in (loss.round for loss in rounds):
        elements = {rank: found for rank in one.works if (found := one.elements(rank)) is not None}
        if len(elements) < len(one.works):
            continue
        work = {rank: one.path(rank, less_data=True, less_gc=True) for rank in elements}
        for rank in elements:
            sizes.append(elements[rank] - median(n for other, n in elements.items() if other != rank))
            works.append(work[rank] - median(s for other, s in work.items() if other != rank))
    return rank_correlation(sizes, works)
