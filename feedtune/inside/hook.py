"""The patch on ``torch.utils.data.DataLoader``: two methods, wrapped in place.

The class object stays the same, so subclasses, ``isinstance`` and pickling are untouched. torch is half
built when this runs; all that touches its optimizers waits for the first loader that is made.
"""

from __future__ import annotations

import functools
from typing import Any

from .runtime import Runtime
from .site import call_site


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
