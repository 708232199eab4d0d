"""What a step's time was spent on, as the clock takes it down."""

from __future__ import annotations

import gc
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from feedtune.inside.moments import HostMoments
from feedtune.inside.stepclock import StepClock
from feedtune.inside.taps import Taps


class Hands(HostMoments):
    """A clock whose hands the test moves; a device that is behind by ``lag`` seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lag = 0.0
        self.released: list[object] = []

    def stamp(self, _: object = None) -> float:
        self.now += 1.0
        return self.now

    step_edge = optimizer_stepped = stamp

    def passed(self, stamp: float) -> bool:
        return stamp <= self.now - self.lag

    def release(self, step: object) -> None:
        self.released.append(step)


@pytest.fixture
def clock() -> StepClock:
    clock = StepClock()
    clock.moments = Hands()
    return clock


def a_step(clock: StepClock, row: int) -> None:
    clock.begin()
    clock.returned((row,))


def tell_all(clock: StepClock) -> None:
    clock.backward_begins()
    clock.bucket_ready(8)
    clock.waited("call", 0.0)
    clock.copy_begins()
    clock.collection_ends(clock.collection_begins())
    clock.other_asked()
    clock.other_returned()
    clock.backward_ends()
    clock.optimizer_stepped(None)


def test_a_step_ends_where_the_next_one_begins(clock) -> None:
    a_step(clock, 0)  # begins at 1, has its batch at 2
    clock.backward_begins()
    clock.backward_ends()  # 3
    clock.optimizer_stepped(None)  # 4
    assert clock.take() == []
    a_step(clock, 1)
    assert clock.take() == [((0,), {"b": 2.0, "o": 3.0})]
    assert clock.take(at_end=True) == [((1,), None)]
    assert clock.take(at_end=True) == []


def test_a_request_that_brings_no_batch_ends_a_step_and_is_none(clock) -> None:
    a_step(clock, 0)
    clock.begin()  # the epoch ends here
    clock.optimizer_stepped(None)  # and this belongs to nobody
    a_step(clock, 1)
    a_step(clock, 2)
    assert [row for row, _ in clock.take()] == [(0,), (1,)]


def test_steps_wait_in_order_for_a_device_that_is_behind(clock) -> None:
    clock.moments.lag = 5.0
    for row in range(4):
        a_step(clock, row)
    assert [row for row, _ in clock.take()] == [(0,)]
    clock.moments.lag = 0.0
    assert [row for row, _ in clock.take()] == [(1,), (2,)]
    assert len(clock.moments.released) == 3


def test_a_device_that_never_comes_costs_a_bounded_memory(clock) -> None:
    clock.moments.lag = 1e9
    found = []
    for row in range(1000):
        a_step(clock, row)
        found += clock.take()
    assert clock.waiting <= 257
    assert clock.lost == len(found) > 700
    assert [row for row, _ in found] == [(row,) for row in range(len(found))]
    assert {parts for _, parts in found} == {None}


def test_of_steps_that_rest_there_is_a_row_in_its_place(clock) -> None:
    a_step(clock, 0)
    clock.begin(full=False)  # 3: the end of the step before
    clock.returned((1,))
    tell_all(clock)
    clock.begin(full=False)
    clock.returned((2,))
    assert clock.known == 3
    a_step(clock, 3)
    tell_all(clock)
    a_step(clock, 4)
    found = clock.take()
    assert [row for row, _ in found] == [(0,), (1,), (2,), (3,)]
    assert [parts is None for _, parts in found] == [False, True, True, False]
    assert clock.moments.now == 16.0  # two of each of three steps, the end of one, nine of training


def test_steps_are_worth_taking_in_bulk(clock) -> None:
    for row in range(64):
        assert not clock.full
        a_step(clock, row)
    a_step(clock, 64)
    assert clock.full
    assert len(clock.take()) == 64
    assert not clock.full


def test_the_last_bucket_of_a_backward_is_where_ranks_wait(clock) -> None:
    a_step(clock, 0)
    clock.backward_begins()
    first, last = clock.bucket_ready(100), clock.bucket_ready(20)  # 3, 4
    clock.bucket_reduced(first)  # 5
    clock.bucket_reduced(last)  # 6
    clock.backward_ends()  # 7
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert parts["y"] == [["gradients", 3.0, 5.0]]
    assert (parts["r"], parts["w"], parts["v"]) == (2.0, [2.0, 2.0], 120)


def test_a_callback_that_comes_late_does_not_move_the_end_of_the_wait(clock) -> None:
    """A bucket is reduced when backward returns, whenever the interpreter lets the callback run."""
    a_step(clock, 0)
    clock.backward_begins()
    entry = clock.bucket_ready(8)  # 3
    clock.backward_ends()  # 4
    clock.bucket_reduced(entry)  # 5
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert parts["y"] == [["gradients", 2.0, 3.0]]


def test_two_backwards_are_two_points_of_waiting(clock) -> None:
    a_step(clock, 0)
    for _ in range(2):
        clock.backward_begins()
        clock.bucket_reduced(clock.bucket_ready(8))
        clock.backward_ends()
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert [kind for kind, *_ in parts["y"]] == ["gradients", "gradients"]
    assert parts["b"] == 7.0
    assert parts["b"] == parts["y"][1][2] + 1.0


def test_a_backward_without_buckets_waits_for_nobody(clock) -> None:
    a_step(clock, 0)
    clock.backward_begins()
    clock.backward_ends()
    a_step(clock, 1)
    assert "y" not in clock.take()[0][1]


def test_what_is_kept_of_one_step_is_bounded(clock) -> None:
    a_step(clock, 0)
    clock.backward_begins()
    for _ in range(200):
        clock.bucket_reduced(clock.bucket_ready(1))
    clock.backward_ends()
    for _ in range(100):
        clock.waited("call", clock.moments.stamp())
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert len(parts["w"]) == 32
    assert parts["v"] == 200
    assert len(parts["y"]) == 65
    assert parts["y"][-1] == ["call", None, None]
    assert clock.crowded == 1


def test_without_a_step_nothing_is_taken_down(clock) -> None:
    clock.backward_begins()
    clock.backward_ends()
    clock.waited("call", 0.0)
    clock.copy_begins()
    clock.copy_ends()
    clock.collection_ends(clock.collection_begins())
    clock.other_asked()
    clock.other_returned()
    assert clock.bucket_ready(3) is None
    assert clock.take(at_end=True) == []


@pytest.fixture
def tapped():
    clock = StepClock()
    taps = Taps(clock)
    taps.install()
    yield clock
    taps.remove()


def train(steps: int = 1) -> torch.nn.Module:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model


def test_a_training_step_is_seen_through_torch_itself(tapped) -> None:
    train()  # whose first use of torch collects garbage of its own
    a_step(tapped, 0)
    train()
    begun = time.monotonic()
    gc.collect()
    took = time.monotonic() - begun
    a_step(tapped, 1)
    ((_, parts),) = tapped.take()
    assert 0 <= parts["b"] <= parts["o"]
    assert parts["o"] <= parts["c"][-2]  # collected after the optimizer's step
    assert 0 < parts["c"][-1] <= took


def test_short_collections_are_added_to_the_one_before_and_many_take_no_more_room(clock) -> None:
    a_step(clock, 0)
    for seconds in (0.5, 0.0004, 0.0004, *[0.25] * 20):
        begun = clock.collection_begins()
        clock.moments.now += seconds - 1.0
        clock.collection_ends(begun)
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert len(parts["c"]) == 2 * 8
    assert parts["c"][1] == pytest.approx(0.5008)
    assert sum(parts["c"][1::2]) == pytest.approx(0.5008 + 20 * 0.25)


def test_waits_for_other_loaders_are_kept_one_by_one(clock) -> None:
    clock.begin()  # 1
    clock.other_asked()  # by a dataset, for its part of the batch
    clock.other_returned()
    clock.returned((0,))  # 2
    for _ in range(2):
        clock.other_asked()  # 3, 5
        assert clock.collection_begins() is None  # part of the wait
        clock.other_returned()  # 4, 6
    assert clock.collection_begins() == 7.0
    clock.other_returned()  # that was not asked
    a_step(clock, 1)
    assert clock.take() == [((0,), {"d": [2.0, 1.0, 4.0, 1.0]})]


@pytest.mark.parametrize("device", [False, True])
def test_many_waits_for_other_loaders_take_no_more_room(clock, device: bool) -> None:
    clock.moments.device = device
    a_step(clock, 0)
    for _ in range(100):
        clock.other_asked()
        clock.other_returned()
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert len(parts["d"]) == 2 * 8
    assert sum(parts["d"][1::2]) == (8.0 if device else 100.0)  # spans of a device cannot be added up


def test_a_wait_for_another_loader_between_two_copies_is_no_copy(clock) -> None:
    a_step(clock, 0)
    for _ in range(2):
        clock.copy_begins()  # 3
        clock.copy_ends()  # 4, 7
        clock.other_asked()  # 5, 8
        clock.other_returned()  # 6, 9
    a_step(clock, 1)
    ((_, parts),) = clock.take()
    assert parts == {"h": 3.0, "d": [4.0, 1.0, 7.0, 1.0]}


def test_another_thread_s_wait_for_a_loader_is_not_this_step_s(clock) -> None:
    a_step(clock, 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(clock.other_asked).result()
        clock.other_asked()
        pool.submit(clock.other_returned).result()
    clock.other_returned()
    a_step(clock, 1)
    assert clock.take() == [((0,), {"d": [2.0, 1.0]})]


def test_another_thread_s_work_is_not_this_step_s(tapped) -> None:
    a_step(tapped, 0)
    train()
    a_step(tapped, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: torch.ones(1, requires_grad=True).sum().backward()).result()
    a_step(tapped, 2)
    assert "b" not in tapped.take()[1][1]


def test_a_prefetching_thread_does_not_take_the_training_s_place(tapped) -> None:
    a_step(tapped, 0)
    train()
    fetcher = threading.Thread(target=a_step, args=(tapped, 1))
    fetcher.start()
    fetcher.join()
    train()
    a_step(tapped, 2)
    assert all("b" in parts for _, parts in tapped.take())


def test_taps_come_off_again() -> None:
    before = torch.autograd.backward, torch.distributed.monitored_barrier, list(gc.callbacks)
    taps = Taps(StepClock())
    taps.install()
    assert torch.autograd.backward is not before[0]
    taps.remove()
    assert (torch.autograd.backward, torch.distributed.monitored_barrier, list(gc.callbacks)) == before


def test_a_tap_that_somebody_has_wrapped_stays_and_does_nothing() -> None:
    clock = StepClock()
    taps = Taps(clock)
    before = torch.autograd.backward
    taps.install()
    inner = torch.autograd.backward
    try:
        torch.autograd.backward = lambda *args, **kwargs: inner(*args, **kwargs)
        outer = torch.autograd.backward
        taps.remove()
        assert torch.autograd.backward is outer
        train()
    finally:
        torch.autograd.backward = before
    assert clock.take(at_end=True) == []


@pytest.mark.parametrize("install", ["install_copies", "install"])
def test_a_compiled_training_is_compiled_as_without_taps(install) -> None:
    from torch._dynamo.testing import CompileCounter

    def work(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(3, dtype=torch.float64)
        buffer.copy_(x.to(torch.float64) * 2)
        return buffer.to(torch.float32).sin()

    def compiled() -> tuple[int, torch.Tensor]:
        torch._dynamo.reset()
        counter = CompileCounter()
        found = torch.compile(work, backend=counter, fullgraph=True)(torch.ones(3))
        return counter.op_count, found

    before = compiled()
    taps = Taps(StepClock())
    getattr(taps, install)()
    try:
        taps.clock.begin()
        after = compiled()
    finally:
        taps.remove()
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


class Place:
    """As a tensor on a GPU, or as one that is not."""

    def __init__(self, on_gpu: bool) -> None:
        self.is_cuda, self.is_cpu = on_gpu, not on_gpu


def test_copies_to_a_gpu_are_seen_whichever_way_they_are_made() -> None:
    clock = StepClock()
    taps = Taps(clock)
    gpu, cpu = Place(True), Place(False)
    to, into = taps._copy(lambda _, target: target), taps._copy(lambda target, *_, **__: target)
    ways = {
        "to a GPU": (lambda: to(cpu, gpu), True),
        "to the CPU": (lambda: to(cpu, cpu), False),
        "between GPUs": (lambda: to(gpu, gpu), False),
        "into a buffer": (lambda: into(gpu, cpu, True), True),
        "into a buffer, by name": (lambda: into(gpu, other=cpu), True),
        "of a number into a buffer": (lambda: into(gpu, 3.0), False),
        "into a buffer on the CPU": (lambda: into(cpu, cpu), False),
        "from a GPU into another": (lambda: into(gpu, gpu), False),
    }
    for way, (copy, seen) in ways.items():
        clock.begin()
        clock.returned((1,))
        assert copy() in (gpu, cpu)
        clock.begin()
        ((_, parts),) = clock.take()
        assert ("h" in parts) == seen, way


def test_pinned_batches_are_counted_whole() -> None:
    module = types.SimpleNamespace()

    def pin_memory(data: object, device: object = None) -> object:
        if isinstance(data, list):
            return [module.pin_memory(one, device) for one in data]
        time.sleep(0.002)
        return data

    module.pin_memory = pin_memory
    taps = Taps(StepClock())
    taps.install_pin(module)
    batches = [[1, [2, 3]], [4]]
    with ThreadPoolExecutor(2) as threads:  # torch pins in a thread, a loop of one's own may do so, too
        assert list(threads.map(module.pin_memory, batches)) == batches
    count, seconds = taps.pinned
    assert count == 2
    assert seconds >= 4 * 0.002
    taps.remove()
    assert module.pin_memory is pin_memory
