"""The patch on ``torch.utils.data.DataLoader`` and on DDP: methods, wrapped in place.

The class object stays the same, so subclasses, ``isinstance`` and pickling are untouched. torch is half
built when this runs; all that touches its optimizers waits for the first loader that is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .signs import note
from .site import call_site, note_made

if TYPE_CHECKING:
    from .runtime import Runtime


def patch(module: Any, config: dict[str, Any]) -> None:
    """Hook into the DataLoader class in ``module`` as the mode of the run wants it.

    ``trial`` (tune) runs blocks behind the loop's iterator, ``run`` only watches, ``apply`` only sets.
    """
    cls, mode = module.DataLoader, config.get("mode", "trial")
    if mode == "apply":
        from .applied import Applied

        _on_each(cls, Applied(config["settings"], config["identity"]).follow)
    elif mode == "run":
        from .observed import Observer

        _on_each(cls, functools.partial(_follow, Observer(config, module)))
    else:
        from .runtime import Runtime

        _on_each(cls, functools.partial(_follow, Runtime(config, cls)))
        _note_workers(cls, config["folder"])
        _let_workers_finish(module._utils.worker)


def patch_models(module: Any) -> None:
    """Hook into the DDP class in ``module``, where steps are taken down: what its ranks wait for is timed."""
    from .ddp import BUCKETS

    BUCKETS.patch(module)


def _on_each(cls: Any, follow: Callable[[Any], None]) -> None:
    """Follow DataLoader, and also subclasses that have taken its methods into their own hands."""
    follow(cls)

    @classmethod  # type: ignore[misc]  # it becomes one of DataLoader's
    def __init_subclass__(sub: Any, **words: Any) -> None:
        super(cls, sub).__init_subclass__(**words)
        if _stands_alone(sub):
            follow(sub)

    cls.__init_subclass__ = __init_subclass__


def _stands_alone(cls: Any) -> bool:
    """Whether a subclass makes its iterators as DataLoader does, and never asks DataLoader: torchdata's."""
    code = getattr(vars(cls).get("__iter__"), "__code__", None)
    return code is not None and "_get_iterator" in code.co_names and "super" not in code.co_names


def _follow(runtime: Runtime, cls: Any) -> None:
    """Wrap ``__init__`` and ``__iter__``."""
    make, iterate = cls.__init__, cls.__iter__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if runtime.active():
            note_made(self, call_site())
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


_SENDING_S = 0.5  # how long a worker that ends waits for a batch on its way; handing over memory takes less


def _let_workers_finish(worker: Any) -> None:
    """Wrap ``_worker_loop``: a worker told to end in mid-batch first has that batch handed over.

    torch lets it end while a thread still sends, which leaves a temporary file or folder where that was the
    worker's first batch, and blocks end their workers so again and again. A batch that fills the pipe, where
    nobody reads any more, is given up as torch does it. Spawned workers know nothing of us.
    """
    loop = worker._worker_loop

    @functools.wraps(loop)
    def _worker_loop(*args: Any, **kwargs: Any) -> None:
        loop(*args, **kwargs)
        sender = getattr(args[3], "_thread", None)  # of the queue for batches, closed by now
        if sender is not None:
            sender.join(_SENDING_S)

    worker._worker_loop = _worker_loop
