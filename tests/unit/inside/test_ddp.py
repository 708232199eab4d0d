"""Which communication hook DDP ends up with, and that the model, and what it computes, know nothing of it."""

from __future__ import annotations

import atexit
import copy
import io
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel, distributed

from feedtune.inside.ddp import Buckets, TimedHook, _why_no_hook, _why_not
from feedtune.inside.quiet import Quiet
from feedtune.inside.stepclock import StepClock


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def buckets(monkeypatch):
    """Patched into DDP for the test."""
    for owner, name in (
        (DistributedDataParallel, "_pre_forward"),
        (DistributedDataParallel, "_sync_buffers"),
        (dist, "_register_comm_hook"),
        (dist, "_register_builtin_comm_hook"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(
        distributed.Join, "notify_join_context", staticmethod(distributed.Join.notify_join_context)
    )
    found = Buckets()
    found.everywhere = True
    found.clock = StepClock()
    found.patch(distributed)
    yield found
    atexit.unregister(found.settle)


def model(**words) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **words)


def backward(ddp: nn.Module) -> list[torch.Tensor]:
    ddp(torch.arange(8.0).sin().view(2, 4)).exp().sum().backward()
    return [parameter.grad for parameter in ddp.parameters()]


def stepped(buckets: Buckets, ddp: nn.Module, named: bool = True) -> dict:
    """The parts of a step with a backward of that model, which the clock is told of, or not."""
    clock = buckets.clock
    clock.begin()
    clock.returned((0,))
    if named:
        clock.backward_begins()
    backward(ddp)
    if named:
        clock.backward_ends()
    clock.begin()
    ((_, parts),) = clock.take()
    return parts


def doubled(state, bucket):
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value() * 2)


def test_a_model_without_a_hook_gets_ours(buckets) -> None:
    parts = stepped(buckets, model())
    assert (buckets.hook, buckets.why, buckets.trained) == ("own", None, 1)
    assert [kind for kind, *_ in parts["y"]] == ["buffers", "gradients"]
    assert parts["v"] == 4 * (16 + 4 + 4 + 4)
    assert len(parts["w"]) == 1


def test_it_computes_what_ddp_computes(buckets) -> None:
    found = backward(model())
    assert buckets.hook == "own"
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain.load_state_dict(model().module.state_dict())
    assert all(map(torch.equal, found, backward(plain)))


def test_the_mean_is_a_multiplication_and_a_sum() -> None:
    """A division by 3 rounds otherwise."""
    summed = []

    class Group:
        def size(self):
            return 3

        def allreduce(self, tensors):
            summed.extend(tensors)
            future = torch.futures.Future()
            future.set_result(tensors)
            return SimpleNamespace(get_future=lambda: future)

    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    bucket = SimpleNamespace(buffer=lambda: values.clone())
    found = TimedHook(Buckets(), Group(), None)(None, bucket).wait()
    assert torch.equal(found, torch.mul(values, 1.0 / 3))
    assert not torch.equal(found, values / 3)
    assert found is summed[0]


def test_of_a_join_the_mean_is_over_the_ranks_that_are_left() -> None:
    hook = TimedHook(Buckets(), SimpleNamespace(size=lambda: 4), None)
    assert hook._ranks() == 4
    future = torch.futures.Future()
    future.set_result([torch.full((1,), 3.0)])
    hook.joined = SimpleNamespace(wait=lambda: None, get_future=lambda: future)
    assert hook._ranks() == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_script_s_hook_is_timed_and_alone_in_the_model(buckets, late: bool) -> None:
    ddp, seen = model(), []
    if late:
        plain = backward(ddp)
        assert buckets.hook == "own"
        ddp.zero_grad()
    ddp.register_comm_hook(seen, doubled)
    parts = stepped(buckets, ddp)
    assert seen == [0]
    assert buckets.hook == "user"
    assert [kind for kind, *_ in parts["y"]] == ["buffers", "gradients"]
    assert ddp._comm_hooks == [(doubled, seen)]
    if late:
        assert torch.equal(ddp.module[1].bias.grad, plain[3] * 2)
    with pytest.raises(RuntimeError, match="only be called once"):
        ddp.register_comm_hook(seen, doubled)


