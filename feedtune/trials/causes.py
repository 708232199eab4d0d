"""Why a start, a block or a whole command did not do what it should: the words for a person."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from feedtune.analysis.failures import Cause, cause_of
from feedtune.analysis.standing import Standing, blame
from feedtune.beside.stacks import children, read_stack
from feedtune.launch.boot import BootFolder
from feedtune.trials.server import StartState

_TAIL_BYTES = 20_000
_READERS = 8  # stacks read at once
_MOST_WORKERS = 16  # of a rank, whose stacks are read


def output_of(log: Path) -> str:
    """The end of the command's output."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def ended(state: StartState, k: int, code: int | None, output: str) -> Cause:
    """Why the command has ended in the middle of block ``k``.

    Args:
        state: what its ranks have said, taken under the server's lock.
        k: the block.
        code: the command's exit code; ``None`` where only a rank has ended.
        output: the end of its output.
    """
    diverged = _diverged(state, k)
    if diverged is not None:
        return diverged
    loader = [(message["rank"], message["text"]) for message in state.errors.get(k, ())]
    uncaught = [(message["rank"], message["text"]) for message in state.uncaught]
    if code == 0 and not uncaught:
        return Cause("script_ended", "exit code 0")
    by_pid = {hello["pid"]: rank for rank, hello in state.hellos.items()}
    lost = {by_pid[pid]: pid for pid in state.lost if pid in by_pid}
    silent = {rank: pid for rank, pid in lost.items() if (k, rank) not in state.results and code != 0}
    return cause_of(uncaught, loader, code, output, silent)


def _diverged(state: StartState, k: int) -> Cause | None:
    """Some ranks have ended well, others stand or failed at a later step: unequal numbers of batches."""
    wrong = {message["rank"] for message in state.uncaught}
    done = {
        rank: state.results[k, rank]["total"]
        for rank in state.hellos
        if (k, rank) in state.results and state.results[k, rank]["partial"] and rank not in wrong
    }
    others = {rank: state.steps.get(rank, 0) for rank in state.hellos if rank not in done}
    if not done or not others:
        return None
    rank, steps = min(done.items(), key=lambda pair: pair[1])
    return Cause(
        "ranks_diverged",
        f"rank {rank} ended its training after {steps} steps, while rank {min(others)} went on: the ranks "
        "have unequal numbers of batches (a DistributedSampler gives all the same), or one left its loop",
    )


def hung(state: StartState, folder: Path) -> Cause:
    """Who hangs, by the last stacks of all ranks and of their workers.

    Args:
        state: what the ranks have said, taken under the server's lock.
        folder: where processes write their stacks when they are signalled.
    """
    pids = {rank: int(hello["pid"]) for rank, hello in state.hellos.items()}
    below = {rank: children(pid)[:_MOST_WORKERS] for rank, pid in pids.items()}
    wanted = [*pids.values(), *(pid for found in below.values() for pid in found)]
    with ThreadPoolExecutor(_READERS) as readers:
        stacks = dict(zip(wanted, readers.map(lambda pid: _standing(pid, folder), wanted), strict=True))
    return blame(
        {rank: stacks[pid] for rank, pid in pids.items()},
        {rank: [s for pid in found if (s := stacks[pid]) is not None] for rank, found in below.items()},
    )


def _standing(pid: int, folder: Path) -> Standing | None:
    stack = read_stack(pid, folder)
    if stack is None:
        return None
    return Standing(pid, stack)


def how_far(boot: BootFolder, command: Sequence[str], chosen: str | None) -> str:
    """The likely cause of a training that was never seen, from the signs that its processes left."""
    seen = boot.seen()
    if "error" in seen:
        return f"feedtune's start-up code failed in its interpreter: {boot.error()}"
    if "python" not in seen:
        isolated = [
            w for w in command if w in ("-I", "-E") or (w[:1] == "-" and w[1:2] in "IE" and w.isalpha())
        ]
        if isolated:
            return f"Python was started with {isolated[0]}, which ignores PYTHONPATH; leave that option out"
        return (
            "no Python process saw PYTHONPATH (a container, ssh, sudo or srun --export=NONE in between, "
            "or no Python at all); let PYTHONPATH through"
        )
    if "torch" not in seen:
        return (
            "it never imported torch.utils.data (DALI, ffcv and tf.data pipelines are no torch DataLoaders)"
        )
    if "loader" not in seen:
        return "it never made a torch DataLoader"
    if "iterated" not in seen:
        return "it made a DataLoader but never iterated over it through DataLoader.__iter__"
    if chosen:
        places = ", ".join(boot.loaders()) or "none"
        return f"no DataLoader made at {chosen} trained; its loaders were made at: {places}"
    return "it ended before two optimizer steps fell between batches of one DataLoader; let it train longer"
