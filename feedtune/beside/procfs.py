"""What ``/proc/<pid>`` says of one process: pure parsers of its files."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RANK_VARIABLES = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")


class Stat(NamedTuple):
    """Fields of ``/proc/<pid>/stat`` that are used; ``state`` is that of the main thread."""

    comm: str
    state: str
    parent: int
    minor_faults: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int
    rss_pages: int


def parse_stat(text: bytes) -> Stat:
    r"""One process's ``stat``; the name may hold spaces, parentheses and any bytes.

    >>> parse_stat(
    ...     b"4242 (a) (b\xff) D 17 4242 17 34816 4242 4194560 9731 12 3 0 2150 310 0 0 20 0 5 0 88123 "
    ...     b"815104000 51200 18446744073709551615 1 1 0 0 0 0 0 16781312 134254082 0 0 0 17 1 0 0 0 0 0\n"
    ... )  # doctest: +NORMALIZE_WHITESPACE
    Stat(comm='a) (b�', state='D', parent=17, minor_faults=9731, major_faults=3, user_ticks=2150,
         system_ticks=310, threads=5, start_ticks=88123, rss_pages=51200)
    """
    head, _, tail = text.rpartition(b")")
    f = tail.split(None, 23)
    return Stat(
        comm=head.partition(b"(")[2].decode(errors="replace"),
        state=f[0].decode(),
        parent=int(f[1]),
        minor_faults=int(f[7]),
        major_faults=int(f[9]),
        user_ticks=int(f[11]),
        system_ticks=int(f[12]),
        threads=int(f[17]),
        start_ticks=int(f[19]),
        rss_pages=int(f[21]),
    )


def parse_schedstat(text: bytes) -> tuple[float, float]:
    r"""Seconds on a CPU, and seconds ready without one, of one thread; of ``/proc/<pid>``: the main one.

    >>> parse_schedstat(b"962291000 1938364000 3\n")
    (0.962291, 1.938364)
    """
    run, delay = text.split()[:2]
    return int(run) / 1e9, int(delay) / 1e9


def parse_io(text: bytes) -> dict[str, int]:
    r"""Counters of ``/proc/<pid>/io``: ``rchar`` counts what was read, from the cache too.

    >>> parse_io(b"rchar: 6976\nwchar: 0\nsyscr: 10\nread_bytes: 4096\nwrite_bytes: 0\n")["read_bytes"]
    4096
    """
    words = text.split()
    return {name[:-1].decode(): int(value) for name, value in zip(words[::2], words[1::2], strict=False)}


def parse_pss(text: str) -> int | None:
    r"""Bytes of ``Pss`` in ``smaps_rollup``: memory, with shared pages divided among their users.

    >>> parse_pss("5574761b8000-7fff22acd000 ---p 00000000 00:00 0  [rollup]\nRss:  1764 kB\nPss:   304 kB\n")
    311296
    """
    match = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def parse_rank(environ: bytes) -> int | None:
    r"""Rank of a process in its environment, whichever launcher has put it there.

    >>> parse_rank(b"HOME=/root\0RANK=3\0LOCAL_RANK=1\0")
    3
    """
    variables = dict(item.split(b"=", 1) for item in environ.split(b"\0") if b"=" in item)
    for name in _RANK_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            return int(variables[name])
    return None
