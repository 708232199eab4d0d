"""A process that works a slice whenever it is asked to, in turns with something else."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Afresh:
    """A command that prints a line once it is ready, and one for each line that it is sent.

    Args:
        command: the command, or the launcher of its ranks, of which the first prints and reads.
        stderr: of it; at its end one rank leaves the other alone, which complains.
        env: what it has besides this process's own environment.

    Attributes:
        ready: words of its first line.
        rates: of the slices that it trained.
    """

    def __init__(self, command: list[str], stderr: int | None = subprocess.DEVNULL, **env: str) -> None:
        self.rates: list[float] = []
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.ready = self._read()

    def _read(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args} has ended")
        return line.split()

    def ask(self, line: object) -> list[str]:
        """Words of its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def train(self, line: str = "go on") -> float:
        """One slice more, of a script that answers with its rate; the rate."""
        self.rates.append(float(self.ask(line)[0]))
        return self.rates[-1]

    def end(self) -> str:
        """Its last words."""
        return self._process.communicate()[0].strip()


def several(start: Callable[[int], T], starts: int, jobs: int) -> list[T]:
    """What ``start(number)`` returns for each start, ``jobs`` at a time, each on cores of its own."""
    if jobs == 1:
        return [start(number) for number in range(starts)]
    shares = multiprocessing.Queue()  # type: multiprocessing.Queue[set[int]]
    cores = sorted(os.sched_getaffinity(0))
    for job in range(jobs):
        shares.put(set(cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]))
    with ProcessPoolExecutor(jobs, initializer=_take_share, initargs=(shares,)) as pool:
        return list(pool.map(start, range(starts)))


def _take_share(shares: multiprocessing.Queue[set[int]]) -> None:
    os.sched_setaffinity(0, shares.get())
