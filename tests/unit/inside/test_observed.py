"""The hook that only watches: which loaders are one, and what it keeps alive (nothing)."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from feedtune.inside.identity import shape_of
from feedtune.inside.light import EARLY
from feedtune.inside.observed import Observer
from feedtune.inside.signs import BATCHES_WITHOUT_OPTIMIZER
from feedtune.inside.stepfile import StepFile


class Numbers(Dataset):
    def __init__(self, count: int = 8) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


class Batches:
    """Stands in for the class of torch's iterators, so that the real one stays unwrapped."""

    def __next__(self) -> int:
        return 1


@pytest.fixture
def observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observer]:
    (tmp_path / "boot" / "seen").mkdir(parents=True)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr("feedtune.inside.observed.at_exit", lambda _: None)
    config = {"mode": "run", "records": str(tmp_path), "folder": str(tmp_path / "boot"), "steps": None}
    found = Observer(config, SimpleNamespace(DataLoader=DataLoader, _BaseDataLoaderIter=Batches))
    yield found
    found._detach()


def iterated(observer: Observer, loader: DataLoader) -> Batches:
    return observer.iterate(loader, lambda _: Batches())


def watch_of(iterator: Batches):
    return iterator.__dict__["_feedtune_pass"].watch


def trained(observer: Observer, iterator: Batches, steps: int) -> None:
    for _ in range(steps):
        next(iterator)
        observer.optimizer_steps += 1


def lines(tmp_path: Path) -> list[list]:
    return [json.loads(line) for line in (tmp_path / "steps.rank0.jsonl").read_text().splitlines()]


def test_no_loader_iterator_or_dataset_is_kept_alive(observer: Observer) -> None:
    loader = DataLoader(Numbers())
    iterator = iterated(observer, loader)
    trained(observer, iterator, 5)
    refs = [weakref.ref(thing) for thing in (loader, loader.dataset, iterator)]
    gc.disable()  # no cycle either: workers end when the last reference goes
    try:
        del loader, iterator
        assert [ref() for ref in refs] == [None, None, None]
    finally:
        gc.enable()


def test_another_dataset_at_the_place_of_one_that_is_gone_is_another_loader(observer: Observer) -> None:
    first = watch_of(iterated(observer, DataLoader(Numbers(8))))
    loader = DataLoader(Numbers(4))
    observer._watches[(*shape_of(loader), id(loader.dataset))] = first
    second = watch_of(iterated(observer, loader))
    assert second is not first
    assert watch_of(iterated(observer, DataLoader(Numbers(8)))) is first


def test_a_dataset_that_grows_stays_the_same_loader(observer: Observer) -> None:
    loader = DataLoader(Numbers(8))
    first = watch_of(iterated(observer, loader))
    loader.dataset.count = 80
    assert watch_of(iterated(observer, loader)) is first


def test_of_loaders_that_train_in_turns_the_first_is_recorded(observer: Observer) -> None:
    """Whichever is waited for longer: that differs between ranks."""
    first, second = iterated(observer, DataLoader(Numbers(8))), iterated(observer, DataLoader(Numbers(4)))
    for _ in range(5):
        watch_of(second).wait_s = 100.0
        next(first)
        next(second)
        observer.optimizer_steps += 1
    assert observer._recorded == [watch_of(first)]


class Counts:
    """A meter of workers, each of which has made batches in so many seconds."""

    def __init__(self, *made: tuple[int, float]) -> None:
        self.made = made

    def read(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(batches=batches, fetch_s=seconds) for batches, seconds in self.made]


def test_what_a_loader_s_workers_need_is_of_all_its_iterations(observer: Observer) -> None:
    watch = watch_of(iterated(observer, DataLoader(Numbers())))
    assert watch.summary()["supply_s"] is None  # no workers
    first = Counts((2, 0.2), (2, 0.8))
    watch.count_in(first)
    watch.count_in(first)  # workers that persist
    assert watch.supply_s == pytest.approx(0.4 / 2)
    watch.count_in(Counts((6, 0.6), (6, 0.8), (0, 0.0)))
    assert watch.summary()["supply_s"] == pytest.approx(0.2 / 2)


