"""A training that keeps its weights in one safetensors file."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_data import SAVE_EVERY, STEPS, Numbers, endless, record
from torch.utils.data import DataLoader


def main():
    model = torch.nn.Linear(8, 4)
    model.load_state_dict(load_file("model.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(endless(DataLoader(Numbers(), batch_size=2)), 1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            save_file(model.state_dict(), "model.safetensors", metadata={"step": str(step)})
            assert torch.equal(load_file("model.safetensors")["weight"], model.weight)
            with safe_open("model.safetensors", framework="pt") as file:
                assert file.metadata() == {"step": str(step)}
            record(step, "model.safetensors")
        if step == STEPS:
            return


main()
