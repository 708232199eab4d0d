"""What taking steps down costs, in one process: blocks of steps with the hook armed and off, in turns.

Usage: python tests/bench/overhead_blocks.py [--blocks 60] [--step-ms 20]

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


def make_step(step_ms: float) -> Any:
    """A function that trains one step of about that length on a batch of 64."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor, times: int = 1) -> None:
        for _ in range(times):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = torch.randn(64, 256)
    begun = time.perf_counter()
    for _ in range(50):
        step(batch)
    once = (time.perf_counter() - begun) / 50
    begun = time.perf_counter()
    for _ in range(20):
        step(batch, 11)
    more = ((time.perf_counter() - begun) / 20 - once) / 10
    times = max(1, 1 + round((step_ms / 1e3 - once) / more))
    return lambda one: step(one, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--step-ms", type=float, default=20)
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    (Path(folder) / "seen").mkdir()
    observer = Observer({"records": folder, "folder": folder}, dataloader)
    _follow(observer, dataloader.DataLoader)
    step = make_step(args.step_ms)
    loader = DataLoader([torch.randn(64, 256)] * 10_000_000, batch_size=None, num_workers=1)
    batches = iter(loader)
    for _ in range(50):
        step(next(batches))
    many = max(10, int(600 / args.step_ms))
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
            begun = time.perf_counter()
            for _ in range(many):
                step(next(batches))
            rates[armed].append(many / (time.perf_counter() - begun))
    gain = paired_gain(rates[False], rates[True])
    steps = observer._file.steps if observer._file else 0
    print(
        f"{1e3 / rates[False][0]:.2f} ms a step: armed / off {gain.ratio:.4f} "
        f"({gain.low:.4f} to {gain.high:.4f}), {len(rates[True])} pairs of {many} steps; "
        f"{observer.trace.clock.cost_s / max(1, steps) * 1e6:.0f} us a step"
    )


main()
