"""What DistributedDataParallel waits for: its gradient buckets and its broadcast of buffers.

On a host a backward returns once all its gradients are reduced, so that its end, and the moment in which the
last gradient is there, tell what a rank waits. On a GPU only a communication hook sees when a bucket is ready
and when all ranks have reduced it. DDP takes one a model. A script's own is wrapped on its way into DDP's
reducer, so that the model itself knows nothing of it; where there is none by the first forward pass, ours
does what DDP does without one, bit for bit, and gives way if the script brings one later. On a host it would
make one more pass over all gradients, some percent of a step. Where nothing is possible DDP is left alone,
and why is told.
"""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Optional

from .quiet import Quiet
from .stepclock import StepClock

_SETTLES_S = 0.5
_COMPILED = (
    "DDP's forward pass runs inside compiled code, where none of its waits can be seen; they can where the "
    "model is compiled before DDP gets it: DDP(torch.compile(model))"
)


class Buckets:
    """Sees the buckets of all DDP models of this process.

    Attributes:
        hook: ``own`` or ``user``: whose communication hook is timed; ``gradients``: these are; or ``none``.
        models: the DDP models that have run forward in training, and are alive.
        trained: how many there were.
        quiet: what fails here is told to it, and not to the script.
        everywhere: hosts get a communication hook, too.
        compiled: a model has trained inside compiled code.
    """

    def __init__(self) -> None:
        self.clock: Optional[StepClock] = None
        self.quiet = Quiet()
        self.hook = "none"
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.trained = 0
        self.everywhere = False
        self.compiled = False
        self._why: Optional[str] = None
        self._builtin: weakref.WeakSet[Any] = weakref.WeakSet()  # reducers with a hook of DDP's
        self._hooks: weakref.WeakKeyDictionary[Any, TimedHook] = weakref.WeakKeyDictionary()  # of reducers
        self._register: Any = None  # torch's own
        self._under_way: deque[weakref.ref[Any]] = deque(maxlen=256)  # what futures will call

    @property
    def why(self) -> Optional[str]:
        """Why gradients cannot be seen; ``None`` where they can."""
        return _COMPILED if self.compiled else self._why

    def patch(self, module: Any) -> None:
        """Wrap what the DDP class in ``module`` calls; the class object stays the same."""
        cls, dist, join = module.DistributedDataParallel, module.dist, module.Join
        atexit.register(self.settle)
        self._register, builtin = dist._register_comm_hook, dist._register_builtin_comm_hook
        prepare, broadcast, notify = cls._pre_forward, cls._sync_buffers, join.notify_join_context

        @functools.wraps(self._register)
        def _register_comm_hook(reducer: Any, state: Any, hook: Any) -> None:
            self._take(reducer, state, hook)

        @functools.wraps(builtin)
        def _register_builtin_comm_hook(reducer: Any, kind: Any) -> None:
            timed = self._hooks.get(reducer)
            if timed is not None and timed.own:
                timed.give_way(*_like_builtin(kind, timed.state))
                self.hook = "user"
                return
            builtin(reducer, kind)
            self._builtin.add(reducer)

        @functools.wraps(prepare)
        def _pre_forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            import torch

            if torch.compiler.is_compiling():
                self._in_compiled(model)
                return prepare(model, *inputs, **kwargs)
            self.quiet(self._before_forward, model)
            return prepare(model, *inputs, **kwargs)

        @functools.wraps(broadcast)
        def _sync_buffers(model: Any) -> Any:
            import torch

            clock = self.clock
            if torch.compiler.is_compiling() or clock is None or not self.quiet(clock.mine):
                return broadcast(model)
            arrive = self.quiet(clock.moments.stamp)
            result = broadcast(model)
            self.quiet(clock.waited, "buffers", arrive)
            return result

        @functools.wraps(notify)
        def notify_join_context(joinable: Any) -> Any:
            work = notify(joinable)
            timed = self._hooks.get(getattr(joinable, "reducer", None)) if work is not None else None
            if timed is not None:
                timed.joined = None if joinable._divide_by_initial_world_size else work
            return work

        dist._register_comm_hook = _register_comm_hook
        dist._register_builtin_comm_hook = _register_builtin_comm_hook
        cls._pre_forward = _pre_forward
        cls._sync_buffers = _sync_buffers
        join.notify_join_context = staticmethod(notify_join_context)

    def synchronize(self, wanted: bool) -> None:
        """Whether backward passes from now on synchronize gradients, as outside and inside ``no_sync()``."""
        for model in self.models:
            model.require_backward_grad_sync = wanted

    def calls(self, callback: Any) -> Any:
        """The callback, which a future will call and let go, on a thread of its process group's."""
        self._under_way.append(weakref.ref(callback))
        return callback

    def settle(self) -> None:
        """Before the interpreter ends: a thread that still has a callback of ours would abort the process."""
        until = time.monotonic() + _SETTLES_S
        while any(ref() is not None for ref in self._under_way) and time.monotonic() < until:
            time.sleep(0.001)

    def _take(self, reducer: Any, state: Any, hook: Any) -> None:
        """The script registers a communication hook."""
        timed = self._hooks.get(reducer)
        if timed is not None and timed.own:
            timed.give_way(state, hook)
        else:
            timed = TimedHook(self, state, hook)
            self._register(reducer, None, timed)
            self._hooks[reducer] = timed
        self.hook = "user"

    def _in_compiled(self, model: Any) -> None:
        """Becomes part of the compiled code: one store, and no guard of its own."""
        import torch

        if model.training and torch.is_grad_enabled():
            self.compiled = True

    def _before_forward(self, model: Any) -> None:
        """The model runs: if it trains and has no hook, time its gradients, or buckets with one of ours."""
        import torch

        if model in self.models or not model.training or not torch.is_grad_enabled():
            return
        self.models.add(model)
        self.trained += 1
        if model.reducer in self._hooks:
            return
        on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
        how = "gradients" if on_host and not self.everywhere else "own"
        why = _why_not(model)
        if how == "own":
            why = why or self._add_hook(model)
        elif why is None:
            self._watch_gradients(model)
        if why is None and self.hook == "none":
            self.hook = how
        self._why = self._why or why

    def _add_hook(self, model: Any) -> Optional[str]:
        """Time its buckets with a communication hook of ours; why not, where that cannot be."""
        why = _why_no_hook(model, model.reducer in self._builtin)
        if why is None:
            timed = TimedHook(self, model.process_group, None)
            try:
                self._register(model.reducer, None, timed)
            except RuntimeError as error:
                return f"DDP takes no communication hook: {error}"
            self._hooks[model.reducer] = timed
        return why

    def _watch_gradients(self, model: Any) -> None:
        """After DDP's own hooks on the nodes that accumulate gradients, which fill its buckets."""
        alive = weakref.ref(model)

        def ended() -> None:
            if self.clock is not None:
                self.quiet(self.clock.gradients_reduced)

        def ready() -> None:
            found, clock = alive(), self.clock
            if found is None or clock is None or not found.require_forward_param_sync:  # in no_sync()
                return
            if clock.gradient_ready():  # DDP waits in a callback of its own, which comes before the second
                _when_backward_ends(lambda: _when_backward_ends(ended))

        def hook(*_: Any) -> None:
            self.quiet(ready)

        for parameter in model.parameters():
            if parameter.requires_grad and not getattr(parameter, "_ddp_ignored", False):
                parameter.view_as(parameter).grad_fn.next_functions[0][0].register_hook(hook)


