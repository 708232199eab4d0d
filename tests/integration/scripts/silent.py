"""Two gloo ranks; only the first one reads data and hands it on, as accelerate's dispatcher does."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Small(Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        return torch.full((16,), float(index % 7))


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(Small(), batch_size=4, num_workers=1)) if dist.get_rank() == 0 else None
while True:
    x = next(batches) if batches is not None else torch.empty(4, 16)
    dist.broadcast(x, 0)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
