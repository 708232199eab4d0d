"""Are block rates true? Five trainings under trial beside the same scripts afresh, timed by themselves.

Usage: python tests/bench/truth.py [KIND ...]

Prints for each the mean rate of its blocks, the script's own rate before and after them, and the ratio.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STEADY = str(Path(__file__).resolve().parent / "steady.py")
WORKERS = {"latency": 8, "decode": 2, "memory": 0, "eval": 1, "iterable": 2}
SECONDS = os.environ.get("SECONDS", "15")  # timed by the script itself, before and again after the trial


def command(kind: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if kind == "eval" else []
    return [sys.executable, *launcher, STEADY, kind]


def afresh(kind: str) -> float:
    env = {**os.environ, "WORKERS": str(WORKERS[kind]), "SECONDS": SECONDS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(kind), env=env, stdout=subprocess.PIPE, text=True, check=False)
    return float(re.findall(r"([0-9.]+) steps/s", done.stdout)[-1])


def blocks(kind: str) -> list[dict]:
    env = {**os.environ, "WORKERS": str(WORKERS[kind]), "SECONDS": "1e9", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--set",
            f"num_workers={WORKERS[kind]}",
            "--set",
            "prefetch_factor=2",
            "--block-seconds",
            "3",
        ]
        words = [*words, "--set", "pin_memory=false", "--budget", "600", "--out", folder + "/run", "--json"]
        full = [sys.executable, "-m", "feedtune", "tune", *words, "--", *command(kind)]
        done = subprocess.run(full, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [b for b in json.loads(done.stdout)["blocks"] if b["kind"] == "confirm" and b["rate"]]


def main() -> None:
    print(f"{'':<10}{'workers':>8}{'blocks':>8}{'block rate':>13}{'afresh':>12}{'and again':>12}{'ratio':>8}")
    for kind in sys.argv[1:] or WORKERS:
        before, found, after = afresh(kind), blocks(kind), afresh(kind)
        rate = math.exp(sum(math.log(b["rate"]) for b in found) / len(found))
        print(
            f"{kind:<10}{WORKERS[kind]:>8}{len(found):>8}{rate:>13.3f}{before:>12.3f}{after:>12.3f}"
            f"{rate / math.sqrt(before * after):>8.3f}",
            flush=True,
        )


main()
