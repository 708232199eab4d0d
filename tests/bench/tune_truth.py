"""Are the printed rates true? Tune, then run the winner afresh without the hook, timed by the script itself.

Usage: python tests/bench/tune_truth.py vision --data DIR [--nproc N] [vision options ...]
       python tests/bench/tune_truth.py latency

Prints the printed rate beside the script's own, and the ceiling beside the script edited by hand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LATENCY = HERE.parent / "integration" / "scripts" / "latency.py"
TUNE = os.environ.get("TUNE", "").split()  # more options for feedtune tune
LAST_RATE = re.compile(r"([0-9.]+) steps/s")


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return done.stdout


def tune(command: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--out", folder + "/run", *TUNE, "--json", "--", *command]
        return json.loads(run([sys.executable, "-m", "feedtune", "tune", *words]))


def report(document: dict, own: float) -> None:
    printed = document["best"]["rate"]
    print(f"verdict        {document['verdict']}")
    print(f"best           {document['best']['settings']}, starts {document['starts']}")
    print(f"printed rate   {printed:10.3f} steps/s")
    print(f"script's own   {own:10.3f} steps/s, ratio {own / printed:.3f}")


def latency() -> None:
    document = tune([sys.executable, str(LATENCY)])
    workers = document["best"]["settings"]["num_workers"]
    # A long run, so that starting the workers is a small part of the script's own time.
    steps = str(int(30 * document["best"]["rate"]))
    env = {**os.environ, "WORKERS": str(workers), "STEPS": steps}
    report(document, float(LAST_RATE.findall(run([sys.executable, str(LATENCY)], env=env))[-1]))


def vision(options: list[str]) -> None:
    nproc = 1
    if "--nproc" in options:
        at = options.index("--nproc")
        nproc = int(options[at + 1])
        del options[at : at + 2]
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    command = [*launcher, "-m", "feedtune.workloads.vision", *options]
    document = tune([*command, "--epochs", "1000000"])
    best = document["best"]["settings"]
    words = ["--num-workers", str(best["num_workers"])]
    words += ["--prefetch-factor", str(best["prefetch_factor"])] if best["prefetch_factor"] else []
    words += ["--pin-memory"] if best["pin_memory"] else ["--no-pin-memory"]
    epoch = document["loader"]["epoch_steps"]
    text = run([*command, *words, "--epochs", "2", "--log-every", str(max(2, epoch // 8))])
    # The script's own lines from the last two thirds of its epochs: the workers' start is long past.
    inside = [
        float(rate)
        for step, rate in re.findall(r"step (\d+): loss \S+ ([0-9.]+) steps/s", text)
        if int(step) % epoch > epoch // 3
    ]
    report(document, sum(inside) / len(inside))
    print(f"script in all  {LAST_RATE.findall(text)[-1]} steps/s, worker starts included")
    print(f"edge           {document['edge']}")
    if nproc == 1:
        text = run([sys.executable, str(HERE / "hand_ceiling.py"), *options])
        for kind, rate in re.findall(r"(\w+) ([0-9.]+) steps/s", text):
            ours = document["ceiling"][kind]
            print(
                f"ceiling {kind:<9} ours {ours:8.3f}, by hand {float(rate):8.3f}, "
                f"ratio {ours / float(rate):.3f}"
            )


if __name__ == "__main__":
    if sys.argv[1] == "latency":
        latency()
    else:
        vision(sys.argv[2:])
