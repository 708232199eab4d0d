"""Two ranks with unequal numbers of batches, as a dataset split by hand gives them."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Part(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((16,), float(index % 7)), index % 10


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Part(400 if dist.get_rank() else 500), batch_size=4, num_workers=1)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
