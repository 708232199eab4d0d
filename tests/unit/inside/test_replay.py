"""Cached batches: containers are rebuilt, what the loop does to a batch never shows later."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from feedtune.inside.replay import Cache, Player, map_tensors, measure, tensors

Pair = namedtuple("Pair", "x y")


class Encoding(UserDict):
    """As transformers' BatchEncoding."""

    def __init__(self, data: dict) -> None:
        super().__init__(data)
        self.note = "kept"


@dataclass
class Example:
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Many(list):
    """A list of a class of its own."""


class Named(dict):
    """A dictionary of a class of its own."""


class Knot:
    """A batch that refers to itself."""

    def __init__(self) -> None:
        self.x = ones()
        self.me = self


def ones() -> torch.Tensor:
    return torch.ones(4, 3)


CONTAINERS = {
    "tensor": lambda: ones(),
    "list": lambda: [ones(), "label"],
    "tuple": lambda: (ones(), 3),
    "dict": lambda: {"x": ones(), "n": None},
    "nested": lambda: {"a": [{"b": (ones(),)}]},
    "namedtuple": lambda: Pair(ones(), "label"),
    "defaultdict": lambda: defaultdict(list, x=ones()),
    "UserDict": lambda: Encoding({"x": ones()}),
    "dataclass": lambda: Example(ones(), "name"),
    "frozen dataclass": lambda: Frozen(ones()),
    "list subclass": lambda: Many([ones()]),
    "OrderedDict": lambda: OrderedDict(x=ones()),
    "dict subclass": lambda: Named(x=ones()),
    "reference to itself": lambda: Knot(),
    "with a class": lambda: {"x": ones(), "kind": int},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_are_rebuilt_and_tensors_changed(make) -> None:
    batch = make()
    twin = map_tensors(batch, lambda t: t + 1)
    assert type(twin) is type(batch)
    assert [t.sum().item() for t in tensors(twin)] == [24.0]
    assert [t.sum().item() for t in tensors(batch)] == [12.0]
    assert measure(batch) == (12, 48, 1)


def test_what_is_no_tensor_comes_through() -> None:
    assert map_tensors((ones(), "a", None, 3, b"b"), torch.neg)[1:] == ("a", None, 3, b"b")
    assert map_tensors(Encoding({"x": ones()}), torch.neg).note == "kept"
    assert map_tensors(Example(ones(), "n"), torch.neg).name == "n"


def test_a_batch_that_refers_to_itself_still_does_so() -> None:
    batch = Knot()
    twin = map_tensors(batch, torch.neg)
    assert twin.me is twin
    assert twin is not batch


def offer(cache: Cache, batch) -> None:
    elements, size, _ = measure(batch)
    cache.offer(batch, elements, size)


def batches(cache: Cache) -> list:
    return [kept.batch for kept in cache.whole()]


def sizes(cache: Cache) -> list[int]:
    return [kept.elements for kept in cache.whole()]


def test_the_cache_keeps_clones() -> None:
    cache = Cache(2, 1 << 20)
    batch = ones()
    offer(cache, batch)
    batch.zero_()
    assert batches(cache)[0].sum() == 12


def test_the_cache_is_full_when_it_has_what_was_wanted() -> None:
    cache = Cache(3, 1 << 20)
    for _ in range(5):
        offer(cache, ones())
    assert len(batches(cache)) == 3


def test_the_bytes_of_the_cache_are_bounded_but_one_batch_is_always_kept() -> None:
    cache = Cache(10, 100)
    for _ in range(4):
        offer(cache, ones())  # 48 bytes each
    assert len(batches(cache)) == 2
    small = Cache(10, 1)
    for _ in range(4):
        offer(small, ones())
    assert len(batches(small)) == 1


@pytest.mark.parametrize("rows", [(4, 4, 1, 4), (1, 4, 4, 4), (4, 1, 4, 4)])
def test_a_partial_batch_is_not_replayed(rows) -> None:
    cache = Cache(10, 1 << 20)
    for count in rows:
        offer(cache, torch.ones(count, 3))
    assert [len(batch) for batch in batches(cache)] == [4, 4, 4]
    assert sizes(cache) == [12, 12, 12]


@pytest.mark.parametrize("partial", [0, 2, 5])
def test_a_partial_batch_is_none_of_those_that_were_wanted(partial) -> None:
    """An epoch of six batches, the last of them partial; the cache may begin anywhere in it."""
    cache = Cache(10, 1 << 20)
    told = []
    for step in range(30):
        offer(cache, torch.ones(1 if step % 6 == partial else 4, 3))
        told.append(cache.missing)
    assert [len(batch) for batch in batches(cache)] == [4] * 10
    assert [kept.step for kept in cache.whole()] == [s for s in range(30) if s % 6 != partial][:10]
    assert told[-1] == 0
    assert told[3] > 0


def test_a_full_memory_leaves_nothing_missing() -> None:
    cache = Cache(10, 100)
    for _ in range(4):
        offer(cache, ones())
    assert cache.missing == 0


def test_ranks_replay_the_steps_that_all_of_them_have_kept() -> None:
    """One rank has less room, the other a partial batch: batch j is the same step on both."""
    first, second = Cache(4, 3 * 48), Cache(4, 1 << 20)
    for step in range(6):
        offer(first, torch.full((4, 3), float(step)))
        offer(second, torch.full((1 if step == 1 else 4, 3), float(step)))
    common = {k.step for k in first.whole()} & {k.step for k in second.whole()}
    assert common == {0, 2}
    for cache in (first, second):
        source = Player(cache, False, common)
        assert [source.next()[0].mean().item() for _ in range(5)] == [0, 2, 0, 2, 0]


def test_batches_of_many_sizes_are_replayed_as_they_come() -> None:
    """A bucketing sampler: no number of samples is the usual one, none is partial."""
    cache = Cache(10, 1 << 30)
    rows = [8, 3, 9, 5, 7, 4, 8, 6, 9, 2]
    for count in rows:
        offer(cache, torch.ones(count, 3))
    assert [len(batch) for batch in batches(cache)] == rows
    assert sizes(cache) == [3 * count for count in rows]


def test_uneven_batches_ask_for_more_of_them() -> None:
    cache = Cache(10, 1 << 20)
    for width in range(10, 75):
        offer(cache, torch.ones(4, width))
    assert len(batches(cache)) == 50


def player(*batches) -> Player:
    cache = Cache(len(batches), 1 << 20)
    for batch in batches:
        offer(cache, batch)
    return Player(cache, pinned=False)


def test_batches_come_round_with_their_sizes() -> None:
    source = player(torch.full((2, 2), 1.0), torch.full((2, 2), 2.0), torch.full((2, 2), 3.0))
    values = []
    for _ in range(7):
        batch, elements = source.next()
        values.append(batch.mean().item())
        assert elements == 4
    assert values == [1, 2, 3, 1, 2, 3, 1]
    assert not source.cloning
    assert source.clone_s == 0.0


def in_place(batch) -> None:
    batch["x"].sub_(5)


def grad(batch) -> None:
    batch["x"].requires_grad_()


def view(batch) -> None:
    batch["x"][0].zero_()


def same_device(batch) -> None:
    batch["x"].to("cpu").add_(3)  # the very same tensor


def resize(batch) -> None:
    batch["x"].unsqueeze_(0)


@pytest.mark.parametrize("change", [in_place, grad, view, same_device, resize])
def test_a_loop_that_changes_its_batches_gets_clones(change) -> None:
    source = player(*({"x": torch.full((2, 2), float(i))} for i in range(3)))
    values = []
    for _ in range(9):
        batch, _ = source.next()
        assert batch["x"].shape == (2, 2)
        assert not batch["x"].requires_grad
        values.append(batch["x"].mean().item())
        change(batch)
    assert values == [0, 1, 2] * 3
    assert source.cloning
    assert source.clone_s > 0


def test_a_loop_that_begins_to_change_them_later_spoils_no_replay() -> None:
    source = player(*({"x": torch.full((2, 2), float(i))} for i in range(4)))
    values = []
    for step in range(16):
        batch, _ = source.next()
        values.append(batch["x"].mean().item())
        if step >= 5:
            batch["x"].sub_(100)
    assert source.cloning
    assert min(values) >= 0
    assert set(values[6:]) == {0.0, 2.0, 3.0}  # the one that was spoilt is out


def test_what_a_loop_takes_out_of_a_container_is_there_again() -> None:
    source = player({"x": ones(), "y": ones()}, {"x": ones(), "y": ones()})
    for _ in range(5):
        batch, _ = source.next()
        assert set(batch) == {"x", "y"}
        batch.pop("y")
        batch["new"] = 1
    assert not source.cloning
