"""What taking steps down costs: one training with the hook and one without, a slice of each in turns.

Usage: python tests/bench/overhead_blocks.py [--starts 8] [--pairs 40] [--seconds 0.2] [--step-ms 20]
    [--device cuda] [--model resnet50] [--jobs 1]

Whole runs (tests/bench/overhead.py) differ by more than the cost on a machine that does other things, and two
processes of the same training by some percent in how their memory lies: both are started several times. It
prints the ratio of the slices' rates, with the hook over without, with its 95 % interval; and of the rates by
the training process's own processor time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from afresh import Afresh, several
from torch import nn
from torch.utils.data import DataLoader, dataloader

from feedtune.analysis.stats import geometric_mean, paired_gain
from feedtune.inside.hook import _follow
from feedtune.inside.observed import Observer
from feedtune.workloads.resnet import build_model


def make_step(step_ms: float, device: str, times: int) -> tuple[Any, int]:
    """A function that trains one step on a batch of 64, and how many forwards it has; 0: find out."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor, times: int) -> None:
        batch = batch.to(device, non_blocking=True)
        for _ in range(times):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = torch.randn(64, 256)
    if not times:
        once = seconds_each(lambda one: step(one, 1), batch, 50)
        more = (seconds_each(lambda one: step(one, 11), batch, 20) - once) / 10
        times = max(1, 1 + round((step_ms / 1e3 - once) / more))
    return lambda one: step(one, times), times


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


def child(args: argparse.Namespace) -> None:
    """For each line on standard input, a number of steps; prints the seconds that they took."""
    observer = None
    if args.child == "armed":
        folder = tempfile.mkdtemp()
        (Path(folder) / "seen").mkdir()
        observer = Observer({"records": folder, "folder": folder}, dataloader)
        _follow(observer, dataloader.DataLoader)
    times = 0
    if args.model == "toy":
        step, times = make_step(args.step_ms, args.device, args.times)
        batch, workers = torch.randn(64, 256), 1
    else:  # its batches are too large to come from a worker at full speed
        step, batch, workers = make_resnet_step(args.device), torch.randn(128, 3, 224, 224), 0
    if args.device != "cpu" and not workers:
        batch = batch.pin_memory()
    batches = iter(DataLoader([batch] * 10_000_000, batch_size=None, num_workers=workers))
    for _ in range(50):
        step(next(batches))
    print(times, seconds_each(lambda _: step(next(batches)), batch, 20), flush=True)
    for line in sys.stdin:
        synchronize()
        begun = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step(next(batches))
        synchronize()
        print(time.perf_counter() - begun[0], time.process_time() - begun[1], flush=True)
    if observer is not None and observer._file is not None:
        steps = observer._file.steps
        print(f"{observer.trace.quiet.cost_s / max(1, steps) * 1e6:.0f} us a step of {steps}", flush=True)


def process(kind: str, times: str = "0") -> Afresh:
    """One of the two; its first words are its ``times`` and the seconds of a step."""
    words = [sys.executable, __file__, "--child", kind, "--times", times, *sys.argv[1:]]
    return Afresh(words, stderr=None)


def start(args: argparse.Namespace, number: int) -> dict[str, list[float]]:
    """Start both, in turns each first, and train slices in turns; the mean rates of each by both clocks."""
    first, second = ("off", "armed") if number % 2 else ("armed", "off")
    both = {first: process(first)}
    both[second] = process(second, both[first].ready[0])
    steps = max(5, int(args.seconds / float(both[first].ready[1])))
    rates: dict[str, list[list[float]]] = {"off": [], "armed": []}
    for pair in range(args.pairs + 1):
        for kind in ("armed", "off") if pair % 2 else ("off", "armed"):
            rates[kind].append([steps / float(seconds) for seconds in both[kind].ask(steps)])
    words = both["armed"].end()
    both["off"].end()
    means = {
        kind: [geometric_mean(one) for one in zip(*kept[1:], strict=True)] for kind, kept in rates.items()
    }
    rate, armed = means["off"][0], means["armed"][0]
    print(f"  {1e3 / rate:.2f} ms a step, {armed / rate:.4f}; {words}", flush=True)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=8, help="of both processes")
    parser.add_argument("--pairs", type=int, default=40, help="of slices in each")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a slice")
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--model", choices=["toy", "resnet50"], default="toy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="starts at a time, each on cores of its own")
    parser.add_argument("--child", choices=["armed", "off"], help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    found = several(functools.partial(start, args), args.starts, args.jobs)
    sides = [list(zip(*(one[kind] for one in found), strict=True)) for kind in ("off", "armed")]
    wall, cpu = (paired_gain(*pair) for pair in zip(*sides, strict=True))
    print(
        f"armed / off {wall.ratio:.4f} ({wall.low:.4f} to {wall.high:.4f}), by processor time "
        f"{cpu.ratio:.4f} ({cpu.low:.4f} to {cpu.high:.4f}), "
        f"{args.starts} starts, {args.pairs} pairs of slices each"
    )


if __name__ == "__main__":
    main()
