"""What has ended a block: from exit codes, tracebacks and stacks to a reason and a sentence."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feedtune.records import Reason

# Lines of an error, of torch 2.6 to 2.13 and of CUDA, and what they mean; the first that fits counts.
_SIGNS: tuple[tuple[str, Reason, str], ...] = (
    (r"out of shared memory|Bus error|No space left on device.*/torch_|unable to (?:mmap|open|resize|write).*"
     r"(?:/torch_|shared memory)", "shm", "/dev/shm is full: a worker died of a bus error"),
    (r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|HIP out of memory", "gpu_memory",
     "the GPU's memory is full"),
    (r"^MemoryError|Cannot allocate memory|DefaultCPUAllocator", "ram", "the machine's memory is full"),
    (r"Too many open files|received \d+ items of ancdata", "descriptors", "too many open files"),
    (r"worker \(pid\(?s?\)? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)"
     r"|is killed by signal", "worker_died", "a worker process was killed"),
    (r"DataLoader timed out", "hang", "the script's own time limit for a batch has passed"),
)  # fmt: skip
# What peers of a rank that has gone say; the cause stands elsewhere.
_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|DistBackendError|Socket Timeout"
    r"|Timed out waiting|connectFullMesh|remote process exited|NCCL communicator was aborted"
)
_KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID (\d+)")  # torchrun's report


@dataclass(frozen=True)
class Cause:
    """Why a block has failed: its reason, one sentence for a person, and the last stack or traceback."""

    reason: Reason
    text: str
    stack: str = ""


def cause_of(
    errors: Sequence[tuple[int, str]],
    code: int | None,
    output: str,
    in_loader: bool,
    silent: Mapping[int, int],
) -> Cause:
    """The cause of an end that was not planned.

    Args:
        errors: ``(rank, traceback)`` of what was raised, in order of arrival.
        code: the command's exit code; negative: the signal that ended it; ``None`` while it runs.
        output: the end of the command's output.
        in_loader: whether the first error came out of a loader's ``next()``.
        silent: ranks that ended without a word and their pids, the first one first.
    """
    own = [(rank, text) for rank, text in errors if not _ECHO.search(last_line(text))]
    rank, trace = (own or [(-1, "")])[0]
    shown = shown_output(output)
    where = "" if rank < 0 else f"rank {rank}: "
    said = trace or ("" if silent else shown)
    for pattern, reason, text in _SIGNS:
        if re.search(pattern, said, re.MULTILINE):
            return Cause(reason, f"{where}{text}: {last_line(said)}", said)
    if trace:
        return Cause("loader_failed" if in_loader else "script_failed", f"{where}{last_line(trace)}", trace)
    if silent:  # killed: its peers and its launcher only tell of the loss
        gone, pid = next(iter(silent.items()))
        signals = {int(number): name for name, number in _KILLED.findall(output)}
        by = f"ended by {signals[pid]}" if pid in signals else "ended without a word (killed?)"
        return Cause("rank_died", f"rank {gone} was {by}", shown)
    ended = ended_by(code)
    if code is not None and (code < 0 or code in (128 + signal.SIGKILL, 128 + signal.SIGSEGV)):
        return Cause("rank_died", f"the command was ended by {ended}", shown)
    return Cause("script_failed", f"{ended}: {last_line(shown)}", shown)


def ended_by(code: int | None) -> str:
    """An exit code in words.

    >>> ended_by(-9), ended_by(137), ended_by(1)
    ('SIGKILL', 'SIGKILL', 'exit code 1')
    """
    if code is None:
        return "no exit code"
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"


@dataclass(frozen=True)
class Standing:
    """Where a process stands that does not move: its calls ``(function, file, line)``, innermost first."""

    pid: int
    calls: tuple[tuple[str, str, int], ...]

    @property
    def waits(self) -> str | None:
        """What it waits for of others: ``batch``, ``ranks`` or ``work``; ``None``: it is busy, or hangs."""
        for name, file in self._names():
            if name in ("_try_get_data", "_get_data") and file.endswith("dataloader.py"):
                return "batch"
            if name == "_worker_loop":
                return "work"  # no fetch above it: it waits for indices
            if name == "fetch" and file.endswith("fetch.py"):
                return None
            if "torch/distributed/" in file or name == "_engine_run_backward":
                return "ranks"  # DDP reduces inside backward
        return None

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker of a DataLoader."""
        return any(name == "_worker_loop" for name, _ in self._names())

    @property
    def fetches(self) -> bool:
        """Whether it is reading and collating samples."""
        return any(name == "fetch" and file.endswith("fetch.py") for name, file in self._names())

    @property
    def place(self) -> str:
        """The innermost call of the script's own; the innermost of all if there is none."""
        own = (call for call in self.calls if not _FOREIGN.search(call[1]))
        call = next(own, self.calls[0] if self.calls else None)
        return _shown(call) if call else "an unknown place"

    def __str__(self) -> str:
        return "\n".join(f"  {_shown(call)}" for call in self.calls)

    def _names(self) -> list[tuple[str, str]]:
        # py-spy writes Class.method where the interpreter knows it, faulthandler the function alone.
        return [(function.rpartition(".")[2], file) for function, file, _ in self.calls]


_FOREIGN = re.compile(r"/lib/python3|site-packages|/_feedtune_|^<frozen")


def _shown(call: tuple[str, str, int]) -> str:
    function, file, line = call
    return f"{function} ({file}:{line})"


def blame(ranks: Mapping[int, Standing | None], workers: Mapping[int, Sequence[Standing]]) -> Cause:
    """Who hangs, where all stand still.

    Args:
        ranks: each rank's main thread; ``None`` where its stack could not be read.
        workers: the stacks of each rank's children that could be read.
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
    waiting = [f"rank {rank} waits for {_WAITS_FOR[s.waits]}" for rank, s in read.items() if s.waits]
    return Cause("hang", "; ".join(stuck or waiting) or "no stack could be read", stack)


_WAITS_FOR = {"batch": "its workers", "ranks": "the other ranks", "work": "work"}


def _described(rank: int, standing: Standing | None, workers: Sequence[Standing]) -> str:
    lines = [f"rank {rank}, process {standing.pid}:\n{standing}" if standing else f"rank {rank}: no stack"]
    busy = (worker for worker in workers if worker.is_worker and worker.waits is None)
    return "\n".join([*lines, *(f"rank {rank}, worker process {w.pid}:\n{w}" for w in busy)])


def shown_output(text: str, lines: int = 15) -> str:
    """Of a command's output what tells of its end: its last traceback, or its last lines."""
    found = [line[:500] for line in text.splitlines()]
    starts = [i for i, line in enumerate(found) if line.startswith("Traceback")]
    if starts and "ChildFailedError" not in text[text.rfind("Traceback") :]:
        return "\n".join(found[starts[-1] :][-40:])
    if starts:  # torchrun's own report comes last; the script's error is the first one
        end = next((i for i in range(starts[0] + 1, len(found)) if found[i][:1] not in ("", " ")), starts[0])
        return "\n".join(found[starts[0] : end + 1])
    return "\n".join(found[-lines:])


def last_line(text: str) -> str:
    """The last line that says something; of a traceback, the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
