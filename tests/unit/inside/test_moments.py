"""Events on a GPU's stream, on a GPU that is played here: which device and stream they lie on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from feedtune.inside.copies import CopyRate
from feedtune.inside.moments import CudaMoments
from feedtune.inside.stepclock import StepClock


class Gpu:
    """Two devices whose clock ticks with each event; ``current`` is the one that torch has chosen."""

    def __init__(self) -> None:
        self.ticks = itertools.count()
        self.current = 0
        self.handles = {0: 7, 1: 7}  # current stream of each device
        self.capturing = False
        self.made = 0
        self.touched: set[int] = set()

    def current_stream(self, device: int) -> SimpleNamespace:
        self.touched.add(device)
        return SimpleNamespace(device=device, handle=self.handles[device])

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.stream = SimpleNamespace(device=None)
        self.tick = -1

    def record(self, stream: SimpleNamespace) -> None:
        self.stream, self.tick = stream, next(self.gpu.ticks)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        if self.stream.device != other.stream.device:
            raise RuntimeError("events of different devices")
        return 1e3 * (other.tick - self.tick)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", gpu.handles.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    return gpu


def optimizer(device: int | None) -> SimpleNamespace:
    place = SimpleNamespace(is_cuda=device is not None, device=SimpleNamespace(index=device))
    return SimpleNamespace(param_groups=[{"params": []}, {"params": [place]}])


def clock_on(moments: CudaMoments) -> StepClock:
    clock = StepClock()
    clock.moments = moments
    return clock


def train(clock: StepClock, steps: int, device: int | None = 0, between: Callable[[], None] = lambda: None):
    for row in range(steps):
        clock.begin()
        clock.returned((row,))
        clock.backward_begins()
        clock.backward_ends()
        between()
        clock.optimizer_stepped(optimizer(device))
    clock.begin()
    return [parts for _, parts in clock.take()]


def test_a_rank_that_chose_no_device_takes_no_memory_on_the_first(gpu: Gpu) -> None:
    """``model.to("cuda:1")`` without ``set_device``: an event on device 0 would make a context there."""
    parts = train(clock_on(CudaMoments()), 3, device=1)
    assert gpu.touched == {1}
    assert ["s" in one for one in parts] == [False, True, True]


def test_parameters_on_the_host_train_on_the_current_device(gpu: Gpu) -> None:
    gpu.current = 1
    train(clock_on(CudaMoments()), 2, device=None)
    assert gpu.touched == {1}


def test_before_an_optimizer_steps_no_device_is_known(gpu: Gpu) -> None:
    clock = clock_on(CudaMoments())
    for row in range(3):
        clock.begin()
        clock.returned((row,))
    clock.begin()
    assert [parts for _, parts in clock.take()] == [None] * 3
    assert not gpu.touched
    assert clock.moments.trains is None


@pytest.mark.usefixtures("gpu")
def test_optimizers_that_step_inside_backward_show_the_device() -> None:
    """On a GPU backward runs on a thread of autograd's, and so do optimizers that are hooked into it."""
    clock = clock_on(CudaMoments())
    for row in range(4):
        clock.begin()
        clock.returned((row,))
        clock.backward_begins()
        clock.backwards += 1
        thread = threading.Thread(target=clock.optimizer_stepped, args=(optimizer(1),))
        thread.start()
        thread.join()
        clock.backwards -= 1
        clock.backward_ends()
    clock.begin()
    found = [parts for _, parts in clock.take()]
    assert clock.moments.trains == 1
    assert clock.moments.foreign == 0
    assert all({"t", "s", "b", "o"} <= set(parts) for parts in found[1:])


def test_waits_for_other_loaders_are_events_that_are_used_again(gpu: Gpu) -> None:
    clock = clock_on(CudaMoments())

    def other() -> None:
        clock.other_asked()
        clock.other_returned()

    assert [len(parts.get("d", ())) for parts in train(clock, 3, between=other)] == [0, 2, 2]
    train(clock, 3, between=other)
    made = gpu.made
    assert [parts["d"][1] for parts in train(clock, 3, between=other)] == [1.0] * 3  # a tick
    assert gpu.made <= made + 1  # the end of the last step is kept
    clock.returned((3,))
    gpu.handles[0] = 8  # a prefetcher's: what the training's stream does meanwhile is not known
    other()
    gpu.handles[0] = 7
    clock.begin()
    assert [set(parts) for _, parts in clock.take()] == [{"t", "s"}]


