"""What `feedtune apply` costs a training, beside the same script with the same settings set by hand.

Usage: python tests/bench/apply_cost.py [--pairs 12] [--steps 600]

Tunes the latency-bound script of the tests once, then starts it whole: by hand with the tuning's settings,
and without an edit under `apply`. Prints the ratios, applied over by hand, of the steps' rates that the
script itself has timed, and of whole starts, each with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from feedtune.analysis.stats import paired_gain

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "integration" / "scripts" / "latency.py")]
FEEDTUNE = [sys.executable, "-m", "feedtune"]


def started(words: list[str], **env: str) -> tuple[float, float]:
    """Steps a second by the script's own clock, and starts a second of the whole."""
    begun = time.perf_counter()
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[0]), 1 / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    steps = {"STEPS": str(args.steps)}
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        options = ["--set", "num_workers=8", "--set", "prefetch_factor=2", "--set", "pin_memory=false"]
        tuning = [*FEEDTUNE, "tune", "--out", run, *options, "--", *COMMAND]
        subprocess.run(tuning, capture_output=True, check=True)
        workers = json.loads(Path(run, "result.json").read_text())["best"]["settings"]["num_workers"]
        ways = (
            lambda: started(COMMAND, WORKERS=str(workers), **steps),
            lambda: started([*FEEDTUNE, "apply", run, "--", *COMMAND], **steps),
        )
        found: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
        for pair in range(args.pairs):
            for way in (0, 1) if pair % 2 == 0 else (1, 0):
                for kept, value in zip(found[way], ways[way](), strict=True):
                    kept.append(value)
    (by_hand, whole), (applied, whole_applied) = found
    print(f"num_workers={workers}, {args.steps} steps, {by_hand[0]:.1f} steps/s by hand")
    for name, bare, ours in (("steps/s", by_hand, applied), ("whole starts", whole, whole_applied)):
        gain = paired_gain(bare, ours)
        print(f"{name}, applied / by hand: {gain.ratio:.4f} ({gain.low:.4f} to {gain.high:.4f})")


main()
