"""How long a block goes on: decided at marks, for all ranks at once."""

from __future__ import annotations

import math

from feedtune.records import BlockPlan

MARK_EVERY_S = 5.0  # a block that turns out slow is looked at again after so long


def warmup_steps(num_workers: int, prefetch_factor: int | None) -> int:
    """Steps until the pipeline is steady: one full turnover of what is in flight, a whole number of cycles."""
    return max(2, num_workers * (prefetch_factor or 0))


def next_chunk(plan: BlockPlan, steps: int, seconds: float, elapsed_s: float) -> int:
    """Steps that the block goes on from a mark, a multiple of its cycle; 0 ends it.

    Args:
        plan: the block's plan.
        steps: steps measured so far, in whole cycles.
        seconds: time they took.
        elapsed_s: time since the block began, warm-up and excluded stretches included.
    """
    enough = steps >= plan.min_cycles * plan.cycle
    if elapsed_s >= plan.max_s or (enough and seconds >= plan.target_s):
        return 0
    if steps == 0 or seconds <= 0:  # an excluded stretch fell into the first chunk
        return math.ceil((plan.warmup + plan.cycle) / plan.cycle) * plan.cycle
    rate = steps / seconds
    if enough and rate < plan.stop_below:
        return 0
    wanted = rate * min(max(plan.target_s - seconds, 0.0), MARK_EVERY_S)
    return max(1, math.ceil(wanted / plan.cycle)) * plan.cycle
