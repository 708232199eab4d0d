"""A training that torch.profiler sees for a while: how long the GPU idled while the loop waited for data.

Prints one JSON line: which batches were profiled, the mean step, the GPU's idle time inside ``next()``, and
all its idle time, kernel by kernel. A profiler slows the host, so that the loader has more time: whoever
compares has to look at the same steps.

Usage: python tests/bench/profiled_training.py --mode data|gpu|launch --workers W --before N
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from feedtune.workloads.resnet import build_model

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
WAITS = "the loop waits"


class Photos(Dataset):
    """JPEG of 500 x 375, read from files, cropped and resized to 224."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"{number:04}.jpg" for number in range(64)]
        self.count = count
        rng = np.random.default_rng(0)
        for file in self.files:
            if not file.exists():
                small = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
                image = Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)
                image.save(file, quality=92)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self.files[index % 64], "rb") as file:
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=(40, 20, 420, 360))
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div_(255)
        return (pixels - MEAN) / STD, index % 1000


class Cached(Dataset):
    """A batch that is there already."""

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        self.batch = torch.randn(shape), torch.randint(0, 10, shape[:1])
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch


def setting(args: argparse.Namespace) -> tuple[nn.Module, DataLoader]:
    steps = args.before + args.profiled + 4 * args.workers + 8
    if args.mode == "data":
        data: Dataset = Photos(Path(args.data), steps * args.batch)
        loader = DataLoader(data, args.batch, num_workers=args.workers, pin_memory=True, drop_last=True)
        return build_model("resnet50", 1000), loader
    if args.mode == "gpu":
        loader = DataLoader(Cached((128, 3, 224, 224), steps), None, num_workers=args.workers)
        return build_model("resnet50", 1000), loader
    small = [layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.ReLU())]
    loader = DataLoader(Cached((32, 64), steps), None, num_workers=args.workers)
    return nn.Sequential(*small, nn.Linear(64, 10)), loader


def busy(events: list, begin: float, end: float) -> float:
    """Time in which the GPU did anything between two moments; events are sorted and may overlap."""
    total, last = 0.0, begin
    for one_begin, one_end in events:
        if one_end <= last or one_begin >= end:
            continue
        total += min(one_end, end) - max(one_begin, last)
        last = max(last, min(one_end, end))
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["data", "gpu", "launch"], required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--before", type=int, default=60)
    parser.add_argument("--profiled", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--data", default="/tmp/feedtune-photos")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    model, loader = setting(args)
    model = model.cuda().to(memory_format=torch.channels_last) if args.mode != "launch" else model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.mode != "launch"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batches = iter(loader)
    for _ in range(args.before):
        step(*next(batches))
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(args.profiled + 2):
            with torch.profiler.record_function(WAITS):
                batch = next(batches)
            step(*batch)
        torch.cuda.synchronize()
    cpu = torch.autograd.DeviceType.CPU
    found = profile.events()
    times = [(e.time_range.start, e.time_range.end, e.name == WAITS, e.device_type == cpu) for e in found]
    waits = sorted((begin, end) for begin, end, waited, host in times if waited and host)
    gpu = sorted((begin, end) for begin, end, waited, host in times if not waited and not host)
    waits = waits[1:]
    begin, end = waits[0][0], waits[-1][0]
    idle = sum((b - a) - busy(gpu, a, b) for a, b in waits[:-1])
    steps = len(waits) - 1
    print(
        json.dumps(
            {
                "first": args.before + 1,
                "steps": steps,
                "step_s": (end - begin) / steps / 1e6,
                "wait_s": sum(b - a for a, b in waits[:-1]) / steps / 1e6,
                "idle_in_wait_s": idle / steps / 1e6,
                "idle_s": ((end - begin) - busy(gpu, begin, end)) / steps / 1e6,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
