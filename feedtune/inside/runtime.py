"""What one process knows of its loaders: which of them trains, and when this process becomes a rank."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from . import snapshot
from .client import Client
from .identity import Watch, batch_size_of, shape_of
from .machine import Machine
from .probe import can_be_imported, start_method
from .signs import BATCHES_WITHOUT_OPTIMIZER, mark, note
from .site import identity_of
from .stack_signal import arm
from .trace import Trace
from .view import View
from .watched import Watched

# The loader that trains is the one between whose batches optimizer steps fall; one such step could be
# a leftover of a loop before, two in a row are not.
STEPS_TO_TRUST = 2


class Runtime:
    """Process-wide state of the hook.

    Args:
        config: the start-up folder's configuration.
        loader_class: torch's DataLoader, with its own ``__iter__`` already taken by the caller.
    """

    watch_class = Watch

    def __init__(self, config: dict[str, Any], loader_class: Any) -> None:
        self.config = config
        self.loader_class = loader_class
        self.armed = True
        self.optimizer_steps = 0
        self.machine: Machine | None = None
        self._watches: dict[tuple[Any, ...], Watch] = {}
        self._inherited: Machine | None = None  # in a forked child: its rank's, kept as long as the child
        self._hooked = False
        self.trace: Trace | None = Trace() if config.get("trace") else None
        self.open_files: Counter[str] = Counter()
        mark(config["folder"], "torch")
        os.register_at_fork(after_in_child=self._forked)

    def active(self) -> bool:
        """Whether loaders of this process concern us: not inside a DataLoader worker, not after a fork."""
        if not self.armed:
            return False
        from torch.utils.data import get_worker_info

        return get_worker_info() is None

    def _forked(self) -> None:
        """A child of a rank is a worker or a helper: it drops our connection and stays untouched."""
        if self.machine is not None:
            self.machine.forked()
            # Freed here, the training iterator would tell the rank's living workers to end.
            self._inherited = self.machine
            self.machine = None
            self.armed = False
            if self.trace is not None:
                self.trace.remove()

    def loader_made(self) -> None:
        """First loader of the process: torch is complete now, its global hooks can be set."""
        if self._hooked:
            return
        self._hooked = True
        mark(self.config["folder"], "loader")
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(*_: Any) -> None:
            if not self.optimizer_steps:
                mark(self.config["folder"], "stepped")
            self.optimizer_steps += 1

        register_optimizer_step_post_hook(stepped)
        save = torch.save

        @functools.wraps(save)
        def tagged_save(*args: Any, **kwargs: Any) -> Any:
            self.pause("save")
            return save(*args, **kwargs)

        torch.save = tagged_save
        if self.trace is not None:
            self.trace.install()

    def pause(self, tag: str) -> None:
        """What the process does now is no training step."""
        if self.machine is not None:
            self.machine.pause(tag)

    def iterate(self, loader: Any, iterate: Callable[[Any], Any]) -> Iterator[Any]:
        """What ``iter(loader)`` gives to the loop."""
        watch = self._watch(loader)
        if self.machine is not None and self.machine.watch is watch:
            return self.machine.new_epoch(loader)
        return Watched(self, watch, loader, iterate)

    def _watch(self, loader: Any) -> Watch:
        """The identity of a loader: where it was made, its dataset, its sampler's type, its batch size."""
        dataset = loader.dataset
        shape = shape_of(loader)
        key = (*shape, id(dataset))
        if not self._watches:
            self.open_files = snapshot.open_data_files()
        watch = self._watches.get(key) or self._successor(shape, loader)
        if watch is None:
            watch = self.watch_class(key, dataset, len(set(map(id, self._watches.values()))))
            watch.base_files = self.open_files
            note(self.config["folder"], "loaders", watch.place)
        self._watches[key] = watch
        if all(ref() is not loader for ref in watch.loaders):
            watch.loaders = [ref for ref in watch.loaders if ref() is not None] + [weakref.ref(loader)]
        return watch

    def _successor(self, shape: tuple[Any, ...], loader: Any) -> Watch | None:
        """A function that makes dataset and loader anew each epoch is one identity, once the old is gone."""
        for watch in self._watches.values():
            same = watch.key[:-1] == shape and watch.reads_like(loader.dataset)
            if same and not watch.has_other_than(loader):
                watch.adopt(loader.dataset)
                return watch
        return None

    def wants(self, watch: Watch) -> bool:
        """Whether the loader is known to train by now."""
        if watch.passed or not self.armed or not self._chosen(watch):
            return False
        if self.machine is None and watch.is_one(self.config.get("known")):
            return True  # an earlier start has seen it train; this one need not fetch under its own settings
        if self.machine is not None:  # training goes on with another loader once the first one is gone
            return watch.trained >= STEPS_TO_TRUST and not self.machine.watch.has_other_than(None)
        if watch.trained >= STEPS_TO_TRUST:
            return True
        return (
            self.optimizer_steps == 0
            and watch.batches >= BATCHES_WITHOUT_OPTIMIZER
            and watch.batches == max(other.batches for other in self._watches.values())
        )

    def _chosen(self, watch: Watch) -> bool:
        """Whether the user leaves the choice to us, or has named this loader."""
        place = self.config.get("chosen")
        return not place or f"{os.sep}{watch.place}".endswith(f"{os.sep}{place}")

    def take_over(self, watched: Watched) -> View | None:
        """Become a rank with this loader, if the driver agrees: the view that goes on where it stood."""
        if self.machine is not None:
            self.machine.adopt(watched.watch, watched.loader, watched.stop())
            return self.machine.new_epoch(watched.loader, already=watched.delivered)
        rank, world = rank_and_world()
        client = Client(self.config["host"], self.config["port"], self.config["token"])
        rivals = {w.number: w for w in self._watches.values() if w.trained and self._chosen(w)}
        answer = client.ask(
            {
                "type": "hello",
                "rank": rank,
                "world": world,
                "pid": os.getpid(),
                "start": self.config["start"],
                "loader": describe(watched, self),
                "rivals": [[n, w.wait_s] for n, w in sorted(rivals.items())],
            }
        )
        if not answer.get("ok") or answer.get("loader", watched.watch.number) != watched.watch.number:
            watched.watch.passed = True
            client.close()
            return None
        self._leave_no_variables()
        arm(self.config["records"])
        feed = watched.stop()
        if self.trace is not None:
            self.trace.claim()
        self.machine = Machine(client, self.config, rank, watched.watch, self.loader_class, feed, self.trace)
        return self.machine.new_epoch(watched.loader, already=watched.delivered)

    def _leave_no_variables(self) -> None:
        """What this rank starts from now on (helpers, spawned workers) knows nothing of us."""
        os.environ.pop("FEEDTUNE_RUN_ID", None)
        if os.environ.get("FEEDTUNE_GUARD"):  # redirected by Python code: in what this rank starts, too
            os.environ["FEEDTUNE_GUARD_ONLY"] = "1"
            return
        folder = self.config["folder"]
        rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != folder]
        if any(rest):
            os.environ["PYTHONPATH"] = os.pathsep.join(rest)
        else:
            os.environ.pop("PYTHONPATH", None)


def rank_and_world() -> tuple[int, int]:
    """``(rank, world size)``; the environment can lack both (Lightning's rank 0)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def describe(watched: Watched, runtime: Runtime) -> dict[str, Any]:
    """What the driver needs to know of the loader as the user wrote it."""
    import resource

    import torch

    loader = watched.loader
    feed = watched.feed()
    context = loader.multiprocessing_context
    return {
        "number": watched.watch.number,
        "num_workers": int(loader.num_workers),
        "prefetch_factor": None if loader.prefetch_factor is None else int(loader.prefetch_factor),
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "batch_size": batch_size_of(loader),
        "iterable": feed is None,
        "epoch_steps": feed.epoch_length if feed is not None else None,
        "dataset": type(loader.dataset).__name__,
        "in_order": bool(getattr(loader, "in_order", True)),
        "multiprocessing_context": None if context is None else context.get_start_method(),
        "start_method": start_method(),
        "spawns": can_be_imported(),
        "site": watched.watch.place,
        "identity": identity_of(loader),
        "optimizer_steps": runtime.optimizer_steps,
        "trained": watched.watch.trained > 0,
        "open_files": sorted(runtime.open_files),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # torch's own gap
        "torch": str(torch.__version__),
    }
