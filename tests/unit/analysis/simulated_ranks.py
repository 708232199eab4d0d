"""Step records of ranks that wait for each other, from a small simulation on one common clock.

Each rank asks for a batch, waits for it, copies it, may wait for rank 0's buffers, computes, and waits in its
backward for all ranks. Records are on clocks of their own, which start anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from feedtune.analysis.steps import Figures, StepSeen, choose_steps, measure_steps

Amount = float | Callable[[int, int], float]  # seconds, or a function of (rank, step)


def on(rank: int, seconds: float, usual: float = 0.0, every: int = 1) -> Callable[[int, int], float]:
    """``seconds`` on one rank, in every so many steps, and else as usual."""
    return lambda r, step: seconds if r == rank and step % every == 0 else usual


@dataclass
class Job:
    """A training to simulate; times in seconds.

    Attributes:
        wait: for data that would be there at once else; with ``made`` it comes on top.
        made: what a rank's loader needs for a batch; it works ahead by ``queue`` batches.
        buffers: how long rank 0's broadcast takes; ``None``: the model has none.
        call: how long a collective takes that the script calls after the optimizer; ``None``: it calls none.
        skew: how much later than the first a rank leaves where all wait for all.
        accumulate: steps of which only the last one synchronizes.
        gc: collection of garbage before the forward pass; ``late_gc`` after the optimizer.
        other: wait for another loader before the forward pass; ``late_other`` after the optimizer.
        noise: relative standard deviation of each stretch of work.
    """

    ranks: int = 2
    steps: int = 150
    wait: Amount = 0.0
    made: Amount | None = None
    queue: int = 4
    copy: Amount = 0.0
    forward: Amount = 0.008
    backward: Amount = 0.010
    optimizer: Amount = 0.001
    after: Amount = 0.0
    comm: Amount = 0.001
    buffers: float | None = None
    call: float | None = None
    accumulate: int = 1
    elements: Callable[[int, int], int] | None = None
    gc: Amount = 0.0
    late_gc: Amount = 0.0
    other: Amount = 0.0
    late_other: Amount = 0.0
    skew: Amount = 0.0
    cuda: bool = False
    hidden: float = 0.0
    noise: float = 0.0
    seed: int = 1
    without: tuple[str, ...] = ()
    _random: random.Random = field(init=False, repr=False)

    def run(self) -> dict[int, list[StepSeen]]:
        """The records of all ranks."""
        self._random = random.Random(self.seed)
        now = dict.fromkeys(range(self.ranks), 0.0)
        ready = dict.fromkeys(range(self.ranks), 0.0)
        asked: dict[int, list[float]] = {rank: [] for rank in now}
        rows: dict[int, list[tuple[float, float, dict[str, Any]]]] = {rank: [] for rank in now}
        for step in range(self.steps):
            begin = dict(now)
            parts: dict[int, dict[str, Any]] = {rank: {"y": []} for rank in now}
            for rank in now:
                now[rank] += self._draw(self.wait, rank, step)
                if self.made is not None:
                    asked[rank].append(begin[rank])
                    free = asked[rank][step - self.queue] if step >= self.queue else 0.0
                    ready[rank] = max(ready[rank], free) + self._draw(self.made, rank, step)
                    now[rank] = max(now[rank], ready[rank])
                parts[rank]["s"] = now[rank] - begin[rank]
                copy = self._draw(self.copy, rank, step)
                if copy:
                    parts[rank]["h"] = copy
                now[rank] += copy
            self._step(step, begin, now, parts)
            for rank in now:
                rows[rank].append((begin[rank], now[rank], parts[rank]))
        return {rank: [self._record(rank, i, *row) for i, row in enumerate(rows[rank])] for rank in rows}

    def _step(self, step: int, begin: dict, now: dict, parts: dict) -> None:
        if self.buffers is not None and step % self.accumulate == 0:
            root = now[0]
            for rank, arrive in now.items():
                now[rank] = max(arrive, root) + self.buffers
                parts[rank]["y"].append(["buffers", arrive - begin[rank], now[rank] - begin[rank]])
        syncs = self.ranks > 1 and step % self.accumulate == self.accumulate - 1
        for rank in now:
            self._spend("c", self.gc, rank, step, begin, now, parts)
            self._spend("d", self.other, rank, step, begin, now, parts)
            now[rank] += self._draw(self.forward, rank, step)
            now[rank] += self._draw(self.backward, rank, step)
            if self.elements is not None:
                parts[rank]["n"] = self.elements(rank, step)
        if syncs:
            self._meet(step, "gradients", self._draw(self.comm, 0, step), begin, now, parts)
        for rank in now:
            parts[rank]["b"] = now[rank] - begin[rank]
            if step % self.accumulate == self.accumulate - 1:
                now[rank] += self._draw(self.optimizer, rank, step)
                parts[rank]["o"] = now[rank] - begin[rank]
            now[rank] += self._draw(self.after, rank, step)
            self._spend("c", self.late_gc, rank, step, begin, now, parts)
            self._spend("d", self.late_other, rank, step, begin, now, parts)
        if self.call is not None:
            self._meet(step, "call", self.call, begin, now, parts)

    def _spend(
        self, key: str, amount: Amount, rank: int, step: int, begin: dict, now: dict, parts: dict
    ) -> None:
        seconds = self._amount(amount, rank, step)
        if seconds:
            parts[rank].setdefault(key, []).extend([now[rank] - begin[rank], seconds])
            now[rank] += seconds

    def _meet(self, step: int, kind: str, seconds: float, begin: dict, now: dict, parts: dict) -> None:
        """All wait for all."""
        leave = max(now.values()) + seconds
        for rank, arrive in now.items():
            now[rank] = leave + self._amount(self.skew, rank, step)
            parts[rank]["y"].append([kind, arrive - begin[rank], now[rank] - begin[rank]])

    def _record(self, rank: int, step: int, begin: float, end: float, parts: dict) -> StepSeen:
        """On the rank's own clock; under CUDA the host is ahead of its GPU."""
        enter_s = 1000.0 * (rank + 1) + begin
        wait_s = parts.pop("s")
        if self.cuda:
            parts.update(s=wait_s, t=end - begin)
            wait_s += self.hidden
        kept = {key: value for key, value in parts.items() if key not in self.without and value != []}
        return StepSeen(step, enter_s, enter_s + wait_s, None, 0.0 if step == 0 else None, kept)

    def _amount(self, amount: Amount, rank: int, step: int) -> float:
        return amount(rank, step) if callable(amount) else amount

    def _draw(self, amount: Amount, rank: int, step: int) -> float:
        """With noise that now and then holds a rank up, as on a machine with more to do than cores."""
        seconds = self._amount(amount, rank, step)
        if self.noise and seconds:
            seconds *= max(0.2, self._random.gauss(1.0, self.noise))
            if self._random.random() < self.noise / 20:
                seconds += self._random.expovariate(1 / 0.004)
        return seconds


def measured(ranks: dict, workers: int, prefetch: int | None, only: int | None = None, **more) -> Figures:
    """Figures of the job, or of one of its ranks."""
    chosen = choose_steps(ranks, workers, prefetch)
    return measure_steps(chosen, ranks if only is None else {only: ranks[only]}, **more)
