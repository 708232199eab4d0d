"""What has ended a block: from exit codes and tracebacks to a reason and a sentence."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feedtune.analysis.tracebacks import clean_lines, error_line, last_line, raised, sentence, tracebacks
from feedtune.records import Reason

__all__ = [
    "Cause", "cause_of", "ended_by", "exit_codes", "is_echo", "last_line", "shown_output", "worker_error",
]  # fmt: skip

# What exceptions of torch 2.6 to 2.13, CUDA and the system mean; the first that fits counts.
_SIGNS: tuple[tuple[str, Reason, str], ...] = (
    (r"Too many open files|received \d+ items of ancdata", "descriptors", "too many open files"),
    (r"killed by signal: Bus error", "shm", "a worker died of a bus error, as it does when /dev/shm is full"),
    (r"(?:/torch_|shared memory|/dev/shm).*No space left|No space left.*/dev/shm"
     r"|unable to allocate shared memory\(shm\)", "shm", "/dev/shm is full"),
    (r"^[\w.]*OutOfMemoryError\b|(?:CUDA|HIP)(?: error:)? out of memory|Cuda failure.*out of memory"
     r"|(?:CUDNN|CUBLAS)_STATUS_ALLOC_FAILED", "gpu_memory", "the GPU's memory is full"),
    (r"^RuntimeError: unable to mmap.*Cannot allocate memory", "ram",
     "no more memory can be mapped: it is full, or vm.max_map_count is reached"),
    (r"^[\w.]*MemoryError\b|Cannot allocate memory|DefaultCPUAllocator|std::bad_alloc", "ram",
     "the machine's memory is full"),
    (r"DataLoader worker .*is killed by signal: Killed", "worker_died", "a worker process was killed"),
    (r"DataLoader worker .*is killed by signal", "worker_died", "a worker process has crashed"),
    (r"DataLoader worker \(pid.*exited unexpectedly", "worker_died", "a worker process ended by itself"),
    (r"DataLoader timed out", "hang", "the script's own time limit for a batch has passed"),
)  # fmt: skip
# Neither torch nor the system raises these for such a reason: whatever they say, it is the script's own.
_SCRIPTS_OWN = re.compile(r"(?:Value|Type|Key|Index|Assertion|Attribute|NotImplemented)Error\b")
# What peers of a rank that has gone say; the cause stands elsewhere.
_ECHO = re.compile(
    r"gloo/transport|Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout"
    r"|Dist(?:Backend|Network|Store)Error|Timed out waiting|connectFullMesh|remote process exited"
    r"|NCCL communicator was aborted"
)
_LAUNCHERS = re.compile(
    r"[\w.]*(?:ChildFailedError|ProcessExitedException|CalledProcessError|SignalException)\b"
)
_WATCHDOG = re.compile(r"\[Rank (\d+)\] Watchdog caught collective operation timeout: .*?OpType=(\w+)")
_TORCHRUN_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
_SPAWN_EXIT = re.compile(r"process (\d+) terminated with (?:signal (SIG\w+)|exit code (\d+))")
# Signals that end a process which has not asked for it; shells add 128 to them.
_DEADLY = ("SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV")


@dataclass(frozen=True)
class Cause:
    """Why a block has failed: its reason, one sentence for a person, and the last stack or traceback."""

    reason: Reason
    text: str
    stack: str = ""


def cause_of(
    uncaught: Sequence[tuple[int, str]],
    loader: Sequence[tuple[int, str]],
    code: int | None,
    output: str,
    silent: Mapping[int, int],
) -> Cause:
    """The cause of an end that was not planned.

    Args:
        uncaught: ``(rank, traceback)`` of what has ended ranks, in order of arrival.
        loader: the same of what came out of a loader's ``next()``; the script may have lived with it.
        code: the command's exit code; negative: the signal that ended it; ``None`` while it runs.
        output: the end of the command's output.
        silent: ranks that ended without a word and their pids, the first one first.
    """
    own = [(rank, text) for rank, text in uncaught if not is_echo(text)]
    if own:
        lines = {error_line(text) for _, text in loader}
        return _told(*own[0], in_loader=error_line(own[0][1]) in lines)
    gone = next(iter(silent.items()), None)
    number = _exit_of(*gone, code, output) if gone else None
    if gone and number is not None and number < 0:
        return _died(gone[0], number, code, output)
    if loader:
        return _told(*loader[-1], in_loader=True)
    written = _own_error(output)
    if written:  # a process of multiprocessing leaves no other trace of what it raised
        return _told(None, written, in_loader=False)
    if gone:
        return _died(gone[0], number, code, output)
    if uncaught:
        return _told(*uncaught[0], in_loader=False)
    if _deadly(code):
        return Cause("rank_died", f"the command was ended by {ended_by(code)}", shown_output(output))
    shown = shown_output(output)
    return Cause("script_failed", f"{ended_by(code)}: {error_line(shown)}", shown)


def _told(rank: int | None, text: str, *, in_loader: bool) -> Cause:
    """The cause that a traceback tells."""
    where = "" if rank is None else f"rank {rank}: "
    stack = "\n".join(clean_lines(text)).strip()
    sign = _sign(stack)
    if sign is not None:
        reason, words, message = sign
        if reason == "gpu_memory" and "_utils/pin_memory.py" in stack:
            reason, words = "ram", "no more memory can be page-locked"
        return Cause(reason, f"{where}{words}: {sentence(message)}", stack)
    return Cause("loader_failed" if in_loader else "script_failed", f"{where}{error_line(stack)}", stack)


def _sign(text: str) -> tuple[Reason, str, str] | None:
    """What an exception of a traceback is known for, and its message; earlier ones are causes."""
    messages = [m for m in raised(text) or [last_line(text)] if not _SCRIPTS_OWN.match(m)]
    for pattern, reason, words in _SIGNS:
        for message in messages:
            if re.search(pattern, message):
                return reason, words, message
    return None


def is_echo(text: str) -> bool:
    """Whether a rank has failed only since another one has gone."""
    if "DataLoader worker process" in text or "_utils/fetch.py" in text or _sign(text):
        return False  # data can come over a connection, too
    return bool(_ECHO.search((raised(text) or [last_line(text)])[-1]))


def _died(rank: int, number: int | None, code: int | None, output: str) -> Cause:
    """The cause where a rank has ended without a word."""
    shown = shown_output(output)
    watchdog = _WATCHDOG.search(output)
    if watchdog and number != -signal.SIGKILL:
        return Cause("hang", f"rank {watchdog[1]}: not all ranks took part in {watchdog[2]} in time", shown)
    if number == -signal.SIGKILL:
        text = "was ended by SIGKILL, as the system does when memory runs out"
    elif number is not None and number < 0:
        text = f"was ended by {ended_by(number)}"
    elif number is not None:
        text = f"ended with exit code {number} and without a word"
    else:
        text = f"ended without a word; of the command there is {ended_by(code)}"
    return Cause("rank_died", f"rank {rank} {text}", shown)


def exit_codes(output: str) -> tuple[dict[int, int], dict[int, int]]:
    """Exit codes that a launcher has reported, negative for signals: by pid (torchrun), by rank (mp.spawn).

    >>> exit_codes("  exitcode  : -9 (pid: 123)  (SIGKILL)")
    ({123: -9}, {})
    >>> exit_codes("ProcessExitedException: process 1 terminated with signal SIGSEGV")
    ({}, {1: -11})
    """
    by_pid = {int(pid): int(code) for code, pid in _TORCHRUN_EXIT.findall(output)}
    by_rank = {}
    for rank, name, code in _SPAWN_EXIT.findall(output):
        by_rank[int(rank)] = int(code) if code else -getattr(signal, name, 0)
    return by_pid, by_rank


def _exit_of(rank: int, pid: int, code: int | None, output: str) -> int | None:
    """A rank's exit code, negative for a signal; ``None`` where nobody has told it."""
    by_pid, by_rank = exit_codes(output)
    told = by_pid.get(pid, by_rank.get(rank))
    if told is not None:
        return told
    return _deadly(code)


