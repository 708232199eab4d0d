"""Data that takes a steady time to read, and a record of the saves that were read back."""

import os
import time

import torch
from torch.utils.data import Dataset

SAVE_EVERY = 40
STEPS = int(os.environ.get("STEPS", "100000"))


class Numbers(Dataset):
    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), float(index % 5)), index % 4


def endless(loader):
    while True:
        yield from loader


def record(step, file):
    """Write down that a file has been saved and read back, outside of the project folder."""
    if "LOGS" in os.environ:
        with open(os.environ["LOGS"] + "/saves", "a") as log:
            log.write(f"{step} {file} {os.path.getsize(file)}\n")
