"""What `feedtune run` costs a training: whole processes with and without it, in turns.

Usage: python tests/bench/overhead.py [--kinds step20 step2 ddp20] [--pairs 6] [--seconds 10]

`step20`, `step2`: one process, CPU-bound steps of about 20 and 2 ms with one worker; `ddp20`: two gloo ranks;
`resnet`: ResNet-50 in bf16 on a GPU from cached batches. Prints the ratio of the steps' rates that the script
itself has timed, with its 95 % interval, and what feedtune says that it costs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from feedtune.analysis.stats import paired_gain


def train(kind: str, seconds: float) -> None:
    """The training that is timed; it knows nothing of feedtune."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    ranks = kind.startswith("ddp")
    if ranks:
        torch.distributed.init_process_group("gloo")
    if kind == "resnet":
        from feedtune.workloads.resnet import build_model

        model, device = build_model("resnet50", 10).cuda().to(memory_format=torch.channels_last), "cuda"
        shape = (128, 3, 224, 224)
    else:
        width, depth = {"20": (512, 10), "2": (256, 4)}[re.sub("[a-z]", "", kind)]
        model, device, shape = (
            nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))),
            "cpu",
            (64, width),
        )
        if ranks:
            model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(shape)
    workers = 0 if kind == "resnet" else 1
    loader = DataLoader([batch] * 1_000_000, batch_size=None, num_workers=workers)
    begun, done = None, 0
    for number, one in enumerate(loader):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(one.to(device, non_blocking=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == 40:
            begun = time.perf_counter()
        done += begun is not None
        if begun is not None and number % 20 == 0 and time.perf_counter() - begun > seconds and not ranks:
            break
        if ranks and number == 40 + int(seconds * 40):
            break
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{done / (time.perf_counter() - begun):.4f} steps/s", flush=True)
    os._exit(0) if ranks else None


def once(kind: str, seconds: float, watched: bool) -> tuple[float, str]:
    words = [sys.executable, __file__, "--train", kind, "--seconds", str(seconds)]
    if kind.startswith("ddp"):
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        if watched:
            words = [sys.executable, "-m", "feedtune", "run", "--out", f"{folder}/run", "--", *words]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
        if watched:
            document = json.loads(Path(folder, "run/result.json").read_text())
            (training,) = document["trainings"]
            costs = [rank["cost_s"] / rank["steps"] * 1e6 for rank in training["ranks"]]
            said = f"{max(costs):.0f} us a step; samplers {document['readings']['cpu_s']:.2f} s of CPU"
    return min(float(rate) for rate in re.findall(r"([0-9.]+) steps/s", done.stdout)), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["step20", "step2", "ddp20"])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--train")
    args = parser.parse_args()
    if args.train:
        train(args.train, args.seconds)
        return
    for kind in args.kinds:
        rates: dict[bool, list[float]] = {False: [], True: []}
        said = ""
        for pair in range(args.pairs):
            for watched in (False, True) if pair % 2 == 0 else (True, False):
                rate, note = once(kind, args.seconds, watched)
                rates[watched].append(rate)
                said = note or said
        gain = paired_gain(rates[False], rates[True])
        print(f"{kind:8} {rates[False][0]:.1f} steps/s; watched / bare {gain} | {said}", flush=True)


main()
