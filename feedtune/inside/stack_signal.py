"""A signal on which this process writes its own stack: for whoever finds it hanging and may not ptrace it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterable
from typing import Any

from .linefiles import private

SIGNAL = signal.SIGRTMIN + 11  # the same number stands in feedtune/beside/stacks.py
_file: Any = None  # faulthandler keeps the descriptor only


def arm(folder: str) -> None:
    """Register on the signal, if nobody else uses it; the stack goes to ``stack.<pid>`` in the folder."""
    global _file
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:  # it knows no handler of faulthandler's own
        return
    try:
        path = os.path.join(folder, f"stack.{os.getpid()}")
        file = open(path, "w", opener=private)  # noqa: SIM115 (stays open)
    except OSError:
        return  # only the words in an error message are lost
    faulthandler.register(SIGNAL, file=file, all_threads=False)
    _file = file


def forget(folder: str, pids: Iterable[int]) -> None:
    """Remove the files of processes that have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it never wrote one
            os.unlink(os.path.join(folder, f"stack.{pid}"))
