"""What changing from one setting to another costs: measured beside predicted.

Usage: python tests/bench/swap.py

Two tunings that climb from 2 workers to 32 and go back to none, on data whose batch takes 8 ms and on data
whose batch takes 0.5 s in a worker. A swap is ending and starting the workers, with the first batch. It is
predicted before each block from the blocks before it.
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


def blocks(sample_s: str) -> list[dict]:
    env = {**os.environ, "WORKERS": "2", "SAMPLE_S": sample_s, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--max-workers", "32", "--trials", "12", "--block-seconds", "0.5", "--budget", "900"]
        words = [*words, "--set", "prefetch_factor=2", "--out", folder + "/run", "--json"]
        full = [sys.executable, "-m", "feedtune", "tune", *words, "--", sys.executable, LATENCY]
        done = subprocess.run(full, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)["blocks"]
    return [b for b in found if None not in (b["swap_s"], b["predicted_swap_s"])]


def main() -> None:
    print(f"{'batch':>8}{'workers':>9}{'blocks':>8}{'median':>11}{'predicted':>11}{'ratio':>8}{'first':>11}")
    for sample_s, batch in (("0.00025", "8 ms"), ("0.015", "0.5 s")):
        found = blocks(sample_s)
        for workers in sorted({b["settings"]["num_workers"] for b in found}):
            these = [b for b in found if b["settings"]["num_workers"] == workers]
            real, predicted = (median(b[key] for b in these) for key in ("swap_s", "predicted_swap_s"))
            figures = f"{real:>9.3f} s{predicted:>9.3f} s{predicted / real:>8.2f}"
            print(
                f"{batch:>8}{workers:>9}{len(these):>8}{figures}{these[0]['predicted_swap_s']:>9.3f} s",
                flush=True,
            )


main()
