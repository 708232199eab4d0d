"""The end of a process, whichever way Python takes to it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Callable
from typing import NoReturn, Optional


def at_exit(call: Callable[[], None]) -> None:
    """Have something called at the end of this process; twice in some, so it must bear that.

    Processes of ``multiprocessing`` (``mp.spawn`` under fork) end without the handlers of ``atexit``.
    """
    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, call, exitpriority=0)


_codes: list[object] = []  # what sys.exit was called with, the last one last


def remember_exit() -> None:
    """Remember what ``sys.exit`` is called with from now on: nothing else tells it to a process that ends."""
    leave = sys.exit

    @functools.wraps(leave)
    def remembered(*code: object) -> NoReturn:
        _codes.append(code[0] if code else None)
        leave(*code)  # type: ignore[arg-type]  # whatever the script gave

    sys.exit = remembered


def exit_code() -> int:
    """The code that this process ends with, as far as it is known; asked while it ends."""
    if ending_error() is not None:
        return 1
    code = _codes[-1] if _codes else 0
    return code if isinstance(code, int) else int(code is not None)  # a text is printed, and means 1


def flush() -> None:
    """Write what the script has printed: a process that is kept until it is killed never does."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or none at all
            stream.flush()


def inheriting() -> bool:
    """Whether this is a spawned process that still runs its parent's main module once more."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def ending_error() -> Optional[BaseException]:
    """The exception that ends this process, if one does; asked while it ends."""
    error: Optional[BaseException] = getattr(sys, "last_value", None)
    if error is None:
        error = sys.exc_info()[1]  # in a process of multiprocessing it is still on its way
    if isinstance(error, SystemExit):  # torch's mp.spawn turns an exception into an exit
        return error.__context__ if error.code not in (None, 0) else None
    return error
