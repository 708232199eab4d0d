"""Forty short runs with planted faults: how often class and rank come out right.

Usage: python tests/bench/plants.py [--runs 40] [--ranks 2 4] [--plants loader forward ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "integration/scripts/planted.py"
# What is planted, and the class that it has to be given.
EXPECTED = {
    "loader": "imbalance/input",
    "forward": "imbalance/compute",
    "backward": "imbalance/compute",
    "comm": "communication",
    "lengths": "imbalance/lengths",
}
ON_ONE_RANK = ("loader", "forward", "backward")


def cases(plants: list[str], ranks: list[int]) -> list[tuple[str, int, int, str]]:
    """``(plant, ranks, planted rank, batchnorm)``: all that differ, in turns."""
    found = []
    for plant, world, norm in itertools.product(plants, ranks, "01"):
        planted = (0, world - 1) if plant in ON_ONE_RANK else (0,)
        found += [(plant, world, rank, norm) for rank in planted]
    return found


def look(plant: str, world: int, rank: int, norm: str) -> tuple[bool, str]:
    """Run one case; whether class and rank are right, and what was said."""
    env = {**os.environ, "PLANT": plant, "RANK_PLANTED": str(rank), "BATCHNORM": norm, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "feedtune", "run", "--json", "--out", f"{folder}/run", "--"]
        words += [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        done = subprocess.run([*words, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return False, done.stderr[-300:]
    found = json.loads(done.stdout)["trainings"][0]["finding"]
    right = found["class"] == EXPECTED[plant]
    if plant in ON_ONE_RANK:
        right = right and found["rank"] == rank
    return right, f"{found['class']} rank {found['rank']}: {found['evidence']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--plants", nargs="+", choices=EXPECTED, default=list(EXPECTED))
    args = parser.parse_args()
    rights = 0
    for number, case in enumerate(
        itertools.islice(itertools.cycle(cases(args.plants, args.ranks)), args.runs), 1
    ):
        right, said = look(*case)
        rights += right
        print(f"{number:2} {'right' if right else 'WRONG'} {case} {said}", flush=True)
    print(f"{rights} of {args.runs} right")


if __name__ == "__main__":
    main()
