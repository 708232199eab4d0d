"""Which loader is meant, and what is known of it in another start."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from feedtune.inside.identity import Watch, batch_size_of, length_of, same_kind
from feedtune.inside.runtime import Runtime

SITE = (("/home/me/train.py", 42, 6), ("/home/me/main.py", 3, 0))


def watch(site=SITE, number: int = 1) -> Watch:
    return Watch((site, "RandomSampler", "4", 7), [1, 2, 3], number)


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(())


class Refuses(Unsized):
    def __len__(self) -> int:
        raise NotImplementedError


class Odd(BatchSampler):
    def __init__(self) -> None:
        super().__init__(SequentialSampler([1]), 1, False)
        self.batch_size = [2, 3]


def test_a_loader_is_known_by_its_number_and_place() -> None:
    assert watch().place == "/home/me/train.py:42"
    assert watch(None).place == watch(()).place == ""
    assert watch().is_one([1, "/home/me/train.py:42"])
    assert not watch().is_one([0, "/home/me/train.py:42"])
    assert not watch().is_one([1, "/home/me/train.py:43"])
    assert not watch().is_one(None)


@pytest.mark.parametrize(
    ("chosen", "meant"),
    [
        (None, True),
        ("", True),
        ("train.py:42", True),
        ("me/train.py:42", True),
        ("/home/me/train.py:42", True),
        ("rain.py:42", False),
        ("train.py:4", False),
        ("train.py:2", False),
        ("/train.py:42", False),
        ("main.py:3", False),
        (":42", False),
        ("other/train.py:42", False),
    ],
)
def test_the_loader_that_the_user_names(chosen, meant) -> None:
    runtime = Runtime.__new__(Runtime)
    runtime.config = {"chosen": chosen}
    assert runtime._chosen(watch()) == meant
    assert runtime._chosen(watch(())) == (not chosen)
    runtime.config = {}
    assert runtime._chosen(watch())


def test_data_of_one_kind() -> None:
    assert same_kind([1, 2], [3, 4])
    assert not same_kind([1, 2], [3])
    assert not same_kind([1, 2], (1, 2))
    assert same_kind(Unsized(), Unsized())
    assert [length_of(data) for data in ([1], Unsized(), Refuses())] == [1, None, None]


def test_samples_of_a_batch() -> None:
    assert batch_size_of(DataLoader([1, 2], batch_size=2)) == 2
    assert batch_size_of(DataLoader([1, 2], batch_size=None)) is None
    assert batch_size_of(DataLoader([1, 2], batch_sampler=Odd())) is None
    assert batch_size_of(DataLoader([1, 2], batch_sampler=[[0], [1]])) is None