class TimedHook:
    """A communication hook that also tells the clock.

    Args:
        buckets: knows the clock.
        state: what the hook is given; our own takes the process group.
        hook: the script's; ``None`` for ours.
    """

    def __init__(self, buckets: Buckets, state: Any, hook: Optional[Callable[[Any, Any], Any]]) -> None:
        self._buckets = buckets
        self.state = state
        self._hook = hook
        self.joined: Any = None  # tells how many ranks are left, where the mean is over these

    @property
    def own(self) -> bool:
        """The script has none."""
        return self._hook is None

    def give_way(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """The script brings its own after all."""
        self.state, self._hook = state, hook

    def __call__(self, _: Any, bucket: Any) -> Any:
        """What DDP calls with each bucket that is ready."""
        clock, quiet = self._buckets.clock, self._buckets.quiet
        entry = None if clock is None else quiet(_ready, clock, bucket)
        if self._hook is None:
            return self._mean(bucket.buffer(), clock, entry)
        if clock is None:
            return self._hook(self.state, bucket)
        clock.hooks += 1
        try:
            future = self._hook(self.state, bucket)
        finally:
            clock.hooks -= 1
        if entry is not None and hasattr(future, "add_done_callback"):
            future.add_done_callback(self._buckets.calls(lambda _: quiet(clock.bucket_reduced, entry)))
        return future

    def _mean(self, buffer: Any, clock: Optional[StepClock], entry: Any) -> Any:
        """The mean over the ranks: the multiplication that DDP does without a hook, then the same sum."""
        quiet = self._buckets.quiet
        buffer.mul_(1.0 / self._ranks())  # DDP does this while it fills the buffer
        work = self.state.allreduce([buffer])

        def reduced(future: Any) -> Any:
            value = future.value()[0]
            if clock is not None and entry is not None:
                quiet(clock.bucket_reduced, entry)
            return value

        return work.get_future().then(self._buckets.calls(reduced))

    def _ranks(self) -> int:
        if self.joined is None:
            return int(self.state.size())
        self.joined.wait()
        return int(self.joined.get_future().value()[0].item())


BUCKETS = Buckets()  # models can be made before anything else of ours is


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Of the backward that runs; after what others have asked for."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(call)


def _ready(clock: StepClock, bucket: Any) -> Any:
    buffer = bucket.buffer()
    return clock.bucket_ready(buffer.numel() * buffer.element_size())


def _like_builtin(kind: Any, group: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """State and hook that do what a built-in hook does, for a reducer that has ours already."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if str(kind).endswith("FP16_COMPRESS"):
        return group, default_hooks.fp16_compress_hook
    return group, default_hooks.allreduce_hook


def _why_not(model: Any) -> Optional[str]:
    """Why nothing of a model's gradients can be seen."""
    if getattr(model, "_use_python_reducer", False):
        return "DDP's Python reducer runs inside the compiled backward"
    if getattr(model, "_delay_all_reduce_params", None):
        return "the model delays some of its reductions"
    return None


def _why_no_hook(model: Any, builtin: bool) -> Optional[str]:
    """Why a model cannot have a communication hook of ours."""
    size = model.process_group.size()
    if builtin:
        return "the model uses one of DDP's built-in communication hooks, which cannot be timed"
    if getattr(getattr(model, "_join_config", None), "enable", False):
        return "uneven inputs are joined, which averages over the ranks that are left"
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return "sparse gradients have no buckets to time"
    if model.gradient_as_bucket_view and size & (size - 1):
        # DDP multiplies a gradient that it copies, and divides one that lies in the bucket already.
        return f"with gradient_as_bucket_view on {size} ranks a hook would round otherwise than DDP"
    return None
