"""Taps on torch's own functions that tell a step clock what the training does; each can be taken off again.

They call what they wrap with the same arguments, add two stamps, and know nothing of the training's values.
Inside ``torch.compile`` they step aside. What fails in them is told to ``Quiet``, never to the script.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

from .quiet import Quiet
from .rescue import rescue_from
from .stepclock import StepClock, collect_gc

# Blocking collectives that scripts call themselves, each step for a loss to print, or as a barrier.
_CALLS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip
# Not isend and irecv: torch compares what a P2POp is given with these very functions.
_PAIRS = ("batch_isend_irecv", "recv", "recv_object_list", "send", "send_object_list")


class Taps:
    """The taps of one process.

    Args:
        clock: told what happens.
        quiet: told what fails here.

    Attributes:
        pinned: batches that were pinned, and the seconds it took.
        untimed: collectives in steps that the script waits for later, and exchanges of two ranks alone:
            of neither it is seen where ranks wait for each other.
    """

    def __init__(self, clock: StepClock, quiet: Optional[Quiet] = None) -> None:
        self.clock = clock
        self.untimed = 0
        self._quiet = Quiet() if quiet is None else quiet
        self._undo: list[Callable[[], None]] = []
        self._inside = False  # in a collective that calls others
        self._stepping = False
        self.pinned: list[float] = [0, 0.0]

    def install(self) -> None:
        """Tap backward, optimizer, collectives and garbage collection; torch is complete by now."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        quiet, clock = self._quiet, self.clock

        def stepped(optimizer: Any, *_: Any) -> None:
            self._stepping = True
            quiet(clock.optimizer_stepped, optimizer)
            self._stepping = False

        handle = register_optimizer_step_post_hook(stepped)
        # Not while torch goes through its hooks.
        self._undo.append(lambda: None if self._stepping else handle.remove())
        self._replace(torch.autograd, "backward", self._backward)
        if torch.distributed.is_available():
            for names, tap in ((_CALLS, self._collective), (_PAIRS, self._pair)):
                for name in names:
                    if hasattr(torch.distributed, name):
                        self._replace_call(torch.distributed, name, tap)
        told = collect_gc(clock)

        def watch(phase: str, about: Any) -> None:
            quiet(told, phase, about)

        self._undo.append(rescue_from(watch))
        gc.callbacks.append(watch)
        self._undo.append(lambda: gc.callbacks.remove(watch))

    def install_pin(self, module: Any) -> None:
        """Tap what pins batches, in its thread or in the loop; ``module`` is torch's module of it."""
        self._replace(module, "pin_memory", self._pin)

    def install_copies(self) -> None:
        """Tap the copies to a GPU, once the process is known to use one."""
        import torch

        for name in ("to", "cuda", "copy_"):
            self._replace(torch.Tensor, name, self._copy)

    def remove(self) -> None:
        """Take them off; one that somebody else has wrapped meanwhile stays, and does nothing."""
        undo, self._undo = self._undo, []
        for call in undo:
            with contextlib.suppress(Exception):  # the script has taken it off itself, or put something there
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

    def _replace_call(self, owner: Any, name: str, tap: Callable[[Any], Any]) -> None:
        """Tap a function inside torch's wrapper around it: scripts import these by their names."""
        whole = getattr(owner, name)
        inner = getattr(whole, "__wrapped__", None)
        cells = [cell for cell in getattr(whole, "__closure__", None) or () if cell.cell_contents is inner]
        if inner is None or len(cells) != 1:
            self._replace(owner, name, tap)
            return
        (cell,) = cells
        cell.cell_contents = wrapped = functools.wraps(inner)(tap(inner))

        def undo() -> None:
            if cell.cell_contents is wrapped:
                cell.cell_contents = inner

        self._undo.append(undo)

    def _backward(self, before: Any) -> Any:
        import torch

        quiet, clock, compiling = self._quiet, self.clock, torch.compiler.is_compiling

        def backward(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return before(*args, **kwargs)
            mine = quiet(clock.backward_begins)
            clock.backwards += 1
            try:
                return before(*args, **kwargs)
            finally:
                clock.backwards -= 1
                if mine:
                    quiet(clock.backward_ends)

        return backward

    def _collective(self, before: Any) -> Any:
        import torch

        quiet, clock, compiling = self._quiet, self.clock, torch.compiler.is_compiling

        def collective(*args: Any, **kwargs: Any) -> Any:
            if compiling() or not self._is_the_scripts():
                return before(*args, **kwargs)
            arrive = quiet(clock.moments.stamp)
            self._inside = True
            try:
                work = before(*args, **kwargs)
            finally:
                self._inside = False
            if work is None:
                quiet(clock.waited, "call", arrive)
            else:  # it goes on meanwhile
                self.untimed += 1
            return work

        return collective

    def _is_the_scripts(self) -> bool:
        """Whether a call that begins now is one of the script's own, in a step."""
        return not (self._inside or self.clock.hooks) and bool(self._quiet(self.clock.mine))

    def _pair(self, before: Any) -> Any:
        import torch

        compiling = torch.compiler.is_compiling

        def exchange(*args: Any, **kwargs: Any) -> Any:
            if not compiling() and self._is_the_scripts():
                self.untimed += 1
            return before(*args, **kwargs)

        return exchange

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
        """To the GPU, or into a buffer there, as graphs of a step and prefetchers have them."""
        import torch

        quiet, clock, compiling = self._quiet, self.clock, torch.compiler.is_compiling

        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            source = tensor if tensor.is_cpu else args[0] if args else kwargs.get("other")
            if not getattr(source, "is_cpu", False) or compiling() or not quiet(clock.copy_begins):
                return before(tensor, *args, **kwargs)
            result = before(tensor, *args, **kwargs)
            if result.is_cuda:
                quiet(clock.copy_ends)
            return result

        return copy
