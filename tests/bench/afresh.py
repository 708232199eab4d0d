"""A script without feedtune that trains a slice whenever it is asked to, between the blocks of a trial."""

from __future__ import annotations

import os
import subprocess
import sys


class Afresh:
    """The script, which prints its rate after each slice and waits for a line.

    Args:
        command: the script, or the launcher of its ranks, of which the first prints and reads.
        env: what it has besides this process's own environment.
    """

    def __init__(self, command: list[str], **env: str) -> None:
        self.rates: list[float] = []
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # at its end one rank leaves the other alone
            text=True,
        )
        self._read()  # trained once: all that a first time takes is behind it

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args} has ended")
        return float(line.split()[0])

    def train(self, words: str = "go on") -> float:
        """One slice more; its rate."""
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        self.rates.append(self._read())
        return self.rates[-1]

    def end(self) -> None:
        self._process.communicate()
