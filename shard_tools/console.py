"""What every command of both packages shares: JSON on stdout, progress on stderr, errors as exit codes."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from typing import Any

import typer

from shard_tools.errors import ToolError


def print_json(document: dict[str, Any]) -> None:
    """Write one JSON document to stdout, the only thing that ``--json`` puts there."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text):  # file names that are no UTF-8
        text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Write a line for a person to stderr; a terminal that has been closed is no reason to fail."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # What it still holds would make the interpreter's own end fail.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (stays open)


class Progress:
    """Progress on stderr: a rewritten line on a terminal, else a plain line every few seconds."""

    def __init__(self, label: str, total: int | None = None, unit: str = "files") -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self._terminal = sys.stderr.isatty()
        self._every_s = 0.2 if self._terminal else 5.0
        self._last = self._start = time.monotonic()

    def add(self, count: int = 1) -> None:
        """Count what is done; prints at most a few times a second."""
        self.done += count
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self._print(now)

    def _print(self, now: float) -> None:
        rate = self.done / max(now - self._start, 1e-9)
        of = f"/{self.total:,}" if self.total else ""
        line = f"{self.label}: {self.done:,}{of} {self.unit}, {rate:,.0f}/s"
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the rewritten line."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def run_app(app: typer.Typer, name: str) -> None:
    """Run a typer application; a ``ToolError`` becomes its message and its exit code, Ctrl-C becomes 130."""
    try:
        app(prog_name=name)
    except ToolError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a device that is gone: nothing that a traceback would explain
        say(f"error: {error.filename or 'the operating system'}: {error.strerror or error}")
        sys.exit(3)
