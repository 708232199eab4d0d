"""``feedtune run --ceiling``: the time budget of a training, and what it reaches when data is free."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from feedtune.analysis.steps import StepSeen
from feedtune.inside.identity import lasting
from feedtune.launch.foreground import find_program
from feedtune.records import BlockResult
from feedtune.rundir import redact
from feedtune.trials.live import LiveRun, in_trial
from feedtune.trials.options import TuneOptions
from feedtune.trials.seen import SCHEMA, RankSeen, reading, training

_PAIRS = 3  # of blocks with and without gradient synchronization


def run_with_ceiling(options: TuneOptions, steps: int | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure a training as it is and against free data; the document of ``result.json``.

    Args:
        options: what the user asks for; settings are not searched.
        steps: steps of the training as it is to measure at least; ``None`` leaves it to the block's time.
        tell: receives lines for a person.

    Errors are those of ``in_trial``.
    """
    find_program(options.command, "feedtune run --ceiling -- torchrun --nproc_per_node=2 train.py")

    def make(*words: Any) -> CeilingRun:
        return CeilingRun(steps, *words)

    return in_trial(make, "feedtune run --ceiling", options, tell)


class CeilingRun(LiveRun):
    """The user's own settings, cached batches, and these without gradient synchronization.

    Args:
        wanted: steps of the training as it is.
        words: those of ``LiveRun``.
    """

    traced = True

    def __init__(self, wanted: int | None, *words: Any) -> None:
        super().__init__(*words)
        self._wanted = wanted
        self._seen: dict[int, RankSeen] = {}
        self._synced: dict[bool, list[BlockResult]] = {True: [], False: []}  # by whether gradients are

    def steps(self) -> None:
        """The blocks."""
        hello = self.begin()
        own = self.answer.own
        assert own is not None
        baseline = self.trials.baseline(own, self._wanted or 0)
        self._seen = self._ranks()
        self.trials.ceilings(bool(hello["loader"]["cuda"]), baseline)
        ddp = any(seen.about["ddp"]["models"] for seen in self._seen.values())
        if ddp and self.answer.ceiling is not None:
            self._without_sync()

    def _ranks(self) -> dict[int, RankSeen]:
        """The training as each rank has seen it in the latest block."""
        state = self.session.state()
        with self.server.locked():
            hellos = dict(state.hellos)
        found = {}
        for rank, block in self.session.latest.items():
            hello, end = hellos[rank], self.session.ends[rank]
            about = {
                "world": hello["world"],
                "pid": hello["pid"],
                "host": socket.gethostname(),
                "cuda": hello["loader"]["cuda"],
                "own_thread": True,
                "missed": 0,
                "dropped": 0,
                "loader": {**lasting(hello["loader"]), "trained": hello["loader"]["trained"]},
                **end["trace"],
            }
            records = [StepSeen(r.step, r.enter_s, r.return_s, r.tag, None, r.parts) for r in block.records]
            workers = [[0.0, 0, end["workers"]]] if end["workers"] else []
            found[rank] = RankSeen(about, records, workers)
        return found

    def _without_sync(self) -> None:
        """Blocks of cached batches with and without gradient synchronization, in turns."""
        pinned = max(self.answer.ceilings, key=lambda kind: self.answer.ceilings[kind] or 0.0)
        plan = self.trials.ceiling_plan(pinned)
        self.tell(f"cached batches in {_PAIRS} pairs, each without and then with gradient synchronization:")
        for _ in range(_PAIRS):
            for synced in (False, True):
                self._synced[synced].append(self.trials.run(replace(plan, no_sync=not synced)))

    def document(self) -> dict[str, Any]:
        """The measured training beside its ceiling."""
        trainings = [training(1, self._seen)] if self._seen else []
        return {
            "schema": SCHEMA,
            "machine": self.machine.as_dict(),
            "command": redact(self.options.command),
            "run": str(self.run_dir.path),
            "exit_code": 128 + signal.SIGINT if self.answer.interrupted else 0,
            "seconds": round(self.seconds, 3),
            "steps_asked": self._wanted,
            "trainings": trainings,
            "ceiling": self._ceiling(),
            "readings": None,
            "note": "interrupted: what was measured until then" if self.answer.interrupted else None,
            "reading": reading(trainings, against_free_data=True),
        }

    def _ceiling(self) -> dict[str, Any]:
        """G, AU = X / G and starvation = 1 - AU (METHODS 1); gradient synchronization by difference."""
        baseline = next((b for b in self.trials.blocks if b.kind == "baseline" and b.measured), None)
        rate = None if baseline is None else baseline.rate
        top = self.answer.ceiling
        spreads = [b.spread for b in self.trials.blocks if b.kind == "ceiling" and b.spread is not None]
        return {
            "rate": rate,
            "ceiling": top,
            "pinned": self.answer.ceilings.get(True),
            "pageable": self.answer.ceilings.get(False),
            "spread": max(spreads, default=None),
            "au": None if rate is None or top is None else rate / top,
            "starvation": self.trials.starvation(baseline) if baseline is not None else None,
            "sync": self._sync_cost(),
        }

    def _sync_cost(self) -> dict[str, Any] | None:
        """T(sync) - T(no_sync) of cached batches, in seconds a step; the pairs' mean."""
        pairs = [
            (1 / on.rate, 1 / off.rate)
            for on, off in zip(self._synced[True], self._synced[False], strict=False)
            if on.measured and off.measured and on.rate and off.rate
        ]
        if not pairs:
            return None
        on, off = (fmean(side) for side in zip(*pairs, strict=True))
        return {"pairs": len(pairs), "step_s": on, "no_sync_step_s": off, "exposed_s": on - off}
