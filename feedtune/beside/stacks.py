"""The last Python stack of a process that does not move: by py-spy, else by the process's own faulthandler.

py-spy reads another process's memory, which the system can refuse (ptrace). The hook has therefore
registered ``faulthandler`` on a signal in every rank and every forked worker; it writes the main thread,
which takes the signal, to ``stack.<pid>`` in the run folder, also while the interpreter is stuck in C code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 11  # the same number stands in feedtune/inside/stack_signal.py
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')
_PY_SPY_SECONDS = 10.0
_ANSWER_SECONDS = 2.0
_MOST_CHILDREN = 64


Call = tuple[str, str, int]  # function, file, line


def parse_py_spy(text: str, pid: int) -> tuple[Call, ...]:
    """Frames of the main thread from ``py-spy dump --json``.

    >>> parse_py_spy('[{"os_thread_id": 7, "frames": [{"name": "f", "filename": "a.py", "line": 3}]}]', 7)
    (('f', 'a.py', 3),)
    """
    threads = json.loads(text)
    # In another pid namespace the number is another one; the list ends with the oldest thread.
    main = next((t for t in threads if t.get("os_thread_id") == pid), None)
    main = main or next((t for t in threads if t.get("thread_name") == "MainThread"), None)
    main = main or (threads[-1] if threads else {})
    return tuple((f["name"], f["filename"], f["line"]) for f in main.get("frames", ()))


def parse_faulthandler(text: str) -> tuple[Call, ...]:
    r"""Frames of the last thread that ``faulthandler`` wrote: the main thread, which takes the signal.

    >>> parse_faulthandler('Current thread 0x01 (most recent call first):\n  File "a.py", line 3 in f\n')
    (('f', 'a.py', 3),)
    """
    frames: list[Call] = []
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match:
            number = match["line"]
            frames.append((match["function"], match["file"], int(number) if number.isdigit() else 0))
        elif line.startswith(("Thread", "Current thread")):
            frames = []
    return tuple(frames)


def read_stack(pid: int, folder: Path, py_spy: Sequence[str] | None = None) -> tuple[Call, ...] | None:
    """The main thread's stack, innermost call first; ``None`` where nobody could read it.

    Args:
        pid: the process.
        folder: where its faulthandler writes ``stack.<pid>``.
        py_spy: py-spy's command; by default the one beside this interpreter or on PATH, if any.
    """
    command = _py_spy() if py_spy is None else list(py_spy)
    if command:
        frames = _ask_py_spy(command, pid)
        if frames:
            return frames
    return _ask_faulthandler(pid, folder / f"stack.{pid}") or None


def children(pid: int) -> list[int]:
    """Living children of a process, oldest first; at most 64."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return sorted(found)[:_MOST_CHILDREN]


def _py_spy() -> list[str]:
    found = shutil.which(
        "py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    return [found] if found else []


def _ask_py_spy(command: list[str], pid: int) -> tuple[Call, ...]:
    words = [*command, "dump", "--nonblocking", "--full-filenames", "--json", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PY_SPY_SECONDS, check=False)
        if done.returncode == 0:
            return parse_py_spy(done.stdout, pid)
    return ()


def _ask_faulthandler(pid: int, file: Path) -> tuple[Call, ...]:
    """Send the signal that the hook has registered, where it has: its default action would kill."""
    if not file.exists() or not _catches(pid):
        return ()
    with contextlib.suppress(OSError):  # the process ends meanwhile, or its rank removes the file of a worker
        before = file.stat().st_size
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if (size := file.stat().st_size) > before:
                time.sleep(0.05)  # the rest of it
                if file.stat().st_size == size:
                    break
        return parse_faulthandler(file.read_bytes()[before:].decode(errors="replace"))
    return ()


def _catches(pid: int) -> bool:
    """Whether the process handles the signal, and does not hold it back."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    sets = dict(line.split(":\t", 1) for line in status.splitlines() if line.startswith("Sig"))
    bit = 1 << (SIGNAL - 1)
    return bool(int(sets.get("SigCgt", "0"), 16) & bit) and not int(sets.get("SigBlk", "0"), 16) & bit
