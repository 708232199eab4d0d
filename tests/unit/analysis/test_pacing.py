"""How long a block goes on."""

from __future__ import annotations

import random

import pytest

from feedtune.analysis.blocks import measure_block
from feedtune.analysis.pacing import MARK_EVERY_S, next_chunk, warmup_steps
from feedtune.records import BlockPlan
from feedtune.settings import LoaderSettings


def plan(workers: int = 4, **changes) -> BlockPlan:
    values = {
        "warmup": warmup_steps(workers, 2),
        "cycle": max(1, workers),
        "target_s": 1.2,
        "max_s": 9.6,
    }
    return BlockPlan(0, "candidate", LoaderSettings(workers), **{**values, **changes})


@pytest.mark.parametrize(
    ("workers", "prefetch", "steps"), [(8, 4, 40), (2, 2, 6), (1, 2, 3), (1, 1, 2), (0, None, 2)]
)
def test_the_warm_up_is_one_turnover_and_a_cycle(workers, prefetch, steps) -> None:
    assert warmup_steps(workers, prefetch) == steps


def test_a_block_goes_on_until_its_target() -> None:
    # 12 warm-up steps and 12 clean ones of 0.01 s: 1.08 s are left.
    assert next_chunk(plan(), 24, (), 0.01, 0.3) == 108
    assert next_chunk(plan(), 128, (), 0.01, 1.4) > 0
    assert next_chunk(plan(), 132, (), 0.01, 1.4) == 0


def test_marks_are_at_most_so_far_apart() -> None:
    assert next_chunk(plan(target_s=100.0, max_s=999.0), 24, (), 0.01, 0.3) == MARK_EVERY_S / 0.01


def test_the_end_comes_at_max_s_whatever_is_missing() -> None:
    assert next_chunk(plan(), 24, (23,), None, 9.6) == 0
    assert next_chunk(plan(), 24, (), 0.01, 9.7) == 0
    assert next_chunk(plan(), 24, (), 0.01, 9.5) > 0


def test_a_slow_block_stops_early_but_not_before_its_cycles() -> None:
    slow = plan(target_s=60.0, max_s=600.0, stop_below=50.0)
    assert next_chunk(slow, 24, (), 0.1, 2.0) == 0
    assert next_chunk(slow, 24, (), 0.01, 2.0) > 0
    assert next_chunk(slow, 20, (), 0.1, 2.0) > 0  # two cycles of four after the warm-up
    assert next_chunk(slow, 24, (16,), 0.1, 2.0) > 0


def simulate(plan: BlockPlan, rate: float, every: int, pause_s: float) -> tuple[int, set[int], float]:
    """A rank that trains at a rate and pauses every so many steps: steps, pauses and seconds at the end."""
    step, now, active, active_steps = 0, 0.0, 0.0, 0
    pauses: set[int] = set()
    stop = plan.warmup + plan.min_cycles * plan.cycle
    for _ in range(5_000):
        while step < stop:
            step += 1
            now += 1 / rate
            paused = every and step % every == 0
            if paused:
                now += pause_s
                pauses.add(step)
            elif step > plan.warmup:
                active += 1 / rate
                active_steps += 1
        go = next_chunk(plan, step, pauses, active / active_steps if active_steps else None, now)
        assert go >= 0
        assert go % plan.cycle == 0
        if not go:
            return step, pauses, now
        stop += go
    raise AssertionError("never ends")


@pytest.mark.parametrize("rate", [0.1, 1.0, 7.0, 100.0, 1e4])
@pytest.mark.parametrize("workers", [0, 1, 3, 8, 32])
def test_every_block_ends(rate, workers) -> None:
    for every in (0, 1, 2, 3, 9, 17, 50) if rate < 1000 else (0, 50):
        for pause_s in (0.0, 0.5):
            this = plan(workers)
            step, _, now = simulate(this, rate, every, pause_s)
            least = this.warmup + this.min_cycles * this.cycle
            # Not one chunk beyond the later of its least steps and its longest time.
            chunk = max(MARK_EVERY_S + this.cycle / rate, (this.warmup + 2 * this.cycle) / rate)
            pauses_s = pause_s * (step // every if every else 0)
            assert step >= least
            assert now <= max(this.max_s, least / rate) + chunk + pauses_s


def test_a_block_without_pauses_reaches_its_target_and_its_measure() -> None:
    source = random.Random(3)
    for _ in range(100):
        this = plan(source.choice([0, 1, 2, 4, 8, 16]))
        rate = 10 ** source.uniform(0, 4)
        step, _, _ = simulate(this, rate, 0, 0.0)
        clean = step - this.warmup
        assert clean % this.cycle == 0
        assert clean >= this.min_cycles * this.cycle
        assert clean / rate >= this.target_s - 1e-6 or step / rate >= this.max_s
        assert (
            clean / rate <= max(this.target_s + this.cycle / rate, this.min_cycles * this.cycle / rate) + 1e-6
        )


@pytest.mark.parametrize("every", [0, 30, 50, 7])
def test_what_pacing_calls_enough_can_be_measured(every) -> None:
    from test_blocks import rank

    for workers in (0, 1, 2, 4, 8):
        this = plan(workers)
        step, pauses, _ = simulate(this, 200.0, every, 0.01)
        durations = [1 / 200 + (0.01 if s + 1 in pauses else 0.0) for s in range(step)]
        tags = {s: "eval" for s in pauses if s < step}
        result = measure_block(this, {0: rank(durations, tags=tags)})
        assert result.rate == pytest.approx(200.0), (workers, result)
