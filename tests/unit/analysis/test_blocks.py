"""From step records to rates: bursts of workers, pauses, ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from feedtune.analysis.blocks import RankBlock, clean_stretches, measure_block, whole_periods, with_edges
from feedtune.analysis.pacing import next_chunk, warmup_steps
from feedtune.records import BlockPlan, StepRecord
from feedtune.settings import LoaderSettings


def plan(workers: int = 1, **changes) -> BlockPlan:
    settings = LoaderSettings(workers)
    values = {
        "warmup": warmup_steps(settings.num_workers, settings.prefetch_factor),
        "cycle": max(1, workers),
        "target_s": 1.0,
        "max_s": 100.0,
    }
    return BlockPlan(0, "candidate", settings, **{**values, **changes})


def rank(durations, waits=None, tags=None, clones=None, first_step=7, begin=100.0, end_tag=None) -> RankBlock:
    """A rank whose steps took so long, from one ``next()`` to the following one."""
    records, now = [], begin
    for step, seconds in enumerate(durations):
        wait = waits[step] if waits else seconds / 2
        clone = clones[step] if clones else 0.0
        records.append(StepRecord(step, now, now + wait, (tags or {}).get(step), 4, clone))
        now += seconds
    return RankBlock(records, begin, now, first_step, end_tag=end_tag)


def bursts(workers: int, fetch_s: float, steps: int, offset: int, jitter: float, seed: int):
    """Arrivals of lock-step workers: each ``fetch_s`` all of them deliver one batch, and compute takes
    next to nothing. ``offset`` batches of a burst have passed before the block begins.
    """
    source = random.Random(seed)
    times, cycle_end = [], 0.0
    step = -offset
    while len(times) < steps + 1:
        if (step + offset) % workers == 0:
            cycle_end += fetch_s * (1 + source.uniform(-jitter, jitter))
        if step >= 0:
            times.append(cycle_end + (step + offset) % workers * 1e-6)
        step += 1
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 16, 24, 32])
def test_the_rate_of_bursts_is_their_mean_wherever_the_block_begins(workers) -> None:
    source = random.Random(workers)
    for _ in range(40):
        fetch_s = source.uniform(0.01, 2.0)
        cycles = source.randint(3, 9)
        steps = warmup_steps(workers, 2) + cycles * workers + source.randrange(workers)
        block = rank(bursts(workers, fetch_s, steps, source.randrange(workers), 0.0, 0))
        rate = measure_block(plan(workers), {0: block}).rate
        assert rate == pytest.approx(workers / fetch_s, rel=0.01)
        assert rate <= 1.03 * workers / fetch_s


def test_the_rate_of_uneven_bursts_stays_at_their_mean() -> None:
    for seed in range(40):
        source = random.Random(seed)
        workers = source.choice([2, 4, 8, 32])
        steps = warmup_steps(workers, 2) + 40 * workers
        block = rank(bursts(workers, 0.5, steps, source.randrange(workers), 0.2, seed))
        result = measure_block(plan(workers), {0: block})
        # 40 cycles, each +-20 %: four standard errors of the mean are 7 %.
        assert result.rate == pytest.approx(workers / 0.5, rel=0.075)
        assert result.steps == 40 * workers


def test_a_window_of_forty_steps_would_have_lied() -> None:
    """The contrast: 40 steps of bursts of 32 read up to twice the bound, depending on where they begin."""
    durations = bursts(32, 0.128, 400, 0, 0.0, 0)
    naive = [40 / sum(durations[begin : begin + 40]) for begin in range(64, 200)]
    assert max(naive) > 1.2 * 250
    assert min(naive) < 0.7 * 250
    assert measure_block(plan(32), {0: rank(durations)}).rate == pytest.approx(250, rel=0.01)


def test_the_warm_up_is_not_measured() -> None:
    block = rank([5.0] * 4 + [0.1] * 12)
    result = measure_block(plan(2, warmup=4), {0: block})
    assert (result.steps, result.rate) == (12, pytest.approx(10.0))
    assert result.spread == pytest.approx(0.0, abs=1e-9)


def test_pauses_are_cut_out_with_the_step_before_and_a_warm_up_after() -> None:
    # Steps of 0.1 s; validation before step 20; the queue has filled: six steps at double speed.
    durations = [0.1] * 40
    durations[19] = 30.0
    durations[20:26] = [0.05] * 6
    result = measure_block(plan(2), {0: rank(durations, tags={20: "eval"})})
    assert result.rate == pytest.approx(10.0)
    assert result.steps == 12 + 14  # after a warm-up of six each, in cycles of two
    assert result.tags == {"eval": 1}


def test_a_pause_at_the_very_end_spoils_the_last_step() -> None:
    durations = [0.1] * 15 + [30.0]
    blocks = {0: rank(durations, end_tag="eval"), 1: rank(durations)}
    result = measure_block(plan(2), blocks)
    assert result.rate == pytest.approx(10.0)
    assert result.steps == 8  # after a warm-up of six, and without the spoilt one in a cycle of two


def test_a_period_that_ends_with_the_block_counts() -> None:
    """As it did for the rule that has ended the block there."""
    durations = [3.0 if step % 10 == 9 else 0.1 for step in range(40)]
    tags = dict.fromkeys(range(10, 40, 10), "save")
    result = measure_block(plan(8), {0: rank(durations, tags=tags, end_tag="save")})
    assert result.rate == pytest.approx(10.0)
    assert result.steps == 3 * 9
    assert next_chunk(plan(8), 40, [10, 20, 30, 40], 0.1, 4.0) == 0


def test_a_pause_of_one_rank_is_cut_out_of_all() -> None:
    durations = [0.1] * 40
    durations[19] = 30.0
    result = measure_block(plan(2), {0: rank(durations, tags={20: "save"}), 1: rank(durations)})
    assert result.rate == pytest.approx(10.0)


def test_a_tag_on_the_first_step_is_no_pause_inside_the_block() -> None:
    result = measure_block(plan(1), {0: rank([0.1] * 10, tags={0: "eval"})})
    assert result.steps == 7  # all but the warm-up


def test_stretches_are_whole_cycles_between_pauses() -> None:
    assert clean_stretches(30, [], 4, 4) == [(4, 28)]
    assert clean_stretches(30, [15], 4, 4) == [(4, 12), (19, 27)]
    assert clean_stretches(30, [3, 6, 29], 4, 4) == [(10, 26)]
    assert clean_stretches(3, [], 4, 4) == []


def test_any_stretches_are_whole_clean_and_apart() -> None:
    source = random.Random(1)
    for _ in range(500):
        total, cycle, warmup = source.randint(0, 80), source.randint(1, 9), source.randint(0, 12)
        pauses = (
            sorted(source.sample(range(1, total), min(source.randint(0, 6), total - 1))) if total > 1 else []
        )
        last = 0
        for begin, end in clean_stretches(total, pauses, warmup, cycle):
            assert begin >= last + warmup
            assert begin < end <= total
            assert (end - begin) % cycle == 0
            # Neither the spoilt step before a pause nor the warm-up after it is inside.
            assert not any(begin - warmup < pause <= end for pause in pauses)
            last = end


def test_a_loop_that_pauses_too_often_is_measured_from_pause_to_pause() -> None:
    # 8 workers need 24 steps to turn over, the loop saves every ten.
    durations = [3.0 if step % 10 == 9 else 0.1 for step in range(60)]
    tags = dict.fromkeys(range(10, 60, 10), "save")
    result = measure_block(plan(8), {0: rank(durations, tags=tags)})
    assert result.state == "ok"
    assert result.rate == pytest.approx(10.0)
    assert result.steps == 4 * 9
    assert "pause to pause" in result.detail
    assert whole_periods([10, 20, 21, 30]) == [(10, 19), (21, 29)]


def test_too_few_cycles_are_no_result() -> None:
    result = measure_block(plan(4), {0: rank([0.1] * 23)})
    assert (result.state, result.reason, result.rate) == ("failed", "too_few_steps", None)
    assert "23 steps, of which 8 in whole cycles of 4" in result.detail
    assert not result.measured
    assert measure_block(plan(4), {0: rank([])}).reason == "too_few_steps"
    assert measure_block(plan(4), {0: rank([0.1] * 24)}).measured


@pytest.mark.parametrize(("steps", "start"), [(20, 7), (21, 8)])
def test_ranks_that_do_not_change_together_have_diverged(steps, start) -> None:
    ranks = {0: rank([0.1] * 21), 1: rank([0.1] * steps, first_step=start)}
    result = measure_block(plan(2), ranks)
    assert (result.state, result.reason, result.rate) == ("failed", "ranks_diverged", None)
    assert result.first_steps == {"0": 7, "1": start}
    assert str(steps) in result.detail


def test_the_jobs_pace_is_that_of_the_slowest_rank() -> None:
    ranks = {0: rank([0.1] * 20), 1: rank([0.125] * 20), 2: rank([0.1] * 20)}
    result = measure_block(plan(2), ranks)
    assert result.rate == pytest.approx(8.0)
    assert result.first_steps == {"0": 7, "1": 7, "2": 7}


def test_time_spent_cloning_is_not_the_scripts() -> None:
    result = measure_block(plan(1), {0: rank([0.1] * 20, clones=[0.02] * 20)})
    assert result.rate == pytest.approx(1 / 0.08)


def test_waits_and_edge() -> None:
    waits = [2.0, 0.5] + [0.025] * 18
    durations = [2.1, 0.6] + [0.1] * 18
    result = measure_block(plan(1), {0: rank(durations, waits=waits), 1: rank(durations, waits=[0.01] * 20)})
    assert result.wait_share == pytest.approx(0.25)
    # The warm-up's two steps took 2.7 s, and 0.2 s at the steady rate.
    assert result.edge_s == pytest.approx(2.5)
    assert result.elements == 4


def test_t3_a_long_wait_for_the_first_batch_is_never_in_the_mean() -> None:
    """pytorch #6350: with many workers the first batch comes late."""
    usual = rank([0.1] * 60)
    late = rank([17.0] + [0.1] * 59)
    one, other = (measure_block(plan(8), {0: block}) for block in (usual, late))
    assert (other.rate, other.spread, other.steps) == (
        pytest.approx(one.rate),
        pytest.approx(one.spread, abs=1e-9),
        one.steps,
    )
    assert other.rate == pytest.approx(10.0)
    assert other.wait_share == pytest.approx(one.wait_share)
    assert one.edge_s == pytest.approx(0.0, abs=1e-6)
    assert other.edge_s == pytest.approx(16.9)  # told apart


