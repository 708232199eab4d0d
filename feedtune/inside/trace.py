"""The steps of one training rank as they are written down: clock, taps on torch, meters in the workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Optional

from .copies import CopyRate
from .ddp import BUCKETS
from .meter import RunMeters, WorkerMeter, module_of_workers
from .moments import CudaMoments
from .pace import Pace
from .probe import forks, ready
from .quiet import Quiet
from .replay import measure
from .stepclock import MOST_SYNCS, StepClock
from .stepfile import StepFile
from .taps import Taps

_MEASURED_EACH = 64  # batches that are all measured; after them one in so many is, unless they differ
_UNEVEN = 1.05  # largest over smallest batch
_WORKERS_EVERY_S = _TAKEN_EVERY_S = 1.0
_FOREIGN = 0.1  # share of steps
_SHOWN = 16  # batches after which an optimizer has stepped, and copies to the GPU were seen


class Trace:
    """Follows the training of this process, from the first loader on; nothing is kept until it is a rank.

    Attributes:
        clock: the steps.
        quiet: all that taps, hooks and meters call goes through it; once it fails, everything comes off.
        told: called with what has failed.
        limit: steps to write.
    """

    def __init__(self) -> None:
        self.clock = StepClock()
        self.quiet = BUCKETS.quiet = Quiet()
        self.quiet.failed = self._failed
        self.told: Optional[Callable[[Exception], None]] = None
        self._taps = Taps(self.clock, self.quiet)
        self._meters: Optional[RunMeters] = None
        self._file: Optional[StepFile] = None
        self._sizes: list[int] = []  # smallest and largest batch
        self._batches = 0
        self._rate: Optional[CopyRate] = None
        self._pace = Pace()
        self._workers_s = self._taken_s = 0.0
        self.limit: Optional[int] = None
        self._meter: Optional[WorkerMeter] = None  # of the running iterator
        self._error: Optional[Exception] = None

    def _failed(self, error: Exception) -> None:
        self._error = error
        self.remove()
        if self.told is not None:
            self.told(error)

    def install(self) -> None:
        """Tap torch, which is complete by now."""
        self.quiet(self._install)

    def _install(self) -> None:
        self._taps.install()
        with contextlib.suppress(ImportError):
            from torch.utils.data._utils import pin_memory

            self._taps.install_pin(pin_memory)

    def install_meters(self) -> None:
        """Put meters into workers that start from now on."""
        self._meters = RunMeters(module_of_workers())

    def remove(self) -> None:
        """Take everything off again."""
        BUCKETS.clock = None
        self.clock.step = None
        self._taps.remove()
        if self._meters is not None:
            self._meters.remove()

    def workers_of(self, loader: Any) -> Any:
        """A context in which ``iter(loader)`` starts workers with a meter; gives the meter, or ``None``."""
        if self._meters is None:
            return contextlib.nullcontext()
        return self._meters.around(self.quiet(_meter_for, loader))

    def claim(self, file: Optional[StepFile] = None) -> None:
        """This process is a rank: its steps are taken down from now on, and go to a file, if one is given."""
        import torch

        self._file = file
        self.clock.drop()
        self.quiet.cost_s = 0.0
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own gap
            self.clock.moments = CudaMoments()
            self._taps.install_copies()
        BUCKETS.clock = self.clock

    def begin(self, iterator: Any) -> None:
        """The loop asks the training iterator for a batch."""
        begun = time.monotonic()
        clock, file = self.clock, self._file
        full = file is None or self._pace.full(file.steps + clock.known, begun, self.quiet.cost_s)
        clock.begin(ready(iterator) if full else None, full)
        self.quiet.cost_s += time.monotonic() - begun

    def returned(self, row: tuple[Any, ...], batch: Any, meter: Optional[WorkerMeter]) -> None:
        """The loop has got it; steps that are known by now are written."""
        clock, file = self.clock, self._file
        clock.returned(row, None if clock.rests else self._elements(batch))
        self.count(batch)
        if file is None:
            return
        near = self.limit is not None and file.steps + clock.waiting >= self.limit
        if near or clock.full or row[1] - self._taken_s > _TAKEN_EVERY_S:
            self._taken_s = row[1]
            self._write_steps(file, at_end=False)
        before, self._meter = self._meter, meter
        if meter is not before:
            self._write_workers(row[1], before)  # these workers have ended
        if meter is not before or row[1] - self._workers_s > _WORKERS_EVERY_S:
            self._write_workers(row[1], meter)
        self.quiet.cost_s += time.monotonic() - row[1]

    def count(self, batch: Any) -> None:
        """The loop has one batch more; if copies should have been seen by now, and were not, time one."""
        self._batches += 1
        clock = self.clock
        if self._batches == _SHOWN and not clock.copied and clock.moments.trains is not None:
            with contextlib.suppress(Exception):  # a batch of a kind that cannot be looked through
                self._rate = CopyRate(batch, clock.moments.trains)

    def _write_workers(self, now: float, meter: Optional[WorkerMeter]) -> None:
        if meter is not None and self._file is not None:
            self._workers_s = now
            self._file.add_workers(now, 0, [list(totals) for totals in meter.read()])

    def _elements(self, batch: Any) -> Optional[int]:
        """Tensor elements of a batch: of all where batches differ, else of one now and then."""
        sizes = self._sizes
        uneven = bool(sizes) and sizes[1] > _UNEVEN * sizes[0]
        if self._batches >= _MEASURED_EACH and self._batches % _MEASURED_EACH and not uneven:
            return None
        try:
            found = measure(batch)[0]
        except Exception:  # noqa: BLE001  # a batch of a kind that cannot be looked through
            return None
        self._sizes = [min(sizes[0], found), max(sizes[1], found)] if sizes else [found, found]
        return found

    def finish(self) -> None:
        """Write what is left: of steps that a device has not passed, that they were."""
        if self._file is not None:
            self._write_steps(self._file, at_end=True)
            self._write_workers(time.monotonic(), self._meter)
            self._meter = None

    def _write_steps(self, file: StepFile, at_end: bool) -> None:
        for known, parts in self.clock.take(at_end):
            if self.limit is None or file.steps < self.limit:
                file.add((*known, parts))

    def about(self) -> dict[str, Any]:
        """What belongs to the description of the rank."""
        clock = self.clock
        note, why = None, BUCKETS.why
        if BUCKETS.trained and why is None:
            why = self._unseen()
        if self._error is not None:
            note = f"taking steps down has failed: {type(self._error).__name__}: {self._error}"
        elif clock.moments.foreign > _FOREIGN * 2 * self._batches:
            note = "the loop asks for batches from another stream or thread than the one that trains"
        elif self._batches > _SHOWN and clock.moments.device and clock.moments.trains is None:
            note = "no optimizer of torch steps, so which stream of the GPU trains is not known"
        return {
            "ddp": {"models": BUCKETS.trained, "hook": BUCKETS.hook, "why": why},
            "clock": "cuda" if clock.moments.device else "host",
            "clock_note": note,
            "cost_s": round(self.quiet.cost_s, 6),
            "copies": self._copies(),
            "pin_s": [int(self._taps.pinned[0]), round(self._taps.pinned[1], 6)],
        }

    def _unseen(self) -> Optional[str]:
        """Why DDP's waits are seen, and others of the script's are not."""
        if self._taps.untimed > _FOREIGN * self._batches:
            return (
                "the script starts collectives of its own and waits for them later, or exchanges with single "
                "ranks, which is not timed"
            )
        if self.clock.crowded > _FOREIGN * self._batches:
            return f"ranks wait for each other at more than {MOST_SYNCS} points of a step"
        return None

    def _copies(self) -> Optional[dict[str, Any]]:
        """How long copies of a batch take: ``None`` where each is seen, or none is needed."""
        rate = self._rate
        if rate is None or self.clock.copied:
            return None
        return {"bytes": rate.bytes, "pinned": rate.pinned, "seconds": rate.seconds()}


def _meter_for(loader: Any) -> Optional[WorkerMeter]:
    return WorkerMeter(loader.num_workers) if loader.num_workers and forks(loader) else None
