"""What the samplers cost beside a training of 8 ranks with 16 workers each: share of one core, lag, bytes.

    python tests/bench/sampler_cost.py [--seconds 60] [--threads 100] [--rss-mb 0]

The processes sleep: nothing of a training is needed to read what the kernel says of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from feedtune.beside.readings import read_heads, read_readings
from feedtune.beside.start import start_sampler

_TREE = """
import mmap, os, sys, threading, time
ranks, workers, threads, rss = map(int, sys.argv[1:])
for rank in range(ranks):
    if os.fork() == 0:
        held = bytearray(rss << 20)
        for _ in range(threads):
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        for worker in range(workers):
            if os.fork() == 0:
                open("/proc/self/comm", "w").write("pt_data_worker")
                time.sleep(3600)
        time.sleep(3600)
print("ready", flush=True)
time.sleep(3600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seconds", 60), ("ranks", 8), ("workers", 16), ("threads", 100), ("rss-mb", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--interval", type=float, default=1.0)
    asked = parser.parse_args()
    words = map(str, (asked.ranks, asked.workers, asked.threads, asked.rss_mb))
    tree = subprocess.Popen(
        [sys.executable, "-c", _TREE, *words], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert tree.stdout is not None
        tree.stdout.readline()
        time.sleep(2)
        with tempfile.TemporaryDirectory() as folder:
            sampler = start_sampler(Path(folder), tree.pid, asked.interval)
            time.sleep(asked.seconds)
            print("ended:", sampler.stop() or "as asked")
            report(Path(folder) / "readings.jsonl")
    finally:
        os.killpg(tree.pid, signal.SIGKILL)
        tree.wait()


def report(path: Path) -> None:
    """Print what the sampler says of itself."""
    readings = list(read_readings(path))
    own = [r for r in readings if r.source == "sampler"]
    first, last = own[0], own[-1]
    seconds = last.t_s - first.t_s
    cpu_s = float(last.values["cpu_s"] or 0) - float(first.values["cpu_s"] or 0)
    size = int(last.values["file_bytes"] or 0) - int(first.values["file_bytes"] or 0)
    lags = sorted(float(r.values["lag_s"] or 0) for r in own)
    members = {r.of for r in readings if r.source == "process"}
    detailed = [r for r in readings if r.source == "process_memory"]
    print("samplers:", {name: why or "ok" for name, why in read_heads(path)[0]["samplers"].items()})
    print(f"{len(members)} processes, {len(own)} ticks in {seconds:.1f} s, {last.values['lost_ticks']} lost")
    print(f"CPU: {100 * cpu_s / seconds:.2f} % of one core; start: {first.values['cpu_s']} s once")
    print(f"lag: median {lags[len(lags) // 2]:.3f} s, largest {lags[-1]:.3f} s")
    print(
        f"file: {size / seconds / 1024:.1f} KiB/s; memory read {len(detailed) / len(members):.1f} times each"
    )
    gaps = {r.source: 0 for r in readings}
    for reading in readings:
        gaps[reading.source] += 1
    print("rows a source:", gaps)


if __name__ == "__main__":
    main()
