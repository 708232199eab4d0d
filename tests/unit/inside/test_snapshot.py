"""Datasets as they were before the first fetch."""

from __future__ import annotations

import os

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from feedtune.inside import snapshot


class Lazy(Dataset):
    """Opens something at its first fetch."""

    def __init__(self, name: str = "lazy") -> None:
        self.name = name
        self.handle: object | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[str, int]:
        self.handle = self.handle or object()
        return self.name, index


def test_a_handle_opened_on_a_copy_reaches_no_other() -> None:
    dataset = Lazy()
    taken = snapshot.take(dataset)
    one = snapshot.fresh(dataset, taken)
    assert one[2] == ("lazy", 2)
    assert one.handle is not None
    assert snapshot.fresh(dataset, taken).handle is None
    assert dataset.handle is None


def test_a_handle_opened_on_the_dataset_itself_reaches_no_copy() -> None:
    dataset = Lazy()
    taken = snapshot.take(dataset)
    assert dataset[0] == ("lazy", 0)
    copy = snapshot.fresh(dataset, taken)
    assert copy.handle is None
    assert type(copy) is Lazy


def test_attributes_that_a_fetch_adds_are_gone() -> None:
    dataset = Lazy()
    taken = snapshot.take(dataset)
    dataset.extra = 1
    assert not hasattr(snapshot.fresh(dataset, taken), "extra")


def test_datasets_inside_datasets_are_fresh_too() -> None:
    inner = [Lazy("a"), Lazy("b"), Lazy("c")]
    nested = Subset(ConcatDataset([Subset(inner[0], [3, 1]), inner[1], ConcatDataset(inner[2:])]), range(8))
    taken = snapshot.take(nested)
    one = snapshot.fresh(nested, taken)
    assert [one[i] for i in range(8)] == [nested[i] for i in range(8)]
    assert all(dataset.handle is not None for dataset in inner)
    again = snapshot.fresh(nested, taken)
    concat = again.dataset
    leaves = [concat.datasets[0].dataset, concat.datasets[1], concat.datasets[2].datasets[0]]
    assert [leaf.name for leaf in leaves] == ["a", "b", "c"]
    assert [leaf.handle for leaf in leaves] == [None] * 3


def test_the_data_itself_is_shared() -> None:
    dataset = Lazy()
    dataset.data = torch.zeros(5)
    assert snapshot.fresh(dataset, snapshot.take(dataset)).data is dataset.data


def test_objects_without_attributes_are_used_as_they_are() -> None:
    for dataset in ([1, 2, 3], range(4), torch.arange(3)):
        taken = snapshot.take(dataset)
        assert snapshot.fresh(dataset, taken) is dataset


def test_a_class_on_top_of_list_is_used_as_it_is() -> None:
    class Samples(list):
        pass

    dataset = Samples([4, 5])
    dataset.note = "kept"
    copy = snapshot.fresh(dataset, snapshot.take(dataset))
    assert list(copy) == [4, 5]
    assert copy.note == "kept"


def test_open_data_files_are_those_open_for_reading(tmp_path) -> None:
    data, log = tmp_path / "data.bin", tmp_path / "log.txt"
    data.write_bytes(b"x")
    before = set(snapshot.open_data_files())
    with open(data, "rb"), open(log, "w"), open(os.devnull):
        assert set(snapshot.open_data_files()) - before == {str(data)}
    assert str(data) not in snapshot.open_data_files()
