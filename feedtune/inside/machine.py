"""The block machine of a rank: behind an ordinary iterator, one setting after the other.

It belongs to the process, not to an iterator: a loop that asks for a new iterator each epoch goes on in
the same block with the same workers. All ranks get block k's plan from the control server before they
start it, and change at the same step, so that collectives stay matched.
"""

from __future__ import annotations

import atexit
import copy
import gc
import json
import multiprocessing.util
import os
import time
import traceback
from collections import Counter
from typing import Any, NoReturn

from . import snapshot
from .client import Client, ControlLost
from .exits import ending_error, exit_code, flush, remember_exit
from .feed import Feed
from .replay import Cache, Player, measure
from .swap import Source

_MEASURED_EACH = 64  # steps of a block whose batches are all measured; after them one in so many is
_ONE_SHOT = "the iterable dataset yields nothing when it is read again; start it for each trial: --isolate"


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
        self.records: list[tuple[int, float, float, str | None, int, float]] = []
        self.stop_at = plan["warmup"] + plan["min_cycles"] * plan["cycle"]
        self.marks = 0
        self.active_s = 0.0  # time of the steps after the first warm-up, excluded stretches left out
        self.active_steps = 0
        self.paused_s = 0.0  # excluded stretches
        self.files: Counter[str] | None = None  # open files before a block without workers

    def enter(self, now: float, tag: str | None) -> None:
        """The loop asks for the next batch: count the step behind, unless it was cut out."""
        if tag is not None:
            self.paused_s += now - self.records[-1][2]
        elif self.step > self.warmup:
            self.active_s += now - self.records[-1][1]
            self.active_steps += 1


