"""What a block will take, from what earlier ones took."""

from __future__ import annotations

from statistics import fmean, linear_regression

from feedtune.analysis.pacing import batches_of_swap
from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings


class Costs:
    """Remembers the blocks of a tuning; predicts swaps, steps and whole blocks."""

    def __init__(self) -> None:
        self._seconds: dict[LoaderSettings, float] = {}  # of the latest block, its swap included
        self._rates: dict[LoaderSettings, float] = {}
        self._worker_s: float | None = None  # longest time of a batch in a worker
        self._processes: dict[int, float] = {}  # workers -> what a swap took beside its batches

    def learn(self, result: BlockResult, seconds: float) -> None:
        """Take in a block that was run, and its time from end to end."""
        self._seconds[result.settings] = seconds
        if result.rate:
            self._rates[result.settings] = result.rate
        self._worker_s = max(filter(None, (self._worker_s, result.worker_s)), default=None)
        batch_s, workers = self._batch_s(), result.settings.num_workers
        if batch_s is not None and result.swap_s is not None:
            self._processes[workers] = max(0.0, result.swap_s - batch_s * batches_of_swap(workers))

    def of(self, settings: LoaderSettings) -> float:
        """Seconds of a block: as it took before; else the longest so far, with its own swap."""
        if settings in self._seconds:
            return self._seconds[settings]
        return max(self._seconds.values(), default=0.0) + (self.swap_s(settings) or 0.0)

    def swap_s(self, settings: LoaderSettings) -> float | None:
        """Seconds that changing to the settings and away from them will take; ``None``: not known yet."""
        batch_s, workers = self._batch_s(), settings.num_workers
        if batch_s is None:
            return None
        return batch_s * batches_of_swap(workers) + self._processes_s(workers)

    def step_s(self) -> float:
        """The longest step to expect: one worker alone, or the slowest block; 0 before anything is known."""
        slowest = min(self._rates.values(), default=None)
        return max(self._worker_s or 0.0, 1 / slowest if slowest else 0.0)

    def _processes_s(self, workers: int) -> float:
        """Starting and ending so many workers: as it took before, else in proportion."""
        if workers in self._processes:
            return self._processes[workers]
        known = {count: seconds for count, seconds in self._processes.items() if count}
        if not workers or not known:
            return 0.0
        if len(known) == 1:
            return workers * fmean(seconds / count for count, seconds in known.items())
        slope, base = linear_regression(list(known), list(known.values()))
        return max(0.0, base + slope * workers)

    def _batch_s(self) -> float | None:
        """Time of one batch in a worker; where none was measured, of a step without workers."""
        alone = [1 / rate for settings, rate in self._rates.items() if not settings.num_workers]
        return self._worker_s or max(alone, default=None)
