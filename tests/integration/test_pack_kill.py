"""Kill a pack at random moments: nothing half-written is ever visible, and the next run ends the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from shard_tools.cli import main; main()", "pack"]
OPTIONS = ["--shard-size", "300kB"]
ROUNDS = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "src"
    for number in range(3000):
        path = root / f"c{number % 7}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(4, "big") * (1000 + number % 500))
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pack(source: Path, out: Path, form: str, workers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, str(source), str(out), *OPTIONS, "--format", form, "--workers", str(workers)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[bytes]) -> str:
    _, errors = process.communicate(timeout=60)
    return errors.decode()


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(child) for child in text.split()]


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("whole")
    for form in ("wds", "lmdb"):
        assert finish(pack(source, folder / form, form, 1)) == ""
    return {form: contents(folder / form) for form in ("wds", "lmdb")}


@pytest.mark.parametrize("form", ["wds", pytest.param("lmdb", marks=pytest.mark.slow)])
def test_p6_p13_kill_while_packing_publishes_nothing_and_resumes(
    form: str, source: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    chance = random.Random(form)
    killed = 0
    for number in range(ROUNDS):
        out = tmp_path / f"out{number}"
        for _ in range(2):
            process = pack(source, out, form, chance.choice([1, 2, 3]))
            time.sleep(chance.uniform(0.05, 0.5))
            workers = children(process.pid)
            if number % 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            finish(process)
            killed += process.returncode == -signal.SIGKILL
            wait_gone(workers)
            if out.exists():
                assert contents(out) == whole[form]
        process = pack(source, out, form, chance.choice([1, 2, 4]))
        errors = finish(process)
        assert process.returncode == 0 or "holds a finished pack" in errors, errors
        assert contents(out) == whole[form]
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"out{number}"]
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
    assert killed > ROUNDS / 2


def test_p14_a_killed_worker_ends_the_run_in_seconds(source: Path, tmp_path: Path) -> None:
    process = pack(source, tmp_path / "out", "wds", 2)
    workers: list[int] = []
    while len(workers) < 2 and process.poll() is None:
        workers = children(process.pid)
    os.kill(workers[0], signal.SIGKILL)
    start = time.monotonic()
    errors = finish(process)
    assert time.monotonic() - start < 5
    assert process.returncode == 3
    assert "was killed by signal 9" in errors
    assert "finished shards are kept" in errors
    wait_gone(workers)
    assert not (tmp_path / "out").exists()
    assert finish(pack(source, tmp_path / "out", "wds", 2)) == ""


@pytest.mark.parametrize("workers", [1, 3])
def test_interrupt_leaves_no_process_and_no_temporary_file(
    workers: int, source: Path, tmp_path: Path
) -> None:
    process = pack(source, tmp_path / "out", "wds", workers)
    journal = tmp_path / ".out.shard-tools-work" / "journal.jsonl"
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 3):
        time.sleep(0.002)
    started = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    finish(process)
    assert process.returncode == 130
    wait_gone(started)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in left if name.endswith(".tmp")]
    assert "journal.jsonl" in left
    assert not (tmp_path / "out").exists()


def test_two_packs_at_once_do_not_write_the_same_folder(source: Path, tmp_path: Path) -> None:
    first = pack(source, tmp_path / "out", "wds", 1)
    second = pack(source, tmp_path / "out", "wds", 1)
    errors = [finish(first), finish(second)]
    assert sorted([first.returncode, second.returncode]) == [0, 2]
    assert any("holds a finished pack" in text for text in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
