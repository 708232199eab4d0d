"""What a block counts as its own time."""

from __future__ import annotations

import pytest

from feedtune.inside.block import Block

PLAN = {"k": 0, "warmup": 2, "cycle": 1, "min_cycles": 3}


def run(block: Block, steps: list[tuple[float, str | None]]) -> None:
    """Enter steps at these times, each with its tag; every batch is there after a tenth of a second."""
    for number, (now, tag) in enumerate(steps):
        if number:
            block.enter(now, tag)
        block.records.append((block.step, now, now + 0.1, tag, 4, 0.0))
        block.step += 1


def test_steps_after_the_warm_up_are_active_time() -> None:
    block = Block(PLAN, 0)
    run(block, [(float(second), None) for second in range(7)])
    assert (block.active_steps, block.active_s) == (4, pytest.approx(4.0))
    assert block.paused_s == 0.0


def test_a_pause_is_counted_apart_with_the_step_that_it_spoils() -> None:
    block = Block(PLAN, 0)
    times = [0.0, 1.0, 2.0, 3.0, 15.0, 16.0, 17.0]
    run(block, [(now, "eval" if now == 15.0 else None) for now in times])
    assert block.paused_s == pytest.approx(15.0 - 3.1)
    assert (block.active_steps, block.active_s) == (3, pytest.approx(3.0))


def test_a_pause_in_the_warm_up_is_counted_too() -> None:
    block = Block(PLAN, 0)
    run(block, [(0.0, None), (9.0, "save"), (10.0, None)])
    assert block.paused_s == pytest.approx(8.9)
    assert block.active_steps == 0


def test_a_block_runs_its_warm_up_and_its_least_cycles_before_it_asks() -> None:
    assert Block({**PLAN, "warmup": 12, "cycle": 4}, 0).stop_at == 24
