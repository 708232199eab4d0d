"""What a recorded step costs the training loop, in microseconds: with and without parts, and by other ways.

The pipe is read by a process of its own, as in a run. Usage: python tests/bench/record_cost.py
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedtune.inside.stepfile import StepFile
from feedtune.inside.stepline import step_line
from feedtune.trials.collect import Collector

STEPS = 100_000
EVERY = 256
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def parts(random_s: Callable[[], float]) -> dict[str, Any]:
    """A step of DDP on a GPU with six buckets."""
    return {
        "t": random_s(), "s": random_s(), "h": random_s(), "b": random_s(), "o": random_s(),
        "y": [["buffers", random_s(), random_s()], ["gradients", random_s(), random_s()]], "r": random_s(),
        "w": [random_s() for _ in range(6)], "v": 102_228_128, "c": [random_s(), random_s()], "q": 3,
        "n": 19_267_584,
    }  # fmt: skip


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


def timed(name: str, call: Callable[[], Any]) -> None:
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    print(f"{best / STEPS * 1e6:8.2f}  {name}")


def ways(kind: str, rows: list[tuple[Any, ...]]) -> None:
    def batches(change: Callable[[Any], Any]) -> None:
        for first in range(0, STEPS, EVERY):
            ENCODE([[first, *change(list(row))] for row in rows[first : first + EVERY]])

    timed(f"{kind}: json.dumps at add", lambda: [json.dumps([1, *row]) for row in rows])
    timed(f"{kind}: the same, rounded", lambda: [json.dumps([1, *rounded(list(row))]) for row in rows])
    timed(f"{kind}: an encoder that is kept", lambda: [ENCODE([1, *row]) for row in rows])
    timed(f"{kind}: json at flush, a list of {EVERY}", lambda: batches(lambda row: row))
    timed(f"{kind}: the same, rounded", lambda: batches(rounded))
    timed(f"{kind}: step_line", lambda: [step_line(1, row) for row in rows])


def adds(kind: str, rows: list[tuple[Any, ...]]) -> None:
    """The whole of ``add``, flushes and the pipe included."""
    with tempfile.TemporaryDirectory() as folder:
        ready, stop = os.pipe(), os.pipe()
        reader = os.fork()
        if reader == 0:
            with Collector(Path(folder)):
                os.write(ready[1], b".")
                os.read(stop[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        files = iter([StepFile(folder, rank) for rank in range(3)])
        dropped = 0

        def run() -> None:
            nonlocal dropped
            file = next(files)
            for row in rows:
                file.add(row)
            file.finish()
            dropped += file.dropped

        timed(f"{kind}: StepFile.add in all", run)
        os.write(stop[1], b".")
        os.waitpid(reader, 0)
        size = (Path(folder) / "steps.rank0.jsonl").stat().st_size
        print(f"          {size / STEPS:.0f} bytes a line; {dropped} of {3 * STEPS} dropped")


def main() -> None:
    draw = random.Random(1).random
    start = time.monotonic()
    # Steps as fast as they are added here: a flush every 256.
    short = [(start + step * 1e-7, start + step * 1e-7 + 0.001, None, None) for step in range(STEPS)]
    whole = [(*row, parts(lambda: draw() * 0.1)) for row in short]
    print("microseconds a step")
    for kind, rows in (("without parts", short), ("with parts", whole)):
        ways(kind, rows)
        adds(kind, rows)


if __name__ == "__main__":
    main()
