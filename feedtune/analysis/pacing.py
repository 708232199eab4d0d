"""How long a block goes on: decided at marks, for all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Collection

from feedtune.analysis.blocks import MIN_PERIODS, clean_stretches, whole_periods
from feedtune.records import BlockPlan

MARK_EVERY_S = 5.0  # a block that turns out slow is looked at again after so long


def warmup_steps(num_workers: int, prefetch_factor: int | None) -> int:
    """Steps until the pipeline is steady: a full turnover of what is in flight, and one cycle more.

    While the last worker starts, the first ones fill the queue; a fast loop empties it in one turnover
    and in what the workers add meanwhile.
    """
    return max(2, num_workers * ((prefetch_factor or 0) + 1))


def next_chunk(
    plan: BlockPlan, step: int, pauses: Collection[int], pace_s: float | None, elapsed_s: float
) -> int:
    """Steps that the block goes on from a mark, a multiple of its cycle; 0 ends it.

    Args:
        plan: the block's plan.
        step: steps of the block so far.
        pauses: steps before which some rank did something else than train.
        pace_s: seconds a step, pauses left out; ``None`` while only the warm-up has passed.
        elapsed_s: time since the block's first batch, pauses left out: workers may take long to start.
    """
    clean = sum(end - begin for begin, end in clean_stretches(step, sorted(pauses), plan.warmup, plan.cycle))
    enough = clean >= plan.min_cycles * plan.cycle
    if elapsed_s >= plan.max_s:
        return 0
    if pace_s is None or not enough:
        # Where the loop pauses before the queue has turned over, whole periods have to do.
        periods = whole_periods(sorted(pauses))
        measured = sum(end - begin for begin, end in periods)
        if len(periods) >= MIN_PERIODS and pace_s is not None and measured * pace_s >= plan.target_s:
            return 0
        return math.ceil((plan.warmup + plan.cycle) / plan.cycle) * plan.cycle
    left = plan.target_s - clean * pace_s
    if left <= 0 or 1 / pace_s < plan.stop_below:
        return 0
    return max(1, math.ceil(min(left, MARK_EVERY_S) / pace_s / plan.cycle)) * plan.cycle


def batches_of_swap(num_workers: int) -> float:
    """How many times of one batch in a worker a block's change takes, besides starting and ending workers.

    The first batch comes after one. The end waits for those in progress: workers that are busy all the time
    are, at a random moment, half way through one, and the last to finish is almost a whole batch away.
    """
    return 1 + num_workers / (num_workers + 1) if num_workers else 1.0
