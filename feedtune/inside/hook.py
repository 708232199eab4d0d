"""The patch on ``torch.utils.data.DataLoader``: two methods, wrapped in place.

The class object stays the same, so subclasses, ``isinstance`` and pickling are untouched. torch is half
built when this runs; all that touches its optimizers waits for the first loader that is made.
"""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType
from typing import Any

from .runtime import Runtime

_OWN = os.path.dirname(os.path.abspath(__file__))


def patch(module: Any, config: dict[str, Any]) -> None:
    """Wrap ``__init__`` and ``__iter__`` of the DataLoader class in ``module``."""
    cls = module.DataLoader
    runtime = Runtime(config, cls)
    make, iterate = cls.__init__, cls.__iter__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if runtime.active():
            self.__dict__["_feedtune_site"] = call_site()
            runtime.loader_made()

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Any:
        if not runtime.active():
            return iterate(self)
        return runtime.iterate(self, iterate)

    cls.__init__ = __init__
    cls.__iter__ = __iter__


def call_site() -> tuple[tuple[str, int, int], ...]:
    """The three innermost frames outside torch and this package: ``((file, line, instruction), ...)``."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, int, int]] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) and f"{os.sep}torch{os.sep}" not in name:
            found.append((name, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)
