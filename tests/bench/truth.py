"""Are block rates true? Five trainings under trial beside the same scripts afresh, timed by themselves.

Usage: python tests/bench/truth.py [KIND ...]

The fresh process, without feedtune, trains for a slice between each two blocks of the trial, which wait for
it: what else the machine does meets both. A block is held against the mean of the slices around it. Prints
for each training both rates, and the mean of the ratios, block over afresh, with its 95 % interval.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

from afresh import Afresh

from feedtune.analysis.stats import geometric_mean, paired_gain
from feedtune.trials.options import TuneOptions
from feedtune.trials.tune import tune

STEADY = str(Path(__file__).resolve().parent / "steady.py")
WORKERS = {"latency": 8, "decode": 2, "memory": 0, "eval": 1, "iterable": 2}
SECONDS = 4.0  # of a slice, and of a block


def measure(kind: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if kind == "eval" else []
    command = [sys.executable, *launcher, STEADY, kind]
    os.environ.update(WORKERS=str(WORKERS[kind]), OMP_NUM_THREADS="1")
    fixed = {"num_workers": WORKERS[kind], "prefetch_factor": 2, "pin_memory": False}
    afresh = Afresh(command, SLICE=str(SECONDS))

    def tell(line: str) -> None:
        print(line, file=sys.stderr)
        if " candidate " in line or " confirm " in line:
            afresh.train()
            print(f"{'afresh':>12} {afresh.rates[-1]:65.2f} steps/s", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        options = TuneOptions(
            command, Path(folder, "run"), budget_s=900, pairs=6, block_s=SECONDS, fixed=fixed
        )
        found = [b["rate"] for b in tune(options, tell)["blocks"] if b["kind"] == "confirm"]
    afresh.end()
    bare = [math.sqrt(before * after) for before, after in zip(afresh.rates, afresh.rates[1:], strict=False)]
    pairs = [(a, b) for a, b in zip(bare, found, strict=True) if b]
    gain = paired_gain(*zip(*pairs, strict=True))
    rates = map(geometric_mean, zip(*pairs, strict=True))
    shown = "".join(f"{rate:>13.3f}" for rate in rates)
    return f"{WORKERS[kind]:>8}{len(pairs):>8}{shown}{gain.ratio:>9.3f} ({gain.low:.3f} to {gain.high:.3f})"


def main() -> None:
    print(f"{'':<10}{'workers':>8}{'blocks':>8}{'afresh':>13}{'block rate':>13}{'ratio':>9}")
    for kind in sys.argv[1:] or WORKERS:
        print(f"{kind:<10}{measure(kind)}", flush=True)


main()
