"""``readings.jsonl``: what the samplers have read, one line a tick and source.

The first line, and one more for each later start in the same folder, is an object::

    {"schema": "feedtune.readings/1", "started_at": "2026-01-02T03:04:05+00:00", "t_s": 81.5, "host": "n1",
     "pid": 4711, "root_pid": 4700, "interval_s": 1.0,
     "samplers": {"nvml": "the package nvidia-ml-py is not installed", "disks": null},
     "columns": {"disk": ["reads", "read_bytes", ...], ...}}

``samplers`` says why one is not available; ``null``: it is. Every other line is an array
``[t_s, source, [[of, value, ...], ...]]``: a row a thing, with its values in the order of the source's
columns; a value is ``null``, and missing at the end of a row, where it was not measured. ``t_s`` is the
tick's begin on the host's monotonic clock, that of the step records.

Names that end in ``_s`` or ``_bytes`` and faults, reads, writes, periods are totals since the start of the
process, the cgroup or the machine, unless they say how much is in use; NVML's PCIe counters can wrap.

========================  ==============  ================================================================
source                    of              what
========================  ==============  ================================================================
process                   pid             state of the main thread; CPU time and faults of the process;
                                          CPU time and time ready without a CPU of its main thread; reads
                                          (of workers in turns where there are more than 64 processes)
process_start             pid             new, or another part or name than before; part: main (trains),
                                          worker (a DataLoader's) or helper; ``started_s`` tells two of one
                                          pid apart
process_end               pid             gone since the last tick
process_descriptors       pid             every ten seconds: open files
process_limits            pid             every minute: how many may be open, cores it may run on
process_memory            pid             every ten seconds, or as often as it is cheap: memory, with shared
                                          pages divided among their users
thread                    pid/tid         a thread of a training process that pins memory
processes_left_out        ``""``          processes beyond the first thousand
cpu, core                 ``""``, number  all CPUs; each of them every ten seconds
memory, shm               ``""``          bytes now
pressure                  cpu, io,        time in which some, and all, tasks waited; ``cgroup/cpu``: of the
                          memory          command's own cgroup
cgroup_cpu, _memory,      folder          the command's cgroup, and its ancestors that have a limit
_memory_detail
disk                      device          whole devices; read_s / reads of a stretch is await
gpu_device, gpu,          number          ``event_reasons``: NVML's bits for what holds the clocks down
gpu_link
gpu_util                  number          the driver's own samples, ``at_s`` monotonic
gpu_process               number/pid      GPU memory of a process
sampler                   ``""``          the sampler process itself: its CPU seconds, how late this tick
                                          began, ticks lost so far, bytes in the file
note                      who             something to know: a sampler that has failed, a longer interval
========================  ==============  ================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedtune.beside.base import Rows
from feedtune.records import Reading

SCHEMA = "feedtune.readings/1"
FILE_NAME = "readings.jsonl"
OWN_COLUMNS = {"sampler": ("cpu_s", "lag_s", "lost_ticks", "file_bytes"), "note": ("text",)}
SLOWER_EVERY_BYTES = 64 << 20  # after each so many the interval doubles
MOST_BYTES = 512 << 20  # then it ends: at twice the interval each time, days of the largest trainings


class FileGone(Exception):
    """The file was removed while it was written: nobody wants it any more."""


class ReadingsFile:
    """Appends whole lines, one write a tick; counts what could not be written."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.bytes = os.fstat(self._handle).st_size
        # A sampler that was killed can have left half a line; ours must not go on with it.
        last = os.pread(self._handle, 1, self.bytes - 1) if self.bytes else b"\n"
        self._broken = last != b"\n"
        self.lost = 0

    def head(self, head: Mapping[str, Any]) -> None:
        """Write the line that names the format.

        Raises:
            OSError: it cannot be written.
        """
        self._write(json.dumps(head, separators=(",", ":")).encode() + b"\n")

    def add(self, t_s: float, rows: Rows) -> None:
        """Write one tick.

        Raises:
            FileGone: the file was removed.
        """
        stamp = round(t_s, 3)
        lines = [
            json.dumps([stamp, source, [_trimmed(row) for row in found]], separators=(",", ":"))
            for source, found in rows.items()
            if found
        ]
        if os.fstat(self._handle).st_nlink == 0:
            raise FileGone
        try:
            self._write("".join(f"{line}\n" for line in lines).encode())
        except OSError:  # a full disk; it may have room again later
            self.lost += 1

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _write(self, data: bytes) -> None:
        if self._broken:
            data = b"\n" + data
        while data:
            written = os.write(self._handle, data)
            self.bytes += written
            self._broken = data[written - 1 : written] != b"\n"
            data = data[written:]


def _trimmed(row: list[Any]) -> list[Any]:
    while row and row[-1] is None:
        row = row[:-1]
    return row


def read_heads(path: Path) -> list[dict[str, Any]]:
    """The lines that name the format: one for each start of the samplers; none where there is no file."""
    return [line for line in _lines(path) if isinstance(line, dict) and line.get("schema") == SCHEMA]


def read_readings(path: Path) -> Iterator[Reading]:
    """Every reading, in the order of the file; half a line, as a killed sampler leaves it, is passed over.

    Values that were not measured are ``None``. No file gives no readings.
    """
    columns: dict[str, list[str]] = {}
    for line in _lines(path):
        if isinstance(line, dict):
            columns = line.get("columns", {}) if line.get("schema") == SCHEMA else columns
        elif isinstance(line, list) and len(line) == 3:
            t_s, source, rows = line
            names = columns.get(source, [])
            for of, *values in rows:
                values += [None] * (len(names) - len(values))
                yield Reading(t_s, source, of, dict(zip(names, values, strict=False)))


def _lines(path: Path) -> Iterator[Any]:
    try:
        file = open(path, "rb")  # noqa: SIM115  # closed below; no file is no error
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:  # half a line of a sampler that was killed, or of a full disk
                continue
