"""What changing from one setting to another costs: measured beside predicted.

Usage: python tests/bench/swap.py

For each worker count a tuning with that count held fast, on data whose batch takes 8 ms and on data whose
batch takes 0.5 s in a worker; median over its blocks of ending and starting the workers, first batch too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

LATENCY = str(Path(__file__).resolve().parents[1] / "integration" / "scripts" / "latency.py")
COUNTS = (0, 2, 8, 32)


def swaps(workers: int, sample_s: str) -> list[dict]:
    env = {**os.environ, "WORKERS": str(workers), "SAMPLE_S": sample_s, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--set", f"num_workers={workers}", "--set", "prefetch_factor=2", "--block-seconds", "0.5"]
        words = [*words, "--budget", "900", "--out", folder + "/run", "--json"]
        full = [sys.executable, "-m", "feedtune", "tune", *words, "--", sys.executable, LATENCY]
        done = subprocess.run(full, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = [b for b in json.loads(done.stdout)["blocks"] if b["predicted_swap_s"] is not None]
    return [b for b in found if b["swap_s"] is not None]


def main() -> None:
    print(f"{'batch':>8}{'workers':>9}{'blocks':>8}{'median':>11}{'predicted':>11}{'ratio':>8}")
    for sample_s, batch in (("0.00025", "8 ms"), ("0.015", "0.5 s")):
        for workers in COUNTS:
            found = swaps(workers, sample_s)
            real, predicted = (median(b[key] for b in found) for key in ("swap_s", "predicted_swap_s"))
            figures = f"{real:>9.3f} s{predicted:>9.3f} s{predicted / real:>8.2f}"
            print(f"{batch:>8}{workers:>9}{len(found):>8}{figures}", flush=True)


main()
