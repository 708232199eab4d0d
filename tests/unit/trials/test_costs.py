"""Predictions from what earlier blocks took."""

from __future__ import annotations

import math
import random

import pytest

from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings
from feedtune.trials.costs import Costs

BATCH = 0.1
EACH, BASE = 0.01, 0.02  # of a worker's start and end, and of a swap


def swap_s(workers: int) -> float:
    batches = 1 + workers / (workers + 1)
    return BASE + EACH * workers + BATCH * batches


def block(workers: int, seconds: float | None = None) -> BlockResult:
    took = swap_s(workers) if seconds is None else seconds
    return BlockResult(
        0, "candidate", LoaderSettings(workers), rate=max(1, workers) / BATCH,
        worker_s=BATCH if workers else None, swap_s=took,
    )  # fmt: skip


def test_nothing_is_predicted_before_anything_is_known() -> None:
    costs = Costs()
    assert costs.swap_s(LoaderSettings(4)) is None
    assert costs.step_s() == 0
    assert costs.of(LoaderSettings(4)) == 0


def test_a_swap_is_batches_and_processes_in_proportion() -> None:
    costs = Costs()
    costs.learn(block(2), 1.0)
    costs.learn(block(8), 1.0)
    assert costs.swap_s(LoaderSettings(32)) == pytest.approx(swap_s(32))
    assert costs.swap_s(LoaderSettings(8, 4)) == pytest.approx(swap_s(8))
    assert costs.swap_s(LoaderSettings(0)) == pytest.approx(BATCH)


def test_one_worker_count_alone_predicts_by_the_worker() -> None:
    costs = Costs()
    costs.learn(block(2), 1.0)
    each = (swap_s(2) - BATCH * 5 / 3) / 2
    assert costs.swap_s(LoaderSettings(4)) == pytest.approx(BATCH * 9 / 5 + 4 * each)


def test_swaps_faster_than_their_batches_predict_no_negative_time() -> None:
    costs = Costs()
    costs.learn(block(2, 0.0), 1.0)
    costs.learn(block(8, 0.0), 1.0)
    assert costs.swap_s(LoaderSettings(1)) >= BATCH


def test_without_workers_a_step_is_the_time_of_a_batch() -> None:
    costs = Costs()
    costs.learn(block(0, BATCH + 0.3), 1.0)
    assert costs.swap_s(LoaderSettings(0)) == pytest.approx(BATCH + 0.3)
    assert costs.step_s() == pytest.approx(BATCH)


def test_a_block_takes_what_it_took_or_the_longest_with_its_own_swap() -> None:
    costs = Costs()
    costs.learn(block(2), 1.5)
    costs.learn(block(8), 1.2)
    assert costs.of(LoaderSettings(8)) == 1.2
    assert costs.of(LoaderSettings(32)) == pytest.approx(1.5 + swap_s(32))


def test_the_longest_step_is_a_worker_alone_or_the_slowest_block() -> None:
    costs = Costs()
    costs.learn(block(8), 1.0)
    assert costs.step_s() == pytest.approx(BATCH)
    costs.learn(BlockResult(1, "candidate", LoaderSettings(1), rate=2.0), 1.0)
    assert costs.step_s() == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_was_measured_predictions_are_times(seed) -> None:
    source = random.Random(seed)

    def some(low: float, high: float) -> float | None:
        return source.choice([None, source.uniform(low, high)])

    costs = Costs()
    for _ in range(source.randrange(8)):
        settings = LoaderSettings(source.choice([0, 1, 2, 8, 32]), source.choice([2, 4]))
        rate, worker_s, swap = some(0.01, 1e5), some(0.0, 10.0), some(0.0, 20.0)
        result = BlockResult(0, "candidate", settings, rate=rate, worker_s=worker_s, swap_s=swap)
        costs.learn(result, source.uniform(0.0, 60.0))
        for workers in (0, 1, 3, 64):
            predicted = costs.swap_s(LoaderSettings(workers))
            assert predicted is None or 0 <= predicted < math.inf
            assert 0 <= costs.of(LoaderSettings(workers)) < math.inf
        assert 0 <= costs.step_s() < math.inf
