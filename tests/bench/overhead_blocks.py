"""What taking steps down costs, in one process: blocks of steps with the hook armed and off, in turns.

Usage: python tests/bench/overhead_blocks.py [--blocks 60] [--step-ms 20] [--device cuda] [--model resnet50]

Whole processes (tests/bench/overhead.py) differ by more than the cost on a machine that does other things.
Prints the ratio of the blocks' rates, armed over off, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, dataloader

from feedtune.analysis.stats import paired_gain
from feedtune.inside.hook import _follow
from feedtune.inside.observed import Observer
from feedtune.workloads.resnet import build_model


def make_step(step_ms: float, device: str) -> Any:
    """A function that trains one step of about that length on a batch of 64."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor, times: int = 1) -> None:
        batch = batch.to(device, non_blocking=True)
        for _ in range(times):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = torch.randn(64, 256)
    once = seconds_each(step, batch, 50)
    more = (seconds_each(lambda one: step(one, 11), batch, 20) - once) / 10
    times = max(1, 1 + round((step_ms / 1e3 - once) / more))
    return lambda one: step(one, times)


def make_resnet_step(device: str) -> Any:
    """A function that trains ResNet-50 in bf16 on one batch of images."""
    model = build_model("resnet50", 1000).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(batch: torch.Tensor) -> None:
        images = batch.to(device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16):
            loss = model(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_each(step: Any, batch: torch.Tensor, times: int) -> float:
    """Mean time of a step, after five to warm up."""
    for _ in range(5):
        step(batch)
    synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        step(batch)
    synchronize()
    return (time.perf_counter() - begun) / times


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--model", choices=["toy", "resnet50"], default="toy")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    (Path(folder) / "seen").mkdir()
    observer = Observer({"records": folder, "folder": folder}, dataloader)
    _follow(observer, dataloader.DataLoader)
    if args.model == "toy":
        step, batch, workers = make_step(args.step_ms, args.device), torch.randn(64, 256), 1
    else:  # its batches are too large to come from a worker at full speed
        step, batch, workers = make_resnet_step(args.device), torch.randn(128, 3, 224, 224), 0
    if args.device != "cpu" and not workers:
        batch = batch.pin_memory()
    loader = DataLoader([batch] * 10_000_000, batch_size=None, num_workers=workers)
    batches = iter(loader)
    for _ in range(50):
        step(next(batches))
    many = max(10, int(0.6 / seconds_each(lambda _: step(next(batches)), batch, 10)))
    rates: dict[bool, list[float]] = {False: [], True: []}
    for block in range(args.blocks):
        for armed in (True, False) if block % 2 else (False, True):
            if armed and not observer.armed:
                observer.armed = True
                observer._wrap()
                observer.trace.install()
                observer.trace.clock.drop()
            elif not armed and observer.armed:
                observer._detach()
            for _ in range(3):
                step(next(batches))
            synchronize()
            begun = time.perf_counter()
            for _ in range(many):
                step(next(batches))
            synchronize()
            rates[armed].append(many / (time.perf_counter() - begun))
    gain = paired_gain(rates[False], rates[True])
    steps = observer._file.steps if observer._file else 0
    print(
        f"{1e3 / rates[False][0]:.2f} ms a step: armed / off {gain.ratio:.4f} "
        f"({gain.low:.4f} to {gain.high:.4f}), {len(rates[True])} pairs of {many} steps; "
        f"{observer.trace.quiet.cost_s / max(1, steps) * 1e6:.0f} us a step"
    )


main()
