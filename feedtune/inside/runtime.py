"""What one process knows of its loaders: which of them trains, and when this process becomes a rank."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from . import snapshot
from .client import Client
from .feed import Feed, RecordedSampler
from .machine import Machine, View
from .signs import mark
from .swap import shut_down

# The loader that trains is the one between whose batches optimizer steps fall; one such step could be
# a leftover of a loop before, two in a row are not.
_STEPS_TO_TRUST = 2
# With no optimizer step after so many batches, the loader with most batches is taken, said openly.
_BATCHES_WITHOUT_OPTIMIZER = 200


class Watch:
    """What is known of one loader identity, over all loader objects that share it."""

    def __init__(self, key: tuple[Any, ...], dataset: Any, number: int) -> None:
        self.key = key
        self.number = number
        self.loaders: list[weakref.ref[Any]] = []
        self.base_files: Counter[str] = Counter()  # open before any fetch
        self.adopt(dataset)
        self.batches = 0
        self.trained = 0  # gaps between its batches in which an optimizer stepped
        self.wait_s = 0.0
        self.passed = False

    def adopt(self, dataset: Any) -> None:
        """Take the dataset in its present state for the blocks to come."""
        self.dataset = dataset
        self.snapshot = snapshot.take(dataset)

    def has_other_than(self, loader: Any) -> bool:
        """Whether another loader of this identity is still alive."""
        return any(found not in (None, loader) for found in (ref() for ref in self.loaders))


class Runtime:
    """Process-wide state of the hook.

    Args:
        config: the start-up folder's configuration.
        loader_class: torch's DataLoader, with its own ``__iter__`` already taken by the caller.
    """

    def __init__(self, config: dict[str, Any], loader_class: Any) -> None:
        self.config = config
        self.loader_class = loader_class
        self.armed = True
        self.optimizer_steps = 0
        self.machine: Machine | None = None
        self._watches: dict[tuple[Any, ...], Watch] = {}
        self._hooked = False
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
            self.machine = None
            self.armed = False

    def loader_made(self) -> None:
        """First loader of the process: torch is complete now, its global hooks can be set."""
        if self._hooked:
            return
        self._hooked = True
        mark(self.config["folder"], "loader")
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(*_: Any) -> None:
            self.optimizer_steps += 1

        register_optimizer_step_post_hook(stepped)
        save = torch.save

        @functools.wraps(save)
        def tagged_save(*args: Any, **kwargs: Any) -> Any:
            if self.machine is not None:
                self.machine.pause("save")
            return save(*args, **kwargs)

        torch.save = tagged_save

    def iterate(self, loader: Any, iterate: Callable[[Any], Any]) -> Iterator[Any]:
        """What ``iter(loader)`` gives to the loop."""
        watch = self._watch(loader)
        if self.machine is not None and self.machine.watch is watch:
            return self.machine.new_epoch(loader)
        return Watched(self, watch, loader, iterate)

    def _watch(self, loader: Any) -> Watch:
        """The identity of a loader: where it was made, its dataset, its sampler's type, its batch size."""
        dataset = loader.dataset
        shape = (
            loader.__dict__.get("_feedtune_site"),
            type(loader.sampler).__name__,
            repr(getattr(loader.batch_sampler, "batch_size", loader.batch_size)),
        )
        key = (*shape, id(dataset))
        if not self._watches:
            self.open_files = snapshot.open_data_files()
        watch = self._watches.get(key) or self._successor(shape, loader)
        if watch is None:
            watch = Watch(key, dataset, len(set(map(id, self._watches.values()))))
            watch.base_files = self.open_files
        self._watches[key] = watch
        if all(ref() is not loader for ref in watch.loaders):
            watch.loaders = [ref for ref in watch.loaders if ref() is not None] + [weakref.ref(loader)]
        return watch

    def _successor(self, shape: tuple[Any, ...], loader: Any) -> Watch | None:
        """A function that makes dataset and loader anew each epoch is one identity, once the old is gone."""
        for watch in self._watches.values():
            same = watch.key[:-1] == shape and _same_kind(watch.dataset, loader.dataset)
            if same and not watch.has_other_than(loader):
                watch.adopt(loader.dataset)
                return watch
        return None

    def wants(self, watch: Watch) -> bool:
        """Whether the loader is known to train by now."""
        if self.machine is not None or watch.passed or not self.armed:
            return False
        if watch.trained >= _STEPS_TO_TRUST:
            return True
        return (
            self.optimizer_steps == 0
            and watch.batches >= _BATCHES_WITHOUT_OPTIMIZER
            and watch.batches == max(other.batches for other in self._watches.values())
        )

    def take_over(self, watched: Watched) -> View | None:
        """Become a rank with this loader, if the driver agrees: the view that goes on where it stood."""
        rank, world = _rank()
        client = Client(self.config["host"], self.config["port"], self.config["token"])
        rivals = {w.number: w for w in self._watches.values() if w.trained}
        answer = client.ask(
            {
                "type": "hello",
                "rank": rank,
                "world": world,
                "pid": os.getpid(),
                "start": self.config["start"],
                "loader": _describe(watched, self),
                "rivals": [[n, w.wait_s] for n, w in sorted(rivals.items())],
            }
        )
        if not answer.get("ok") or answer.get("loader", watched.watch.number) != watched.watch.number:
            watched.watch.passed = True
            client.close()
            return None
        self._leave_no_variables()
        feed = watched.stop()
        self.machine = Machine(client, self.config, rank, watched.watch, self.loader_class, feed)
        return self.machine.new_epoch(watched.loader, already=watched.delivered)

    def _leave_no_variables(self) -> None:
        """What this rank starts from now on (helpers, spawned workers) knows nothing of us."""
        os.environ.pop("FEEDTUNE_RUN_ID", None)
        folder = self.config["folder"]
        rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != folder]
        if any(rest):
            os.environ["PYTHONPATH"] = os.pathsep.join(rest)
        else:
            os.environ.pop("PYTHONPATH", None)


