"""The vision training with its loop edited by hand to reuse ten batches: what the ceiling has to agree with.

Usage: python tests/bench/hand_ceiling.py --data DIR [options of feedtune.workloads.vision]

For each line on standard input, ``pageable`` or ``pinned``, it trains for SLICE seconds (environment) on
batches in such memory, and prints its rate in them.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist

from feedtune.workloads.vision import Training, find_job, make_loader, open_data, parse_args

SLICE = float(os.environ.get("SLICE", "4"))
WARM = 5


def rate(training: Training, batches: list) -> float:
    """Steps a second in one slice; all ranks do the same steps."""
    stream = itertools.cycle(batches)

    def seconds(steps: int) -> float:
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            training.step(*next(stream))
        synchronize()
        return time.perf_counter() - begun

    seconds(WARM)
    steps = agreed(max(1, round(SLICE * WARM / seconds(WARM))))
    return steps / seconds(steps)


def agreed(value: object) -> object:
    """The first rank's."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


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
    pageable = [[t.clone() for t in batch] for batch in itertools.islice(loader, 10)]
    batches = {"pageable": pageable}
    if torch.cuda.is_available():
        batches["pinned"] = [[t.pin_memory() for t in batch] for batch in pageable]
    kind = "pageable"
    while kind:
        found = rate(training, batches[kind])
        job.say(f"{found:.3f} steps/s")
        kind = agreed(sys.stdin.readline().strip() if job.rank == 0 else "")
    os._exit(0)  # each rank by itself; nothing was saved


main()
