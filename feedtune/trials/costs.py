"""What a block will take, from what earlier ones took."""

from __future__ import annotations

from feedtune.analysis.pacing import predict_swap
from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings


class Costs:
    """Remembers the blocks of a tuning; predicts swaps, steps and whole blocks."""

    def __init__(self) -> None:
        self._seconds: dict[LoaderSettings, float] = {}  # of the latest block, its swap included
        self._rates: dict[LoaderSettings, float] = {}
        self._worker_s: float | None = None  # longest time of a batch in a worker
        self._fork_s: float | None = None

    def learn(self, result: BlockResult, seconds: float, fork_s: float | None) -> None:
        """Take in a block that was run, its time from end to end, and the time of one worker's start."""
        self._seconds[result.settings] = seconds
        if result.rate:
            self._rates[result.settings] = result.rate
        self._worker_s = max(filter(None, (self._worker_s, result.worker_s)), default=None)
        self._fork_s = fork_s or self._fork_s

    def of(self, settings: LoaderSettings) -> float:
        """Seconds of a block: as it took before; else the longest so far, with its own swap."""
        if settings in self._seconds:
            return self._seconds[settings]
        return max(self._seconds.values(), default=0.0) + (self.swap_s(settings) or 0.0)

    def swap_s(self, settings: LoaderSettings) -> float | None:
        """Seconds that changing to the settings and away from them will take; ``None``: not known yet."""
        return predict_swap(settings.num_workers, self._batch_s(), self._fork_s)

    def step_s(self) -> float:
        """The longest step to expect: one worker alone, or the slowest block; 0 before anything is known."""
        slowest = min(self._rates.values(), default=None)
        return max(self._worker_s or 0.0, 1 / slowest if slowest else 0.0)

    def _batch_s(self) -> float | None:
        """Time of one batch in a worker; where none was measured, of a step without workers."""
        alone = [1 / rate for settings, rate in self._rates.items() if not settings.num_workers]
        return self._worker_s or max(alone, default=None)
