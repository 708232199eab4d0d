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
from typing import Any, NoReturn

from . import snapshot
from .block import Block
from .client import Client, ControlLost
from .ddp import BUCKETS
from .exits import ending_error, exit_code, flush, remember_exit
from .feed import Feed
from .linefiles import private
from .replay import Cache, Player, measure
from .swap import Source
from .trace import Trace
from .view import View

_MEASURED_EACH = 64  # steps of a block whose batches are all measured; after them one in so many is
_ONE_SHOT = "the iterable dataset yields nothing when it is read again; start it for each trial: --isolate"


class Machine:
    """Runs the blocks of one rank.

    Args:
        client: connection to the control server.
        config: the start-up folder's configuration.
        rank: this process's rank.
        watch: identity of the training loader.
        loader_class: torch's DataLoader.
        feed: its index iterator; ``None`` for iterable data.
        trace: takes the steps down, their parts too; ``None`` where only their rate counts.
    """

    def __init__(
        self,
        client: Client,
        config: dict[str, Any],
        rank: int,
        watch: Any,
        loader_class: Any,
        feed: Feed | None,
        trace: Trace | None = None,
    ) -> None:
        import torch

        self.client = client
        self._trace = trace
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
        if self._trace is not None:
            self._trace.quiet(self._trace.clock.begin, block.source and block.source.ready())
        batch, elements, clone_s = self._fetch(block)
        now = time.monotonic()
        block.records.append((block.step, enter, now, tag, elements, clone_s))
        if self._trace is not None:
            self._trace.quiet(self._trace.clock.returned, (block, block.step), elements)
            self._trace.quiet(self._trace.count, batch)
            if self._trace.clock.full:
                self._take_parts()
        block.step += 1
        self.total_steps += 1
        if now - self._beat_s > 1.0:
            self._beat(None)
        return batch

    def _take_parts(self, at_end: bool = False) -> None:
        """Keep the parts of steps that are known by now with their blocks."""
        assert self._trace is not None
        for (block, step), parts in self._trace.quiet(self._trace.clock.take, at_end) or ():
            block.parts[step] = parts

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
                "elapsed_s": now - block.records[0][2] - block.paused_s,
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
        if self._trace is not None:
            BUCKETS.synchronize(not plan["no_sync"])
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
        if self._trace is not None:
            self._trace.quiet(self._trace.clock.begin)  # the last step ends here
            self._synchronize()
            self._take_parts(at_end=True)
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
                "end_tag": None if partial else block.tag,
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
                "trace": None if self._trace is None else self._trace.about(),
                "workers": None if block.source is None else block.source.worker_totals(),
            }
        )

    def _write(self, block: Block) -> None:
        """Add the block's records to the file; a run folder that takes no more ends the tuning."""
        rows: list[list[Any]] = [[block.k, *record] for record in block.records]
        if self._trace is not None:
            for row in rows:
                row.append(block.parts.get(row[1]))
        lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        try:
            with open(self._path, "a", opener=private) as file:
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
