"""What the loader's workers did."""

from __future__ import annotations

import json

import pytest

from feedtune.analysis.steps import StepSeen
from feedtune.analysis.workers import QueueSeen, measure_queue, measure_workers

MIB = 2**20


def totals(
    batches: int, fetch_s: float = 0.02, cpu_s: float = 0.005, rchar: int = MIB, disk: int = 0
) -> list:
    """Of a worker whose batches all take the same."""
    return [
        batches, batches * fetch_s, batches * fetch_s / 4, batches * fetch_s / 10, batches * cpu_s,
        batches * rchar, batches * disk,
    ]  # fmt: skip


def test_a_batchs_time_is_split() -> None:
    found = measure_workers([[1.0, 0, [totals(10), totals(10)]], [2.0, 0, [totals(25), totals(24)]]])
    assert found.all.batches == 49
    assert found.all.fetch_s == pytest.approx(0.02)
    assert found.all.transform_s == pytest.approx(0.005)
    assert found.all.collate_s == pytest.approx(0.002)
    assert found.all.cpu_s == pytest.approx(0.005)
    assert found.all.wait_s == pytest.approx(0.015)
    assert found.supply_s == pytest.approx(0.01)  # two workers
    assert {worker: one.batches for worker, one in found.workers.items()} == {0: 25, 1: 24}
    assert found.slow is None
    assert json.loads(json.dumps(found.as_dict()))["workers"]["1"]["batches"] == 24


def test_totals_begin_anew_with_other_workers() -> None:
    lines = [[t, 0, [totals(n)]] for t, n in enumerate([10, 50, 5, 30, 60])]
    found = measure_workers(lines)
    assert found.all.batches == 110
    assert found.all.fetch_s == pytest.approx(0.02)


def test_lines_of_some_of_the_workers() -> None:
    found = measure_workers([[1.0, 0, [totals(9), totals(9)]], [1.0, 2, [totals(8)]]])
    assert {worker: one.batches for worker, one in found.workers.items()} == {0: 9, 1: 9, 2: 8}


@pytest.mark.parametrize(("slow_s", "named"), [(0.027, True), (0.025, False)])
def test_a_slow_worker_is_named(slow_s: float, named: bool) -> None:
    found = measure_workers([[1.0, 0, [totals(20), totals(20), totals(20, slow_s)]]])
    assert (found.slow == 2) is named
    assert found.supply_s == pytest.approx(slow_s / 3)
    if named:
        assert found.slow_ratio == pytest.approx(1.35)


def test_one_worker_or_one_batch_is_not_slow() -> None:
    assert measure_workers([[1.0, 0, [totals(20)]]]).slow is None
    assert measure_workers([[1.0, 0, [totals(20), totals(1, 0.5)]]]).slow is None


def test_a_cold_first_pass_shows_in_the_first_half() -> None:
    lines = [[float(n), 0, [totals(n, disk=MIB)]] for n in range(0, 51, 5)]
    warm = [[50.0 + n, 0, [totals(n)]] for n in range(0, 51, 5)]
    found = measure_workers(lines + warm)
    assert found.first_half.cold_share == pytest.approx(1.0)
    assert found.last_half.cold_share == 0.0
    assert found.first_half.asked_bytes == found.last_half.asked_bytes == 50 * MIB


def test_what_was_never_asked_for_has_no_cold_share() -> None:
    found = measure_workers([[1.0, 0, [totals(20, rchar=0, disk=MIB)]]])
    assert {found.first_half.cold_share, found.last_half.cold_share} == {None}


def test_read_ahead_is_no_more_than_all() -> None:
    lines = [[float(n), 0, [totals(n, disk=3 * MIB)]] for n in (0, 10, 20)]
    assert measure_workers(lines).last_half.cold_share == 1.0


@pytest.mark.parametrize("lines", [[], [[1.0, 0, []]], [[1.0, 0, [totals(0)]]]])
def test_no_batches_are_nothing(lines: list) -> None:
    assert measure_workers(lines) is None


def test_more_threads_than_one_leave_no_negative_wait() -> None:
    assert measure_workers([[1.0, 0, [totals(9, cpu_s=0.08)]]]).all.wait_s == 0.0


def test_the_queue_is_that_of_the_steps_that_have_seen_it() -> None:
    ready = [None, 0, 4, 0, 2]
    records = [
        StepSeen(i, i, i + 0.1, None, None, {} if q is None else {"q": q}) for i, q in enumerate(ready)
    ]
    assert measure_queue([StepSeen(0, 0.0, 0.1), *records]) == QueueSeen(4, 1.5, 0.5)
    assert measure_queue(records[:1]) is None
