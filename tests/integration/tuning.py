"""Running the real command on real scripts, and looking for what it must not leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
FEEDTUNE = [str(BIN / "feedtune")] if (BIN / "feedtune").exists() else [sys.executable, "-m", "feedtune"]


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


class Footprint:
    """What a command may leave on the machine: processes, shared memory, scratch and temporary folders.

    Made before the command is started, which gets ``env``: a mark that all its processes inherit, and a
    temporary folder of its own.
    """

    SECONDS = 5.0  # the promise, also after a SIGKILL

    def __init__(self, folder: Path) -> None:
        self._tmp = folder / "tmp"
        self._tmp.mkdir()
        self._mark = uuid.uuid4().hex
        self._segments = set(os.listdir("/dev/shm"))
        self._scratch = unlocked_scratch()
        self.env = {"FOOTPRINT": self._mark, "TMPDIR": str(self._tmp)}

    def left(self) -> list[str]:
        """What is there now and was not before."""
        temporary = [path.name for path in self._tmp.iterdir() if not self._by_design(path)]
        return [
            *processes_with(self._mark),
            *orphans(set(os.listdir("/dev/shm")) - self._segments),
            *map(str, unlocked_scratch() - self._scratch),
            *temporary,
        ]

    def _by_design(self, path: Path) -> bool:
        """torch's compile cache, and folders of workers that were killed just as they had made them."""
        empty = path.is_dir() and not any(path.iterdir())
        return path.name.startswith("torchinductor_") or (path.name.startswith("pymp-") and empty)

    def wait(self) -> list[str]:
        """What is left when the time is over; nothing, as soon as there is nothing."""
        deadline = time.monotonic() + self.SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


GENERATED = ("torch_", "sem.", "psm_", "pym-", "nccl-")


def orphans(names: set[str]) -> set[str]:
    """Which files of /dev/shm nobody uses: no process maps them, torch's creator (in the name) has ended."""
    mapped: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {int(line.split()[4]) for line in maps.read_text().splitlines() if "/dev/shm" in line}
    found = set()
    for name in names:
        if not name.startswith(GENERATED):
            continue  # a folder that another test keeps there
        parts = name.split("_")
        if parts[0] == "torch" and Path(f"/proc/{parts[1]}").exists():
            continue
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/dev/shm/{name}").stat().st_ino not in mapped:
                found.add(name)
    return found


def unlocked_scratch() -> set[Path]:
    """Scratch folders that no guardian holds."""
    found = set()
    for base in ("/var/tmp", "/tmp", "/dev/shm"):
        for folder in Path(base).glob("*feedtune-*"):
            try:
                with (folder / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            found.add(folder)
    return found
