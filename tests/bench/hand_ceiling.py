"""The vision training with its loop edited by hand to reuse ten batches: what the ceiling has to agree with.

Usage: python tests/bench/hand_ceiling.py --data DIR [options of feedtune.workloads.vision]
"""

from __future__ import annotations

import itertools
import sys
import time

import torch

from feedtune.workloads.vision import Training, find_job, make_loader, open_data, parse_args

WARM, MEASURED_S = 20, 3.0


def rate(training: Training, batches: list) -> float:
    """Steps a second over about three seconds."""

    def synchronize() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    stream = itertools.cycle(batches)
    for _ in range(WARM):
        training.step(*next(stream))
    synchronize()
    begun, steps = time.perf_counter(), 0
    while time.perf_counter() - begun < MEASURED_S:
        training.step(*next(stream))
        steps += 1
    synchronize()
    return steps / (time.perf_counter() - begun)


def main() -> None:
    args = parse_args(sys.argv[1:])
    job = find_job()
    images = open_data(args.data)
    loader = make_loader(args, job, images)
    training = Training(args, job, len(images.classes))
    batches = list(itertools.islice(loader, 10))
    pageable = [[t.clone() for t in batch] for batch in batches]
    print(f"pageable {rate(training, pageable):.3f} steps/s")
    if torch.cuda.is_available():
        pinned = [[t.pin_memory() for t in batch] for batch in pageable]
        print(f"pinned {rate(training, pinned):.3f} steps/s")


main()