def test_early_steps_are_not_lost(observer: Observer, tmp_path: Path) -> None:
    """With gradients that are accumulated over many batches, it takes long until a loader trains."""
    iterator = iterated(observer, DataLoader(Numbers()))
    for _ in range(30):
        for _ in range(9):
            next(iterator)
        trained(observer, iterator, 1)
    observer._at_exit()
    assert [line[0] for line in lines(tmp_path)] == list(range(300))
    assert json.loads((tmp_path / "rank0.json").read_text())["missed"] == 0


def test_the_memory_of_early_steps_is_bounded_and_the_rest_is_counted(
    observer: Observer, tmp_path: Path
) -> None:
    observer.optimizer_steps = 1  # else the loader would be taken after 200 batches
    iterator = iterated(observer, DataLoader(Numbers()))
    for _ in range(EARLY + 100):
        next(iterator)
    trained(observer, iterator, 3)
    observer._at_exit()
    about = json.loads((tmp_path / "rank0.json").read_text())
    assert about["missed"] == 103
    assert len(lines(tmp_path)) == EARLY
    (watch,) = observer._all()
    assert not watch.early


def test_a_loader_that_is_taken_for_its_batches_alone_is_told_so(observer: Observer, tmp_path: Path) -> None:
    def told() -> bool:
        return json.loads((tmp_path / "rank0.json").read_text())["loader"]["trained"]

    iterator = iterated(observer, DataLoader(Numbers()))
    for _ in range(BATCHES_WITHOUT_OPTIMIZER + 1):
        next(iterator)
    assert told() is False
    trained(observer, iterator, 1)  # its first step comes late
    observer._at_exit()
    assert told() is True


def test_a_limit_inside_the_early_steps(observer: Observer, tmp_path: Path) -> None:
    observer.config["steps"] = 2
    trained(observer, iterated(observer, DataLoader(Numbers())), 9)
    assert [line[0] for line in lines(tmp_path)] == [0, 1]


def test_an_error_ends_the_watching_and_is_noted(observer: Observer, tmp_path: Path) -> None:
    iterator = iterated(observer, DataLoader(Numbers()))
    trained(observer, iterator, 3)
    (tmp_path / "steps.rank0.jsonl").unlink()
    assert next(iterator) == 1
    observer._file._written_s = observer.trace._taken_s = float("-inf")  # time to write
    assert next(iterator) == 1
    assert not observer.armed
    assert "FileNotFoundError" in (tmp_path / "boot" / "seen" / "stopped").read_text()


def test_a_second_process_of_the_same_rank_gets_files_of_its_own(tmp_path: Path) -> None:
    one, two = StepFile(str(tmp_path), 3), StepFile(str(tmp_path), 3)
    one.add((1.0, 2.0, None, 0.5))
    two.add((3.0, 4.0, "eval", None))
    for number, file in enumerate((one, two)):
        file.describe({"number": number})
        file.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank3.2.json", "rank3.json", "steps.rank3.2.jsonl", "steps.rank3.jsonl",
    ]  # fmt: skip
    assert json.loads((tmp_path / "steps.rank3.jsonl").read_text()) == [0, 1.0, 2.0, None, 0.5]
    assert json.loads((tmp_path / "steps.rank3.2.jsonl").read_text()) == [0, 3.0, 4.0, "eval"]
    assert json.loads((tmp_path / "rank3.2.json").read_text()) == {"number": 1}


def test_what_waits_is_written_each_second_or_256_steps(tmp_path: Path) -> None:
    file = StepFile(str(tmp_path), 0)
    path = tmp_path / "steps.rank0.jsonl"
    start = file._written_s
    for step in range(255):
        file.add((start, start + step / 1000, None, None))
    assert path.read_text() == ""
    file.add((start, start, None, None))
    assert len(path.read_text().splitlines()) == 256
    file.add((start, file._written_s + 1.0, None, None))
    assert len(path.read_text().splitlines()) == 257
    file.add((start, start, None, None))
    file.drop()
    file.flush()
    assert len(path.read_text().splitlines()) == 257