def _deadly(code: int | None) -> int | None:
    """The signal in a command's exit code, negative; ``None`` where it tells of none."""
    number = 0 if code is None else -code if code < 0 else code - 128
    name = ended_by(-number) if number > 0 else ""
    return -number if name in _DEADLY or (name and code is not None and code < 0) else None


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


def shown_output(text: str, lines: int = 15) -> str:
    """Of a command's output what tells of its end: the traceback that does, or its last lines."""
    rows = clean_lines(text)
    found = tracebacks(rows)
    if not found:
        return "\n".join([row for row in rows if row.strip()][-lines:])
    told = _own_error(text) or next((t for t in found if not _of_launcher(t)), found[-1])
    return "\n".join(told.splitlines()[-40:])


def _own_error(output: str) -> str | None:
    """The traceback in an output that is neither a launcher's report nor the echo of another rank's end."""
    found = tracebacks(clean_lines(output))
    own = [trace for trace in found if not _of_launcher(trace) and not is_echo(trace)]
    if not own:
        return None
    # Ranks that are ended by a launcher raise later than the one whose error it reports.
    return own[0] if len(own) < len(found) else own[-1]


def worker_error(output: str) -> Cause | None:
    """What a worker's queue has written on a batch that it could not send: the loop waits for it for ever.

    Args:
        output: what the command has written in this block.
    """
    found = [text for text in tracebacks(clean_lines(output)) if "multiprocessing/queues.py" in text]
    if not found:
        return None
    told = _told(None, found[-1], in_loader=False)
    text = f"a worker could not send its batch: {told.text}"
    return Cause("hang" if told.reason == "script_failed" else told.reason, text, told.stack)


def _of_launcher(trace: str) -> bool:
    return bool(_LAUNCHERS.match((raised(trace) or [""])[-1]))
