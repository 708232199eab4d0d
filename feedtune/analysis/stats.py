"""Intervals for gains, and the choice of the winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, stdev

from feedtune.analysis.policy import POLICY
from feedtune.records import BlockResult

MIN_STRETCHES = 5  # whose means make an interval


@dataclass(frozen=True)
class Gain:
    """Ratio of two rates with its 95 % interval, from interleaved pairs of blocks."""

    ratio: float
    low: float
    high: float

    @property
    def proven(self) -> bool:
        """The interval lies above 1, and the ratio is worth a change."""
        return self.low > 1.0 and self.ratio >= POLICY.min_gain


def paired_gain(baseline: Sequence[float], candidate: Sequence[float]) -> Gain:
    """Student's t interval on the log ratios of pairs of blocks measured next to each other.

    Args:
        baseline: rates of the A blocks, one a pair.
        candidate: rates of the B blocks, in the same order; at least 4 pairs make a usable interval.

    Raises:
        ValueError: fewer than two pairs, or unequal numbers.
    """
    logs = [math.log(b / a) for a, b in zip(baseline, candidate, strict=True)]
    if len(logs) < 2:
        raise ValueError("an interval needs at least two pairs")
    mean = fmean(logs)
    half = _half_width_of_mean(logs)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def mean_half_width(means: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean, from means of consecutive stretches of about equal length.

    Such batch means are nearly independent where single steps are not (METHODS section 2).

    Args:
        means: one a stretch; with fewer than five the interval says nothing, and is ``None``.
    """
    return _half_width_of_mean(means) if len(means) >= MIN_STRETCHES else None


def _half_width_of_mean(values: Sequence[float]) -> float:
    from scipy.special import stdtrit  # a tenth of what importing scipy.stats takes

    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rho of paired values, ties sharing their mean rank; ``None`` where one does not vary."""
    if len(first) < 3 or min(first) == max(first) or min(second) == max(second):
        return None
    return correlation(_places(first), _places(second))


def _places(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[begin]]:
            for index in order[begin:end]:
                places[index] = (begin + end - 1) / 2
            begin = end
    return places


def lower_bound(block: BlockResult) -> float:
    """Lower confidence bound of a block's rate, from the spread of its (about five) sub-stretches."""
    return block.speed * (1 - _half_width(block))


def upper_bound(block: BlockResult) -> float:
    """Upper confidence bound of a block's rate, as ``lower_bound``."""
    return block.speed * (1 + _half_width(block))


def _half_width(block: BlockResult) -> float:
    return 2 * (block.spread or 0.0) / math.sqrt(5)


def pick_winner(blocks: Sequence[BlockResult]) -> BlockResult | None:
    """The cheapest settings whose lower bound is within 2 % of the best lower bound.

    Lower bounds on both sides: the highest rate of all is the one that noise has helped most.
    """
    measured = [b for b in blocks if b.measured]
    if not measured:
        return None
    floor = max(map(lower_bound, measured)) * (1 - POLICY.near_best)
    return min((b for b in measured if lower_bound(b) >= floor), key=lambda b: b.settings.cost)


def geometric_mean(values: Sequence[float]) -> float:
    """Mean of rates on the log scale, the one that the gain's interval lives on."""
    return math.exp(fmean(math.log(value) for value in values))
