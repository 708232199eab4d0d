"""Trains with loaders of several kinds, one after the other, and writes down what each loop received.

Arguments: kinds. ``WORKERS`` sets their worker count. One line a kind and rank in ``LOGS/received.rank{r}``:
a hash of all batches in order, of the samples' own random numbers, and the state of every generator after.
"""

import hashlib
import json
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

WORKERS = int(os.environ.get("WORKERS", "0"))
SAMPLES, BATCH = 44, 4


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index])


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        # Seeds of workers depend on their number and the global generator.
        return (
            torch.tensor([index, torch.randint(1000, ()).item()]) for index in range(first, SAMPLES, step)
        )


def loader_of(kind):
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    if kind == "iterable":
        return DataLoader(Stream(), batch_size=BATCH, num_workers=WORKERS)
    sampler = DistributedSampler(Numbers(), shuffle=True) if kind == "distributed" else None
    shuffle = None if sampler else True
    return DataLoader(
        Numbers(), BATCH, shuffle=shuffle, sampler=sampler, generator=generator, num_workers=WORKERS
    )


def train(kind):
    torch.manual_seed(1)
    random.seed(1)
    model = torch.nn.Linear(1, 1)
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = loader_of(kind)
    received = hashlib.sha256()
    for epoch in range(2):
        if kind == "distributed":
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            received.update(batch.numpy().tobytes())
            received.update(torch.rand(1).numpy().tobytes())  # as dropout would
            optimizer.zero_grad()
            model(batch[:, :1].float()).sum().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{kind}.{rank}.pt")
    states = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + str(random.getstate()).encode())
    line = {
        "kind": kind, "hash": received.hexdigest(), "states": states.hexdigest(),
        "workers": loader.num_workers, "iterator": type(iter(loader)).__name__,
    }  # fmt: skip
    with open(f"{os.environ['LOGS']}/received.rank{rank}", "a") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if "distributed" in sys.argv:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for kind in sys.argv[1:]:
        train(kind)
    print("pid", os.getpid())
