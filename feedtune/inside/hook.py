"""The patch on ``torch.utils.data.DataLoader``: methods, wrapped in place.

The class object stays the same, so subclasses, ``isinstance`` and pickling are untouched. torch is half
built when this runs; all that touches its optimizers waits for the first loader that is made.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .signs import note
from .site import call_site

if TYPE_CHECKING:
    from .runtime import Runtime


def patch(module: Any, config: dict[str, Any]) -> None:
    """Hook into the DataLoader class in ``module`` as the mode of the run wants it.

    ``trial`` (tune) runs blocks behind the loop's iterator, ``run`` only watches, ``apply`` only sets.
    """
    mode = config.get("mode", "trial")
    if mode == "apply":
        from . import applied

        applied.install(module.DataLoader, config)
    elif mode == "run":
        from .observed import Observer

        _follow(module.DataLoader, Observer(config, module))
    else:
        from .runtime import Runtime

        _follow(module.DataLoader, Runtime(config, module.DataLoader))
        _note_workers(module.DataLoader, config["folder"])


def _follow(cls: Any, runtime: Runtime) -> None:
    """Wrap ``__init__`` and ``__iter__``, also of subclasses that have taken both into their own hands."""
    _wrap(cls, runtime)

    @classmethod  # type: ignore[misc]  # it becomes one of DataLoader's
    def __init_subclass__(sub: Any, **words: Any) -> None:
        super(cls, sub).__init_subclass__(**words)
        if _stands_alone(sub):
            _wrap(sub, runtime)

    cls.__init_subclass__ = __init_subclass__


def _stands_alone(cls: Any) -> bool:
    """Whether a subclass makes its iterators as DataLoader does, and never asks DataLoader: torchdata's."""
    code = getattr(vars(cls).get("__iter__"), "__code__", None)
    return code is not None and "_get_iterator" in code.co_names and "super" not in code.co_names


def _wrap(cls: Any, runtime: Runtime) -> None:
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


def _note_workers(cls: Any, folder: str) -> None:
    """Wrap ``_get_iterator``: workers may be gone before the guardian has seen them, their memory stays."""
    start = cls._get_iterator

    @functools.wraps(start)
    def _get_iterator(self: Any) -> Any:
        iterator = start(self)
        for worker in getattr(iterator, "_workers", ()):
            note(folder, "workers", str(worker.pid))
        return iterator

    cls._get_iterator = _get_iterator
