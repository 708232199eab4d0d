"""The ceiling of `feedtune run --ceiling` beside the same training edited by hand to reuse its batches.

Usage: python tests/bench/ceiling_truth.py --data DIR [--starts 1] [--blocks 12] [--seconds 4] [--nproc N]
    [--jobs 1] [vision options]

The training edited by hand, without feedtune, trains for a slice between each two blocks of cached batches,
which wait for it: what else the machine does meets both. A block is held against the mean of the slices
around it. Prints the ratio of the rates, ours over by hand, with its 95 % interval, for batches in pageable
memory and, where there is a GPU, in pinned memory. On a CPU two processes of one training differ by some
percent in how their memory lies: several starts of both, whose means are compared then, tell more; a machine
with many cores does ``--jobs`` of them at a time, each on its own.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afresh import Afresh, several

from feedtune.analysis.stats import geometric_mean, paired_gain
from feedtune.settings import LoaderSettings
from feedtune.trials.ceiling import CeilingRun
from feedtune.trials.live import in_trial
from feedtune.trials.options import TuneOptions

Rates = dict[str, tuple[list[float], list[float]]]  # of each kind of memory: by hand, and ours
# Else it is chance, for the whole life of a process, whether it asks the kernel for pages anew in each step.
HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 33)}
HAND = str(Path(__file__).with_name("hand_ceiling.py"))


class ManyCeilings(CeilingRun):
    """Blocks of cached batches as `run --ceiling` has them, many of each kind.

    Args:
        hand: starts what trains between them.
        first: start it first.
        blocks: of each kind.
        words: those of ``CeilingRun``.
    """

    def __init__(self, hand: Callable[[], Afresh], first: bool, blocks: int, *words: Any) -> None:
        super().__init__(None, *words)
        self.start_hand, self.first = hand, first
        self.count = blocks
        self.rates: Rates = {}

    def steps(self) -> None:
        hand = self.start_hand() if self.first else None
        hello = self.begin()
        hand = hand or self.start_hand()
        self.trials.baseline(LoaderSettings.from_dict(hello["loader"]))
        for kind in ("pageable", "pinned") if hello["loader"]["cuda"] else ("pageable",):
            by_hand, ours = self.rates[kind] = ([], [])
            before = hand.train(kind)
            for _ in range(self.count):
                found = self.trials.run(self.trials.ceiling_plan(kind == "pinned")).rate
                after = hand.train(kind)
                print(f"  {kind:<9} ours {found or math.nan:9.3f}, by hand {after:9.3f} steps/s", flush=True)
                if found:
                    by_hand.append(math.sqrt(before * after))
                    ours.append(found)
                before = after
        hand.end()


def start(args: argparse.Namespace, options: list[str], number: int) -> Rates:
    """Start both trainings, in turns each first; the rates by hand and of ours, of each kind of memory."""
    launcher = [sys.executable]
    if args.nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
    hand = functools.partial(Afresh, [*launcher, HAND, *options], SLICE=str(args.seconds))
    command = [*launcher, "-m", "feedtune.workloads.vision", *options, "--epochs", "1000000"]
    runs: list[ManyCeilings] = []

    def make(*words: Any) -> ManyCeilings:
        runs.append(ManyCeilings(hand, number % 2 == 0, args.blocks, *words))
        return runs[0]

    with tempfile.TemporaryDirectory() as folder:
        trial = TuneOptions(command, Path(folder, "run"), block_s=args.seconds)
        in_trial(make, "ceiling_truth", trial, print)
    for kind, rates in runs[0].rates.items():
        by_hand, ours = map(geometric_mean, rates)
        print(f"{kind:<9} by hand {by_hand:.3f}, ours / by hand {ours / by_hand:.4f}", flush=True)
    return runs[0].rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a slice, and of a block")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="starts at a time")
    args, options = parser.parse_known_args()
    os.environ.update(HEAP)
    found = several(functools.partial(start, args, options), args.starts, args.jobs)
    for kind in found[0]:
        pairs = [one[kind] for one in found]
        sides = [[geometric_mean(side) for side in pair] for pair in pairs]
        by_hand, ours = zip(*sides, strict=True) if len(pairs) > 1 else pairs[0]
        gain = paired_gain(by_hand, ours)
        print(
            f"{kind:<9} ours / by hand {gain.ratio:.4f} ({gain.low:.4f} to {gain.high:.4f}), "
            f"{args.starts} starts, {args.blocks} blocks each"
        )


if __name__ == "__main__":
    main()
