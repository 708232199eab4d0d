"""The vision training with its loop edited by hand to reuse ten batches: what the ceiling has to agree with.

Usage: python tests/bench/hand_ceiling.py --data DIR [options of feedtune.workloads.vision]
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
import torch.distributed as dist

from feedtune.workloads.vision import Training, find_job, make_loader, open_data, parse_args

WARM, MEASURED_S = 20, 3.0


def rate(training: Training, batches: list) -> float:
    """Steps a second over about three seconds; all ranks do the same steps."""
    stream = itertools.cycle(batches)

    def seconds(steps: int) -> float:
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            training.step(*next(stream))
        synchronize()
        return time.perf_counter() - begun

    seconds(WARM)
    steps = [max(1, round(MEASURED_S * WARM / seconds(WARM)))]
    if dist.is_initialized():
        dist.broadcast_object_list(steps)
    return steps[0] / seconds(steps[0])


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    args = parse_args(sys.argv[1:])
    job = find_job()
    images = open_data(args.data)
    if job.world > 1:
        dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
    loader = make_loader(args, job, images)
    training = Training(args, job, len(images.classes))
    batches = list(itertools.islice(loader, 10))
    pageable = [[t.clone() for t in batch] for batch in batches]
    job.say(f"pageable {rate(training, pageable):.3f} steps/s")
    if torch.cuda.is_available():
        pinned = [[t.pin_memory() for t in batch] for batch in pageable]
        job.say(f"pinned {rate(training, pinned):.3f} steps/s")
    if job.world > 1:
        dist.destroy_process_group()


main()
