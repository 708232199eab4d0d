"""What a watched rank writes down: one line a step, and once who it is.

No thread and no open file: lines are appended each second or 256 steps, so that workers inherit nothing.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Optional

# enter_s, return_s, tag, made_s: see feedtune.analysis.steps
Row = tuple[float, float, Optional[str], Optional[float]]

_MOST = 256
_EVERY_S = 1.0


class StepFile:
    """The files of one rank in the run folder; a process that has the same rank gets others.

    Args:
        folder: the run folder.
        rank: this process's rank.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.steps = 0
        self.part, self._path = _claim(folder, rank)
        name = f"rank{rank}.json" if self.part == 1 else f"rank{rank}.{self.part}.json"
        self._about = os.path.join(folder, name)
        self._lines: list[str] = []
        self._written_s = time.monotonic()

    def describe(self, about: dict[str, Any]) -> None:
        """Write who this rank is; a later call replaces it."""
        temporary = f"{self._about}.tmp"
        with open(temporary, "w") as file:
            json.dump(about, file, default=str)
        os.replace(temporary, self._about)

    def add(self, row: Row) -> None:
        """Take a step down, to be written soon."""
        enter_s, return_s, *more = row
        line: list[Any] = [self.steps, round(enter_s, 6), round(return_s, 6), *more]
        while line[-1] is None:
            line.pop()
        self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        self.steps += 1
        if len(self._lines) >= _MOST or return_s - self._written_s >= _EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Append what waits."""
        lines, self._lines = self._lines, []
        self._written_s = time.monotonic()
        data = "".join(lines).encode()
        if not data:
            return
        target = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            while data:
                data = data[os.write(target, data) :]
        finally:
            os.close(target)

    def drop(self) -> None:
        """Forget what waits: another process writes it."""
        self._lines = []


def _claim(folder: str, rank: int) -> tuple[int, str]:
    """A file that no process before has taken: of a restarted rank, or of a second training in a row."""
    part = 1
    while True:
        name = f"steps.rank{rank}.jsonl" if part == 1 else f"steps.rank{rank}.{part}.jsonl"
        path = os.path.join(folder, name)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            part += 1
            continue
        return part, path
