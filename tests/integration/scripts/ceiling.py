"""A short training that saves as it goes: DDP where a launcher started it, else one process.

WORKERS of the loader; STEPS of the training; FAIL_AT a step it raises an error.
"""

import itertools
import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS = int(os.environ.get("STEPS", "100000"))
FAIL_AT = int(os.environ.get("FAIL_AT", "-1"))


class Slow(Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), float(index % 5))


def main():
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    sampler = None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(Slow())
    loader = DataLoader(
        Slow(), batch_size=4, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "1"))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    print("epoch 0", flush=True)
    for step, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step % 25 == 5:
            torch.save(model.state_dict(), "last.pt")
            with open("log.txt", "a") as file:
                file.write(f"{step}\n")
        if step == FAIL_AT:
            raise ValueError("this training fails")
        if step == STEPS:
            break
    with open("finished", "w") as file:
        file.write("yes")


if __name__ == "__main__":
    main()
