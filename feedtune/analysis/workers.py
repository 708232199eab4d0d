"""What the loader's workers did: where a batch's time goes, what came from the disk, which worker is slow.

A line ``[t_s, first_worker, [[batches, fetch_s, transform_s, collate_s, cpu_s, rchar, read_bytes], ...]]``
has totals since the start of the iterator's workers; ``fetch_s`` is the whole time of the batches in the
worker, with the transform, the collate function and the CPU time (of all its threads) in it. With a new
iterator they start from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from feedtune.analysis.policy import POLICY
from feedtune.analysis.steps import StepSeen

Line = Sequence[Any]
_COLUMNS = 7
_LEAST = 5  # batches of a worker whose mean says something


@dataclass(frozen=True)
class WorkerSplit:
    """A mean batch in workers, in seconds.

    Attributes:
        batches: how many.
        fetch_s: in the worker, all in all.
        transform_s: of it in the dataset's transform.
        collate_s: of it in the collate function.
        cpu_s: CPU time in it; of several threads more than the wall.
        wait_s: wall less CPU time: waiting for storage, the network or a CPU (METHODS section 1).
    """

    batches: int
    fetch_s: float
    transform_s: float
    collate_s: float
    cpu_s: float
    wait_s: float


@dataclass(frozen=True)
class Read:
    """What the workers read.

    Attributes:
        asked_bytes: what they asked the system for (rchar).
        disk_bytes: what came from a disk (read_bytes).
        cold_share: disk over asked, at most 1; ``None`` where nothing was asked for. Files that are mapped
            into memory are not asked for.
    """

    asked_bytes: int
    disk_bytes: int

    @property
    def cold_share(self) -> float | None:
        """Share that was not in the page cache."""
        return min(1.0, self.disk_bytes / self.asked_bytes) if self.asked_bytes > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "cold_share": self.cold_share}


@dataclass(frozen=True)
class WorkersSeen:
    """What a rank's workers did.

    Attributes:
        all: a mean batch of all workers.
        workers: of each worker that made one.
        supply_s: seconds a batch that they need when they are never held up: batches are delivered in order,
            so that the slowest worker's time counts, over their number.
        slow: the worker whose mean batch takes at least 1.3 times the median of the others (METHODS D4).
        slow_ratio: its time over that median.
        first_half: what was read for the first half of the batches.
        last_half: and for the last; colder first and warmer later passes are a cold page cache (METHODS D6).
    """

    all: WorkerSplit
    workers: dict[int, WorkerSplit]
    supply_s: float
    slow: int | None
    slow_ratio: float | None
    first_half: Read
    last_half: Read

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **asdict(self),
            "workers": {str(worker): asdict(split) for worker, split in self.workers.items()},
            "first_half": self.first_half.as_dict(),
            "last_half": self.last_half.as_dict(),
        }


@dataclass(frozen=True)
class QueueSeen:
    """Batches that were ready in the loader's queue when the loop asked for one.

    Attributes:
        steps: how often it was looked at.
        mean: batches.
        empty_share: share of the steps that found none, and waited.
    """

    steps: int
    mean: float
    empty_share: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def measure_queue(records: Sequence[StepSeen]) -> QueueSeen | None:
    """The queue of a rank's steps; ``None`` where it was not seen: no workers, or no steps."""
    ready = [found for one in records if (found := (one.parts or {}).get("q")) is not None]
    if not ready:
        return None
    return QueueSeen(len(ready), fmean(ready), sum(one == 0 for one in ready) / len(ready))


def measure_workers(lines: Sequence[Line]) -> WorkersSeen | None:
    """What a rank's workers did; ``None`` where they made no batch.

    Args:
        lines: of the rank's workers, in order.
    """
    grown = _increments(lines)
    totals: dict[int, list[float]] = {}
    for worker, values in grown:
        totals[worker] = _plus(totals.get(worker, [0.0] * _COLUMNS), values)
    totals = {worker: values for worker, values in sorted(totals.items()) if values[0] > 0}
    if not totals:
        return None
    splits = {worker: _split(values) for worker, values in totals.items()}
    everything = [sum(column) for column in zip(*totals.values(), strict=True)]
    slow, ratio = _slowest(splits)
    first, last = _halves(grown, everything[0])
    supply_s = max(split.fetch_s for split in splits.values()) / len(splits)
    return WorkersSeen(_split(everything), splits, supply_s, slow, ratio, first, last)


def _increments(lines: Sequence[Line]) -> list[tuple[int, list[float]]]:
    """What each worker has done between two lines; where its count falls, other workers have begun."""
    before: dict[int, Sequence[float]] = {}
    found = []
    for _, first_worker, rows in lines:
        for worker, row in enumerate(rows, first_worker):
            known = before.get(worker)
            restarted = known is None or row[0] < known[0] or row[1] < known[1]
            base = [0.0] * _COLUMNS if restarted or known is None else known
            found.append((worker, [max(0.0, now - then) for now, then in zip(row, base, strict=True)]))
            before[worker] = row
    return found


def _plus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _split(values: Sequence[float]) -> WorkerSplit:
    batches = int(values[0])
    fetch, transform, collate, cpu = (value / batches for value in values[1:5])
    return WorkerSplit(batches, fetch, transform, collate, cpu, max(0.0, fetch - cpu))


def _slowest(splits: dict[int, WorkerSplit]) -> tuple[int | None, float | None]:
    """A worker that takes clearly longer than the others."""
    known = {worker: one.fetch_s for worker, one in splits.items() if one.batches >= _LEAST}
    if len(known) < 2:
        return None, None
    slowest = max(known, key=known.__getitem__)
    usual = median(seconds for worker, seconds in known.items() if worker != slowest)
    if usual <= 0 or known[slowest] < POLICY.slow_worker * usual:
        return None, None
    return slowest, known[slowest] / usual


def _halves(grown: Sequence[tuple[int, list[float]]], batches: float) -> tuple[Read, Read]:
    """What was read until half of the batches were made, and after; a line's worth is not cut."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    made = 0.0
    for _, values in grown:
        half = sums[0 if made + values[0] / 2 <= batches / 2 else 1]
        half[0] += values[5]
        half[1] += values[6]
        made += values[0]
    first, last = (Read(int(asked), int(disk)) for asked, disk in sums)
    return first, last
