"""Small trainings, each an ordinary loop that knows nothing of the hook; they log what they get."""

from __future__ import annotations

import io
import os
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

SAMPLES = 22
BATCH = 4
EPOCHS = 400  # a run ends when its driver has seen enough


class Numbers(Dataset):
    """Sample ``i`` is ``i``; a fetch takes a while where it is asked to."""

    def __init__(self, count: int = SAMPLES, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.tensor(index)


class Orders(Sampler):
    """Another order in each pass; which one depends on nothing but the number of the pass."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.passes = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        self.passes += 1
        return iter(order(self.passes - 1, self.count))


def order(number: int, count: int = SAMPLES) -> list[int]:
    """Pass ``number`` of ``Orders``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(count, generator=generator).tolist()


class Trainer:
    """A model of one weight and its optimizer."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.01)

    def step(self, batch) -> None:
        (self.weight * batch.float().sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(log, loader, epochs: int = EPOCHS, trainer: Trainer | None = None) -> None:
    trainer = trainer or Trainer()
    for epoch in range(epochs):
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        log(at="epoch", epoch=epoch)


def plain(log, _) -> None:
    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()))


def with_workers(log, _) -> None:
    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=2))


def workers_start_slowly(log, _) -> None:
    """As spawned workers do, which import what the script imports."""

    def start(_worker: int) -> None:
        time.sleep(2.0)

    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), worker_init_fn=start))


def short(log, _) -> None:
    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()), epochs=6)


def ends_slowly(log, _) -> None:
    """What follows the last step is no part of it."""
    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()), epochs=4)
    log(at="trained", now=time.monotonic())
    time.sleep(0.5)


def persistent(log, _) -> None:
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=2, persistent_workers=True)
    train(log, loader)


def new_loader_each_epoch(log, _) -> None:
    trainer, sampler = Trainer(), Orders()
    for epoch in range(EPOCHS):
        loader = DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        log(at="epoch", epoch=epoch)


def batch_sampler(log, _) -> None:
    sampler = BatchSampler(Orders(), BATCH, drop_last=True)
    train(log, DataLoader(Numbers(), batch_sampler=sampler))


def odd_batch_sampler(log, _) -> None:
    """Its ``batch_size`` is a list, its length unknown: a bucketing sampler."""

    class Buckets:
        def __init__(self) -> None:
            self.batch_size = [2, 3]
            self.orders = Orders()

        def __iter__(self):
            rest = list(self.orders)
            while rest:
                size = 2 + len(rest) % 2
                yield rest[:size]
                rest = rest[size:]

    train(log, DataLoader(Numbers(), batch_sampler=Buckets()))


def unbatched(log, _) -> None:
    train(log, DataLoader(Numbers(), batch_size=None, sampler=Orders()))


def infinite(log, _) -> None:
    """The loader of timm and of Ultralytics: one endless iterator, its workers never end."""

    class Repeat:
        def __init__(self, sampler) -> None:
            self.sampler = sampler

        def __iter__(self):
            while True:
                yield from iter(self.sampler)

    class Infinite(DataLoader):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

    train(log, Infinite(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=1))


def subclass(log, _) -> None:
    """A loader of the user's own, whose iteration passes through ours and adds to each batch."""

    class Shifted(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch + 1000

    train(log, Shifted(Numbers(), batch_size=BATCH, sampler=Orders()))


class Stream(IterableDataset):
    """Numbers in order, shared out over the workers."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        return (torch.tensor(i) for i in range(first, SAMPLES, stride))


def iterable(log, _) -> None:
    train(log, DataLoader(Stream(), batch_size=BATCH))


def with_validation(log, request) -> None:
    """Train and validation loaders are made at one line; validation runs every fifth step."""

    def make(count: int, sampler=None):
        return DataLoader(Numbers(count), batch_size=BATCH, sampler=sampler, num_workers=0)

    first, second = make(9), make(SAMPLES, Orders())
    pause_s = request.get("pause_s", 0.0)
    trainer, steps = Trainer(), 0
    for epoch in range(request.get("epochs", EPOCHS)):
        for batch in second:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
            steps += 1
            if steps % 5 == 0:
                log(at="eval", batches=[b.tolist() for b in first])
                time.sleep(pause_s)
        log(at="epoch", epoch=epoch)


class Split(Numbers):
    """A part of the data: sample ``i`` is ``i`` and where the part begins."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.begin = begin

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.begin + index)


def twin_loaders(log, _) -> None:
    """Train and validation loaders of equal length, made by one expression; validation ends each epoch."""
    loaders = {
        name: DataLoader(Split(begin), batch_size=BATCH, sampler=Orders())
        for name, begin in (("train", 0), ("val", 1000))
    }
    trainer = Trainer()
    for epoch in range(EPOCHS):
        for batch in loaders["train"]:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        log(at="eval", batches=[batch.tolist() for batch in loaders["val"]])
        log(at="epoch", epoch=epoch)


def everything_made_each_epoch(log, _) -> None:
    """A function makes data set and loader anew for each epoch; nothing keeps the old ones."""
    sampler = Orders()

    def make() -> DataLoader:
        return DataLoader(Split(0), batch_size=BATCH, sampler=sampler)

    trainer = Trainer()
    for epoch in range(EPOCHS):
        for batch in make():
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        log(at="epoch", epoch=epoch)


def saves_at_the_end_of_each_epoch(log, _) -> None:
    """The save follows the last step of an epoch, so that it and the seam are one stretch."""
    trainer = Trainer()
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders())
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
            if number == len(loader) - 1:
                torch.save({}, io.BytesIO())
                time.sleep(0.05)
        log(at="epoch", epoch=epoch)


