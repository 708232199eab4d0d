import glob
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Photos(Dataset):
    def __init__(self, root):
        self.files = sorted(glob.glob(root + "/*/*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = np.array(Image.open(self.files[i]).convert("RGB").resize((64, 64)))
        info = get_worker_info()
        return torch.from_numpy(image).permute(2, 0, 1) / 255, i % 4, info.num_workers if info else 0


dist.init_process_group("gloo")
rank, step = dist.get_rank(), 0
with open(os.environ["LOGS"] + "/starts", "a") as starts:
    starts.write(f"{rank}\n")
log = open(os.environ["LOGS"] + f"/rank{rank}", "w", buffering=1)  # noqa: SIM115
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2), torch.nn.Flatten(), torch.nn.Linear(7688, 4))
model = torch.nn.parallel.DistributedDataParallel(net)
data = Photos(sys.argv[1])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for x, y, workers in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        log.write(f"{step} {int(workers[0])}\n")
    if rank == 0:
        torch.save(net.state_dict(), "last.pt")
