"""From the ranks' step records to a timeline for each, lined up where ranks wait for each other.

Keys of a record's ``parts``, in seconds, offsets from the step's begin on the rank's timeline (its GPU's
stream under CUDA, else its host); what was not seen is absent: ``t`` duration on the GPU's timeline, ``s``
exposed starvation there, ``h`` host-to-device copies, ``b`` end of the last backward, ``o`` end of the last
optimizer step, ``y`` sync points ``[kind, arrive, leave]``, ``r`` first gradient bucket ready, ``a`` what the
host took from the broadcast of buffers to there, ``c`` begin and duration of each collection of garbage in
turn, ``d`` the same of waits for batches of other loaders than the recorded one (under CUDA, exposed), ``n``
elements of the batch. Of a long run's steps only some have parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from feedtune.analysis.rounds import BUFFERS, RankStep, Round, Sync, rounds_of
from feedtune.analysis.steps import Chosen, StepSeen, choose_steps

_MOST = 0.5  # a thing that fewer of the measured steps have was not seen
_GAP = 32  # steps: from so many on that were not taken down, what comes next stands for them


@dataclass(frozen=True)
class Timeline:
    """The measured steps of all ranks, lined up.

    Attributes:
        ranks: steps of each rank by position, the last one left out, since it has no end.
        world: ranks that the training has.
        measured: positions of the measured steps, of whole rounds where there are any.
        weights: how many of the training's steps each of them stands for; where not all are taken down in
            full, more than itself.
        cycle: measured stretches are multiples of it, less what was left out.
        left_out: steps left out because ranks had different sync points there, or one lacks its record.
        waits_seen: S is known.
        synced: waits for other ranks are known.
        mismatched: in most steps the ranks had different sync points, so that none are used.
        settled: as ``Figures.settled``.
        rounds: those that end in a measured step.
    """

    ranks: Mapping[int, Sequence[RankStep]]
    world: int
    measured: Sequence[int]
    weights: Mapping[int, float]
    cycle: int
    left_out: int
    waits_seen: bool
    synced: bool
    mismatched: bool
    settled: bool
    rounds: Sequence[Round]

    @property
    def alone(self) -> bool:
        """There is one rank, which never waits for others."""
        return self.world == 1 and len(self.ranks) == 1

    def mean(self, values: Iterable[float], places: Sequence[int]) -> float:
        """Mean of what was found at measured positions, as over all the steps that they stand for."""
        weights = [self.weights[place] for place in places]
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def line_up(
    ranks: Mapping[int, Sequence[StepSeen]],
    workers: int,
    prefetch: int | None,
    world: int,
    loop_waits: bool = True,
    syncs_seen: bool = True,
) -> Timeline:
    """Line up the ranks' steps at their sync points.

    Args:
        ranks: steps of every rank, in order.
        workers: of each rank's loader.
        prefetch: its ``prefetch_factor``.
        world: ranks that the training has; some may have left no record.
        loop_waits: whether the wait for a batch is that of the training's own thread and stream.
        syncs_seen: whether all points where ranks wait for each other are in the records; where the waits
            for gradients are missing, the others say nothing.
    """
    chosen = choose_steps(ranks, workers, prefetch)
    steps = {rank: _on_timeline(records, loop_waits) for rank, records in chosen.ranks.items()}
    known = {place: [of[place].collections is not None for of in steps.values()] for place in chosen.measured}
    places = [place for place, ranks_know in known.items() if all(ranks_know)] or chosen.measured
    waits_seen = _seen(places, steps, "wait_s")
    whole = _whole(len(chosen.steps) - 1, steps, waits_seen, _seen(places, steps, "collections"))
    matched = {place for place in whole if len({of[place].kinds for of in steps.values()}) == 1}
    mismatched = len(matched & set(places)) < _MOST * len(whole & set(places))
    barriers = any(kind != BUFFERS for p in places for kind in steps[min(steps)][p].kinds or ())
    synced = syncs_seen and len(steps) > 1 and barriers and not mismatched
    good = matched if synced else whole
    rounds = tuple(_all_rounds(chosen, steps, good)) if synced else ()
    measured = [place for place in places if place in good]
    left_out = len(places) - len(measured) + sum(any(one) and not all(one) for one in known.values())
    covered = {place for one in rounds for place in range(one.begin + 1, one.end + 1)}
    if covered:  # where ranks wait for each other in every few steps only, of whole rounds
        measured = [place for place in measured if place in covered]
    return Timeline(
        ranks=steps,
        world=world,
        measured=measured,
        weights=_weights(chosen),
        cycle=chosen.cycle,
        left_out=left_out,
        waits_seen=waits_seen,
        synced=bool(covered),
        mismatched=syncs_seen and mismatched,
        settled=chosen.settled,
        rounds=rounds,
    )


def _weights(chosen: Chosen) -> dict[int, float]:
    """How many steps each measured position stands for.

    That is itself, and its share of the steps around its stretch of which there is no more than the wait, or
    nothing. A long training takes all of its first steps down, and later one stretch in so many: without
    weights its begin would decide. What follows these first steps stands for all that lies between.
    """
    measured, none = set(chosen.measured), 0
    groups: list[list[int]] = []  # stretches that were taken down
    stands: list[float] = []
    for place, number in enumerate(chosen.steps):
        none += number - chosen.steps[place - 1] - 1 if place else 0
        if any(records[place].parts is None for records in chosen.ranks.values()):
            none += 1
            continue
        if not groups or (none >= _GAP and groups[-1]):
            before = none / 2 if len(groups) > 1 else 0
            groups.append([])
            stands.append(none - before)
            if len(groups) > 1:
                stands[-2] += before
        else:
            stands[-1] += none
        none = 0
        if place in measured:
            groups[-1].append(place)
    if groups:
        stands[-1] += none
    found = dict.fromkeys(measured, 1.0)
    for places, steps in zip(groups, stands, strict=True):
        found.update(dict.fromkeys(places, 1 + steps / max(1, len(places))))
    return found


def _seen(places: Sequence[int], steps: Mapping[int, Sequence[RankStep]], name: str) -> bool:
    """Whether most of the steps of every rank have it."""
    least = _MOST * len(places)
    seen = [sum(getattr(of[place], name) is not None for place in places) for of in steps.values()]
    return bool(places) and min(seen) >= least


def _whole(total: int, steps: Mapping[int, Sequence[RankStep]], waits: bool, parts: bool) -> set[int]:
    """Steps in which no rank lacks what all have in most steps: its wait, or anything but that."""

    def lacks(one: RankStep) -> bool:
        return (waits and one.wait_s is None) or (parts and one.collections is None)

    return {place for place in range(total) if not any(lacks(of[place]) for of in steps.values())}


def _on_timeline(records: Sequence[StepSeen], loop_waits: bool) -> list[RankStep]:
    """Steps of a rank; under CUDA their lengths on the GPU's timeline are added up.

    Where batches are alike, only some are counted: the others have as many elements.
    """
    found: list[RankStep] = []
    begin_s = 0.0
    device = any("t" in (one.parts or ()) for one in records)
    for one, after in pairwise(records):
        step = _rank_step(begin_s, one, after.enter_s - one.enter_s, device, loop_waits)
        if step.elements is None and found:
            step = step._replace(elements=found[-1].elements)
        found.append(step)
        begin_s += step.length_s
    return found


def _rank_step(begin_s: float, one: StepSeen, length_s: float, device: bool, loop_waits: bool) -> RankStep:
    parts = one.parts or {}
    wait_s = (parts.get("s") if device else one.wait_s) if loop_waits else None
    backward, optimized = parts.get("b"), parts.get("o")
    end_s = None if backward is None else max(backward, optimized or 0.0)
    return RankStep(
        begin_s,
        parts.get("t", length_s),
        wait_s,
        max(0.0, one.wait_s - wait_s) if device and wait_s is not None else None,
        parts.get("h"),
        end_s,
        None if one.parts is None else _spans(parts.get("c", ())),
        _syncs(parts),
        parts.get("n"),
        () if wait_s is None else _spans(parts.get("d", ())),
    )


def _spans(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    return tuple(zip(values[::2], values[1::2], strict=True))


def _syncs(parts: Mapping[str, Any]) -> tuple[Sync, ...] | None:
    """Points of waiting; ``None`` where one of their times is missing.

    While a GPU waits for rank 0's buffers its host runs on. If that takes longer to the first bucket than the
    GPU does once it has them, part of the wait was the host's work, and without the wait it would have shown.
    """
    points = [Sync(*point) for point in parts.get("y") or ()]
    if any(None in point for point in points):
        return None
    ready_s, ahead_s = parts.get("r"), parts.get("a")
    last = max((at for at, point in enumerate(points) if point.kind == BUFFERS), default=None)
    if last is not None and ready_s is not None and ahead_s is not None:
        arrive_s, leave_s = points[last].arrive_s, points[last].leave_s
        points[last] = Sync(BUFFERS, arrive_s, max(arrive_s, min(leave_s, ready_s - ahead_s)))
    return tuple(points)


def _all_rounds(chosen: Chosen, steps: Mapping[int, Sequence[RankStep]], good: set[int]) -> Iterable[Round]:
    pauses = set(chosen.pauses)
    for begin, end in chosen.stretches:
        # The step before shows where the first round begins, if nothing lies between.
        first = begin - 1 if begin and begin not in pauses else begin
        run: list[int] = []
        for place in range(first, end + 1):
            if place < end and place in good:
                run.append(place)
                continue
            yield from (one for one in rounds_of(run, steps) if one.end >= begin)
            run = []
