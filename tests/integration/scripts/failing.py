"""Training that fails in a way that MODE names, where its loader has at least FROM workers (2).

A tuning therefore meets the failure in some trials and not in others. OWN sets the script's own worker
count, DEVICE=cuda trains on GPUs.
"""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

MODE, FROM = os.environ["MODE"], int(os.environ.get("FROM", "2"))


def workers() -> int:
    info = get_worker_info()
    return 0 if info is None else info.num_workers


class Failing(Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        time.sleep(0.001)
        if workers() >= FROM and get_worker_info().id == 1 and index > 40:
            self.fail(index)
        return torch.full((16,), float(index % 7)), index % 10

    def fail(self, index):
        if MODE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "bus":
            os.kill(os.getpid(), signal.SIGBUS)
        if MODE == "exception":
            raise ValueError(f"sample {index} cannot be decoded")
        if MODE == "hang_worker":
            time.sleep(10000)


def main():
    torch.manual_seed(0)
    rank = 0
    device = os.environ.get("DEVICE", "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    model = torch.nn.Linear(16, 10).to(device)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        rank = torch.distributed.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Failing(), batch_size=4, num_workers=int(os.environ.get("OWN", "1")))
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fail_in_loop(rank)


def children() -> int:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return len(file.read().split())


steps = 0


def fail_in_loop(rank):
    global steps
    steps += 1
    if MODE not in ("memory", "hang_loop", "rank_killed", "exit") or children() < FROM or steps % 50:
        return
    if MODE == "memory" and torch.cuda.is_initialized():
        torch.empty(1 << 44, device="cuda")  # 16 TiB
    if MODE == "memory":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1.00 GiB free."
        )
    if rank == 1 or "RANK" not in os.environ:
        if MODE == "hang_loop":
            time.sleep(10000)
        if MODE == "rank_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "exit":
            sys.exit(3)


main()