def test_a_hook_that_ddp_refuses_is_refused(buckets) -> None:
    for hook, error in ((lambda _, __: None, KeyError), (partial(doubled), AttributeError), (3, TypeError)):
        with pytest.raises(error):
            model().register_comm_hook(None, hook)
    assert buckets.hook == "none"


def test_what_a_script_s_hook_raises_is_raised(buckets) -> None:
    ddp = model()

    def broken(_, bucket):
        raise ZeroDivisionError(bucket)

    ddp.register_comm_hook(None, broken)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="GradBucket"):
        backward(ddp)
    assert not buckets.quiet.off


def test_built_in_hooks_are_left_alone(buckets) -> None:
    ddp = model()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert "w" not in stepped(buckets, ddp)
    assert "built-in" in buckets.why


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_a_built_in_hook_that_comes_late_is_done_as_it_would_be(kind: str) -> None:
    kind = getattr(dist.BuiltinCommHookType, kind)
    bare, late = model(), model()
    bare._register_builtin_comm_hook(kind)
    backward(late)
    late.zero_grad()
    late._register_builtin_comm_hook(kind)
    for buffer, other in zip(late.buffers(), model().buffers(), strict=True):
        buffer.copy_(other)
    assert all(map(torch.equal, backward(late), backward(bare)))


def test_a_model_is_saved_and_copied_as_without_us(buckets) -> None:
    ddp = model()
    backward(ddp)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    for twin in (copy.deepcopy(ddp), torch.load(file, weights_only=False)):
        twin.zero_grad()
        assert "w" in stepped(buckets, twin)
    assert ddp._comm_hooks == []


def test_an_evaluation_decides_nothing(buckets) -> None:
    ddp = model()
    with torch.no_grad():
        ddp(torch.ones(2, 4))
    ddp.eval()
    ddp(torch.ones(2, 4))
    assert (buckets.trained, buckets.hook) == (0, "none")
    ddp.register_comm_hook([], doubled)
    assert buckets.hook == "user"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"_join_config": SimpleNamespace(enable=True)}, "joined"),
        ({"modules": lambda: [SimpleNamespace(sparse=True)]}, "sparse"),
        ({"gradient_as_bucket_view": True, "process_group": SimpleNamespace(size=lambda: 6)}, "on 6 ranks"),
        ({"gradient_as_bucket_view": True}, None),
        ({"process_group": SimpleNamespace(size=lambda: 6)}, None),
    ],
)
def test_where_ours_would_change_something_there_is_none(changed: dict, why: str | None) -> None:
    plain = {
        "process_group": SimpleNamespace(size=lambda: 8),
        "gradient_as_bucket_view": False,
        "modules": lambda: [nn.Linear(1, 1)],
    }
    model = SimpleNamespace(**{**plain, **changed})
    assert _why_not(model) is None
    found = _why_no_hook(model, builtin=False)
    assert (found is None) if why is None else (why in found)
    assert "built-in" in _why_no_hook(model, builtin=True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"_use_python_reducer": True}, "compiled backward"), ({"_delay_all_reduce_params": [1]}, "delays")],
)
def test_what_cannot_be_seen_in_any_way_is_told(changed: dict, why: str) -> None:
    assert why in _why_not(SimpleNamespace(**changed))


@pytest.fixture
def hosts(buckets):
    """As on hosts: gradients are timed, and there is no communication hook of ours."""
    buckets.everywhere = False
    return buckets


@pytest.mark.parametrize("named", [True, False])
def test_on_a_host_the_last_gradient_and_the_end_of_backward_tell_the_wait(hosts, named: bool) -> None:
    ddp = model(bucket_cap_mb=0.0001)
    for _ in range(3):
        parts = stepped(hosts, ddp, named)
        assert [kind for kind, *_ in parts["y"]] == ["buffers", "gradients"]
        (_, buffers_end), (arrive, leave) = (of[1:] for of in parts["y"])
        assert buffers_end <= arrive <= leave
        assert "w" not in parts
    assert (hosts.hook, hosts.why, hosts.trained) == ("gradients", None, 1)
    assert ddp._comm_hooks == []


def test_without_synchronization_there_is_no_wait_for_gradients(hosts) -> None:
    ddp = model()

    def waits() -> bool:
        return any(kind == "gradients" for kind, *_ in stepped(hosts, ddp).get("y", ()))

    with ddp.no_sync():
        assert not waits()
    assert waits()
    hosts.synchronize(False)
    assert not waits()
    hosts.synchronize(True)
    assert waits()


