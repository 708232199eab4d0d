"""What all samplers share: their protocol, files of the kernel that stay open, and a limit on slow reads."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

Value = float | int | str | None
Row = list[Value]  # what it is about, as text, then the values of the source's columns
Rows = dict[str, list[Row]]  # by source

SLOW_S = 10.0  # how often what is slow to read, or changes slowly, is read
_CHUNK_BYTES = 65536
_SPARE_DESCRIPTORS = 64


class Sampler(Protocol):
    """Reads one kind of thing. ``sample`` may raise: whoever calls it drops the sampler and notes why.

    Attributes:
        name: of the sampler, as the head of the file lists it.
        columns: names of the values, by source; rows may be shorter, what is missing was not measured.
    """

    name: str
    columns: Mapping[str, tuple[str, ...]]

    def prepare(self) -> str | None:
        """Look what there is to read; ``None``, or why nothing can be read here."""
        ...

    def sample(self, now_s: float) -> Rows:
        """Read everything that is due at this moment (monotonic seconds)."""
        ...

    def close(self) -> None:
        """Let go of open files; may be called twice."""
        ...


class NullSampler:
    """Reads nothing."""

    name = "null"
    columns: Mapping[str, tuple[str, ...]] = {}

    def prepare(self) -> str | None:
        """Always there."""
        return None

    def sample(self, now_s: float) -> Rows:  # noqa: ARG002  # the protocol's
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


class KernelFile:
    """A file under ``/proc`` or ``/sys`` that is read again and again, and stays open meanwhile.

    Reading it anew with ``pread`` costs a fourth of opening it each time, and cannot end up in another
    process that has got the same pid.
    """

    def __init__(self, path: str, keep: bool = True) -> None:
        self._path = path
        self._keep = keep
        self._handle = -1

    def read(self) -> bytes | None:
        """The whole file; ``None`` where it is gone, or kept from us."""
        parts: list[bytes] = []
        try:
            if self._handle < 0:
                self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            size = 0
            while part := os.pread(self._handle, _CHUNK_BYTES, size):
                parts.append(part)
                size += len(part)
        except OSError:
            self.close()
            return None
        if not self._keep:
            self.close()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_part(self) -> bytes | None:
        """The first piece that the kernel hands out: all of a small file, for one call instead of two."""
        try:
            if self._handle < 0:
                self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._handle, 4096, 0)
        except OSError:
            self.close()
            return None
        finally:
            if not self._keep:
                self.close()

    def close(self) -> None:
        """Close it; the next read opens it again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Pace:
    """Spaces reads out so that each kind takes at most a share of one core.

    A read that has cost ``c`` seconds of CPU time is due again after ``c / share``, and never before
    ``every_s``: what is slow on this machine is read less often, whatever the machine.
    """

    def __init__(self, share: float, every_s: float = 0.0) -> None:
        self._share = share
        self._every_s = every_s
        self._due_s: dict[object, float] = {}

    def due(self, what: object, now_s: float) -> bool:
        """Whether ``what`` may be read now."""
        # Ticks come a little early or late; what is due within a moment is due.
        return now_s + 0.05 >= self._due_s.get(what, now_s)

    @contextlib.contextmanager
    def spend(self, what: object, now_s: float) -> Iterator[None]:
        """Count what the enclosed read of ``what`` takes, also where it fails."""
        begun_s = time.thread_time()
        try:
            yield
        finally:
            cost_s = time.thread_time() - begun_s
            self._due_s[what] = now_s + max(self._every_s, cost_s / self._share)


class Turns:
    """Reads of one kind that many processes take turns in, for at most a share of one core in all.

    Each is due every ``every_s`` seconds; what their reads may take grows with time, is kept for ten
    seconds at most, and one long read may overdraw it.
    """

    def __init__(self, source: str, share: float, every_s: float) -> None:
        self.source = source
        self._every_s = every_s
        self._share = share
        self._credit_s = 0.0
        self._last_s: float | None = None
        self._due_s: dict[int, float] = {}

    def due(self, pids: Iterable[int], now_s: float) -> Iterator[int]:
        """Those that may be read now, the longest unread first; each has to be read under ``spend``."""
        passed_s = SLOW_S if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._credit_s = min(self._credit_s + passed_s * self._share, SLOW_S * self._share)
        waiting = [pid for pid in pids if self._due_s.get(pid, 0.0) <= now_s]
        for pid in sorted(waiting, key=lambda pid: self._due_s.get(pid, 0.0)):
            if self._credit_s <= 0:
                return
            yield pid

    @contextlib.contextmanager
    def spend(self, pid: int, now_s: float) -> Iterator[None]:
        """Count what the enclosed read takes."""
        begun_s = time.thread_time()
        yield
        self._credit_s -= time.thread_time() - begun_s
        self._due_s[pid] = now_s + self._every_s

    def forget(self, pid: int) -> None:
        """It has ended."""
        self._due_s.pop(pid, None)


def read_text(path: Path | str) -> str:
    """Text of a small kernel file; empty where there is none, or it is kept from us."""
    return (KernelFile(os.fspath(path), keep=False).read() or b"").decode(errors="replace")


def allow_descriptors() -> int:
    """Raise the limit of open files as far as we may; how many kernel files may then stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return 65536 if soft == resource.RLIM_INFINITY else max(0, soft - _SPARE_DESCRIPTORS)
