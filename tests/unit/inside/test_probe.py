"""What workers measure of themselves, and how they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import fetch

from feedtune.inside.probe import WorkerClock, forks

ROOT = Path(__file__).parents[3]


class Numbers(Dataset):
    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise KeyError("bad sample")
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def loader(clock: WorkerClock, data=None, **changes) -> DataLoader:
    values = {"batch_size": 2, "num_workers": 2, "worker_init_fn": clock, **changes}
    return DataLoader(Numbers() if data is None else data, **values)


def test_batches_of_all_workers_are_counted(tmp_path) -> None:
    clock = WorkerClock(2, None, str(tmp_path), False)
    assert clock.read() == (0, 0.0)
    assert [batch.tolist() for batch in loader(clock)] == [[i, i + 1] for i in range(0, 12, 2)]
    batches, seconds = clock.read()
    assert batches == 6
    assert seconds > 0


def test_iterable_data_is_counted_too(tmp_path) -> None:
    clock = WorkerClock(2, None, str(tmp_path), True)
    assert len(list(loader(clock, Stream()))) == 12
    assert clock.read()[0] == 12


def test_workers_that_start_anew_add_to_what_was_counted(tmp_path) -> None:
    """Iterable data does so at each epoch's end, in the middle of a block."""
    clock = WorkerClock(2, None, str(tmp_path), True)
    again = loader(clock, Stream())
    seen = []
    for _ in range(3):
        list(again)
        seen.append(clock.read())
    assert [batches for batches, _ in seen] == [12, 24, 36]
    assert 0 < seen[0][1] < seen[1][1] < seen[2][1]


def test_the_main_process_fetches_as_always(tmp_path) -> None:
    before = fetch._MapDatasetFetcher.fetch
    clock = WorkerClock(2, None, str(tmp_path), False)
    list(loader(clock))
    assert fetch._MapDatasetFetcher.fetch is before


def test_the_scripts_own_init_is_run_first(tmp_path) -> None:
    def init(worker: int) -> None:
        (tmp_path / f"init{worker}").write_text(str(torch.utils.data.get_worker_info().id))

    list(loader(WorkerClock(2, init, str(tmp_path), False)))
    assert [(tmp_path / f"init{worker}").read_text() for worker in (0, 1)] == ["0", "1"]


@pytest.mark.slow
def test_what_the_scripts_own_init_raises_is_told(tmp_path) -> None:
    def init(_: int) -> None:
        raise ValueError("no such device")

    with pytest.raises(ValueError, match="no such device"):
        list(loader(WorkerClock(2, init, str(tmp_path), False)))


@pytest.mark.slow
def test_a_fetch_that_fails_is_told_and_not_counted(tmp_path) -> None:
    clock = WorkerClock(1, None, str(tmp_path), False)
    with pytest.raises(KeyError, match="bad sample"):
        list(loader(clock, Numbers(bad=5), num_workers=1, prefetch_factor=1))
    assert clock.read()[0] in (2, 3)  # two before it, and at most the one after it


@pytest.mark.parametrize(
    ("method", "forked"), [("fork", True), ("spawn", False), ("forkserver", False), (None, True)]
)
def test_workers_are_forked_or_not(method, forked) -> None:
    if sys.version_info >= (3, 14) and method is None:
        forked = False
    assert forks(DataLoader(Numbers(), num_workers=1, multiprocessing_context=method)) == forked


def test_looking_up_the_start_method_leaves_the_choice_to_the_script() -> None:
    code = (
        "import multiprocessing as m; from feedtune.inside.probe import start_method; "
        "first = start_method(); m.set_start_method('spawn'); "
        "print(first, start_method(), m.get_all_start_methods()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    first, chosen, default = done.stdout.split()
    assert (first, chosen) == (default, "spawn"), done.stderr
