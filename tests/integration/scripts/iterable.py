"""Training on iterable data; split between its workers where SPLIT is set. Every sample is another one."""

import os
import time

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info() if os.environ.get("SPLIT") else None
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, 100000, every):
            time.sleep(0.002)
            yield torch.full((16,), float(index)), index % 10


def main():
    model = torch.nn.Linear(16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for x, y in DataLoader(Stream(), batch_size=4, num_workers=int(os.environ["WORKERS"])):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
