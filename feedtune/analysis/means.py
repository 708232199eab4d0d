"""The mean step of a rank and of the job, and its parts, over any of the measured steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from statistics import median_low

from feedtune.analysis.align import Timeline
from feedtune.analysis.rounds import RankStep, Round, RoundLoss, lose, overlap

Means = Callable[[Sequence[int]], tuple[float, dict[str, float | None]]]


def with_rest(step_s: float, parts: dict[str, float | None]) -> dict[str, float | None]:
    """The parts and what they leave of the step, if it is known what it holds."""
    known = [value for value in parts.values() if value is not None]
    settled = parts["compute_s"] is not None and parts["data_wait_s"] is not None
    return {**parts, "rest_s": step_s - sum(known) if settled else None}


def rank_means(timeline: Timeline, rank: int) -> Means:
    """A function from positions to a rank's mean step and its parts."""
    steps = timeline.ranks[rank]
    copies, computes = _sees(timeline, rank, "copy_s"), timeline.waits_seen and _sees_work(timeline, rank)
    collects = _sees(timeline, rank, "collections")
    alone = 0.0 if timeline.alone else None
    waited = {place: _waited(timeline, rank, place) for place in timeline.measured} if timeline.synced else {}

    def means(places: Sequence[int]) -> tuple[float, dict[str, float | None]]:
        def mean(value: Callable[[RankStep], float], known: bool) -> float | None:
            return timeline.mean((value(steps[place]) for place in places), places) if known else None

        def mean_wait(which: int) -> float | None:
            return timeline.mean((waited[place][which] for place in places), places) if waited else alone

        step_s = timeline.mean((steps[place].length_s for place in places), places)
        parts = {
            "data_wait_s": mean(lambda one: one.data_s, timeline.waits_seen),
            "h2d_s": mean(lambda one: one.copy_s or 0.0, copies),
            "compute_s": mean(lambda one: computing(one, timeline.synced), computes),
            "communication_s": mean_wait(0),
            "straggle_s": mean_wait(1),
            "stall_s": mean(lambda one: collecting(one, timeline.synced), collects),
        }
        return step_s, with_rest(step_s, parts)

    return means


def computing(step: RankStep, synced: bool) -> float:
    """Seconds from the batch's arrival to the end of the work, less all that is another part."""
    if step.end_s is None:
        return 0.0
    begin, end = step.wait_s or 0.0, step.end_s
    waits = overlap(_sync_waits(step, synced), begin, end)
    others = sum(max(0.0, min(at + seconds, end) - at) for at, seconds in step.others)
    return max(0.0, end - begin - waits - others - (step.copy_s or 0.0) - collecting(step, synced, end))


def collecting(step: RankStep, synced: bool, until_s: float | None = None) -> float:
    """Seconds of garbage collection in a step, or until an offset in it, outside of its waits for ranks."""
    end_s = step.length_s if until_s is None else until_s
    spans = [(begin, min(begin + seconds, end_s)) for begin, seconds in step.collections or ()]
    waits = _sync_waits(step, synced)
    return sum(max(0.0, e - b - overlap(waits, b, e)) for b, e in spans)


def _sync_waits(step: RankStep, synced: bool) -> list[tuple[float, float]]:
    return [(one.arrive_s, one.leave_s) for one in step.syncs or ()] if synced else []


def communicating(timeline: Timeline, place: int) -> list[float]:
    """For each sync point of a step the shortest wait of any rank."""
    syncs = [of[place].syncs or () for of in timeline.ranks.values()]
    return [min(point.wait_s for point in points) for points in zip(*syncs, strict=True)]


def _waited(timeline: Timeline, rank: int, place: int) -> tuple[float, float]:
    """Communication and straggle of a rank in a step."""
    shortest = sum(communicating(timeline, place))
    return shortest, max(0.0, sum(one.wait_s for one in timeline.ranks[rank][place].syncs or ()) - shortest)


def _sees(timeline: Timeline, rank: int, name: str) -> bool:
    return any(getattr(timeline.ranks[rank][place], name) is not None for place in timeline.measured)


def _sees_work(timeline: Timeline, rank: int) -> bool:
    """Whether most steps of a rank have a backward; a script may skip one now and then."""
    seen = sum(timeline.ranks[rank][place].end_s is not None for place in timeline.measured)
    return 2 * seen >= len(timeline.measured) > 0


def job_means(timeline: Timeline, without: Collection[int] = ()) -> Means:
    """A function from positions to the job's mean step and its parts.

    Args:
        timeline: of at least two ranks, or of one of several.
        without: positions that no round may touch.
    """
    if not timeline.synced:
        return _unsynced_means(timeline)
    ranks = timeline.ranks
    copies = any(_sees(timeline, rank, "copy_s") for rank in ranks)
    computes = timeline.waits_seen and all(_sees_work(timeline, rank) for rank in ranks)
    collects = any(_sees(timeline, rank, "collections") for rank in ranks)
    losses = [lose(one) for one in timeline.rounds if not touches(one, without)]
    waited = {place: sum(communicating(timeline, place)) for place in timeline.measured}

    def means(places: Sequence[int]) -> tuple[float, dict[str, float | None]]:
        chosen = set(places)
        here = [one for one in losses if one.round.end in chosen]

        def mean(name: str, known: bool) -> float | None:
            return per_step(timeline, here, name) if known else None

        step_s = max(timeline.mean((of[place].length_s for place in places), places) for of in ranks.values())
        parts = {
            "data_wait_s": mean("data_wait_s", timeline.waits_seen),
            "h2d_s": mean("h2d_s", copies),
            "compute_s": mean("compute_s", computes),
            "communication_s": timeline.mean((waited[place] for place in places), places),
            "straggle_s": mean("straggle_s", True),
            "stall_s": mean("stall_s", collects),
        }
        return step_s, with_rest(step_s, parts)

    return means


def per_step(timeline: Timeline, losses: Sequence[RoundLoss], name: str) -> float | None:
    """What rounds lose of a kind, in seconds a step; ``None`` without any."""
    weights = [timeline.weights[one.round.end] for one in losses]
    steps = sum(weight * one.round.steps for weight, one in zip(weights, losses, strict=True))
    lost_s = sum(weight * getattr(one, name) for weight, one in zip(weights, losses, strict=True))
    return lost_s / steps if steps else None


def touches(one: Round, places: Collection[int]) -> bool:
    """Whether a round has part in any of these steps."""
    return any(place in places for place in range(one.begin, one.end + 1))


def _unsynced_means(timeline: Timeline) -> Means:
    """Where waits for other ranks are not seen: the parts of the rank whose step is the median."""
    of_rank = {rank: rank_means(timeline, rank) for rank in timeline.ranks}

    def means(places: Sequence[int]) -> tuple[float, dict[str, float | None]]:
        found = sorted(
            (means(places) for means in of_rank.values()), key=lambda one: one[1]["compute_s"] or 0
        )
        step_s = max(one[0] for one in found)
        typical = found[median_low(range(len(found)))][1]
        # What a rank waits for data, the others may have waited for it: of the job nothing follows.
        return step_s, {**typical, "data_wait_s": None, "rest_s": None}

    return means