def _two(log, fast, slow, trainer: Trainer) -> None:
    for epoch in range(EPOCHS):
        for one, two in zip(fast, slow, strict=True):
            log(at="batch", epoch=epoch, indices=two.tolist(), fast=one.tolist())
            trainer.step(one)
            trainer.step(two)
        log(at="epoch", epoch=epoch)


def two_training_loaders(log, _) -> None:
    """Both feed every step; the second one is slow."""
    fast = DataLoader(Numbers(), batch_size=BATCH)
    slow = DataLoader(Numbers(seconds=0.001), batch_size=BATCH, sampler=Orders())
    _two(log, fast, slow, Trainer())


class LazyFile(Dataset):
    """Reads fixed-width records from a plain file that the first fetch opens: seek, then read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def __len__(self) -> int:
        return os.path.getsize(self.path) // 8

    def handle(self):
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        return self.file

    def __getitem__(self, index: int) -> tuple[int, int]:
        file = self.handle()
        file.seek(index * 8)
        os.sched_yield()  # gives another process that shares the position its chance
        return index, int(file.read(8))


class LazyFiles(LazyFile):
    """Keeps its open files in a dictionary, one a path."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.files: dict = {}

    def handle(self):
        if self.path not in self.files:
            self.files[self.path] = open(self.path, "rb", buffering=0)  # noqa: SIM115
        return self.files[self.path]


class Reader:
    """An object that is no dataset and opens its file when it is first asked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def get(self):
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        return self.file


class LazyReader(LazyFile):
    """Reads through a reader object."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.reader = Reader(path)

    def handle(self):
        return self.reader.get()


_OPEN: dict = {}


class GlobalFile(LazyFile):
    """Keeps its open file in the module, where every copy of the data set finds it."""

    def handle(self):
        if self.path not in _OPEN:
            _OPEN[self.path] = open(self.path, "rb", buffering=0)  # noqa: SIM115
        return _OPEN[self.path]


def _lazy(log, dataset) -> None:
    trainer = Trainer()
    loader = DataLoader(dataset, batch_size=16)
    for epoch in range(EPOCHS):
        for indices, values in loader:
            log(at="batch", epoch=epoch, indices=indices.tolist(), values=values.tolist())
            trainer.step(values)
        log(at="epoch", epoch=epoch)


def lazy_file(log, request) -> None:
    _lazy(log, LazyFile(request["data"]))


def lazy_files(log, request) -> None:
    _lazy(log, LazyFiles(request["data"]))


def lazy_reader(log, request) -> None:
    _lazy(log, LazyReader(request["data"]))


def global_file(log, request) -> None:
    _lazy(log, GlobalFile(request["data"]))


def breaks_off(log, _) -> None:
    """Leaves every epoch after four batches."""
    trainer = Trainer()
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders())
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            if number == 4:
                break
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)


def numpy_worker_count(log, _) -> None:
    import numpy as np

    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=np.int64(1)))


def length_of_iterator(log, _) -> None:
    trainer = Trainer()
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders())
    for epoch in range(EPOCHS):
        iterator = iter(loader)
        log(at="length", value=len(iterator))
        for batch in iterator:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        log(at="epoch", epoch=epoch)


def one_batch_epochs(log, _) -> None:
    train(log, DataLoader(Numbers(BATCH), batch_size=BATCH, sampler=Orders(BATCH)))


def out_of_order(log, _) -> None:
    """Workers overtake each other: every fourth sample is slow."""

    class Uneven(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.02 if index % 4 == 0 else 0.0)
            return torch.tensor(index)

    train(log, DataLoader(Uneven(), batch_size=1, sampler=Orders(), num_workers=3, in_order=False))


def forks_a_helper(log, _) -> None:
    """A helper is forked while blocks run, and ends as any interpreter does."""
    import atexit

    trainer, steps = Trainer(), 0
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders())
    for epoch in range(EPOCHS):
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
            steps += 1
            if steps == 12:
                child = os.fork()
                if child == 0:
                    atexit._run_exitfuncs()
                    os._exit(0)
                log(at="helper", status=os.waitpid(child, 0)[1])
        log(at="epoch", epoch=epoch)


def fetch_fails(log, _) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if torch.utils.data.get_worker_info() is not None:
                raise RuntimeError("damaged sample")
            return torch.tensor(index)

    train(log, DataLoader(Broken(), batch_size=BATCH, sampler=Orders()))


def in_place(log, _) -> None:
    """Changes its batches: what is replayed must not show it."""
    trainer = Trainer()

    class Pairs(Numbers):
        def __getitem__(self, index: int) -> dict:
            return {"x": torch.tensor(float(index)), "y": torch.tensor(index)}

    loader = DataLoader(Pairs(), batch_size=BATCH, sampler=Orders())
    for epoch in range(EPOCHS):
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch["y"].tolist(), values=batch["x"].tolist())
            batch["x"].sub_(100)
            trainer.step(batch.pop("y"))
        log(at="epoch", epoch=epoch)
