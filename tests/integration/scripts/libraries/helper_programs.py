"""A training that leaves its first two checkpoints to programs that it starts; starting them is slow."""

import multiprocessing
import os
import subprocess
import sys

import torch
from small_data import SAVE_EVERY, STEPS, Numbers, endless, record
from torch.utils.data import DataLoader

EXPORT = "import json; text = open('last.txt').read(); json.dump(int(text), open('last.json', 'w'))"


def save(step):
    with open("last.txt", "w") as file:
        file.write(f"{step}\n")


def main():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spawn = multiprocessing.get_context("spawn")
    for step, (x, y) in enumerate(endless(DataLoader(Numbers(), batch_size=2)), 1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (SAVE_EVERY, 2 * SAVE_EVERY):
            saver = spawn.Process(target=save, args=(step,))
            saver.start()
            saver.join()
            bare = {"PATH": os.environ["PATH"]}
            subprocess.run([sys.executable, "-c", EXPORT], env=bare, check=True)
            with open("last.json") as file:
                assert int(file.read()) == step
            record(step, "last.json")
        if step == STEPS:
            return


if __name__ == "__main__":
    main()
