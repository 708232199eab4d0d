"""The ceiling of `feedtune run --ceiling` beside the same training edited by hand to reuse its batches.

Usage: python tests/bench/ceiling_truth.py --data DIR [--rounds 5] [--nproc N] [vision options]

Both are measured in turns; prints the ratio of their rates, ours over by hand, with its 95 % interval, for
batches in pageable memory and, where there is a GPU, in pinned memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from feedtune.analysis.stats import paired_gain

HAND = str(Path(__file__).with_name("hand_ceiling.py"))


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def ours(launcher: list[str], options: list[str]) -> dict[str, float]:
    words = [*launcher, "-m", "feedtune.workloads.vision", *options, "--epochs", "1000000"]
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "feedtune", "run", "--ceiling", "--json", "--out", folder + "/run"]
        found = json.loads(run([*own, "--", *words]))["ceiling"]
    return {kind: found[kind] for kind in ("pageable", "pinned") if found[kind]}


def by_hand(launcher: list[str], options: list[str]) -> dict[str, float]:
    text = run([*launcher, HAND, *options])
    return {kind: float(rate) for kind, rate in re.findall(r"(\w+) ([0-9.]+) steps/s", text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=1)
    args, options = parser.parse_known_args()
    launcher = [sys.executable]
    if args.nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
    rates: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for number in range(args.rounds):
        turn = (by_hand, ours) if number % 2 else (ours, by_hand)
        found = {measure: measure(launcher, options) for measure in turn}
        for kind in found[ours]:
            for side, measure in zip(rates[kind], (by_hand, ours), strict=True):
                side.append(found[measure][kind])
            print(
                f"  {kind:<9} ours {rates[kind][1][-1]:9.3f}, by hand {rates[kind][0][-1]:9.3f} steps/s",
                flush=True,
            )
    for kind, (hand, own) in rates.items():
        gain = paired_gain(hand, own)
        print(
            f"{kind:<9} ours / by hand {gain.ratio:.4f} ({gain.low:.4f} to {gain.high:.4f}), {len(own)} pairs"
        )


main()
