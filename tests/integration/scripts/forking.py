"""Training that forks between its epochs: a validation loader with workers, and a helper process."""

import multiprocessing
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((16,), float(index % 7)), index % 10


def helper():
    with open(os.path.join(os.environ["LOGS"], "helper"), "a") as file:
        file.write("ran\n")


def main():
    model = torch.nn.Linear(16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Slow(120), batch_size=4, num_workers=2)
    test = DataLoader(Slow(16), batch_size=4, num_workers=2)
    while True:
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for x, _ in test:
                model(x)
        process = multiprocessing.Process(target=helper)
        process.start()
        process.join()


if __name__ == "__main__":
    main()
