"""Datasets as they were before the first fetch."""

from __future__ import annotations

import os
from collections import Counter, namedtuple

import numpy as np
import pytest
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
    for dataset in (range(4), torch.arange(3), "name"):
        taken = snapshot.take(dataset)
        assert snapshot.fresh(dataset, taken) is dataset


@pytest.mark.parametrize(
    ("value", "grow"),
    [
        ([1, 2], lambda held: held.append(3)),
        ({"a": 1}, lambda held: held.update(b=2)),
        ({1, 2}, lambda held: held.add(3)),
        (([1],), lambda held: held[0].append(2)),
        ([{"a": [1]}], lambda held: held[0]["a"].append(2)),
    ],
    ids=["list", "dict", "set", "tuple of a list", "nested"],
)
def test_what_a_fetch_puts_into_a_container_is_gone(value, grow) -> None:
    dataset = Lazy()
    dataset.held = value
    as_it_was = repr(value)
    taken = snapshot.take(dataset)
    grow(dataset.held)
    assert repr(dataset.held) != as_it_was
    one, two = snapshot.fresh(dataset, taken), snapshot.fresh(dataset, taken)
    assert repr(one.held) == as_it_was
    assert type(one.held) is type(value)
    grow(one.held)
    assert repr(two.held) == as_it_was


def test_a_long_container_holds_data_and_is_shared() -> None:
    dataset = Lazy()
    dataset.held = list(range(5000))
    assert snapshot.fresh(dataset, snapshot.take(dataset)).held is dataset.held


def test_an_object_that_is_no_dataset_is_fresh_too() -> None:
    class Reader:
        def __init__(self) -> None:
            self.file: object | None = None

    dataset = Lazy()
    dataset.reader = Reader()
    taken = snapshot.take(dataset)
    dataset.reader.file = object()
    copy = snapshot.fresh(dataset, taken)
    assert type(copy.reader) is Reader
    assert copy.reader.file is None


def test_a_marker_without_attributes_stays_the_same_object() -> None:
    class Marker:
        pass

    dataset = Lazy()
    dataset.unset = Marker()
    assert snapshot.fresh(dataset, snapshot.take(dataset)).unset is dataset.unset


def test_datasets_that_refer_to_each_other_still_do() -> None:
    inner, outer = Lazy("inner"), Lazy("outer")
    outer.inner, inner.owner = inner, outer
    copy = snapshot.fresh(outer, snapshot.take(outer))
    assert copy is not outer
    assert copy.inner is not inner
    assert copy.inner.owner is copy


def test_one_object_in_two_places_stays_one() -> None:
    dataset = Lazy()
    dataset.one = dataset.other = Lazy("shared")
    copy = snapshot.fresh(dataset, snapshot.take(dataset))
    assert copy.one is copy.other
    assert copy.one is not dataset.one


Pair = namedtuple("Pair", "left right")


def test_datasets_in_a_namedtuple_are_fresh_too() -> None:
    dataset = Lazy()
    dataset.pair = Pair(Lazy("left"), Lazy("right"))
    taken = snapshot.take(dataset)
    copy = snapshot.fresh(dataset, taken)
    assert type(copy.pair) is Pair
    assert copy.pair.left is not dataset.pair.left
    assert (copy.pair.left.name, copy.pair.right.name) == ("left", "right")


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


def test_open_data_files_are_counted(tmp_path) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(b"x")
    with open(data, "rb"), open(data, "rb"):
        assert snapshot.open_data_files()[str(data)] == 2
    assert snapshot.open_data_files()[str(data)] == 0


def test_a_memory_mapped_file_has_no_position_to_share(tmp_path) -> None:
    data = tmp_path / "train.bin"
    data.write_bytes(bytes(4096))
    mapped = np.memmap(data, mode="r")
    with open(data, "rb"):
        assert str(data) not in snapshot.open_data_files()
    mapped._mmap.close()
    with open(data, "rb"):
        assert str(data) in snapshot.open_data_files()


@pytest.mark.parametrize(
    ("base", "before", "during", "after", "shared"),
    [
        (0, 0, 1, 0, False),  # the copy's own handle has gone with it
        (0, 0, 1, 1, True),  # it stays in a module or a class
        (0, 1, 1, 1, True),  # it was opened there before the block
        (1, 1, 1, 1, False),  # open before any fetch: told apart, with the loader
        (0, 1, 2, 1, False),  # one of the original dataset, and one of the copy that has gone
        (1, 1, 2, 2, True),
    ],
)
def test_shared_files_are_those_that_outlive_the_copy(base, before, during, after, shared) -> None:
    counts = (Counter({"data": count}) for count in (base, before, during, after))
    assert snapshot.shared_files(*counts) == ["data"] * shared


def test_positional_reads_disturb_nobody(tmp_path) -> None:
    """A handle read with ``pread`` may be shared; one whose position has moved may not."""
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    with path.open("rb", buffering=0) as file:
        os.pread(file.fileno(), 4, 2)
        assert str(path) in snapshot.open_data_files()
        assert str(path) not in snapshot.open_data_files(moved=True)
        file.read(4)
        assert str(path) in snapshot.open_data_files(moved=True)


def test_lmdb_handles_that_a_fetch_has_opened_are_let_go(tmp_path) -> None:
    """No copy could open an environment that the dataset itself keeps open."""
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "a")):
        pass

    class Reader:
        def __init__(self) -> None:
            self.count = 0
            self.stores: dict = {}
            self.settings = {"x": 1}

    class Store(Dataset):
        def __init__(self) -> None:
            self.environment, self.reader = None, Reader()

    dataset = Store()
    before = snapshot.take(dataset)
    store = lmdb.open(str(tmp_path / "a"), readonly=True, lock=False)
    dataset.environment = dataset.reader.stores["a"] = store
    dataset.transaction = store.begin()
    dataset.reader.count, dataset.reader.settings["x"] = 5, 2
    del store
    snapshot.release_lmdb(before)
    assert dataset.environment is None
    assert not hasattr(dataset, "transaction")
    assert dataset.reader.stores == {}
    assert (dataset.reader.count, dataset.reader.settings) == (5, {"x": 2})  # all else stays as it has become
    with lmdb.open(str(tmp_path / "a"), readonly=True, lock=False) as again:
        dataset.environment = again
        snapshot.release_lmdb(snapshot.take(dataset))  # it was there before the first fetch
        assert dataset.environment is again
