"""Intervals and the choice of the winner."""

from __future__ import annotations

import math
import random

import pytest

from feedtune.analysis.stats import (
    Gain,
    geometric_mean,
    lower_bound,
    paired_gain,
    pick_winner,
    upper_bound,
)
from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings


def result(workers: int, rate: float | None, spread: float | None = 0.0, **settings) -> BlockResult:
    return BlockResult(0, "candidate", LoaderSettings(workers, **settings), rate=rate, spread=spread)


def test_the_interval_is_students_t_on_log_ratios() -> None:
    gain = paired_gain([10, 10, 10, 10], [11, 12, 11, 12])
    # By hand: logs 0.09531, 0.18232 twice each: mean 0.138816, s 0.050236, t(3, 0.975) 3.182446.
    mean = (math.log(1.1) + math.log(1.2)) / 2
    s = math.sqrt(4 / 3) * (math.log(1.2) - math.log(1.1)) / 2
    half = 3.182446 * s / 2
    assert gain.ratio == pytest.approx(math.sqrt(1.1 * 1.2))
    assert gain.low == pytest.approx(math.exp(mean - half), rel=1e-6)
    assert gain.high == pytest.approx(math.exp(mean + half), rel=1e-6)
    assert gain.proven


def test_pairs_take_out_what_drifts() -> None:
    drift = [10.0, 20.0, 15.0, 40.0]
    gain = paired_gain(drift, [1.1 * rate for rate in drift])
    assert (gain.low, gain.high) == (pytest.approx(1.1), pytest.approx(1.1))


def test_an_interval_needs_two_pairs_of_equal_length() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        paired_gain([1.0], [2.0])
    with pytest.raises(ValueError, match="zip"):
        paired_gain([1.0, 1.0], [2.0])


@pytest.mark.parametrize(
    ("gain", "proven"),
    [
        (Gain(1.05, 1.01, 1.09), True),
        (Gain(1.05, 1.00, 1.10), False),
        (Gain(1.019, 1.01, 1.03), False),
        (Gain(1.02, 1.01, 1.03), True),
        (Gain(0.5, 0.4, 0.6), False),
    ],
)
def test_a_gain_is_proven_above_one_and_worth_a_change(gain, proven) -> None:
    assert gain.proven is proven


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_the_same_settings_hardly_ever_beat_themselves(noise) -> None:
    source = random.Random(20)
    proven = 0
    for _ in range(2000):
        rates = [[100 * math.exp(source.gauss(0, noise)) for _ in range(4)] for _ in "AB"]
        proven += paired_gain(*rates).proven
    assert proven <= 0.03 * 2000


def test_a_real_gain_is_found() -> None:
    source = random.Random(21)
    found = 0
    for _ in range(500):
        a, b = ([mean * math.exp(source.gauss(0, 0.01)) for _ in range(4)] for mean in (100, 110))
        found += paired_gain(a, b).proven
    assert found >= 495


def test_the_cheapest_near_the_best_wins() -> None:
    blocks = [result(2, 60.0), result(4, 98.5), result(8, 100.0), result(16, 99.0)]
    assert pick_winner(blocks).settings.num_workers == 4
    assert pick_winner([result(4, 97.9), result(8, 100.0)]).settings.num_workers == 8


def test_equal_worker_counts_are_told_apart_by_what_they_hold() -> None:
    blocks = [result(4, 100.0, prefetch_factor=8), result(4, 99.5, prefetch_factor=2)]
    assert pick_winner(blocks).settings.prefetch_factor == 2
    pins = [result(4, 100.0, pin_memory=True), result(4, 99.5, pin_memory=False)]
    assert not pick_winner(pins).settings.pin_memory


def test_a_cheap_one_that_wavers_does_not_win() -> None:
    shaky = result(2, 99.5, spread=0.05)
    assert lower_bound(shaky) < 98
    assert pick_winner([shaky, result(8, 100.0)]).settings.num_workers == 8


def test_the_best_wins_where_none_is_sure() -> None:
    assert pick_winner([result(2, 90.0, 0.09), result(8, 100.0, 0.09)]).settings.num_workers == 8


def test_the_highest_rate_does_not_win_by_its_noise() -> None:
    """Its lower bound, 91 steps/s, lies below that of settings which are steady."""
    lucky = result(16, 106.0, spread=0.16)
    assert lower_bound(lucky) < 92
    assert upper_bound(lucky) > 106
    assert pick_winner([lucky, result(4, 98.0)]).settings.num_workers == 4


def test_what_was_not_measured_cannot_win() -> None:
    failed = BlockResult(0, "candidate", LoaderSettings(1), state="failed", reason="hang")
    assert pick_winner([failed]) is None
    assert pick_winner([]) is None
    assert pick_winner([failed, result(4, 5.0)]).settings.num_workers == 4


def test_the_mean_of_rates_is_that_of_the_interval() -> None:
    a, b = [10.0, 14.0, 9.0], [20.0, 22.0, 31.0]
    assert geometric_mean(b) / geometric_mean(a) == pytest.approx(paired_gain(a, b).ratio)
