"""Ranks that only talk: over a real connection, as the hook does, without any training."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from feedtune.inside.client import Client
from feedtune.records import BlockPlan
from feedtune.settings import LoaderSettings

STEPS = 40


class FakeProcess:
    """A command: it runs until it is given an exit code."""

    tier, notes = "python", ()

    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True
        self.code = self.code if self.code is not None else -9


def plan(k: int = 0, workers: int = 1, **changes: Any) -> BlockPlan:
    values = {"warmup": 2, "cycle": 1, "target_s": 0.1, "max_s": 8.0, **changes}
    return BlockPlan(k, values.pop("kind", "candidate"), LoaderSettings(workers), **values)


class FakeRank:
    """One rank's side of the conversation.

    Args:
        port: the control server's.
        folder: the run folder, for its steps.
        rank: its number.
        world: how many there are.
        pid: what it calls its process; another one for a rank that begins anew.
        start: the start of the script that it belongs to.
    """

    def __init__(
        self, port: int, folder: Path, rank: int = 0, world: int = 1, pid: int = 0, start: int = 1
    ) -> None:
        self.rank = rank
        self.pid = pid or 1000 + rank
        self.total = 0
        self._folder = folder
        self._client = Client("127.0.0.1", port, "secret")
        loader = {"number": 0, "site": "train.py:3"}
        hello = {"type": "hello", "rank": rank, "world": world, "pid": self.pid, "start": start}
        try:
            self.answer = self._client.ask({**hello, "loader": loader, "rivals": []})
        except BaseException:
            self.goes()  # the session has ended first
            raise

    def asks(self, k: int | None = None) -> dict[str, Any]:
        return self._client.ask({"type": "plan", "k": k, "rank": self.rank})

    def does(self, k: int, steps: int = STEPS, pace_s: float = 0.01, **changes: Any) -> None:
        """Report a block of steps that took so long, and their records."""
        begin = time.monotonic()
        rows = [[k, i, begin + i * pace_s, begin + (i + 0.5) * pace_s, None, 4, 0.0] for i in range(steps)]
        with open(self._folder / f"steps.rank{self.rank}.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        first, self.total = self.total, self.total + steps
        end = {"start_s": begin, "end_s": begin + steps * pace_s, "close_s": 0.0, "end_tag": None}
        told = {"steps": steps, "total": self.total, "first_step": first, "partial": False, "worker_s": None}
        rest = {"cloned": False, "cached": [], "sizes": [4, 32, 1], "worker_bytes": None, "shared_files": []}
        self.says("result", k=k, **{**end, **told, **rest, "repeated": None, **changes})

    def says(self, kind: str, **words: Any) -> None:
        self._client.send({"type": kind, "rank": self.rank, **words})

    def goes(self) -> None:
        """End in order."""
        self._client.close()

    def dies(self) -> None:
        """End at once, whatever it waits for; from another thread."""
        with contextlib.suppress(OSError):
            self._client._socket.shutdown(socket.SHUT_RDWR)


def in_background(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread
