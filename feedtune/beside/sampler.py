"""The process of the samplers: one tick a second, until the one who started it ends or says so.

``start_sampler`` of ``beside/start.py`` starts it. Standard input carries its orders, a line each:
``root PID`` (the command runs now), ``stop``; its end is an order to stop, so that it cannot outlive the one
who started it. The figures of a tick go to the file in one write.
"""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from feedtune.beside.base import Rows, Sampler, allow_descriptors
from feedtune.beside.cgroups import CgroupSampler
from feedtune.beside.disks import DiskSampler
from feedtune.beside.nvml import NvmlSampler
from feedtune.beside.pressure import PressureSampler
from feedtune.beside.processes import ProcessSampler
from feedtune.beside.readings import (
    FILE_NAME,
    MOST_BYTES,
    OWN_COLUMNS,
    SCHEMA,
    SLOWER_EVERY_BYTES,
    FileGone,
    ReadingsFile,
)
from feedtune.beside.system import SystemSampler

_LOOK_S = 2.0  # how often at least it is looked whether the one who started us still lives
_MOST_ORDER_BYTES = 4096


def default_samplers(run: Path | None, root_pid: int | None, root: Path = Path("/")) -> list[Sampler]:
    """All samplers, over one root for ``proc``, ``sys`` and ``dev``."""
    return [
        ProcessSampler(root_pid, root, run, allow_descriptors()),
        NvmlSampler(),
        SystemSampler(root),
        PressureSampler(root, root_pid),
        CgroupSampler(root, root_pid),
        DiskSampler(root),
    ]


class Recorder:
    """Asks the samplers at each tick and writes what they say; one that fails is noted and dropped."""

    def __init__(
        self, samplers: Sequence[Sampler], path: Path, interval_s: float, root_pid: int | None
    ) -> None:
        self.interval_s = interval_s
        self.lost_ticks = 0
        self._samplers = list(samplers)
        self._root_pid = root_pid
        self._slower_at = SLOWER_EVERY_BYTES
        self._notes: Rows = {"note": []}
        self._file = ReadingsFile(path)
        while self._file.bytes >= self._slower_at:  # of an earlier start
            self._slower_at += SLOWER_EVERY_BYTES

    def begin(self, t_s: float) -> None:
        """Look what there is, and write the head.

        Raises:
            OSError: the file cannot be written.
        """
        states: dict[str, str | None] = {}
        for sampler in list(self._samplers):
            why = self._guarded(sampler, sampler.prepare, "cannot be prepared")
            states[sampler.name] = f"not available: {why}" if why else None
            if why:
                self._drop(sampler)
        head: dict[str, Any] = {
            "schema": SCHEMA,
            "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "t_s": round(t_s, 3),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "root_pid": self._root_pid,
            "interval_s": self.interval_s,
            "samplers": states,
            "columns": {**{k: v for s in self._samplers for k, v in s.columns.items()}, **OWN_COLUMNS},
        }
        self._file.head(head)

    def follow(self, pid: int) -> None:
        """The command is this process."""
        for sampler in self._samplers:
            if isinstance(sampler, ProcessSampler):
                sampler.root_pid = pid
            elif isinstance(sampler, (PressureSampler, CgroupSampler)):
                sampler.follow(pid)

    def tick(self, t_s: float, lag_s: float) -> bool:
        """Read and write once; whether there is to be another tick."""
        rows: Rows = {}
        for sampler in list(self._samplers):
            found = self._guarded(sampler, partial(sampler.sample, t_s), "has failed and is dropped")
            if isinstance(found, str):
                self._notes["note"].append([sampler.name, found])
                self._drop(sampler)
            else:
                rows.update({source: rows.get(source, []) + more for source, more in found.items()})
        more = self._bound()
        own = [
            round(time.process_time(), 3),
            round(lag_s, 3),
            self.lost_ticks + self._file.lost,
            self._file.bytes,
        ]
        rows["sampler"] = [["", *own]]
        rows["note"] = rows.get("note", []) + self._notes["note"]
        self._notes = {"note": []}
        try:
            self._file.add(t_s, rows)
        except FileGone:
            return False
        return more

    def close(self) -> None:
        """Let go of everything."""
        for sampler in list(self._samplers):
            self._drop(sampler)
        self._file.close()

    def _bound(self) -> bool:
        """Keep the file small however long the training runs; whether it may grow further."""
        if self._file.bytes >= MOST_BYTES:
            self._notes["note"].append(
                ["sampler", f"the file has {MOST_BYTES >> 20} MiB: no more is recorded"]
            )
            return False
        if self._file.bytes >= self._slower_at:
            self._slower_at += SLOWER_EVERY_BYTES
            self.interval_s *= 2
            text = f"the file has {self._file.bytes >> 20} MiB: a tick every {self.interval_s:g} s from here"
            self._notes["note"].append(["sampler", text])
        return True

    def _drop(self, sampler: Sampler) -> None:
        self._samplers.remove(sampler)
        self._guarded(sampler, sampler.close, "cannot be closed")

    @staticmethod
    def _guarded(sampler: Sampler, call: Callable[[], Any], what: str) -> Any:
        """What a sampler answers, or in words why it did not."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # noted in the file: one broken source must not cost the rest
            return f"{sampler.name} {what}: {type(error).__name__}: {error}"


class Orders:
    """Orders that come in on a pipe, and the life of the one at its other end."""

    def __init__(self, handle: int, parent: int) -> None:
        self._handle = handle
        self._parent = parent
        self._rest = b""

    def wait(self, until_s: float) -> list[str] | None:
        """Orders until that moment (monotonic); ``None`` when it is time to stop."""
        while os.getppid() == self._parent:  # else it has ended, and a forked child holds the pipe open
            left_s = until_s - time.monotonic()
            ready, _, _ = select.select([self._handle], [], [], max(0.0, min(left_s, _LOOK_S)))
            if ready:
                data = os.read(self._handle, _MOST_ORDER_BYTES)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if not data or b"stop" in lines:
                    return None
                if lines:
                    return [line.decode(errors="replace") for line in lines]
            elif left_s <= 0:
                return []
        return None


def record(recorder: Recorder, orders: Orders) -> None:
    """Tick until told to stop."""
    due_s = time.monotonic()
    recorder.begin(due_s)
    while True:
        now_s = time.monotonic()
        if not recorder.tick(now_s, max(0.0, now_s - due_s)):
            return
        due_s += recorder.interval_s
        missed = int(max(0.0, time.monotonic() - due_s) / recorder.interval_s)
        recorder.lost_ticks += missed
        due_s += missed * recorder.interval_s
        while (found := orders.wait(due_s)) != []:
            if found is None:
                return
            for order in found:
                word, _, pid = order.partition(" ")
                if word == "root" and pid.isdigit():
                    recorder.follow(int(pid))


def main(words: Sequence[str]) -> int:
    """Sample until standard input ends.

    Args:
        words: run folder, pid of the one who started us, pid of the command or ``-``, seconds between ticks.
    """
    run, parent, root_pid, interval = words
    # The terminal's signals are the command's; a broken pipe or a full disk is an error to count.
    for number in (
        signal.SIGINT,
        signal.SIGTSTP,
        signal.SIGTTOU,
        signal.SIGHUP,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_IGN)
    pid = int(root_pid) if root_pid.isdigit() else None
    folder = Path(run)
    try:
        recorder = Recorder(default_samplers(folder, pid), folder / FILE_NAME, float(interval), pid)
        try:
            record(recorder, Orders(sys.stdin.fileno(), int(parent)))
        finally:
            recorder.close()
    except OSError as error:
        sys.stderr.write(f"{folder / FILE_NAME} cannot be written: {error.strerror}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
