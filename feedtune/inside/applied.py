"""The hook of ``feedtune apply``: other settings for the tuned loader, at the end of its ``__init__``.

torch makes its own iterator from them as always; nothing of ours stands between it and the loop.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from typing import Any

from .exits import at_exit, inheriting
from .site import call_site, identify

_APPLIED = "FEEDTUNE_APPLIED"  # in the environment of what an applied training starts: nothing more to say
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


class Applied:
    """What a process knows of the loader to be set.

    Args:
        settings: names and values of ``LoaderSettings``.
        identity: what ``identify`` says of the loader.
    """

    def __init__(self, settings: dict[str, Any], identity: dict[str, Any]) -> None:
        self._settings = settings
        self._identity = identity
        self._missed = False  # this process has made other loaders
        self._silent = False
        self._rank = 0
        os.register_at_fork(after_in_child=self._forked)
        at_exit(self._ended)

    def follow(self, cls: Any) -> None:
        """Wrap ``__init__`` of a DataLoader class."""
        make = cls.__init__

        @functools.wraps(make)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            make(loader, *args, **kwargs)
            self.made(loader)

        cls.__init__ = __init__

    def made(self, loader: Any) -> None:
        """A loader is made: set it if it is the one."""
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            return
        try:
            found = identify(loader, call_site()) == self._identity
            before = self._values(loader)
            if found:
                loader.__dict__.update(changes(loader, self._settings))
        except Exception as error:  # noqa: BLE001  # the user's training must run whatever is wrong with us
            self._say(f"a DataLoader could not be looked at ({error!r}); it stays as it is")
            return
        self._rank = max(self._rank, _local_rank())  # a process group may be gone by the end
        if inheriting():  # a spawned worker runs the script's top level once more
            return
        if found:
            self._say(f"{self._values(loader)} set on the DataLoader at {self._place} (was {before})")
            self._silent = True
            os.environ[_APPLIED] = "1"
        elif not self._missed:
            self._missed = True
            at_exit(self._ended)

    def _values(self, loader: Any) -> str:
        """The settings as a loader has them now; those that a tuning rarely moves only where it did."""
        names = ["num_workers", "prefetch_factor", "pin_memory"]
        names += [] if self._settings.get("in_order", True) else ["in_order"]
        names += ["multiprocessing_context"] if self._settings.get("multiprocessing_context") else []
        return ", ".join(f"{name}={getattr(loader, name)}" for name in names)

    @property
    def _place(self) -> str:
        frames = self._identity["frames"]
        return f"{frames[0][0]}:{frames[0][1]}" if frames else "an unknown place"

    def _ended(self) -> None:
        """The process ends: say so if it has trained, and the loader to be set never came."""
        if self._missed or _has_optimizer():
            self._rank = max(self._rank, _local_rank())
            size = self._identity["batch_size"]
            self._say(
                f"no DataLoader like the tuned one ({self._place}, dataset {self._identity['dataset']}, "
                f"batch size {size}) was made; settings were not applied"
            )
            self._silent = True

    def _say(self, text: str) -> None:
        """One line on stderr, from the first process of a node only."""
        if self._silent or _APPLIED in os.environ or self._rank:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            sys.stderr.write(f"feedtune apply: {text}\n")
            sys.stderr.flush()

    def _forked(self) -> None:
        """A child has made no loader yet."""
        self._missed = False


def changes(loader: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """New attributes of a loader; set in its ``__dict__``, since classes forbid setting some after init."""
    workers = settings["num_workers"]
    values = {
        "num_workers": workers,
        "prefetch_factor": settings["prefetch_factor"] if workers else None,
        "pin_memory": settings["pin_memory"],
    }
    method = settings.get("multiprocessing_context")
    if not workers:
        # torch refuses these without workers, in the next loader that a library makes from this one.
        values["timeout"] = 0
        values["persistent_workers"] = False
        values["_DataLoader__multiprocessing_context"] = None
    elif method is not None:
        values["_DataLoader__multiprocessing_context"] = multiprocessing.get_context(method)
    if "in_order" in settings and "in_order" in loader.__dict__:
        values["in_order"] = settings["in_order"]
    return values


def _has_optimizer() -> bool:
    """Whether an optimizer was made in this process: torch marks the ``step`` of its class then."""
    classes = [getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", object)]
    if classes == [object]:
        return False
    for cls in classes:
        classes += cls.__subclasses__()
    return any(getattr(cls.__dict__.get("step"), "hooked", False) for cls in classes)


def _local_rank() -> int:
    """This process's number on its node; 0 where nobody has given it one."""
    for name in _LOCAL_RANKS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
