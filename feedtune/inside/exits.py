"""The end of a process, whichever way Python takes to it."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
from collections.abc import Callable


def at_exit(call: Callable[[], None]) -> None:
    """Have something called at the end of this process; twice in some, so it must bear that.

    Processes of ``multiprocessing`` (``mp.spawn`` under fork) end without the handlers of ``atexit``.
    """
    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, call, exitpriority=0)


def inheriting() -> bool:
    """Whether this is a spawned process that still runs its parent's main module once more."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)
