"""Two gloo ranks with workers; whatever runs on after the training leaves a trace in the folder TRACES.

``ends.py`` is a rank (torchrun starts it), ``ends.py spawn`` starts its ranks itself and has code after
them, ``ends.py around`` runs that as a child and has code after it. With SHARING=file_system batches lie in
named shared memory. A step takes STEP_S seconds; there are STEPS of them, and WITH says how they end.
"""

import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TRACES = os.environ["TRACES"]


class Slow(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((512,), float(index % 7)), index % 10


def trace(name):
    with open(os.path.join(TRACES, name), "w") as file:
        file.write(str(os.getpid()))


def train(rank=None, port=None):
    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mp.set_sharing_strategy(os.environ.get("SHARING", "file_descriptor"))
    torch.set_num_threads(1)
    data = Slow()
    # mp.spawn would make the workers by "spawn" too, and torch 2.13's abort now and then as they end.
    loader = DataLoader(
        data, batch_size=8, sampler=DistributedSampler(data), num_workers=2, multiprocessing_context="fork"
    )
    net = torch.nn.Linear(512, 10)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    left = int(os.environ.get("STEPS", "1000000"))
    while left > 0:
        for x, y in loader:
            time.sleep(float(os.environ.get("STEP_S", "0")))
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if left % 100 == 0 and dist.get_rank() == 0:
                torch.save(net.state_dict(), "last.pt")
            left -= 1
            if left == 0:
                break
    trace(f"after_training_{dist.get_rank()}")
    if os.environ.get("WITH") == "error":
        raise RuntimeError("the last step fails")
    if os.environ.get("WITH") == "exit":
        sys.exit(3)


if __name__ == "__main__":
    if "around" in sys.argv:
        subprocess.run([sys.executable, __file__, "spawn"], check=False)
        trace("after_subprocess")
    elif "spawn" in sys.argv:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(train, args=(port,), nprocs=2)
        trace("after_spawn")
    else:
        train()