class Machine:
    """Runs the blocks of one rank.

    Args:
        client: connection to the control server.
        config: the start-up folder's configuration.
        rank: this process's rank.
        watch: identity of the training loader.
        loader_class: torch's DataLoader.
        feed: its index iterator; ``None`` for iterable data.
    """

    def __init__(
        self,
        client: Client,
        config: dict[str, Any],
        rank: int,
        watch: Any,
        loader_class: Any,
        feed: Feed | None,
    ) -> None:
        import torch

        self.client = client
        self.watch = watch
        self.feed = feed
        self.loader: Any = None
        self.total_steps = watch.batches
        self._torch = torch
        self._cls = loader_class
        self._rank = rank
        self._records = config["records"]
        self._path = os.path.join(self._records, f"steps.rank{rank}.jsonl")
        self._block: Block | None = None
        self._pause: str | None = None
        self._cache: Cache | None = None
        self._next_k: int | None = None
        self._beat_s = time.monotonic()
        self._sizes: tuple[int, int, int] | None = None
        self._empty_restarts = 0
        self._base_files = watch.base_files
        self._shared: list[str] = []
        remember_exit()
        atexit.register(self._script_ended)
        # A process of multiprocessing (mp.spawn) ends without atexit; its own finalizers come first.
        self._finalizer = multiprocessing.util.Finalize(None, self._script_ended, exitpriority=1000)

    def new_epoch(self, loader: Any, already: int = 0) -> View:
        """The loop asks for an iterator: a view on the running block."""
        self.loader = copy.copy(loader)  # the script's own may go: a new one each epoch is common
        length = None
        if self.feed is not None:
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            self.feed.sampler = loader.__dict__[name]
            length = self.feed.epoch_length
        return View(self, length, None if length is None else length - already)

    def adopt(self, watch: Any, loader: Any, feed: Feed | None) -> None:
        """Training goes on with another loader: the running block does, too, after a new warm-up."""
        self.watch, self.feed, self.loader = watch, feed, copy.copy(loader)
        block = self._block
        if block is not None and block.source is not None:
            block.source.close()
            block.source = self._source(block.plan)
        self.pause("restart")

    def _source(self, plan: dict[str, Any]) -> Source:
        dataset = snapshot.fresh(self.watch.dataset, self.watch.snapshot)
        return Source(self._cls, self.loader, plan["settings"], self.feed, dataset, self._records)

    def pause(self, tag: str) -> None:
        """What the process does now is no training step: ``eval``, ``save``, ``epoch`` or ``restart``."""
        if tag != "epoch" or self._pause is None:  # an epoch's seam hides no save before it
            self._pause = tag
        if tag != "eval" or time.monotonic() - self._beat_s > 1.0:
            self._beat(tag)

    def _beat(self, doing: str | None) -> None:
        """A sign of life, with what takes longer than a step."""
        self._beat_s = time.monotonic()
        self.client.send({"type": "beat", "doing": doing, "total": self.total_steps})

    def next_batch(self) -> Any:
        """The next batch of the running block; changes blocks where the plan says so."""
        enter = time.monotonic()
        block = self._block
        tag = None if self._pause is None else self._take_pause(block, enter)
        if block is not None:
            block.enter(enter, tag)
            if block.step == block.warmup:
                self._synchronize()
                if block.source is not None:
                    block.source.measure_from_here()
                enter = time.monotonic()
        if block is None or (block.step >= block.stop_at and not self._go_on(block)):
            block = self._change_block()
            tag = None
            enter = time.monotonic()
        batch, elements, clone_s = self._fetch(block)
        now = time.monotonic()
        block.records.append((block.step, enter, now, tag, elements, clone_s))
        block.step += 1
        self.total_steps += 1
        if now - self._beat_s > 1.0:
            self._beat(None)
        return batch

    def _take_pause(self, block: Block | None, enter: float) -> str | None:
        """The pending tag, if any, told to the server at once: other ranks need not see this pause."""
        tag, self._pause = self._pause, None
        self._beat(None)  # a hang from here on is one of training again
        if tag is None or block is None or not block.step:
            return None
        if tag == "epoch":  # a seam counts only where it took longer than steps do
            average = (block.records[-1][1] - block.start_s) / block.step
            if enter - block.records[-1][2] <= 2 * average:
                return None
        self.client.send({"type": "pause", "k": block.k, "step": block.step})
        return tag

    def _fetch(self, block: Block) -> tuple[Any, int, float]:
        try:
            if block.player is not None:
                batch, elements = block.player.next()
                return batch, elements, block.player.clone_s
            assert block.source is not None
            batch = block.source.next()
        except StopIteration:
            self._empty_restarts += 1
            if self._empty_restarts > 2:
                self._fail(block, "loader_failed", _ONE_SHOT)
            raise
        except Exception:
            # The script may live with it; if it ends, this is what has ended it.
            text = traceback.format_exc(limit=-6)[-4000:]
            self.client.send({"type": "error", "k": block.k, "rank": self._rank, "text": text})
            raise
        self._empty_restarts = 0
        sizes = self._sizes
        if sizes is None or block.step < _MEASURED_EACH or block.step % _MEASURED_EACH == 0:
            sizes = self._sizes = measure(batch)
            if self._cache is not None and block.plan["cache"]:
                self._cache.offer(batch, sizes[0], sizes[1])
        return batch, sizes[0], 0.0

    def _fail(self, block: Block, reason: str, text: str) -> None:
        self.client.send({"type": "fail", "k": block.k, "rank": self._rank, "reason": reason, "text": text})

    def _go_on(self, block: Block) -> bool:
        """A chunk has ended: whether the block goes on, as the server has fixed it for all ranks."""
        self._synchronize()
        now = time.monotonic()
        answer = self.client.ask(
            {
                "type": "mark",
                "k": block.k,
                "mark": block.marks,
                "step": block.step,
                "pace_s": block.active_s / block.active_steps if block.active_steps else None,
                "elapsed_s": now - block.start_s - block.paused_s,
                "missing": self._cache.missing if self._cache is not None and block.plan["cache"] else 0,
            }
        )
        block.marks += 1
        block.stop_at += answer["go"]
        return bool(answer["go"] > 0)

    def _change_block(self) -> Block:
        self._end_block()
        try:
            plan = self.client.ask({"type": "plan", "k": self._next_k, "rank": self._rank})
        except ControlLost:
            raise SystemExit("the run that steered this training has ended") from None
        if plan["kind"] == "done":
            self._finish()
        self._next_k = plan["k"] + 1
        block = self._block = Block(plan, self.total_steps)
        if plan["cache"]:
            self._cache = Cache(plan["cache"], plan["cache_bytes"])
        if plan["kind"] == "ceiling":
            if self._cache is None:  # other processes of this start have filled theirs: folds, stages
                self._fail(block, "script_ended", "its training began anew, and there is nothing to replay")
                self._stay()
            block.player = Player(self._cache, plan["settings"]["pin_memory"], plan["replay"])
        else:
            if not plan["settings"]["num_workers"]:
                block.files = snapshot.open_data_files(moved=True)
            block.source = self._source(plan)
        return block

    def _script_ended(self) -> None:
        """The script ends by itself in the middle of a block: what was measured until now still counts.

        The last rank to end stays, so that its launcher does not end and nothing after it runs.
        """
        error = ending_error()
        try:
            if error is not None:
                text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]
                self.client.send({"type": "uncaught", "rank": self._rank, "text": text})
            self._end_block(partial=True)
            flush()
            self.client.ask({"type": "leave", "rank": self._rank, "code": exit_code()})
        except (ControlLost, OSError):
            return  # the driver has gone first

    def _end_block(self, partial: bool = False) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        begun = end = time.monotonic()
        if partial and block.records:
            # When the loop left its last step is not known: what came after may be an evaluation, or a save.
            end = block.records.pop()[1]
        worker_s = block.source.worker_seconds() if block.source is not None else None
        if block.source is not None:
            self._close_source(block)
        close_s = time.monotonic() - begun
        self._write(block)
        self.client.send(
            {
                "type": "result",
                "k": block.k,
                "rank": self._rank,
                "steps": len(block.records),
                "total": self.total_steps,
                "start_s": block.start_s,
                "end_s": end,
                "close_s": close_s,
                "first_step": block.first_step,
                "partial": partial,
                "worker_s": worker_s,
                "cloned": bool(block.player and block.player.cloning),
                "cached": [kept.step for kept in self._cache.whole()] if self._cache is not None else [],
                "sizes": self._sizes,
                "worker_bytes": block.source.worker_bytes if block.source is not None else None,
                "shared_files": self._shared,
                "repeated": None if block.source is None else block.source.repeated(),
            }
        )

    def _write(self, block: Block) -> None:
        """Add the block's records to the file; a run folder that takes no more ends the tuning."""
        lines = (json.dumps([block.k, *record], separators=(",", ":")) + "\n" for record in block.records)
        try:
            with open(self._path, "a") as file:
                file.writelines(lines)
        except OSError as error:
            text = error.strerror or str(error)
            self.client.send({"type": "fail", "rank": self._rank, "errno": error.errno, "text": text})
            self._stay()

    def _close_source(self, block: Block) -> None:
        """End the block's loader; after one without workers, look for files it has left open here."""
        source = block.source
        assert source is not None
        during = snapshot.open_data_files(moved=True) if block.files is not None else None
        source.close()
        if block.files is None or during is None:
            return
        block.source = source = None  # the last references to the dataset's copy
        gc.collect()  # cycles inside a dataset would keep its handles
        shared = snapshot.shared_files(
            self._base_files, block.files, during, snapshot.open_data_files(moved=True)
        )
        self._shared = sorted({*self._shared, *shared})

    def forked(self) -> None:
        """This is a child of the rank: it has no part in the blocks."""
        atexit.unregister(self._script_ended)
        self._finalizer.cancel()
        self.client.close()

    def _synchronize(self) -> None:
        if self._torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own gap
            self._torch.cuda.synchronize()

    def _finish(self) -> None:
        """All blocks are done: end quietly and stay where we are until the driver ends the tree."""
        self._synchronize()
        flush()
        self.client.send({"type": "done", "rank": self._rank})
        self._stay()

    def _stay(self) -> NoReturn:
        """Nothing that the script does from here on may happen: the driver ends the tree."""
        while True:
            time.sleep(3600)


class View:
    """One epoch as the loop sees it: as many batches as the bare script would get.

    Args:
        machine: where the batches come from.
        length: batches of an epoch, for ``len()``.
        remaining: batches left in this epoch; ``None`` where only the data's end tells.
    """

    def __init__(self, machine: Machine, length: int | None, remaining: int | None) -> None:
        self._machine = machine
        self._remaining = remaining
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this loader's length is not known")
        return self._length

    def __iter__(self) -> View:
        return self

    def __next__(self) -> Any:
        machine = self._machine
        feed = machine.feed
        if self._remaining == 0 or (self._remaining is None and feed is not None and feed.at_epoch_end()):
            machine.pause("epoch")
            raise StopIteration
        try:
            batch = machine.next_batch()
        except StopIteration:
            machine.pause("restart")
            raise
        if self._remaining is not None:
            self._remaining -= 1
        return batch
