"""Packing speed beside other tools, whole processes, in one run: ``python tests/bench/pack.py [SRC ...]``.

Without SRC it makes 10,000 files of 56 kB. Tools take turns, so that a slow moment of the machine hits all of
them; the page cache is warm. Prints the median of each and its ratio to ``tar cf && sync -f``, which like our
packer has its data on the disk when it ends, and to plain ``tar cf``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARD_WRITER = """
import os, sys, warnings
warnings.simplefilter("ignore")
import webdataset
root, out = sys.argv[1:]
os.mkdir(out)
number = 0
with webdataset.ShardWriter(out + "/shard-%06d.tar", maxsize=64e6, verbose=0) as writer:
    for folder, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                sample = {"__key__": f"{number:09d}", "bin": file.read(), "cls": 0}
            sample["json"] = {"path": os.path.relpath(os.path.join(folder, name), root)}
            writer.write(sample)
            number += 1
"""


def make(root: Path, files: int = 10_000, size: int = 56_000) -> None:
    """Files that do not compress, in 100 classes."""
    for number in range(files):
        path = root / f"class{number % 100:02d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size + (number * 7919) % 1000 - 500))


def jobs(source: Path, out: Path, workers: int) -> dict[str, list[str]]:
    shard_tools = [sys.executable, "-c", "from shard_tools.cli import main; main()"]
    pack = [*shard_tools, "pack", str(source), str(out), "--workers", str(workers)]
    tar = f"tar chf {out} -C {source} ."
    return {
        "tar": ["sh", "-c", tar],
        "tar && sync -f": ["sh", "-c", f"{tar} && sync -f {out}"],
        "shard-tools wds": [*pack, "--format", "wds"],
        "shard-tools lmdb": [*pack, "--format", "lmdb"],
        "webdataset ShardWriter": [sys.executable, "-c", SHARD_WRITER, str(source), str(out)],
    }


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def measure(source: Path, scratch: Path, rounds: int, workers: int) -> None:
    out = scratch / "out"
    times: dict[str, list[float]] = {name: [] for name in jobs(source, out, workers)}
    for _ in range(rounds + 1):  # the first round warms the page cache
        for name, command in jobs(source, out, workers).items():
            os.sync()  # nobody pays for the writes of the one before
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
            remove(out)
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    print(f"\n{source}: median of {rounds}, {workers} workers")
    for name, median in medians.items():
        spread = f"{min(times[name][1:]):.2f}-{max(times[name][1:]):.2f}"
        print(
            f"  {name:<24}{median:7.2f} s  ({spread})"
            f"  {median / medians['tar && sync -f']:6.2f} x tar+sync  {median / medians['tar']:6.2f} x tar"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = [source.resolve() for source in arguments.source]
        if not sources:
            sources = [Path(folder) / "src"]
            make(sources[0])
        for source in sources:
            measure(source, Path(folder), arguments.rounds, arguments.workers)


if __name__ == "__main__":
    main()
