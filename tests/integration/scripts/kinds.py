"""Trains in a loop of one kind over a loader of one kind, both named on the command line.

With ``spawn`` behind them it starts two ranks itself, from a launcher it is one of several.

STEPS ends it, else it trains for ever; WORKERS is what the script gives its training loader. ``LOGS/got0``
then holds a hash of all batches in order. Shards and a database lie in DATA.
"""

import contextlib
import hashlib
import itertools
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)

WORKERS = int(os.environ.get("WORKERS", "1"))
DATA = os.environ.get("DATA", "")
SAMPLES, BATCH = 42, 4


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    """Every worker yields all of it."""

    def __iter__(self):
        return (torch.tensor([float(index)]) for index in range(SAMPLES))


class Shared(IterableDataset):
    """Workers share it."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (torch.tensor([float(index)]) for index in range(first, SAMPLES, step))


class Records(Dataset):
    """Numbers in an LMDB, opened at once or by whoever reads first."""

    def __init__(self, lazily):
        self.env = None if lazily else self.open()

    def open(self):
        import lmdb

        return lmdb.open(os.path.join(DATA, "records"), readonly=True, lock=False)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.env is None:
            self.env = self.open()
        with self.env.begin() as transaction:
            return torch.tensor([float(transaction.get(b"%d" % index))])


class Numbered(DataLoader):
    """Tells how many batches have passed."""

    passed = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.passed += 1
            yield batch


class Rotating(Sampler):
    """Begins each pass where the one before it has ended."""

    def __init__(self):
        self.first = 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for number in range(SAMPLES):
            yield (self.first + number) % SAMPLES
        self.first += 5


class Enough(Exception):
    """The training is over."""


class Training:
    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.cast = contextlib.nullcontext
        self.left = int(os.environ.get("STEPS", "-1"))
        self.got = hashlib.sha256()

    def step(self, batch, update=True):
        self.got.update(batch.numpy().tobytes())
        with self.cast():
            loss = self.model(batch).sum()
        loss.backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.left -= 1
        if self.left == 0:
            raise Enough

    def epochs(self, loader, after=id):
        for epoch in itertools.count():
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for batch in loader:
                self.step(batch)
            after(epoch)


# -- loops: each trains from what ``make`` makes ------------------------------------------------------


def by_next(training, make):
    loader = make()
    while True:
        batches = iter(loader)
        for _ in range(len(loader)):
            training.step(next(batches))


def until_stopped(training, make):
    loader = make()
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        training.step(batch)


def enumerated(training, make):
    loader = make()
    while True:
        for _, batch in enumerate(loader):
            training.step(batch)


def with_a_bar(training, make):
    from tqdm import tqdm

    loader = make()
    while True:
        for batch in tqdm(loader):
            training.step(batch)


def sliced(training, make):
    loader = make()
    while True:
        for batch in itertools.islice(loader, 7):
            training.step(batch)


def by_generator(training, make):
    def batches(loader):
        for batch in loader:
            yield batch * 1

    loader = make()
    while True:
        for batch in batches(loader):
            training.step(batch)


def endless(training, make):
    def forever(loader):
        while True:
            yield from loader

    for batch in forever(make()):
        training.step(batch)


def by_count(training, make):
    loader = make()
    while True:
        for number, batch in enumerate(loader):
            if number == 6:
                break
            training.step(batch)


def in_a_class(training, make):
    class Module:
        def __init__(self):
            self.loader = self.train_dataloader()

        def train_dataloader(self):
            return make()

        def fit(self):
            while True:
                for batch in self.loader:
                    training.step(batch)

    Module().fit()


def new_each_epoch(training, make):
    while True:
        for batch in make():
            training.step(batch)


def alternating(training, make):
    """Two networks with a loader each, as in a GAN."""
    other = Training()
    one, two = make(), make()
    while True:
        for left, right in zip(one, two, strict=True):
            other.step(right)
            training.step(left)


def accumulating(training, make):
    model = training.model = torch.nn.parallel.DistributedDataParallel(training.model)
    loader = make()
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            last = number % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                training.step(batch, update=last)


def mixed_precision(training, make):
    training.cast = lambda: torch.autocast("cpu", torch.bfloat16)
    training.epochs(make())


def compiled(training, make):
    training.model = torch.compile(training.model, backend="eager")
    training.epochs(make())


def validating(training, make):
    """A validation after each epoch, whose workers start anew."""
    held_out = DataLoader(Numbers(), batch_size=BATCH, num_workers=1)

    def validate(_):
        with torch.no_grad():
            for batch in held_out:
                training.model(batch)

    training.epochs(make(), validate)


# -- loaders -----------------------------------------------------------------------------------------


def loader_of(data, **words):
    words = {"shuffle": not isinstance(data, IterableDataset), **words}
    return DataLoader(data, **{"batch_size": BATCH, "num_workers": WORKERS, **words})


def subclass():
    return Numbered(Numbers(), batch_size=BATCH, shuffle=True, num_workers=WORKERS)


def batch_sampler():
    batches = BatchSampler(Rotating(), BATCH, drop_last=True)
    return DataLoader(Numbers(), batch_sampler=batches, num_workers=WORKERS)


def stateful_sampler():
    return loader_of(Numbers(), sampler=Rotating(), shuffle=None)


def own_collate():
    return loader_of(Numbers(), collate_fn=lambda samples: torch.stack(samples).flip(0))


def own_worker_init():
    """What a worker yields needs what the init function has set."""

    class Offset(Numbers):
        def __getitem__(self, index):
            return super().__getitem__(index) + self.offset

    def start(_):
        get_worker_info().dataset.offset = 100

    return loader_of(Offset(), worker_init_fn=start)


def own_generator():
    return loader_of(Numbers(), generator=torch.Generator().manual_seed(5))


def unbatched():
    return loader_of(Numbers(), batch_size=None)


def iterable():
    return loader_of(Stream())


def iterable_split():
    return loader_of(Shared())


def distributed():
    """By "fork" in ranks that were spawned, too, whose workers start faster so."""
    sampler = DistributedSampler(Numbers(), shuffle=True)
    return loader_of(Numbers(), sampler=sampler, shuffle=None, multiprocessing_context="fork")


def web_loader():
    import webdataset

    def numbers(samples):
        return torch.tensor([[float(number)] for (number,) in samples])

    shards = webdataset.WebDataset(os.path.join(DATA, "shard-{000000..000001}.tar"), shardshuffle=False)
    data = shards.decode().to_tuple("cls").batched(BATCH, collation_fn=numbers)
    return webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS)


def stateful_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=WORKERS)


def lmdb_lazily():
    return loader_of(Records(lazily=True))


def lmdb_at_once():
    return loader_of(Records(lazily=False))


def persistent():
    return loader_of(Numbers(), persistent_workers=True)


def main(rank=0, port=None):
    torch.manual_seed(1)
    train, make = (globals()[name] for name in sys.argv[1:3])
    if port is not None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    elif make is distributed:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training()
    with contextlib.suppress(Enough):
        train(training, make)
    with open(os.path.join(os.environ["LOGS"], f"got{rank}"), "w") as log:
        log.write(training.got.hexdigest())


def spawn():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main, args=(port,), nprocs=2)


if __name__ == "__main__":
    spawn() if "spawn" in sys.argv else main()
