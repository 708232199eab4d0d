"""Ways for a batch to reach the GPU. HOW: to | buffer | compiled | there; PIN=1 pins; the GPU is the last."""

import os

import torch
from torch.utils.data import DataLoader

HOW = os.environ["HOW"]
DEVICE = torch.device("cuda", torch.cuda.device_count() - 1)  # and no torch.cuda.set_device


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
    loader = DataLoader(data, batch_size=None, pin_memory=os.environ.get("PIN") == "1")
    for batch in loader:
        optimizer.zero_grad()
        if HOW == "buffer":
            buffer.copy_(batch, non_blocking=True)
            batch = buffer
        loss(batch).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
