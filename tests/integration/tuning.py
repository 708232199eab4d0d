"""Running the real command on real scripts, and looking for what it must not leave behind."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
FEEDTUNE = [str(BIN / "feedtune")]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "default", **more}


def feedtune(*words: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*FEEDTUNE, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=280, check=False
    )


def result_of(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "result.json").read_text())
    return document


def folder_hash(folder: Path) -> str:
    """Names, bytes, modes and times of a whole folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest.update(f"{path.relative_to(folder)} {status.st_mode} {status.st_mtime_ns}\n".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def processes_with(word: str) -> list[str]:
    """Command lines of all processes that hold the word, or carry it in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in text:
            found.append(f"{entry.name} {text[:200]!r}")
    return found


def wait_until_gone(word: str, seconds: float = 10.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := processes_with(word)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
