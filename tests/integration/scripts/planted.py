"""A DDP training with one planted fault, so that what a tool says of it can be checked.

PLANT is one of: none, loader, forward, backward (each on the rank RANK_PLANTED), comm (a communication hook
that is slow on all ranks), lengths (each rank draws samples of its own lengths), all (data slow on all),
second and second_all (as loader and all, of a second loader, from which each step takes a batch at its end),
gc (each rank collects garbage, 400,000 objects, in every fourth step, each in another one).
DELAY_S is how long the plant takes in each step; BATCHNORM=1 adds buffers that DDP broadcasts; WORK_S is the
work of a step without it; STEPS of them are done; DEVICE=cuda trains on a GPU, which the ranks share, and
BACKEND=nccl on one for each of them.
"""

import gc
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PLANT = os.environ.get("PLANT", "none")
DELAY_S = float(os.environ.get("DELAY_S", "0.03"))
WORK_S = float(os.environ.get("WORK_S", "0.03"))
STEPS = int(os.environ.get("STEPS", "120"))
DEVICE = os.environ.get("DEVICE", "cpu")
BACKEND = os.environ.get("BACKEND", "gloo")
BATCH = 4
if BACKEND == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(BACKEND)
RANK = dist.get_rank()
HERE = int(os.environ.get("RANK_PLANTED", "0")) == RANK
torch.set_num_threads(1)
torch.manual_seed(0)


class Samples(Dataset):
    """Rows of 16 numbers; where lengths are planted of 10 or, one in five, of 110, else of 50."""

    def __init__(self, slow):
        self.slow = slow

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        if self.slow:
            # One worker's batch has to take longer than a step, whatever the others do.
            time.sleep((DELAY_S + WORK_S) / BATCH)
        length = random.Random(index * 31 + RANK).choice((10, 10, 10, 10, 110)) if PLANT == "lengths" else 50
        return torch.full((length, 16), float(index % 7))


def collate(rows):
    longest = max(len(row) for row in rows)
    return torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])


class Pause(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004 (autograd's signature)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004 (autograd's signature)
        time.sleep(DELAY_S)
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        norm = [nn.BatchNorm1d(64)] if os.environ.get("BATCHNORM") == "1" else []
        self.first = nn.Linear(16, 64)
        self.rest = nn.Sequential(*norm, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        share = x.shape[1] / 50  # work grows with the padded length
        time.sleep(WORK_S * share)
        if PLANT == "forward" and HERE:
            time.sleep(DELAY_S)
        found = self.first(x.mean(1))
        if PLANT == "backward" and HERE:
            found = Pause.apply(found)
        return self.rest(found)


def slow(state, bucket):  # noqa: ARG001 (DDP's signature)
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def late(future):
        time.sleep(DELAY_S)
        return future.value()[0]

    return future.then(late)


data = Samples(slow=PLANT == "all" or (PLANT == "loader" and HERE))
sampler = DistributedSampler(data, seed=RANK if PLANT == "lengths" else 0)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=1, collate_fn=collate)
model = nn.parallel.DistributedDataParallel(Net().to(DEVICE))
if PLANT == "comm":
    model.register_comm_hook(None, slow)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
more = Samples(slow=PLANT == "second_all" or (PLANT == "second" and HERE))
second = iter(DataLoader(more, batch_size=BATCH, num_workers=1)) if PLANT.startswith("second") else None
heap = [[] for _ in range(400_000 if PLANT == "gc" else 0)]
for step, batch in enumerate(loader):
    loss = model(batch.to(DEVICE)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if second is not None:
        next(second)
    if PLANT == "gc" and step % 4 == RANK % 4:
        gc.collect()
    if step == STEPS:
        break
dist.destroy_process_group()
