"""Intervals for gains, and the choice of the winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from feedtune.analysis.policy import POLICY
from feedtune.records import BlockResult


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
    from scipy.stats import t

    logs = [math.log(b / a) for a, b in zip(baseline, candidate, strict=True)]
    if len(logs) < 2:
        raise ValueError("an interval needs at least two pairs")
    mean = fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


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
