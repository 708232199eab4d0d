"""From the ranks' step records to what a block measured.

Producer-bound batches come in bursts of ``num_workers``, so only whole worker cycles are measured, from
one cycle's edge to another; every excluded stretch (evaluation, save, epoch seam) is cut out and followed
by a new warm-up, since the queue has filled meanwhile and would flatter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pstdev

from feedtune.analysis.policy import POLICY
from feedtune.records import BlockPlan, BlockResult, StepRecord

_PARTS = 5  # sub-stretches whose rates give the spread inside a block
MIN_PERIODS = 3  # whole pauses-to-pauses, where the loop pauses too often for a warm-up


@dataclass(frozen=True)
class RankBlock:
    """One rank's part of a block.

    Attributes:
        records: one record a step, in order.
        start_s: the plan had arrived (the rank's clock).
        end_s: the loop had asked for the batch after the last one.
        first_step: the rank's own count of steps when the block began.
        worker_s: mean time of a batch in one of its workers; ``None`` where it was not measured.
        close_s: time that ending its workers took.
        end_tag: what the loop did between the last step and the end, if it was no step: the last is spoilt.
    """

    records: Sequence[StepRecord]
    start_s: float
    end_s: float
    first_step: int
    worker_s: float | None = None
    close_s: float = 0.0
    end_tag: str | None = None

    @property
    def pauses(self) -> list[int]:
        """Steps before which the loop did something else; the number of steps for one at the very end."""
        found = [record.step for record in self.records if record.tag and record.step > 0]
        return [*found, len(self.records)] if self.end_tag else found

    @property
    def swap_s(self) -> float:
        """What changing to the block and away from it took: worker starts, first batch, worker ends."""
        first = self.records[0].return_s - self.start_s if self.records else 0.0
        return first + self.close_s

    def edge(self, step: int) -> float:
        """When step ``step`` began; for the step after the last, the end of the block."""
        return self.records[step].enter_s if step < len(self.records) else self.end_s

    def seconds(self, begin: int, end: int) -> float:
        """Time of steps ``begin`` to ``end``, less what cloning cached batches took."""
        return self.edge(end) - self.edge(begin) - sum(r.clone_s for r in self.records[begin:end])


def measure_block(plan: BlockPlan, ranks: Mapping[int, RankBlock]) -> BlockResult:
    """What the block measured, over all its ranks."""
    result = BlockResult(plan.k, plan.kind, plan.settings)
    counts = {len(rank.records) for rank in ranks.values()}
    starts = {str(rank): block.first_step for rank, block in sorted(ranks.items())}
    swap_s = max(block.swap_s for block in ranks.values())
    result = replace(result, first_steps=starts, swap_s=swap_s)
    if len(counts) != 1 or len(set(starts.values())) != 1:
        steps = {rank: len(block.records) for rank, block in sorted(ranks.items())}
        detail = f"steps in this block by rank: {steps}; steps before it: {starts}"
        return replace(result, state="failed", reason="ranks_diverged", detail=detail)
    total = counts.pop()
    pauses = sorted({step for block in ranks.values() for step in block.pauses})
    tags = Counter(r.tag for r in ranks[min(ranks)].records if r.tag)
    result = replace(result, tags=dict(tags))
    stretches = clean_stretches(total, pauses, plan.warmup, plan.cycle)
    measured = sum(end - begin for begin, end in stretches)
    if measured < plan.min_cycles * plan.cycle:
        periods = whole_periods(pauses)
        if len(periods) >= MIN_PERIODS:
            note = "the loop pauses more often than the queue turns over: measured from pause to pause"
            return _rates(replace(result, detail=note), ranks, periods, plan)
        # Fewer cycles tell more of the burst they were cut from than of the rate.
        detail = f"{total} steps, of which {measured} in whole cycles of {plan.cycle} after the warm-up"
        return replace(result, state="failed", reason="too_few_steps", detail=detail)
    return _rates(result, ranks, stretches, plan)


def with_edges(result: BlockResult, epoch_steps: int | None, persistent: bool) -> BlockResult:
    """The block with its rate over an epoch: a loader that starts its workers anew pays for them each time.

    Args:
        result: a measured block.
        epoch_steps: batches of one epoch; ``None`` where the loader cannot tell.
        persistent: whether the script keeps its workers over epochs.
    """
    if not result.rate or result.edge_s is None or persistent or not epoch_steps:
        return result
    if result.settings.num_workers == 0:
        return result
    seconds = epoch_steps / result.rate + result.edge_s
    return replace(result, rate_with_edges=epoch_steps / seconds)


def clean_stretches(total: int, pauses: Sequence[int], warmup: int, cycle: int) -> list[tuple[int, int]]:
    """Stretches of whole cycles between pauses, each after a warm-up: ``[(begin, end), ...]``.

    Args:
        total: steps of the block.
        pauses: steps before which the loop did something else; the step before each is spoilt.
        warmup: steps left out at the start and after every pause.
        cycle: measured steps are a multiple of this.
    """
    found = []
    begins = [0, *pauses]
    ends = [*(p - 1 for p in pauses), total]
    for start, end in zip(begins, ends, strict=True):
        begin = start + warmup
        steps = (end - begin) // cycle * cycle
        if steps > 0:
            found.append((begin, begin + steps))
    return found


def whole_periods(pauses: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches from one pause to the step that the next one spoils; the first period is warm-up."""
    return [(begin, end - 1) for begin, end in pairwise(pauses) if end - 1 > begin]


def _rates(
    result: BlockResult, ranks: Mapping[int, RankBlock], stretches: Sequence[tuple[int, int]], plan: BlockPlan
) -> BlockResult:
    steps = sum(end - begin for begin, end in stretches)
    # The ranks leave each step together; where they don't, the slowest is the job's pace.
    seconds = max(sum(block.seconds(b, e) for b, e in stretches) for block in ranks.values())
    if seconds <= 0:
        return replace(result, state="failed", reason="too_few_steps", detail="no time passed")
    delivered = steps / seconds
    worker_s = max((b.worker_s for b in ranks.values() if b.worker_s), default=None)
    # What the workers cannot have made was left over from before the stretch.
    bound = plan.settings.num_workers / worker_s if worker_s else math.inf
    rate = min(delivered, bound)
    spread = _spread(ranks, stretches, plan.cycle)
    waits = [
        sum(r.return_s - r.enter_s for b, e in stretches for r in block.records[b:e]) / seconds
        for block in ranks.values()
    ]
    begin = stretches[0][0]
    edge = max(block.edge(begin) - block.start_s for block in ranks.values()) - begin / rate
    result = replace(
        result,
        steps=steps,
        seconds=seconds,
        rate=rate,
        spread=spread,
        wait_share=max(waits),
        edge_s=max(edge, 0.0),
        rate_with_edges=rate,
        worker_s=worker_s,
        elements=fmean(r.elements for block in ranks.values() for r in block.records),
    )
    if delivered > (1 + POLICY.above_bound) * bound:
        detail = f"{delivered:.2f} steps/s were delivered, and the workers make {bound:.2f} at most"
        return replace(result, state="unstable", reason="above_bound", detail=detail)
    if result.state == "ok" and spread is not None and spread > POLICY.unstable:
        result = replace(result, state="unstable", reason="spread")
    return result


def _spread(ranks: Mapping[int, RankBlock], stretches: Sequence[tuple[int, int]], cycle: int) -> float | None:
    """Coefficient of variation of the rate over about five sub-stretches of whole cycles."""
    cycles = sum((end - begin) // cycle for begin, end in stretches)
    part = max(1, math.ceil(cycles / _PARTS)) * cycle
    rates = []
    for begin, end in stretches:
        for b in range(begin, end - part + 1, part):
            seconds = max(block.seconds(b, b + part) for block in ranks.values())
            if seconds > 0:
                rates.append(part / seconds)
    return pstdev(rates) / fmean(rates) if len(rates) >= 2 else None
