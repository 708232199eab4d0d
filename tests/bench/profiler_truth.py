"""Exposed starvation as feedtune measures it, beside the GPU's idle time that torch.profiler sees.

Needs a CUDA device. Usage: python tests/bench/profiler_truth.py [--cases data:2 data:5 gpu:0 launch:2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("profiled_training.py")


def look(case: str, before: int) -> str:
    mode, workers = case.split(":")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "feedtune", "run", "--out", f"{folder}/run", "--"]
        words += [sys.executable, str(SCRIPT), "--mode", mode, "--workers", workers, "--before", str(before)]
        begun = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{case:10} failed: {done.stderr[-1500:]}"
        truth = json.loads(done.stdout.strip().splitlines()[-1])
        (training,) = json.loads(Path(folder, "run/result.json").read_text())["trainings"]
        lines = [json.loads(line) for line in Path(folder, "run/steps.rank0.jsonl").read_text().splitlines()]
    first, last = truth["first"], truth["first"] + truth["steps"]
    parts = [line[5] for line in lines if first <= line[0] < last and len(line) > 5]
    step_s = sum(part["t"] for part in parts) / len(parts)
    ours = sum(part["s"] for part in parts) / len(parts) / step_s
    theirs = truth["idle_in_wait_s"] / truth["step_s"]
    rank = training["ranks"][0]
    budget = rank["budget"]
    shown = " ".join(
        f"{name[:-2]} {'-' if value is None else f'{value * 1e3:.2f}'}"
        for name, value in budget["parts"].items()
    )
    return (
        f"{case:10} the same {len(parts)} steps: starvation {ours:6.1%}, profiler {theirs:6.1%}, "
        f"{100 * (ours - theirs):+5.1f} points | step {step_s * 1e3:.2f} / {truth['step_s'] * 1e3:.2f} ms, "
        f"wait {truth['wait_s'] * 1e3:.2f} ms, all idle {truth['idle_s'] / truth['step_s']:.1%} | all steps, "
        f"ms: {shown} | {training['finding']['class']}, "
        f"cost {rank['cost_s'] / rank['steps'] * 1e6:.0f} us a step, {rank['clock_note']} "
        f"({time.monotonic() - begun:.0f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["data:2", "data:5", "data:15", "gpu:0", "launch:2"])
    parser.add_argument("--before", type=int, default=60)
    args = parser.parse_args()
    for case in args.cases:
        print(look(case, args.before), flush=True)


main()
