"""What DistributedDataParallel waits for: its gradient buckets and its broadcast of buffers.

Only a communication hook sees when a bucket is ready and when all ranks have reduced it. One can be
registered once a model: a script's own is wrapped; where there is none by the first forward pass, ours does
what DDP does without one, bit for bit; where neither is possible, DDP is left alone, and why is told.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Optional

from .stepclock import StepClock


class Buckets:
    """Sees the buckets of all DDP models of this process.

    Attributes:
        hook: ``own``, ``user`` or ``none``: whose communication hook is timed.
        why: why gradients cannot be seen; ``None`` where they can.
        models: the DDP models that have run forward in training.
    """

    def __init__(self) -> None:
        self.clock: Optional[StepClock] = None
        self.hook = "none"
        self.why: Optional[str] = None
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._register: Any = None  # DDP's own
        self._timed: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # models whose script has a hook that we wrapped

    def patch(self, module: Any) -> None:
        """Wrap methods of the DDP class in ``module``; the class object stays the same."""
        cls = module.DistributedDataParallel
        self._register = register = cls.register_comm_hook
        builtin = cls._register_builtin_comm_hook
        prepare, broadcast = cls._pre_forward, cls._sync_buffers

        @functools.wraps(register)
        def register_comm_hook(model: Any, state: Any, hook: Any) -> Any:
            if not callable(hook):
                return register(model, state, hook)
            result = register(model, state, self._watched(hook))
            self._timed.add(model)
            self.hook = "user"
            return result

        @functools.wraps(builtin)
        def _register_builtin_comm_hook(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = builtin(model, *args, **kwargs)
            self.why = "the model uses one of DDP's built-in communication hooks, which cannot be timed"
            return result

        @functools.wraps(prepare)
        def _pre_forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            if model not in self.models and model.training:
                self._first_forward(model)
            return prepare(model, *inputs, **kwargs)

        @functools.wraps(broadcast)
        def _sync_buffers(model: Any) -> Any:
            clock = self.clock
            if clock is None or not clock.mine():
                return broadcast(model)
            arrive = clock.moments.stamp()
            result = broadcast(model)
            clock.waited("buffers", arrive)
            return result

        cls.register_comm_hook = register_comm_hook
        cls._register_builtin_comm_hook = _register_builtin_comm_hook
        cls._pre_forward = _pre_forward
        cls._sync_buffers = _sync_buffers

    def synchronize(self, wanted: bool) -> None:
        """Whether backward passes from now on synchronize gradients, as outside and inside ``no_sync()``."""
        for model in self.models:
            model.require_backward_grad_sync = wanted

    def _first_forward(self, model: Any) -> None:
        """The model trains: time its buckets with a hook of ours, if it has none."""
        import torch

        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self.models.add(model)
        if model in self._timed:
            return
        why = _why_not(model)
        if why is None:
            try:
                # Without type annotations and with these names, as DDP wants it.
                type(model).register_comm_hook.__wrapped__(
                    model, model.process_group, self._watched(_reduced)
                )
            except (RuntimeError, TypeError, ValueError) as error:
                why = f"DDP takes no communication hook: {error}"
            else:
                self.hook = "own"
        self.why = self.why or why

    def _watched(self, hook: Any) -> Any:
        """A communication hook that also tells the clock."""

        @functools.wraps(hook)
        def watched(state: Any, bucket: Any) -> Any:
            clock = self.clock
            if clock is None:
                return hook(state, bucket)
            buffer = bucket.buffer()
            entry = clock.bucket_ready(buffer.numel() * buffer.element_size())
            future = hook(state, bucket)
            if entry is not None and hasattr(future, "add_done_callback"):
                future.add_done_callback(lambda _: clock.bucket_reduced(entry))
            return future

        if not hasattr(hook, "__name__"):  # a callable object, whose name DDP asks for
            watched.__name__ = watched.__qualname__ = type(hook).__name__
        return watched


BUCKETS = Buckets()  # models can be made before anything else of ours is


def _reduced(state: Any, bucket: Any) -> Any:
    """The mean over the ranks: the same multiplication that DDP does without a hook, then the same sum."""
    import torch.distributed as dist

    buffer = bucket.buffer()
    buffer.mul_(1.0 / state.size())
    work = dist.all_reduce(buffer, group=state, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_reduced.__annotations__.clear()  # DDP accepts its own types there, or none


def _why_not(model: Any) -> Optional[str]:
    """Why a model cannot have a hook of ours."""
    if getattr(model, "_comm_hooks", None):
        return "the script has registered its communication hook before feedtune could see it"
    if getattr(model, "mixed_precision", None) is not None:
        return "DDP's mixed precision brings a communication hook of its own"
    if getattr(model, "_use_python_reducer", False):
        return "DDP's Python reducer runs inside the compiled backward"
    if getattr(getattr(model, "_join_config", None), "enable", False):
        return "uneven inputs are joined, which averages over the ranks that are left"
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return "sparse gradients have no buckets to time"
    if getattr(model, "_delay_all_reduce_params", None):
        return "the model delays some of its reductions"
    return None