def test_the_last_gradient_is_that_of_the_slowest_layer(hosts) -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ARG004 (autograd's signature)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # noqa: ARG004 (autograd's signature)
            time.sleep(0.05)
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.second(Late.apply(self.first(x)))

    parts = stepped(hosts, DistributedDataParallel(Net()))
    ((_, arrive, leave),) = parts["y"]
    assert arrive > 0.05
    assert leave - arrive < 0.05


@pytest.mark.parametrize("kind", ["script", "built-in"])
@pytest.mark.parametrize("late", [False, True])
def test_on_a_host_hooks_of_the_script_s_are_timed_either_way(hosts, kind: str, late: bool) -> None:
    ddp = model()
    if late:
        stepped(hosts, ddp)
    if kind == "script":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    parts = stepped(hosts, ddp)
    assert [of[0] for of in parts["y"]] == ["buffers", "gradients"]
    assert (hosts.hook, hosts.why) == ("user" if kind == "script" else "gradients", None)


def test_sparse_gradients_and_frozen_parameters_are_seen_on_a_host(hosts) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 2)
            self.last.bias.requires_grad_(False)

        def forward(self, x):
            return self.last(self.words(x.long().abs() % 20))

    assert stepped(hosts, DistributedDataParallel(Words()))["y"][-1][0] == "gradients"


@pytest.mark.parametrize("method", ["mine", "bucket_ready", "bucket_reduced", "waited"])
@pytest.mark.parametrize("own", [True, False])
def test_a_clock_that_fails_changes_nothing(buckets, monkeypatch, method: str, own: bool) -> None:
    def failing(*_: object) -> None:
        raise LookupError(method)

    told = []
    buckets.quiet.failed = told.append
    ddp = model()
    if not own:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    buckets.clock.begin()
    monkeypatch.setattr(buckets.clock, method, failing)
    found = backward(ddp)
    until = time.monotonic() + 10
    while not told and time.monotonic() < until:
        time.sleep(0.001)  # what a future calls at its end may come late
    assert [str(error) for error in told] == [method]
    again = model()
    assert all(map(torch.equal, found, backward(again)))


def test_a_model_in_compiled_code_is_told_and_compiled_once(buckets) -> None:
    counter = CompileCounter()
    ddp = torch.compile(DistributedDataParallel(nn.Linear(4, 4)), backend=counter)
    ddp.eval()(torch.ones(2, 4))
    assert buckets.why is None
    ddp.train()
    for number in range(4):
        if number == 1:
            frames = counter.frame_count
        backward(ddp)
    assert "compiled code" in buckets.why
    assert counter.frame_count == frames


def test_a_model_that_cannot_be_looked_at_trains(buckets, monkeypatch) -> None:
    told = []
    buckets.quiet.failed = told.append
    monkeypatch.setattr("feedtune.inside.ddp._why_not", lambda _: 1 // 0)
    backward(model())
    assert len(told) == 1
    assert buckets.hook == "none"


def test_quiet_tells_once_and_then_calls_nothing() -> None:
    quiet, told, calls = Quiet(), [], []
    quiet.failed = told.append
    assert quiet(lambda x: x + 1, 2) == 3
    assert quiet(lambda: 1 // 0) is None
    assert quiet(calls.append, 1) is None
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert (calls, quiet.off) == ([], True)
    with pytest.raises(KeyboardInterrupt):
        Quiet()(_interrupted)


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_the_end_waits_for_what_futures_still_call_but_not_for_ever(buckets) -> None:
    """A thread that lets go of a Python object while the interpreter ends aborts the process."""
    held = [buckets.calls(lambda: None)]
    begun = time.monotonic()
    threading.Timer(0.1, held.clear).start()
    buckets.settle()
    assert not held
    assert time.monotonic() - begun >= 0.1
    held.append(buckets.calls(lambda: None))
    buckets.settle()
    assert held


def test_a_model_s_callbacks_are_waited_for(buckets) -> None:
    for late in (False, True):
        ddp = model()
        if late:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        before = len(buckets._under_way)
        stepped(buckets, ddp)
        assert len(buckets._under_way) == before + 1
    buckets.settle()
    assert all(ref() is None for ref in buckets._under_way)