def test_edges_on_another_stream_say_nothing(gpu: Gpu) -> None:
    clock = clock_on(CudaMoments())
    train(clock, 2)
    gpu.handles[0] = 8  # a prefetcher's
    clock.begin()
    clock.returned((2,))
    gpu.handles[0] = 7
    clock.optimizer_stepped(optimizer(0))
    clock.begin()
    found = [parts for _, parts in clock.take()]
    assert "s" not in found[-1]
    assert clock.moments.foreign == 2


@pytest.mark.usefixtures("gpu")
def test_edges_on_another_thread_say_nothing() -> None:
    clock = clock_on(CudaMoments())
    train(clock, 2)
    thread = threading.Thread(target=clock.begin)
    thread.start()
    thread.join()
    assert clock.moments.foreign == 1


def test_nothing_is_recorded_into_a_graph(gpu: Gpu) -> None:
    clock = clock_on(CudaMoments())
    train(clock, 2)
    gpu.capturing = True
    assert clock.moments.stamp() is None


def test_copies_are_one_stretch_that_takes_two_events(gpu: Gpu) -> None:
    clock = clock_on(CudaMoments())

    def copy_five() -> None:
        for _ in range(5):
            clock.copy_begins()
            clock.copy_ends()

    train(clock, 3, between=copy_five)
    made = gpu.made
    for parts in train(clock, 40, between=copy_five)[1:]:
        assert parts["h"] == 5.0  # the last of five ends that many ticks after the first begins
    assert gpu.made - made <= 40 * 7  # not 40 times 14


def test_what_a_device_idles_while_its_host_collects_garbage_is_the_stretch_between_two_events(
    gpu: Gpu,
) -> None:
    clock = clock_on(CudaMoments())

    def collect() -> None:
        for young in (True, False):
            begun = clock.collection_begins(young)
            clock.collection_ends(begun)

    train(clock, 3)
    made = gpu.made
    found = train(clock, 40, between=collect)
    assert [parts["c"][1] for parts in found] == [1.0] * 40  # of the young one there is nothing
    assert gpu.made - made <= 40 * 6

    def elsewhere() -> None:
        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()

    found = train(clock, 3, between=elsewhere)
    assert all("c" not in parts for parts in found)


def test_events_are_used_again(gpu: Gpu) -> None:
    clock = clock_on(CudaMoments())
    for _ in range(20):
        train(clock, 10)
    assert gpu.made < 100


@pytest.mark.usefixtures("gpu")
def test_what_was_no_copy_to_the_device_leaves_none() -> None:
    clock = clock_on(CudaMoments())
    parts = train(clock, 3, between=clock.copy_begins)
    assert all("h" not in one for one in parts)
    assert not clock.copied


def test_a_batch_on_the_gpu_needs_no_copy() -> None:
    rate = CopyRate([1, "a"], 0)
    assert (rate.bytes, rate.seconds()) == (0, 0.0)


def test_a_copy_that_cannot_be_timed_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> tuple[int, int]:
        return (1 << 20, 1 << 37)

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    rate = CopyRate({"x": torch.ones(4, 3), "y": torch.ones(4)}, 0)
    assert (rate.bytes, rate.pinned, rate.seconds()) == (64, False, None)


@pytest.mark.usefixtures("gpu")
def test_what_the_host_takes_from_the_buffers_to_the_first_bucket_is_told() -> None:
    clock = clock_on(CudaMoments())

    def forward_and_backward() -> None:
        clock.waited("buffers", clock.moments.stamp())
        time.sleep(0.005)
        clock.bucket_ready(8)
        time.sleep(0.005)
        clock.bucket_ready(8)

    for parts in train(clock, 4, between=forward_and_backward)[1:]:
        assert parts["a"] >= 0.005
    assert all("a" not in parts for parts in train(clock, 4)[1:])
