"""Which class a training is of, what it would gain, and the evidence in words (METHODS section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from feedtune.analysis.align import Timeline
from feedtune.analysis.blame import WAITS, Loss, Losses, find_losses
from feedtune.analysis.budget import FLAGS, TrainingBudget
from feedtune.analysis.policy import POLICY

_PART = {
    "data": "data_wait_s",
    "imbalance/input": "data_wait_s",
    "imbalance/compute": "straggle_s",
    "imbalance/lengths": "straggle_s",
    "imbalance/turns": "straggle_s",
    "communication": "communication_s",
    "sched/gc": "stall_s",
    "rest": "rest_s",
}
_NAMED = 8  # ranks in a sentence
_BLIND = ("syncs_unseen", "syncs_differ", "waits_unseen")


@dataclass(frozen=True)
class TrainingClass:
    """What a training loses most to.

    Attributes:
        kind: that of the largest loss; ``mixed`` where the second is nearly as large; ``healthy`` where none
            is material, ``unknown`` where the largest has no name or what matters was not seen.
        share: of the step, of the losses that make the class; ``None`` where there is none.
        critical: the share is severe.
        rank: the one rank that makes it, if it is one.
        gain: speed without these losses over speed now, T / (T - loss): an upper bound.
        evidence: sentences with figures.
        losses: all that were measured, largest first.
        lone: steps far longer than all others, which decide nothing here.
    """

    kind: str
    share: float | None
    critical: bool
    rank: int | None
    gain: float | None
    evidence: tuple[str, ...]
    losses: tuple[Loss, ...]
    lone: int

    def as_dict(self) -> dict[str, Any]:
        """The class as JSON."""
        found = asdict(self)
        lists = {name: list(found[name]) for name in ("evidence", "losses")}
        return {"class": found.pop("kind"), **found, **lists}


def classify(
    timeline: Timeline,
    budget: TrainingBudget,
    supply: Mapping[int, float] | None = None,
    empty: Mapping[int, float] | None = None,
) -> TrainingClass:
    """The class of a training.

    Args:
        timeline: its steps.
        budget: measured from them.
        supply: as of ``find_losses``.
        empty: of each rank with workers the share of its steps in which no batch was ready.
    """
    losses = find_losses(timeline, budget, supply, empty)
    if losses is None:
        return TrainingClass("unknown", None, False, None, None, ("No steps were measured.",), (), 0)
    material = [one for one in losses.found if one.share >= _least(one)]
    blind = not timeline.waits_seen or (not timeline.synced and not timeline.alone)
    alone = bool(material)
    if not alone:  # it may be that nothing is won without faster loading
        material = [one for one in losses.shown() if one.share >= _least(one)]
    if not material:
        kind = "unknown" if blind else "healthy"
        said = _nothing(losses, budget)
        return TrainingClass(kind, None, False, None, None, said, losses.found, losses.lone)
    kind, leading = _leading(material, timeline.waits_seen)
    share = min(1.0, sum(one.share for one in leading))
    waits = sum(one.share for one in leading if one.kind in WAITS)
    won = min(share, waits + losses.most_s / losses.step_s)
    ranks = {one.culprit.rank if one.culprit and one.culprit.sure else None for one in leading}
    return TrainingClass(
        kind,
        share,
        share >= POLICY.severe,
        ranks.pop() if len(ranks) == 1 else None,
        1 / (1 - won) if kind != "unknown" and alone and won < 1 else None,
        (
            *(_sentence(one, losses.step_s, timeline, budget) for one in leading),
            *_ready(leading, losses, supply or {}, empty or {}),
            *_behind(losses, alone),
            *_lone(losses),
        ),
        losses.found,
        losses.lone,
    )


def tell_other(
    found: TrainingClass, timeline: Timeline, others: Mapping[int, Sequence[Mapping[str, Any]]]
) -> tuple[str, ...]:
    """Which loader the wait for data is for, where it is not the recorded one.

    Args:
        found: the class.
        timeline: its steps.
        others: of each rank the other loaders that it has trained with (``others`` of a rank's description).
    """
    if not any(one.kind in WAITS for one in found.losses[:1]):
        return ()
    rank = found.losses[0].culprit.rank if found.losses[0].culprit else min(timeline.ranks)
    steps, places = timeline.ranks[rank], timeline.measured
    waits_s = timeline.mean((steps[place].data_s for place in places), places)
    own_s = timeline.mean((steps[place].wait_s or 0.0 for place in places), places)
    if not others.get(rank) or own_s > waits_s / 2:
        return ()
    most = max(others[rank], key=lambda one: float(one["wait_s"]))
    return (
        f"{_ms(waits_s - own_s)} of {_ms(waits_s)} a step is the wait for another loader of the same steps, "
        f"{most['dataset']} at {most['site']}.",
    )


def _least(one: Loss) -> float:
    """The share from which a loss counts; ranks that differ by chance are not worth a word so soon."""
    return POLICY.severe if one.kind == "imbalance/turns" else POLICY.material


def _leading(material: Sequence[Loss], waits_seen: bool) -> tuple[str, list[Loss]]:
    """The class, and the losses that make it; without S a late rank may be late for its data or its work."""
    first = material[0]
    if first.kind in ("rest", "imbalance/turns") or (first.culprit is not None and not waits_seen):
        return "unknown", [first]
    near = [one for one in material if one.share >= POLICY.second * first.share]
    leading = [one for one in near if one.kind not in ("rest", "imbalance/turns")][:2]
    return "mixed" if len(leading) > 1 else first.kind, leading


def _nothing(losses: Losses, budget: TrainingBudget) -> tuple[str, ...]:
    unseen = [FLAGS[flag] for flag in budget.job.flags if flag in _BLIND]
    if unseen:
        return tuple(f"{text[0].upper()}{text[1:]}." for text in unseen) + _lone(losses)
    said = f"Nothing that could be avoided takes {POLICY.material:.0%} of a step of {_ms(losses.step_s)}"
    small = [one for one in losses.found if one.share < POLICY.material]
    largest = f"; the largest is {_NAMES[small[0].kind]}, {small[0].share:.1%}" if small else ""
    chance = [one for one in losses.found if one.share >= POLICY.material]  # of ranks that are late in turns
    more = tuple(f"By chance, {_NAMES[one.kind]} cost {one.share:.1%}." for one in chance)
    return (f"{said}{largest}.", *more, *_lone(losses))


def _behind(losses: Losses, alone: bool) -> tuple[str, ...]:
    """What is won only together with faster loading.

    Args:
        losses: of the mean step.
        alone: whether something is won without.
    """
    needed = f"the workers need {_ms(losses.step_s - losses.most_s)} for a batch"
    if not alone:
        return (f"None of it is won alone: {needed}.",)
    found = [one for one in losses.found if one.hidden_s >= _least(one) * losses.step_s]
    most = max(found, key=lambda one: one.hidden_s, default=None)
    if most is None:
        return ()
    name = _NAMES[most.kind]
    if most.culprit is not None and most.culprit.sure:
        name = name.replace("one rank's", f"rank {most.culprit.rank}'s")
    return (f"Besides, {name}: {_ms(most.hidden_s)} a step, won only once batches come faster: {needed}.",)


def _lone(losses: Losses) -> tuple[str, ...]:
    if not losses.lone:
        return ()
    return (f"{losses.lone} far longer than all other steps: left out of the class, not of the budget.",)


_NAMES = {
    "data": "waiting for data",
    "imbalance/input": "one rank's data",
    "imbalance/compute": "one rank's work",
    "imbalance/lengths": "unequal batches",
    "imbalance/turns": "ranks that are late in turns",
    "communication": "communication",
    "sched/gc": "garbage collection",
    "rest": "what lies outside the training step's parts",
}


_PLAIN = {
    "imbalance/lengths": "Ranks come last in turns, the larger their batches (rank correlation of elements "
    "and work {rho:.2f}): {amount}.",
    "imbalance/turns": "Ranks come last in turns, and not for the sizes of their batches: {amount}.",
    "communication": "Even the rank that comes last waits for the exchange: {amount}.",
    "rest": "Outside of data, copies, forward, backward, optimizer and waits for ranks: {amount}.",
}


def _sentence(loss: Loss, step_s: float, timeline: Timeline, budget: TrainingBudget) -> str:
    half_s = getattr(budget.job.half_widths, _PART[loss.kind]) if loss.kind in _PART else None
    width = "" if half_s is None else f" ± {half_s / step_s:.1%}"
    amount = f"{_ms(loss.seconds)} of a step of {_ms(step_s)}, {loss.share:.1%}{width}"
    if loss.kind == "data":
        if timeline.alone:
            return f"The loop waits for data: {amount}."
        if not timeline.synced:
            return f"All ranks wait for data in the same steps: at least {amount}."
        return f"Ranks wait for data, and not only one of them: {amount}."
    if loss.kind == "imbalance/input":
        return f"{_comes_last(loss)}; {_waits(loss, timeline)}: {amount}."
    if loss.kind == "imbalance/compute":
        if not timeline.waits_seen:
            return f"{_comes_last(loss)}, for its data or its work, which was not told apart: {amount}."
        return f"{_comes_last(loss)}, for its own work{_sizes(loss, timeline)}: {amount}."
    if loss.kind == "sched/gc":
        by = "" if timeline.alone else _collectors(loss, step_s, budget)
        return f"Python collects garbage: {amount}.{by}"
    if loss.kind == "rest" and _leave_apart(loss, budget):
        return (
            "Ranks leave the same exchange at different times, as with more processes than cores, and wait "
            f"for each other at the next: {amount}."
        )
    return _PLAIN[loss.kind].format(amount=amount, rho=loss.rho)


def _leave_apart(loss: Loss, budget: TrainingBudget) -> bool:
    """Whether the job's rest is none of its ranks': it lies between the ranks."""
    rests = [rank.parts.rest_s or 0.0 for rank in budget.ranks.values()]
    return len(rests) > 1 and max(rests) < loss.seconds / 2


def _comes_last(loss: Loss) -> str:
    assert loss.culprit is not None
    by = loss.culprit
    return f"Rank {by.rank} comes last in {by.votes:.0%} of the {by.rounds} times that ranks lie apart"


def _collectors(loss: Loss, step_s: float, budget: TrainingBudget) -> str:
    """Which ranks collect garbage how long, and what it would cost if all did so in the same steps."""
    found = {rank: one.parts.stall_s or 0.0 for rank, one in budget.ranks.items()}
    ranks = sorted(found, key=lambda rank: -found[rank])
    named = ", ".join(f"rank {rank} {_ms(found[rank])}" for rank in ranks[:_NAMED])
    more = f", {len(ranks) - _NAMED} more ranks less" if len(ranks) > _NAMED else ""
    most_s = found[ranks[0]]
    if loss.seconds - most_s < POLICY.material * step_s:
        return f" Of each step {named}{more}."
    return (
        f" Of each step {named}{more}, at different times: in the same steps on all ranks (gc.disable(), and "
        f"gc.collect() every so many steps) it would cost {_ms(most_s)}."
    )


def _ready(
    leading: Sequence[Loss], losses: Losses, supply: Mapping[int, float], empty: Mapping[int, float]
) -> tuple[str, ...]:
    """Where the wait for data is none for the workers."""
    data = next((one for one in leading if one.kind in WAITS), None)
    if data is None:
        return ()
    ranks = [data.culprit.rank] if data.culprit is not None and data.culprit.sure else list(empty)
    waits_s = sum(one.seconds for one in losses.found if one.kind in WAITS)
    slowest_s = max((supply.get(rank, losses.step_s) for rank in ranks), default=losses.step_s)
    most = max((empty.get(rank, 1.0) for rank in ranks), default=1.0)
    if most > POLICY.material or slowest_s > losses.step_s - waits_s:
        return ()
    return (
        f"The workers are not what it waits for: a batch was ready in {1 - most:.0%} of the steps, and they "
        f"need {_ms(slowest_s)} for one. The time goes into taking a finished batch over, which fewer or no "
        "workers, and fewer or smaller tensors in a batch, make cheaper.",
    )


def _waits(loss: Loss, timeline: Timeline) -> str:
    assert loss.culprit is not None
    waits = {
        rank: timeline.mean((of[place].data_s for place in timeline.measured), timeline.measured)
        for rank, of in timeline.ranks.items()
    }
    own = waits.pop(loss.culprit.rank)
    return f"it waits {_ms(own)} a step for its data, the others {_ms(median(waits.values()))}"


def _sizes(loss: Loss, timeline: Timeline) -> str:
    """Whether the last rank's batches are larger than those of the others."""
    assert loss.culprit is not None
    sizes = {rank: [of[p].elements for p in timeline.measured] for rank, of in timeline.ranks.items()}
    means = {
        rank: fmean(one for one in found if one is not None)
        for rank, found in sizes.items()
        if any(one is not None for one in found)
    }
    own = means.pop(loss.culprit.rank, 0.0)
    usual = median(means.values()) if means else 0.0
    if not usual or own / usual < 1 + POLICY.uneven:
        return ""
    return f" (its batches hold {own / usual:.2f} times the elements of the others')"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
