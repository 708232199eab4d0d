"""The hook of ``feedtune run``: it watches the training loader and changes nothing.

The loop gets torch's own iterator; only ``__next__`` of its class is wrapped, and unwrapped again once
enough steps were seen. Nothing here keeps a loader, an iterator or a dataset alive.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .exits import at_exit
from .identity import lasting, shape_of
from .light import LightWatch, Pass, Sight
from .meter import WorkerMeter
from .quiet import of_a_signal
from .runtime import STEPS_TO_TRUST, Runtime, describe, rank_and_world
from .signs import mark, note
from .stepfile import Row, StepFile
from .trace import Trace

_SILENT = 16  # so many steps with another loader, and none with the first: training goes on with that one


class Observer(Runtime):
    """Process-wide state of the hook that only watches.

    Args:
        config: the start-up folder's configuration.
        module: torch's dataloader module.
    """

    watch_class = LightWatch
    trace: Trace

    def __init__(self, config: dict[str, Any], module: Any) -> None:
        super().__init__({**config, "trace": True}, module.DataLoader)
        self._file: StepFile | None = None
        self._about: dict[str, Any] = {}
        self._training: LightWatch | None = None
        self._recorded: list[LightWatch] = []
        self._pause = ("", float("-inf"))  # latest save
        self._other: tuple[LightWatch | None, float] = (None, float("-inf"))  # latest batch without training
        self._iterator_class = module._BaseDataLoaderIter
        self._fetch = self._iterator_class.__next__
        self.trace.told = self._stopped
        self._wrap()

    def _wrap(self) -> None:
        fetch = self._fetch

        @functools.wraps(fetch)
        def __next__(iterator: Any) -> Any:
            found = iterator.__dict__.get("_feedtune_pass")
            other = False
            if found is not None and self.armed:
                if found.watch is self._training:
                    self._safely(self.trace.begin, iterator)
                elif found.watch.trained:
                    other = True
                    self.trace.quiet(self.trace.clock.other_asked)
            enter_s = time.monotonic()
            try:
                batch = fetch(iterator)
            finally:
                if other:
                    self.trace.quiet(self.trace.clock.other_returned)
            return_s = time.monotonic()
            if found is not None and self.armed:
                self._safely(self._got, found, enter_s, return_s, batch)
            return batch

        self._iterator_class.__next__ = __next__

    def loader_made(self) -> None:
        """First loader of the process: workers that start from now on are measured."""
        if self._hooked:
            return
        super().loader_made()
        self._safely(self.trace.install_meters)

    def iterate(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        """What ``iter(loader)`` gives to the loop: what it always gives."""
        begun = time.monotonic()
        with self.trace.workers_of(loader) as meter:
            iterator = iterate(loader)
        made_s = time.monotonic() - begun
        if isinstance(iterator, self._iterator_class):
            self._safely(self._iterated, loader, iterator, made_s, meter)
        return iterator

    def _safely(self, call: Callable[..., None], *values: Any) -> None:
        """Whatever is wrong with watching, the training goes on; what was wrong is told at the end."""
        try:
            call(*values)
        except Exception as error:
            if of_a_signal(error):
                raise
            self._stopped(error)

    def _stopped(self, error: Exception) -> None:
        self._detach()
        note(self.config["folder"], "stopped", f"{type(error).__name__}: {error}")

    def _iterated(self, loader: Any, iterator: Any, made_s: float, meter: WorkerMeter | None) -> None:
        mark(self.config["folder"], "iterated")
        self._part(loader)
        watch = self._watch(loader)
        assert isinstance(watch, LightWatch)
        if not watch.about:
            watch.about = describe(Sight(loader, watch), self)  # type: ignore[arg-type]  # its two faces
        # A loop often holds nothing but the iterator.
        alive = [ref for ref in watch.loaders if ref() not in (None, iterator)]
        watch.loaders = [*alive, weakref.ref(iterator)]
        before = iterator.__dict__.get("_feedtune_pass")
        if before is not None:  # workers that persist count in their first meter
            meter = before.meter
        watch.count_in(meter)
        iterator.__dict__["_feedtune_pass"] = Pass(watch, made_s, meter)

    def _part(self, loader: Any) -> None:
        """No dataset is held, so another one can lie where a known one was; its loader is another, too."""
        key = (*shape_of(loader), id(loader.dataset))
        watch = self._watches.get(key)
        if watch is not None and not watch.reads_like(loader.dataset):
            del self._watches[key]
            self._watches["parted", watch.number] = watch

    def pause(self, tag: str) -> None:
        """``torch.save`` is called."""
        self._pause = (tag, time.monotonic())

    def _got(self, found: Pass, enter_s: float, return_s: float, batch: Any) -> None:
        """The loop has got a batch."""
        watch = found.watch
        first = found.delivered == 0
        trained = watch.trained
        found.entered(self.optimizer_steps)
        found.returned(self.optimizer_steps, return_s - enter_s)
        if first:
            watch.iterations += 1
            watch.first_s += found.made_s + return_s - enter_s
        row = (enter_s, return_s, self._tag(watch, first), found.made_s if first else None)
        watch.last_s = return_s
        if watch is self._training:
            self._record(row, batch, found.meter)
            return
        watch.early.append(row)
        if not watch.trained:
            self._other = (watch, return_s)
        if self._becomes_training(watch, watch.trained > trained):
            self._record_early(watch)

    def _tag(self, watch: LightWatch, first: bool) -> str | None:
        """Why the time since this loader's last batch was no training."""
        other, other_s = self._other
        if other is watch:
            other_s = float("-inf")
        tag, pause_s = self._pause
        if watch.last_s > float("-inf") and max(other_s, pause_s) > watch.last_s:
            between = [name for name, at in (("eval", other_s), (tag, pause_s)) if at > watch.last_s]
            return "_".join(between)
        return "epoch" if first and watch.batches > 1 else None

    def _becomes_training(self, watch: LightWatch, trained: bool) -> bool:
        """Whether this is the loader to record from now on."""
        before = self._training
        if before is None:
            return self.wants(watch)  # of several the first that is known to train: the same on all ranks
        steps = before.batches
        watch.alone = watch.alone + trained if watch.seen_at == steps else int(trained)
        watch.seen_at = steps
        gone = not before.has_other_than(None)
        return watch.trained >= STEPS_TO_TRUST and (gone or watch.alone >= _SILENT)

    def _all(self) -> list[LightWatch]:
        found = {id(watch): watch for watch in self._watches.values()}
        return [watch for watch in found.values() if isinstance(watch, LightWatch)]

    def _record_early(self, watch: LightWatch) -> None:
        """Take over a loader with the steps that are known of it already."""
        before, self._training = self._training, watch
        self._recorded.append(watch)
        file = self._file or self._claim()
        self.trace.finish()  # what is pending of the loader before comes first
        rows = [row for row in watch.early if before is None or row[0] > before.last_s]
        watch.early.clear()
        # Before the first optimizer step a batch of another that trains, too, looks like an evaluation.
        several = any(other.trained for other in self._all() if other is not watch)
        for enter_s, return_s, tag, made_s in rows:
            if several and tag in ("eval", "eval_save"):
                tag = "save" if tag == "eval_save" else None
            moved, before = before is not None, None
            file.add((enter_s, return_s, tag or ("restart" if moved else None), made_s))
            self._stop_at_limit(file)
            if not self.armed:
                return

    def _claim(self) -> StepFile:
        """This process is a rank."""
        assert self._training is not None
        rank, world = rank_and_world()
        self._file = file = StepFile(self.config["records"], rank)
        import torch

        self._about = {
            "rank": rank,
            "world": world,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # torch's own gap
            "own_thread": self.trace.clock.thread in (None, threading.get_ident()),
            "missed": self._training.batches - len(self._training.early),
            "loader": {**lasting(self._training.about), "trained": self.optimizer_steps > 0},
        }
        self.trace.limit = self.config.get("steps")
        self.trace.claim(file)
        file.describe({**self._about, **self.trace.about()})
        self._leave_no_variables()
        at_exit(self._at_exit)
        return file

    def _record(self, row: Row, batch: Any, meter: WorkerMeter | None) -> None:
        if self._file is None or not self.armed:
            return
        self.trace.returned(row, batch, meter)
        self._stop_at_limit(self._file)

    def _stop_at_limit(self, file: StepFile) -> None:
        limit = self.config.get("steps")
        if limit is not None and file.steps >= limit and self.armed:
            self.trace.clock.drop()  # the running step is one too many
            self._finish(file.flush)
            self._detach()

    def _at_exit(self) -> None:
        if self._file is not None:
            self._finish(self._file.finish)

    def _finish(self, write: Callable[[], None]) -> None:
        """Write what is left, and what other loaders there were."""
        file = self._file
        if file is None:
            return
        others = [watch.summary() for watch in self._all() if watch not in self._recorded]
        self._safely(self.trace.finish)
        self._safely(write)
        # The first step can come late, where gradients of many batches are added up.
        self._about["loader"]["trained"] = self.optimizer_steps > 0
        about = {**self._about, **self.trace.about(), "dropped": file.dropped, "others": others}
        self._safely(file.describe, about)

    def _detach(self) -> None:
        """Watch no longer: the class is as torch made it, and nothing more is recorded."""
        self.armed = False
        self._iterator_class.__next__ = self._fetch
        self.trace.remove()

    def _forked(self) -> None:
        """A child of a rank is a worker or a helper; any other may become a rank itself."""
        for watch in self._all():
            watch.early.clear()
        if self._file is not None:
            self._file.drop()
            self._file = None
            self._detach()
