"""Five small trainings that time themselves: the truth beside which block rates are held.

Usage: python tests/bench/steady.py KIND      (eval: torchrun --standalone --nproc_per_node=2 ... eval)

KIND: latency | decode | memory | eval | iterable. WORKERS (environment) sets num_workers; for each line on
standard input it trains for SLICE seconds, prints its rate in them and waits for the next line; without SLICE
it trains on. The rate leaves out the start, and one turnover of the queue after each evaluation or wait.
"""

from __future__ import annotations

import io
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

WORKERS = int(os.environ.get("WORKERS", "0"))
SLICE = float(os.environ.get("SLICE", "inf"))
BATCH, PREFETCH, EVAL_EVERY = 8, 2, 15


class Waiting(Dataset):
    """Every sample waits 4 ms: a store far away."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int):
        time.sleep(0.004)
        return torch.full((64,), float(index % 7)), index % 10


class Decoding(Dataset):
    """Every sample decodes and resizes a JPEG."""

    def __init__(self) -> None:
        from PIL import Image

        noise = torch.randint(
            0, 255, (60, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        stream = io.BytesIO()
        Image.fromarray(noise.numpy()).resize((640, 480)).save(stream, "JPEG")
        self.data = stream.getvalue()

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int):
        from PIL import Image

        image = Image.open(io.BytesIO(self.data)).convert("RGB").resize((8, 8))
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)[:64].float(), index % 10


class Held(Dataset):
    """Every sample is in memory."""

    def __init__(self) -> None:
        self.data = torch.randn(4096, 64)

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int):
        return self.data[index % 4096], index % 10


class Streaming(IterableDataset):
    """Samples that arrive one after the other, split between the workers."""

    def __iter__(self):
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, 10_000_000, every):
            time.sleep(0.004)
            yield torch.full((64,), float(index % 7)), index % 10


def main(kind: str) -> None:
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, 512 if kind == "memory" else 64), torch.nn.ReLU(), torch.nn.LazyLinear(10)
    )
    model(torch.zeros(1, 64))
    sampler, data = None, {"decode": Decoding, "memory": Held, "iterable": Streaming}.get(kind, Waiting)()
    if kind == "eval":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=WORKERS)
    test = DataLoader(Waiting(), BATCH)
    turnover = WORKERS * (PREFETCH + 1) + 2
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    skip, steps, seconds = 10 * turnover, 0, 0.0
    edge = time.monotonic()
    for number, (x, y) in enumerate(loader, 1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.monotonic()
        if skip:
            skip -= 1
        else:
            steps, seconds = steps + 1, seconds + now - edge
        edge = now
        if kind == "eval" and number % EVAL_EVERY == 0:
            evaluate(model, test)
            skip, edge = max(skip, turnover), time.monotonic()
        if seconds > SLICE and first:  # other ranks wait for this one
            print(f"{steps / seconds:.3f} steps/s", flush=True)
            if not sys.stdin.readline():
                os._exit(0)
            skip, steps, seconds, edge = turnover, 0, 0.0, time.monotonic()


def evaluate(model, test) -> None:
    model.eval()
    with torch.no_grad():
        for number, (x, _) in enumerate(test):
            model(x)
            if number == 3:
                break
    model.train()


if __name__ == "__main__":
    main(sys.argv[1])
