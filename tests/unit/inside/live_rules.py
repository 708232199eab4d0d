"""Small trainings for the rules of the mechanism; as those of ``live_scenarios``, they know nothing of it."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import warnings

import torch
from live_scenarios import BATCH, EPOCHS, SAMPLES, Numbers, Orders, Trainer, train
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Pids(Numbers):
    """Sample ``i`` is ``(i, process that made it)``."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def _pids(log, loader: DataLoader, entry, epochs: int = EPOCHS) -> None:
    """Train, and log each batch with the processes that made it and with ``entry()``."""
    trainer = Trainer()
    for epoch in range(epochs):
        for batch, pids in loader:
            log(
                at="batch", epoch=epoch, indices=batch.tolist(), made_by=sorted(set(pids.tolist())), **entry()
            )
            trainer.step(batch)
        log(at="epoch", epoch=epoch)


def workers_by_pid(log, _) -> None:
    loader = DataLoader(Pids(), batch_size=BATCH, sampler=Orders(), num_workers=2, persistent_workers=True)
    _pids(log, loader, lambda: {"iterator": loader._iterator is not None, "children": children()})


def children() -> list[int]:
    """Living child processes."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += [int(word) for word in file.read().split()]
    return found


def environment(log, request) -> None:
    """What a helper, started at each step, would inherit."""
    os.environ["PYTHONPATH"] = f"{request['config']['folder']}{os.pathsep}/of/the/user"
    os.environ["FEEDTUNE_RUN_ID"] = "0123"
    loader = DataLoader(Pids(), batch_size=BATCH, sampler=Orders())
    _pids(
        log,
        loader,
        lambda: {"variables": {k: v for k, v in os.environ.items() if "PYTHONPATH" in k or "FEED" in k}},
    )


def threads(log, _) -> None:
    loader = DataLoader(Pids(), batch_size=BATCH, sampler=Orders(), num_workers=1)
    _pids(log, loader, lambda: {"threads": [thread.name for thread in threading.enumerate()]})


def distributed_rank(log, _) -> None:
    """The environment tells another rank than torch.distributed, as in Lightning's first process."""
    os.environ.update(RANK="7", WORLD_SIZE="9")
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()))


def evaluates_only(log, request) -> None:
    """Reads batches, and no optimizer ever steps."""
    loader = DataLoader(Numbers(request["batches"] * BATCH), batch_size=BATCH)
    short = DataLoader(Numbers(2 * BATCH), batch_size=BATCH)
    while True:
        for batch in loader:
            log(at="batch", indices=batch.tolist())
        for batch in short:
            log(at="batch", indices=batch.tolist())
        if request["once"]:
            return


def helper_before_training(log, _) -> None:
    """A child that reads some batches of its own, before its parent trains and while it does."""
    if os.fork() == 0:
        for _ in range(20):
            for batch in DataLoader(Numbers(), batch_size=BATCH):
                log(at="helper", indices=batch.tolist())
            time.sleep(0.01)
        os._exit(0)
    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()))


def child_that_stays(log, _) -> None:
    """A child forked in the middle of training outlives its parent."""
    trainer, steps = Trainer(), 0
    for epoch in range(EPOCHS):
        for batch in DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()):
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
            steps += 1
            if steps == 8:
                child = os.fork()
                if child == 0:
                    time.sleep(600)
                    os._exit(0)
                log(at="child", pid=child)


def one_line(log, request) -> None:
    """Loaders of training and evaluation over one dataset, made at one line; they differ in one thing."""
    data = Numbers()
    differences = {
        "sampler": [{"sampler": Orders()}, {}],
        "batch_size": [{"sampler": Orders()}, {"sampler": Orders(), "batch_size": 2 * BATCH}],
    }
    loaders = [DataLoader(data, **{"batch_size": BATCH, **words}) for words in differences[request["differ"]]]
    trainer = Trainer()
    for epoch in range(EPOCHS):
        for batch in loaders[0]:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        for batch in loaders[1]:
            log(at="eval", indices=batch.tolist())
        log(at="epoch", epoch=epoch)


class OneShot(IterableDataset):
    """A generator that is used up by its first reader."""

    def __init__(self, count: int) -> None:
        self.values = iter(range(count))

    def __iter__(self):
        return (torch.tensor(value) for value in self.values)


def one_shot(log, request) -> None:
    trainer = Trainer()
    loader = DataLoader(OneShot(request["samples"]), batch_size=BATCH)
    for epoch in range(EPOCHS):
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
        log(at="epoch", epoch=epoch)


def waits_with_timeout(log, _) -> None:
    """torch refuses a timeout where there are no workers."""
    train(log, DataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=1, timeout=30))


class Sized(IterableDataset):
    """Iterable data that tells its length, for all workers together."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        return (torch.tensor(i) for i in range(first, SAMPLES, stride))


def sized_iterable(log, _) -> None:
    warnings.simplefilter("always")
    loader = DataLoader(Sized(), batch_size=BATCH)
    trainer = Trainer()
    for epoch in range(EPOCHS):
        log(at="length", value=len(loader))
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)


def always_warns(log, _) -> None:
    """Every warning is shown each time; one worker more than there are cores is worth one to torch."""
    warnings.simplefilter("always")
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=200)
    print("made", file=sys.stderr, flush=True)
    train(log, loader)


def stateful(log, _) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    train(log, StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=Orders(), num_workers=1))


def web_loader(log, _) -> None:
    import webdataset

    train(log, webdataset.WebLoader(Sized(), batch_size=BATCH, num_workers=1))


def two_sizes(log, _) -> None:
    """Batches of very different numbers of elements: token lengths."""

    class Texts(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((10 + 10 * (index // BATCH % 2),), index)

    loader = DataLoader(Texts(), batch_size=BATCH)
    trainer = Trainer()
    for epoch in range(EPOCHS):
        for batch in loader:
            log(at="batch", epoch=epoch, indices=batch[:, 0].tolist(), width=batch.shape[1])
            trainer.step(batch)


def saves(log, _) -> None:
    """``torch.save`` before and after the first loader is made."""
    plain = torch.save
    log(at="before", wrapped=hasattr(torch.save, "__wrapped__"))
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=Orders())
    log(at="after", wrapped=getattr(torch.save, "__wrapped__", None) is plain)
    train(log, loader)


def prints(log, request) -> None:
    """Says each step into a buffer of its own size."""
    sys.stdout = open(request["printed"], "w")  # noqa: SIM115
    trainer, steps = Trainer(), 0
    for epoch in range(request["epochs"]):
        for batch in DataLoader(Numbers(), batch_size=BATCH, sampler=Orders()):
            log(at="batch", epoch=epoch, indices=batch.tolist())
            trainer.step(batch)
            steps += 1
            print("step", steps)


class LazyStore(Dataset):
    """Reads from an LMDB environment that the first fetch opens."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count = path, count
        self.store = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        import lmdb

        if self.store is None:
            self.store = lmdb.open(self.path, readonly=True, lock=False)
        with self.store.begin() as transaction:
            return index, int(transaction.get(b"%d" % index))


def lazy_store(log, request) -> None:
    trainer = Trainer()
    loader = DataLoader(LazyStore(request["data"], request["count"]), batch_size=BATCH)
    for epoch in range(EPOCHS):
        for indices, values in loader:
            log(at="batch", epoch=epoch, indices=indices.tolist(), values=values.tolist())
            trainer.step(values)
