"""Exceptions of signal handlers that fall into a callback whose caller swallows them.

Python runs signal handlers wherever its main thread happens to be. Where that is a callback of the garbage
collector, what the handler raises (KeyboardInterrupt of Ctrl-C, SystemExit of a script's own) is printed and
forgotten, and the program goes on. Without us it would have been raised after the collection; there it has
to be raised again.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any


class _Local:
    """Dies with the frame that it is a local variable of."""

    ends: Any


def rescue_from(callback: Callable[..., Any]) -> Callable[[], None]:
    """What falls into a callback is raised again where the thread goes on; a call takes that back.

    An exception that is set from within a Python function would be raised in that very function. It is set
    by a weak reference's callback, in C, when the last such frame is gone.
    """
    before = sys.unraisablehook
    raise_in = ctypes.PyDLL(None)["PyThreadState_SetAsyncExc"]
    raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object, ctypes.py_object]  # the last one is not used

    def unraisablehook(found: Any) -> None:
        if found.object is not callback or found.exc_value is None:
            before(found)
            return
        error = found.exc_value
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # less the callback's frame

        class Again(type(error)):  # type: ignore[misc]  # C makes its one instance: the error itself
            def __new__(cls) -> Any:
                return error

        last = _Local()
        last.ends = weakref.ref(last, functools.partial(raise_in, threading.get_ident(), Again))

    def undo() -> None:
        if sys.unraisablehook is unraisablehook:
            sys.unraisablehook = before

    sys.unraisablehook = unraisablehook
    return undo
