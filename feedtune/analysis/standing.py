"""Who hangs where all stand still: from the last stacks of ranks and workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feedtune.analysis.failures import Cause

# Of the interpreter, of packages and of feedtune's own copy; what is left is the script's.
_FOREIGN = re.compile(r"/lib(?:64)?/python3|/(?:site|dist)-packages/|/_feedtune_|^<frozen")
_LOADER = re.compile(r"/(?:torch|torchdata)/.*dataloader\.py$")
_DDP = "/torch/nn/parallel/distributed.py"
_FETCH = "/torch/utils/data/_utils/fetch.py"
# torchrun's entry point and the decorator of a script's main function lie around everything that a rank does.
_AROUND = ("/torch/distributed/elastic/", "/torch/distributed/run.py", "/torch/distributed/launch")
_WAITS_FOR = {
    "batch": "its workers",
    "ranks": "the other ranks",
    "device": "its GPU, or there for the other ranks",
    "work": "work",
}


@dataclass(frozen=True)
class Standing:
    """Where a process stands that does not move: its calls ``(function, file, line)``, innermost first."""

    pid: int
    calls: tuple[tuple[str, str, int], ...]

    @property
    def waits(self) -> str | None:
        """What it waits for of others: ``batch``, ``ranks``, ``device`` or ``work``; ``None``: it hangs.

        Only what the innermost call of the script's own has called tells: FSDP's forward, say, lies around
        the script's as well.
        """
        names = self._names()
        for number, (name, file) in enumerate(names):
            if name in ("_try_get_data", "_get_data") and _LOADER.search(file):
                return "batch"
            if name == "_worker_loop":  # straight from there it asks for indices, or it is starting up
                return "work" if any("/multiprocessing/queues.py" in f for _, f in names[:number]) else None
            if name == "_engine_run_backward" or (number == 0 and file.endswith(_DDP)):
                return "ranks"  # DDP reduces inside backward, and sends buffers before forward
            if name == "synchronize" and "/torch/cuda/" in file:
                return "device"
            if "/torch/distributed/" in file and not any(part in file for part in _AROUND):
                return "ranks"
            if file.endswith(_FETCH) or not _FOREIGN.search(file):
                return None
        return None

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker of a DataLoader."""
        return any(name == "_worker_loop" for name, _ in self._names())

    @property
    def fetches(self) -> bool:
        """Whether it is reading and collating samples."""
        return any(file.endswith(_FETCH) for _, file in self._names())

    @property
    def place(self) -> str:
        """The innermost call of the script's own; the innermost of all if there is none."""
        loop = next((i for i, (name, _) in enumerate(self._names()) if name == "_worker_loop"), None)
        # Behind the loop of a forked worker stand the calls of its parent.
        own = (call for call in self.calls[:loop] if not _FOREIGN.search(call[1]))
        call = next(own, self.calls[0] if self.calls else None)
        return _shown(call) if call else "an unknown place"

    def __str__(self) -> str:
        return "\n".join(f"  {_shown(call)}" for call in self.calls)

    def _names(self) -> list[tuple[str, str]]:
        # py-spy writes Class.method where the interpreter knows it, faulthandler the function alone.
        return [(function.rpartition(".")[2], file) for function, file, _ in self.calls]


def _shown(call: tuple[str, str, int]) -> str:
    function, file, line = call
    return f"{function} ({file}:{line})"


def blame(
    ranks: Mapping[int, Standing | None],
    workers: Mapping[int, Sequence[Standing]],
    written: Cause | None = None,
) -> Cause:
    """Who hangs, where all stand still.

    Args:
        ranks: each rank's main thread; ``None`` where its stack could not be read.
        workers: the stacks of each rank's children that could be read.
        written: what a worker has written of a batch that it could not send; it counts where nobody hangs.
    """
    stack = "\n".join(_described(rank, ranks[rank], workers.get(rank, ())) for rank in sorted(ranks))
    for rank in sorted(ranks):
        busy = [w for w in workers.get(rank, ()) if w.is_worker and w.waits is None]
        standing = ranks[rank]
        if busy and (standing is None or standing.waits == "batch"):
            return Cause("hang", f"a worker of rank {rank} hangs in {busy[0].place}", stack)
    read = {rank: standing for rank, standing in sorted(ranks.items()) if standing is not None}
    stuck = [
        f"rank {rank} hangs in {'a fetch' if s.fetches else 'its loop'}, in {s.place}"
        for rank, s in read.items()
        if s.waits is None
    ]
    if written is not None and not stuck:
        return Cause(written.reason, written.text, f"{written.stack}\n{stack}")
    waiting = [f"rank {rank} waits for {_WAITS_FOR[s.waits]}" for rank, s in read.items() if s.waits]
    return Cause("hang", "; ".join(stuck or waiting) or "no stack could be read", stack)


def _described(rank: int, standing: Standing | None, workers: Sequence[Standing]) -> str:
    lines = [f"rank {rank}, process {standing.pid}:\n{standing}" if standing else f"rank {rank}: no stack"]
    busy = (worker for worker in workers if worker.is_worker and worker.waits is None)
    return "\n".join([*lines, *(f"rank {rank}, worker process {w.pid}:\n{w}" for w in busy)])