class Watched:
    """An ordinary loader iterator, with each batch counted; the loop cannot tell the difference."""

    def __init__(self, runtime: Runtime, watch: Watch, loader: Any, iterate: Callable[[Any], Any]) -> None:
        self.runtime = runtime
        self.watch = watch
        self.loader = loader
        self.delivered = 0
        self._view: View | None = None
        self._steps_at_last: int | None = None
        self._inner = _iterate_recorded(loader, iterate)
        mark(runtime.config["folder"], "iterated")

    def __iter__(self) -> Watched:
        return self

    def __len__(self) -> int:
        return len(self._view) if self._view is not None else len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if self._view is not None:
            return next(self._view)
        runtime = self.runtime
        if runtime.machine is not None:
            if not self.watch.trained and not self.watch.passed:
                runtime.machine.pause("eval")
            return next(self._inner)
        if self._steps_at_last is not None and runtime.optimizer_steps > self._steps_at_last:
            self.watch.trained += 1
        if runtime.wants(self.watch):
            self._view = runtime.take_over(self)
            if self._view is not None:
                return next(self._view)
        start = time.monotonic()
        batch = next(self._inner)
        if self.delivered:
            self.watch.wait_s += time.monotonic() - start  # the first batch pays for starting workers
        self.delivered += 1
        self.watch.batches += 1
        self._steps_at_last = runtime.optimizer_steps
        feed = self.feed()
        if feed is not None:
            feed.deliver(self._inner)
        return batch

    def feed(self) -> Feed | None:
        """What the iterator has handed out; ``None`` for iterable data."""
        sampler = getattr(self._inner, "_index_sampler", None)
        return sampler.feed if isinstance(sampler, RecordedSampler) else None

    def stop(self) -> Feed | None:
        """End the original iterator; its undelivered batches are in the feed that is returned.

        Returns:
            The feed of a map-style loader, ``None`` for iterable data.
        """
        feed = self.feed()
        shut_down(self._inner)
        self.loader.__dict__["_iterator"] = None
        self._inner = None
        if feed is None:
            return None
        feed.give_back()
        feed.endless = True
        return feed


def _iterate_recorded(loader: Any, iterate: Callable[[Any], Any]) -> Any:
    """The loader's own iterator, made over an index sampler that remembers what it hands out."""
    from torch.utils.data import IterableDataset

    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    if isinstance(loader.dataset, IterableDataset):
        return iterate(loader)
    original = loader.__dict__[name]
    loader.__dict__[name] = RecordedSampler(original)
    try:
        return iterate(loader)
    finally:
        loader.__dict__[name] = original


def _same_kind(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(len(one) == len(other))
    except TypeError:
        return False  # no length: two iterable datasets stay two


def _rank() -> tuple[int, int]:
    """``(rank, world size)``; the environment can lack both (Lightning's rank 0)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    try:
        return None if size is None else int(size)
    except (TypeError, ValueError):
        return None  # a batch sampler of the script's own with batches of its own sizes


def _describe(watched: Watched, runtime: Runtime) -> dict[str, Any]:
    """What the driver needs to know of the loader as the user wrote it."""
    import resource

    import torch

    loader = watched.loader
    feed = watched.feed()
    site = loader.__dict__.get("_feedtune_site") or ()
    return {
        "number": watched.watch.number,
        "num_workers": int(loader.num_workers),
        "prefetch_factor": None if loader.prefetch_factor is None else int(loader.prefetch_factor),
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "batch_size": _batch_size(loader),
        "iterable": feed is None,
        "epoch_steps": feed.epoch_length if feed is not None else None,
        "dataset": type(loader.dataset).__name__,
        "site": f"{site[0][0]}:{site[0][1]}" if site else "",
        "optimizer_steps": runtime.optimizer_steps,
        "trained": watched.watch.trained > 0,
        "open_files": sorted(runtime.open_files),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # torch's own gap
        "torch": str(torch.__version__),
    }
