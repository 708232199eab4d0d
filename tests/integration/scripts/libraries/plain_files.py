"""Saves with what Python, torch and numpy bring: in place, by a temporary name, into a folder made anew."""

import shutil

shutil.rmtree("out")

import os  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from small_data import SAVE_EVERY, STEPS, Numbers, endless, record  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


def save(model, step, losses):
    with open("last.pt", "wb") as file:
        torch.save({"step": step, "model": model.state_dict()}, file)
    torch.save({"step": step}, "best.pt.tmp")
    os.replace("best.pt.tmp", "best.pt")
    np.save("losses.npy", np.array(losses))
    with open(f"out/step{step}.txt", "w") as file:
        file.write(f"{losses[-1]}\n")


def check(step, losses):
    with open("last.pt", "rb") as file:
        assert torch.load(file)["step"] == step
    assert torch.load("best.pt") == {"step": step}
    assert not os.path.exists("best.pt.tmp")
    assert np.load("losses.npy").tolist() == losses
    written = [f"step{number}.txt" for number in range(SAVE_EVERY, step + 1, SAVE_EVERY)]
    assert sorted(os.listdir("out")) == sorted(written)
    record(step, "last.pt")


def main():
    os.mkdir("out")
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for x, y in endless(DataLoader(Numbers(), batch_size=2)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % SAVE_EVERY == 0:
            save(model, len(losses), losses)
            check(len(losses), losses)
        if len(losses) == STEPS:
            return


main()
