"""Why a start, a block or a whole command did not do what it should: the words for a person."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from feedtune.analysis.failures import Cause, cause_of, ended_by, exit_codes, is_echo, worker_error
from feedtune.analysis.standing import Standing, blame
from feedtune.beside.stacks import children, read_stack
from feedtune.inside.signs import BATCHES_WITHOUT_OPTIMIZER
from feedtune.launch.boot import BootFolder
from feedtune.trials.server import StartState

_PYTHON = re.compile(r"(?:^|/)python[\d.]*$")
_TAIL_BYTES = 20_000
_READERS = 8  # stacks read at once
_SEEN = "feedtune sees trainings whose batches come from a torch.utils.data.DataLoader: take yours from one"


def output_of(log: Path, begin: int = 0) -> str:
    """The end of the command's output, from a byte on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
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
    loader = [(message["rank"], message["text"]) for message in state.errors.get(k, ())]
    uncaught = [(message["rank"], message["text"]) for message in state.uncaught]
    if all(is_echo(text) for _, text in uncaught):
        apart = diverged(state, k, output)
        if apart is not None:
            return apart
    if code == 0 and not uncaught:
        return Cause("script_ended", "exit code 0")
    silent = {rank: pid for rank, pid in _lost(state).items() if (k, rank) not in state.results}
    return cause_of(uncaught, loader, code, output, silent if code != 0 else {})


def _lost(state: StartState) -> dict[int, int]:
    """Ranks that have ended and their pids, the first one first."""
    by_pid = {hello.get("pid"): rank for rank, hello in state.hellos.items()}
    return {by_pid[pid]: pid for pid in state.lost if pid in by_pid}


def diverged(state: StartState, k: int, output: str) -> Cause | None:
    """Some ranks have ended well, others stand or failed at a later step: unequal numbers of batches."""
    wrong = {message["rank"] for message in state.uncaught}
    done = {
        rank: state.results[k, rank]["total"]
        for rank in state.hellos
        if (k, rank) in state.results and state.results[k, rank]["partial"] and rank not in wrong
    }
    lost = _lost(state)
    # One that evaluates or saves has left its loop, too.
    others = [rank for rank in state.hellos if rank not in done and (rank in lost or rank not in state.doing)]
    first = next(iter(lost), None)
    if (
        not done or not others or first in others
    ):  # the loss of a rank comes before what the others make of it
        return None
    rank, steps = min(done.items(), key=lambda pair: pair[1])
    by_pid, by_rank = exit_codes(output)
    code = by_pid.get(lost.get(rank, 0), by_rank.get(rank, 0))
    return Cause(
        "ranks_diverged",
        f"rank {rank} ended its training after {steps} steps{f' with exit code {code}' if code > 0 else ''}, "
        f"while rank {min(others)} went on: the ranks have unequal numbers of batches (a DistributedSampler "
        "gives all the same), or one left its loop",
    )


def hung(state: StartState, folder: Path, output: str) -> Cause:
    """Who hangs, by the last stacks of all ranks and of the workers of those that wait for a batch.

    Args:
        state: what the ranks have said.
        folder: where processes write their stacks when they are signalled.
        output: what the command has written in this block.
    """
    pids = {rank: int(hello["pid"]) for rank, hello in state.hellos.items()}
    with ThreadPoolExecutor(_READERS) as readers:

        def read(wanted: Sequence[int]) -> list[Standing | None]:
            return list(readers.map(lambda pid: _standing(pid, folder), wanted))

        ranks = dict(zip(pids, read(list(pids.values())), strict=True))
        workers: dict[int, list[Standing]] = {}
        for rank, standing in ranks.items():
            if standing is None or standing.waits == "batch":
                workers[rank] = [found for found in read(_below(pids[rank])) if found is not None]
    return blame(ranks, workers, worker_error(output))


def _below(pid: int) -> list[int]:
    """Children of a process, and theirs: a fork server's are the workers."""
    found = children(pid)
    return found + [other for child in found for other in children(child)]


def _standing(pid: int, folder: Path) -> Standing | None:
    stack = read_stack(pid, folder)
    return None if stack is None else Standing(pid, stack)


def how_far(boot: BootFolder, command: Sequence[str], chosen: str | None) -> str:
    """The likely cause of a training that was never seen, from the signs that its processes left."""
    outside = kept_out(boot, command)
    if outside is not None:
        return outside
    seen = boot.seen()
    if "torch" not in seen:
        return f"it never imported torch.utils.data; {_SEEN} (not from DALI, ffcv or tf.data)"
    if "loader" not in seen:
        return f"it never made a torch DataLoader; {_SEEN}"
    if "iterated" not in seen:
        return "it made a DataLoader but never iterated over it through DataLoader.__iter__"
    if chosen:
        places = ", ".join(boot.loaders()) or "none"
        return f"no DataLoader made at {chosen} trained; its loaders were made at: {places}"
    if "stepped" not in seen:
        return (
            "no optimizer of torch stepped; without one the loader with most batches is taken, after "
            f"{BATCHES_WITHOUT_OPTIMIZER} batches: let it train longer"
        )
    return "it ended before two optimizer steps fell between batches of one DataLoader; let it train longer"


def kept_out(boot: BootFolder, command: Sequence[str]) -> str | None:
    """Why feedtune did not come into the command's interpreters; ``None`` where it did."""
    seen = boot.seen()
    if "error" in seen:
        return f"feedtune's start-up code failed in its interpreter: {boot.error()}"
    if "python" in seen:
        return None
    option = _deaf_option(command)
    if option:
        return f"Python was started with {option}, which keeps PYTHONPATH out; leave that option out"
    return (
        "no Python process was seen: the command starts none, or a container, ssh, sudo or "
        "srun --export=NONE in between keeps PYTHONPATH from it; let PYTHONPATH through"
    )


def failure(code: int, steps: int) -> str:
    """How a command ended that was let run, and how far it had come.

    >>> failure(2, 0)
    'the command failed (exit code 2) before a training step was recorded; its own output says why'
    >>> failure(143, 1200)
    'the command was ended by SIGTERM after 1,200 recorded steps'
    """
    how = ended_by(code)
    failed = how == f"exit code {code}"
    when = f"after {steps:,} recorded steps" if steps else "before a training step was recorded"
    said = f"the command failed ({how})" if failed else f"the command was ended by {how}"
    return f"{said} {when}{'; its own output says why' if failed else ''}"


def _deaf_option(command: Sequence[str]) -> str:
    """The option of a Python in the command that keeps our start-up folder out, with its word; else empty.

    >>> _deaf_option(["bash", "-c", "python3.11 -uI train.py -E 3"]), _deaf_option(["python", "t.py", "-E"])
    ('-uI', '')
    """
    words = [part for word in command for part in (word.split() if " " in word else [word])]
    python = False  # whether the word belongs to a Python's own options
    for word in words:
        if python and re.fullmatch("-[A-Za-z]*[EIS][A-Za-z]*", word) and word[1] not in "cmWX":
            return word
        python = bool(_PYTHON.search(word)) or (python and word[:1] == "-" and word not in ("-", "-c", "-m"))
    return ""
