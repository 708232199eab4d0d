"""A training that writes its curves for TensorBoard."""

import os

import torch
from small_data import SAVE_EVERY, STEPS, Numbers, endless, record
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter


def main():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    writer = SummaryWriter()
    size = 0
    for step, (x, y) in enumerate(endless(DataLoader(Numbers(), batch_size=2)), 1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss.item(), step)
        if step % SAVE_EVERY == 0:
            writer.add_histogram("weight", model.weight, step)
            writer.flush()
            (events,) = os.listdir(writer.log_dir)
            before, size = size, os.path.getsize(f"{writer.log_dir}/{events}")
            assert size > before
            record(step, f"{writer.log_dir}/{events}")
        if step == STEPS:
            break
    writer.close()


main()
