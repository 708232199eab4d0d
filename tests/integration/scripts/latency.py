"""Latency-bound training: every sample waits (SAMPLE_S, 4 ms), nothing else takes time."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 32 * int(os.environ.get("STEPS", "100000"))

    def __getitem__(self, index):
        time.sleep(float(os.environ.get("SAMPLE_S", "0.004")))
        return torch.full((64,), float(index % 7)), index % 10


def main():
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers = int(os.environ.get("WORKERS", "0"))
    loader = DataLoader(Slow(), batch_size=32, num_workers=workers)
    steps = 0
    for x, y in loader:
        if steps == 0:
            begun = time.monotonic()  # starting the workers is not the rate
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    print(f"{(steps - 1) / (time.monotonic() - begun):.3f} steps/s")


if __name__ == "__main__":
    main()
