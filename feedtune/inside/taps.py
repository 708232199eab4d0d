"""Taps on torch's own functions that tell a step clock what the training does; each can be taken off again.

They call what they wrap with the same arguments, add two stamps, and know nothing of the training's values.
Inside ``torch.compile`` they step aside.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

from .stepclock import StepClock, collect_gc

# Blocking collectives that scripts call themselves, each step for a loss to print, or as a barrier.
_CALLS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter",
)  # fmt: skip


class Taps:
    """The taps of one process.

    Args:
        clock: told what happens.
    """

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._undo: list[Callable[[], None]] = []
        self._inside = False  # in a collective that calls others
        self.pinned: list[float] = [0, 0.0]  # batches, seconds

    def install(self) -> None:
        """Tap backward, optimizer, collectives and garbage collection; torch is complete by now."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        clock = self.clock
        handle = register_optimizer_step_post_hook(lambda *_: clock.optimizer_stepped())
        self._undo.append(handle.remove)
        self._replace(torch.autograd, "backward", self._backward)
        if torch.distributed.is_available():
            for name in _CALLS:
                if hasattr(torch.distributed, name):
                    self._replace(torch.distributed, name, self._collective)
        watch = collect_gc(clock)
        gc.callbacks.append(watch)
        self._undo.append(lambda: gc.callbacks.remove(watch))

    def install_pin(self, module: Any) -> None:
        """Tap what pins batches, in its thread or in the loop; ``module`` is torch's module of it."""
        self._replace(module, "pin_memory", self._pin)

    def install_copies(self) -> None:
        """Tap the copies to a GPU, once the process is known to use one."""
        import torch

        for name in ("to", "cuda"):
            self._replace(torch.Tensor, name, self._copy)

    def remove(self) -> None:
        """Take them off; one that somebody else has wrapped meanwhile stays, and does nothing."""
        undo, self._undo = self._undo, []
        for call in undo:
            call()

    def _replace(self, owner: Any, name: str, tap: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        own = vars(owner).get(name)  # a class may inherit it
        wrapped = functools.wraps(before)(tap(before))
        setattr(owner, name, wrapped)

        def undo() -> None:
            if vars(owner).get(name) is wrapped:
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)

        self._undo.append(undo)

    def _backward(self, before: Any) -> Any:
        clock = self.clock

        def backward(*args: Any, **kwargs: Any) -> Any:
            if not clock.mine():
                return before(*args, **kwargs)
            clock.backward_begins()
            result = before(*args, **kwargs)
            clock.backward_ends()
            return result

        return backward

    def _collective(self, before: Any) -> Any:
        import torch

        clock, compiling = self.clock, torch.compiler.is_compiling

        def collective(*args: Any, **kwargs: Any) -> Any:
            if compiling() or self._inside or kwargs.get("async_op") or not clock.mine():
                return before(*args, **kwargs)
            arrive = clock.moments.stamp()
            self._inside = True
            try:
                return before(*args, **kwargs)
            finally:
                self._inside = False
                clock.waited("call", arrive)

        return collective

    def _pin(self, before: Any) -> Any:
        pinned, inside = self.pinned, threading.local()

        def pin_memory(data: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "yes", False):  # it calls itself for what a batch holds
                return before(data, *args, **kwargs)
            inside.yes = True
            begun = time.monotonic()
            try:
                return before(data, *args, **kwargs)
            finally:
                inside.yes = False
                pinned[0] += 1
                pinned[1] += time.monotonic() - begun

        return pin_memory

    def _copy(self, before: Any) -> Any:
        import torch

        clock, compiling = self.clock, torch.compiler.is_compiling

        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not tensor.is_cpu or not clock.mine():
                return before(tensor, *args, **kwargs)
            begin = clock.moments.stamp()
            result = before(tensor, *args, **kwargs)
            if result.is_cuda:
                clock.copied(begin)
            return result

        return copy
