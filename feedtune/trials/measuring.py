"""The blocks of one tuning: planned, run, kept; baseline and ceiling before all others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from feedtune.analysis.blocks import with_edges
from feedtune.analysis.pacing import warmup_steps
from feedtune.analysis.policy import POLICY
from feedtune.machine import Machine
from feedtune.records import BlockKind, BlockPlan, BlockResult
from feedtune.rundir import RunDir
from feedtune.settings import LoaderSettings
from feedtune.trials.costs import Costs
from feedtune.trials.lines import block_line
from feedtune.trials.options import TuneOptions
from feedtune.trials.session import Session
from feedtune.trials.verdict import Answer
from shard_tools.errors import BadInput, CommandFailed

_CACHED_BATCHES = 10
_CACHE_SHARE = 0.05  # of free memory, over all ranks
_BASELINE_TRIES = 3


class Trials:
    """Runs blocks in a session and keeps what they measured.

    Args:
        options: what the user asks for.
        run: the run folder.
        session: the training under trial.
        machine: facts of this machine.
        tell: receives lines for a person.
    """

    def __init__(
        self,
        options: TuneOptions,
        run: RunDir,
        session: Session,
        machine: Machine,
        tell: Callable[[str], None],
    ) -> None:
        self.options = options
        self.run_dir = run
        self.session = session
        self.machine = machine
        self.tell = tell
        self.begun = time.monotonic()
        self.blocks: list[BlockResult] = []
        self.answer = Answer()
        self.costs = Costs()

    def plan(self, kind: BlockKind, settings: LoaderSettings, **changes: Any) -> BlockPlan:
        """A block's plan, with the warm-up and cycle that its settings need."""
        plan = BlockPlan(
            k=0,
            kind=kind,
            settings=settings,
            warmup=warmup_steps(settings.num_workers, settings.prefetch_factor),
            cycle=max(1, settings.num_workers),
            target_s=self.options.block_s,
            max_s=8 * self.options.block_s,
            step_s=self.costs.step_s(),
        )
        return replace(plan, **changes)

    def run(self, plan: BlockPlan) -> BlockResult:
        """Run a block, keep its result, and say a line."""
        begun = time.monotonic()
        predicted = self.costs.swap_s(plan.settings) if plan.kind != "ceiling" else None
        result = replace(self.session.run(plan), predicted_swap_s=predicted)
        result = self._with_starvation(result)
        loader = self.answer.hello["loader"]
        if plan.kind != "ceiling":
            result = with_edges(result, loader["epoch_steps"], loader["persistent_workers"])
            result = replace(result, rereads=bool(loader["iterable"] and self.blocks))
            result = self._without_repeats(result)
            if result.measured:
                self.costs.learn(result, time.monotonic() - begun)
        self.keep(result)
        return result

    def _without_repeats(self, result: BlockResult) -> BlockResult:
        """Iterable data that is not split: more workers repeat it, and their rate is no gain."""
        first, again = self.session.repeated or (0, 0)
        if not first or again < POLICY.repeated * first:
            return result
        self.answer.repeated = (first, again, result.settings.num_workers)
        own = self.answer.own
        if own is None or result.settings.num_workers <= own.num_workers or not result.measured:
            return result
        detail = f"{again} of the first {first} samples came from more than one worker"
        return replace(result, state="excluded", reason="duplicates", detail=detail)

    def keep(self, result: BlockResult) -> None:
        """Keep a result, run or not, in memory and in the run folder."""
        self.blocks.append(result)
        self.run_dir.append_json("blocks.jsonl", result.as_dict())
        self.tell(f"{time.monotonic() - self.begun:5.0f} s  {block_line(result)}")

    def baseline(self, own: LoaderSettings, steps: int = 0) -> BlockResult:
        """Measure the user's own settings, and fill the cache for the ceiling.

        Args:
            own: the user's settings.
            steps: measured steps wanted at least.

        Raises:
            BadInput: the training is too short.
            CommandFailed: the baseline failed three times; with the script's own error.
        """
        cache_bytes = int(_CACHE_SHARE * (self.machine.ram_available_bytes or 0) / max(1, self.world()))
        plan = self.plan("baseline", own, cache=_CACHED_BATCHES, cache_bytes=cache_bytes)
        # Ten batches have to pass before there is something to replay.
        plan = replace(plan, min_cycles=max(plan.min_cycles, -(-max(_CACHED_BATCHES, steps) // plan.cycle)))
        for _ in range(_BASELINE_TRIES):
            result = self.run(plan)
            if result.measured:
                return result
        if result.reason in ("script_ended", "too_few_steps"):
            raise BadInput(
                "the training ends before its baseline could be measured", "let it train for more steps"
            )
        raise CommandFailed(
            f"the baseline failed {_BASELINE_TRIES} times ({result.reason}): {result.detail}\n{result.stack}",
            f"the command's whole output is in {self.run_dir.log}",
        )

    def ceilings(self, cuda: bool, baseline: BlockResult) -> None:
        """Replay cached batches: pageable always, pinned where there is a GPU to copy to."""
        kinds = (False, True) if cuda else (False,)
        self.answer.ceilings = {pinned: self._ceiling(pinned, baseline) for pinned in kinds}
        best, own = self.answer.ceiling, baseline.rate or 0.0
        if best is not None and best < (1 - POLICY.unstable) * own:
            # Free data is never slower; something else has slowed the replay down.
            self.answer.ceilings = dict.fromkeys(kinds)
            self.answer.odd_ceiling = (best, own)
        self.blocks = [self._with_starvation(block) for block in self.blocks]

    def ceiling_plan(self, pinned: bool) -> BlockPlan:
        """A block that replays the baseline's batches."""
        return self.plan("ceiling", LoaderSettings(0, None, pinned), warmup=_CACHED_BATCHES, cycle=1)

    def _ceiling(self, pinned: bool, baseline: BlockResult) -> float | None:
        """The rate of one kind of replay, on the baseline's batches; ``None`` where it cannot be measured."""
        plan = self.ceiling_plan(pinned)
        result = self.run(plan)
        if not result.measured and result.reason != "too_few_steps":  # without it no starvation is known
            result = self.run(plan)
        if not result.measured or not result.rate:
            return None
        shift = result.elements / baseline.elements if result.elements and baseline.elements else 1.0
        if abs(shift - 1) <= POLICY.uneven:
            return result.rate
        self.answer.uneven = True
        return result.rate * shift  # uneven batches: rates an element, not a step

    def candidates(self) -> list[BlockResult]:
        """Blocks of single settings that have a rate."""
        return [b for b in self.blocks if b.kind in ("baseline", "candidate") and b.measured]

    def world(self) -> int:
        """Ranks of the training."""
        return int(self.answer.hello["world"]) if self.answer.hello else 1

    def starvation(self, block: BlockResult) -> float | None:
        """``1 - rate / ceiling``; ``None`` where either is unknown."""
        return self.answer.starvation(block.rate)

    def _with_starvation(self, block: BlockResult) -> BlockResult:
        return block if block.kind == "ceiling" else replace(block, starvation=self.starvation(block))
