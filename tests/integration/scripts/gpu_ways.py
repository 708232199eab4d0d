"""Ways for a batch to reach the GPU. HOW: to | buffer | compiled | there; PIN=1 pins; the GPU is the last.

With GARBAGE=1 each step collects garbage, 200,000 objects; with SECOND=1 it takes a batch of a second loader,
too, which needs 20 ms for it; HEAVY=1 gives the GPU some 300 ms of work a step.
"""

import gc
import os
import time

import torch
from torch.utils.data import DataLoader

HOW = os.environ["HOW"]
DEVICE = torch.device("cuda", torch.cuda.device_count() - 1)  # and no torch.cuda.set_device


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


def main():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(
        DEVICE
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    place = DEVICE if HOW == "there" else "cpu"
    data = [torch.randn(4096, 1024, device=place) for _ in range(4)] * 20
    buffer = torch.empty(4096, 1024, device=DEVICE)

    def loss(batch):
        return model(batch.to(DEVICE, non_blocking=True)).square().mean()

    if HOW == "compiled":
        loss = torch.compile(loss, backend="aot_eager")
    heap = [[] for _ in range(200_000)] if os.environ.get("GARBAGE") == "1" else None
    large = torch.randn(8192, 8192, device=DEVICE) if os.environ.get("HEAVY") == "1" else None
    loader = DataLoader(data, batch_size=None, pin_memory=os.environ.get("PIN") == "1")
    second = iter(DataLoader(Slow(), batch_size=None)) if os.environ.get("SECOND") == "1" else None
    for batch in loader:
        optimizer.zero_grad()
        if HOW == "buffer":
            buffer.copy_(batch, non_blocking=True)
            batch = buffer
        loss(batch).backward()
        if large is not None:
            for _ in range(16):
                large @ large
        optimizer.step()
        if second is not None:
            next(second)
        if heap is not None:
            gc.collect()


if __name__ == "__main__":
    main()
