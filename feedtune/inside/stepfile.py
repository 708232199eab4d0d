"""What a watched rank writes down: one line a step, and once who it is.

Lines go to the driver each second or 256 lines, by a pipe that is never waited for; what it does not take is
kept up to a bound, and counted beyond that. No thread, and no file that workers could inherit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any, Union

from .linefiles import private
from .recordpipe import MOST_LINE, RecordFiles, RecordPipe, reach
from .stepline import FullRow, Row, encode, step_line

__all__ = ["Row", "StepFile"]

_MOST = 256
_EVERY_S = 1.0
_MOST_BYTES = 1 << 20  # kept while the driver does not read
_LAST_TRIES_S = 1.0
_WORKERS = "workers."


class StepFile:
    """The files of one rank in the run folder; a process that has the same rank gets others.

    Attributes:
        steps: how many were added, the dropped ones included.
        part: 1, or more for a later process of the same rank.
        dropped: steps that could not be handed on.
        dropped_workers: the same of lines on workers.

    Args:
        folder: the run folder.
        rank: this process's rank.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.steps = 0
        self.dropped = 0
        self.dropped_workers = 0
        self.part = _claim(folder, rank)
        name = f"rank{rank}" if self.part == 1 else f"rank{rank}.{self.part}"
        self._about = os.path.join(folder, f"{name}.json")
        self._prefix = f"steps.{name}\t"
        self._workers_prefix = f"{_WORKERS}{name}\t"
        self._out: Union[RecordPipe, RecordFiles] = reach(folder) or RecordFiles(folder)
        self._pid = os.getpid()
        self._lines: list[str] = []
        self._size = 0
        self._fresh = 0  # lines since the last flush
        self._written_s = time.monotonic()

    def describe(self, about: dict[str, Any]) -> None:
        """Write who this rank is; a later call replaces it."""
        temporary = f"{self._about}.tmp"
        with open(temporary, "w", opener=private) as file:
            json.dump(about, file, default=str)
        os.replace(temporary, self._about)

    def add(self, row: Union[Row, FullRow]) -> None:
        """Take a step down, to be written soon; its parts are read now and may change afterwards."""
        if self._out.gone or not self._keep(self._prefix + step_line(self.steps, row)):
            self.dropped += 1
        self.steps += 1
        if self._fresh >= _MOST or row[1] - self._written_s >= _EVERY_S:
            self.flush()

    def add_workers(self, t_s: float, first_worker: int, rows: Sequence[Sequence[float]]) -> None:
        """Take down what workers have done so far; it is written with the next steps.

        Args:
            t_s: when these totals were read (monotonic seconds).
            first_worker: number of the first of them; as many lines are made as it takes.
            rows: ``batches, fetch_s, transform_s, collate_s, cpu_s, rchar, read_bytes`` of each.
        """
        line = f"{self._workers_prefix}[{t_s:.6f},{first_worker},{encode(list(rows))}]\n"
        if len(line) > MOST_LINE and len(rows) > 1:
            half = len(rows) // 2
            self.add_workers(t_s, first_worker, rows[:half])
            self.add_workers(t_s, first_worker + half, rows[half:])
        elif self._out.gone or not self._keep(line):
            self.dropped_workers += 1

    def _keep(self, line: str) -> bool:
        """Keep a line until it is written; not one that is too long, nor too many."""
        self._fresh += 1
        if len(line) > MOST_LINE or self._size + len(line) > _MOST_BYTES:
            return False
        self._lines.append(line)
        self._size += len(line)
        return True

    def flush(self) -> None:
        """Hand on what waits, as far as that goes without waiting."""
        lines, size = self._lines, self._size
        self._lines, self._size, self._fresh = [], 0, 0
        self._written_s = time.monotonic()
        if not lines or os.getpid() != self._pid:  # a forked child has a copy of its parent's
            return
        written = self._out.write(lines)
        rest = lines[written:]
        if self._out.gone:
            self._count(rest)
        elif rest:
            self._lines = rest + self._lines
            self._size += size - sum(map(len, lines[:written]))

    def finish(self) -> None:
        """Hand on what waits at the end of the process, with some patience; the rest is counted.

        It may wait for a second: not to be called while the training goes on.
        """
        until = time.monotonic() + _LAST_TRIES_S
        self.flush()
        while self._lines and time.monotonic() < until:
            time.sleep(0.02)
            self.flush()
        self._count(self._lines)
        self.drop()

    def drop(self) -> None:
        """Forget what waits: another process writes it."""
        self._lines, self._size = [], 0

    def _count(self, lines: Sequence[str]) -> None:
        workers = sum(line.startswith(_WORKERS) for line in lines)
        self.dropped_workers += workers
        self.dropped += len(lines) - workers


def _claim(folder: str, rank: int) -> int:
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
        return part