def test_t4_starting_workers_is_counted_as_the_edge_of_an_epoch() -> None:
    """pytorch #15849, lightning #2875: 17 s of every epoch go into starting workers."""
    result = measure_block(plan(8), {0: rank([17.1] + [0.1] * 59)})
    assert result.edge_s == pytest.approx(17.0)
    each_epoch = with_edges(result, 510, persistent=False)
    assert each_epoch.rate == pytest.approx(10.0)
    assert each_epoch.speed == pytest.approx(510 / (51 + 17))  # a quarter of the epoch
    assert with_edges(result, 510, persistent=True).speed == pytest.approx(10.0)


def test_an_epoch_pays_for_its_worker_starts_where_they_are_started_anew() -> None:
    result = measure_block(plan(1), {0: rank([2.1, 0.6] + [0.1] * 18)})
    assert with_edges(result, 100, False).speed == pytest.approx(100 / 12.5)
    assert with_edges(result, 100, True).speed == pytest.approx(10.0)
    assert with_edges(result, None, False).speed == pytest.approx(10.0)
    alone = measure_block(plan(0), {0: rank([2.1, 0.6] + [0.1] * 18)})
    assert with_edges(alone, 100, False).speed == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("worker_s", "rate", "state"),
    [
        (None, 10.0, "ok"),
        (0.19, 10.0, "ok"),
        (0.205, 2 / 0.205, "ok"),
        (0.21, 2 / 0.21, "unstable"),
        (0.4, 5.0, "unstable"),
    ],
)
def test_a_rate_above_what_the_workers_can_make_is_cut_to_that(worker_s, rate, state) -> None:
    """Two workers; ten steps a second were delivered."""
    result = measure_block(plan(2), {0: replace(rank([0.1] * 20), worker_s=worker_s)})
    assert result.rate == pytest.approx(rate)
    assert result.speed == pytest.approx(rate)
    assert result.state == state
    assert result.measured


def test_a_rate_far_above_the_bound_says_what_was_delivered() -> None:
    steady = rank([0.1] * 20)
    slow = measure_block(plan(2), {0: replace(steady, worker_s=0.1), 1: replace(steady, worker_s=0.21)})
    assert (slow.reason, slow.worker_s) == ("above_bound", 0.21)
    assert "10.00 steps/s were delivered" in slow.detail
    assert "9.52 at most" in slow.detail


def test_a_rate_that_wavers_is_called_unstable() -> None:
    durations = [0.1] * 22 + [0.2] * 20
    result = measure_block(plan(1), {0: rank(durations)})
    assert (result.state, result.reason) == ("unstable", "spread")
    assert result.measured
    assert result.spread > 0.1
    steady = measure_block(plan(1), {0: rank([0.1, 0.105] * 21)})
    assert steady.state == "ok"


def test_bursts_are_no_spread() -> None:
    result = measure_block(plan(8), {0: rank(bursts(8, 0.4, 16 + 80, 3, 0.0, 0))})
    assert result.spread == pytest.approx(0.0, abs=1e-3)
    assert result.state == "ok"
