"""What workers measure of their fetches, against what their data is known to take."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from feedtune.inside.meter import RunMeters, WorkerMeter, module_of_workers, parse_io

SLEEP_S, BURN_S, COLLATE_S = 0.004, 0.003, 0.002
FILE_BYTES = 1 << 20  # a worker's own start reads some 0.2 MB


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Transform:
    def __call__(self, x):
        burn(BURN_S)
        return x


class Known(Dataset):
    """Sleeps so long, burns so much CPU in its transform, and reads so many bytes a sample."""

    def __init__(self, path, transform):
        self.path, self.transform = path, transform

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(SLEEP_S)
        with open(self.path, "rb", buffering=0) as file:
            file.read()
        return self.transform(torch.zeros(3)), isinstance(self.transform, Transform)


def collate(rows):
    time.sleep(COLLATE_S)
    return torch.stack([x for x, _ in rows]), [yes for _, yes in rows]


@pytest.fixture
def meters():
    found = RunMeters(module_of_workers())
    yield found
    found.remove()


def run(meters, loader) -> WorkerMeter:
    meter = WorkerMeter(loader.num_workers)
    with meters.around(meter):
        iterator = iter(loader)
    list(iterator)
    return meter


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(FILE_BYTES))
    return path


@pytest.mark.parametrize("transform", [Transform(), Transform().__call__, lambda x: burn(BURN_S) or x])
def test_the_split_of_a_worker_is_that_of_its_data(meters, file, transform) -> None:
    loader = DataLoader(Known(file, transform), batch_size=4, num_workers=2, collate_fn=collate)
    for worker in run(meters, loader).read():
        assert worker.batches == 5
        samples = 4 * worker.batches
        least = samples * (SLEEP_S + BURN_S) + worker.batches * COLLATE_S
        # A machine that does other things can only add to it.
        assert worker.fetch_s >= least
        assert worker.collate_s >= worker.batches * COLLATE_S
        assert worker.cpu_s >= samples * BURN_S
        assert worker.cpu_s <= worker.fetch_s - samples * SLEEP_S + 0.01
        if not hasattr(transform, "__func__"):  # a bound method belongs to no class of its own
            assert samples * BURN_S <= worker.transform_s <= worker.fetch_s - samples * SLEEP_S


def test_bytes_are_those_that_were_read(meters, file, monkeypatch) -> None:
    monkeypatch.setattr("feedtune.inside.meter._IO_EVERY_S", 0.0)
    loader = DataLoader(Known(file, Transform()), batch_size=4, num_workers=2, collate_fn=collate)
    for worker in run(meters, loader).read():
        assert worker.rchar == pytest.approx(20 * FILE_BYTES, rel=0.1)


def test_a_transform_stays_what_it_is(meters, file) -> None:
    loader = DataLoader(Known(file, Transform()), batch_size=4, num_workers=1, collate_fn=collate)
    meter = WorkerMeter(1)
    with meters.around(meter):
        iterator = iter(loader)
    assert all(yes for _, yeses in iterator for yes in yeses)


def test_the_transform_of_a_dataset_inside_another_is_found(meters, file) -> None:
    data = Subset(Known(file, Transform()), range(8))
    (worker,) = run(meters, DataLoader(data, batch_size=4, num_workers=1, collate_fn=collate)).read()
    assert worker.transform_s >= 8 * BURN_S


def test_the_main_process_keeps_its_own(meters, file) -> None:
    call = Transform.__call__
    run(meters, DataLoader(Known(file, Transform()), batch_size=4, num_workers=1, collate_fn=collate))
    assert Transform.__call__ is call


class Frozen:
    __slots__ = ()

    def __call__(self, x):
        return x


def test_what_cannot_be_timed_is_left_alone(meters, file) -> None:
    data = Known(file, torch.nn.functional.relu)  # a function, of C or not
    (worker,) = run(meters, DataLoader(data, batch_size=4, num_workers=1, collate_fn=collate)).read()
    assert worker.batches == 10
    (worker,) = run(
        meters, DataLoader(Known(file, Frozen()), batch_size=4, num_workers=1, collate_fn=collate)
    ).read()
    assert worker.batches == 10


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(6):
            time.sleep(SLEEP_S)
            yield number


def test_iterable_data_is_measured_too(meters) -> None:
    (worker,) = run(meters, DataLoader(Stream(), batch_size=2, num_workers=1)).read()
    assert worker.batches == 3
    assert worker.fetch_s >= 6 * SLEEP_S


def test_workers_outside_are_torch_s_own(meters, file) -> None:
    loader = DataLoader(Known(file, Transform()), batch_size=4, num_workers=1, collate_fn=collate)
    meter = run(meters, loader)
    before = meter.read()
    list(loader)
    assert meter.read() == before


def test_spawned_workers_are_not_disturbed(meters) -> None:
    loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    meter = WorkerMeter(1)
    with meters.around(meter):
        iterator = iter(loader)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]
    assert meter.read()[0].batches == 0


def test_a_system_that_does_not_tell_is_no_error() -> None:
    with pytest.raises(KeyError):
        parse_io("rchar: 1\n")
