"""One block as a rank runs it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from .replay import Player
from .swap import Source


class Block:
    """One block of this rank: its plan, where its batches come from, and what was recorded."""

    def __init__(self, plan: dict[str, Any], first_step: int) -> None:
        self.plan = plan
        self.k = plan["k"]
        self.warmup = plan["warmup"]
        self.first_step = first_step
        self.start_s = time.monotonic()
        self.source: Source | None = None
        self.player: Player | None = None
        self.step = 0
        self.tag: str | None = None  # what the loop did before the step that it asks for now
        self.records: list[tuple[int, float, float, str | None, int, float]] = []
        self.parts: dict[int, dict[str, Any] | None] = {}  # of steps, where they are taken down
        self.stop_at = plan["warmup"] + plan["min_cycles"] * plan["cycle"]
        self.marks = 0
        self.active_s = 0.0  # time of the steps after the first warm-up, excluded stretches left out
        self.active_steps = 0
        self.paused_s = 0.0  # excluded stretches
        self.files: Counter[str] | None = None  # open files before a block without workers

    def enter(self, now: float, tag: str | None) -> None:
        """The loop asks for the next batch: count the step behind, unless it was cut out."""
        self.tag = tag
        if tag is not None:
            self.paused_s += now - self.records[-1][2]
        elif self.step > self.warmup:
            self.active_s += now - self.records[-1][1]
            self.active_steps += 1
