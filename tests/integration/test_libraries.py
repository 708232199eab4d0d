"""``feedtune tune`` beside project folders of real libraries: they save and read back as they always do,
and nothing of it is there afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from library_cases import CASES, SAVE_EVERY, Case, run_bare
from tuning import feedtune, folder_hash, result_of, wait_until_gone

TIERS = ("overlay", "python+landlock", "python")
# In every tier; the others are guarded by the one that works best here.
IN_ALL_TIERS = {
    *("plain-files", "lightning", "transformers", "safetensors", "distributed-checkpoint"),
    "helper-programs",  # programs that a rank starts are no ranks, and guarded all the same
}
FAST = {("plain-files", "auto")}


class Place:
    """A project folder and what surrounds it; a short path, because sockets are made below it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.work, self.logs, self.run, self.tmp = (base / name for name in ("work", "logs", "run", "tmp"))
        for folder in (self.work, self.logs, self.tmp):
            folder.mkdir()

    def saves(self) -> int:
        log = self.logs / "saves"
        return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def place() -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="ftlib"))
    yield Place(base)
    shutil.rmtree(base)


def abandoned_scratch() -> set[Path]:
    """Scratch folders whose guardian is gone."""
    folders = {path for top in ("/var/tmp", "/tmp") for path in Path(top).glob("feedtune-scratch-*")}
    return {path for path in folders if can_be_locked(path / "lock")}


def can_be_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or just removed
        return False
    return True


def orphaned_segments() -> set[str]:
    """Shared memory of torch whose maker is gone."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    return {name for name in names if not Path("/proc", name.split("_")[1]).exists()}


def appeared(before: set, look: Callable[[], set], seconds: float = 10.0) -> set:
    """What is there that was not there before, once others that run here have tidied up."""
    deadline = time.monotonic() + seconds
    while (new := look() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return new


def env(place: Place) -> dict[str, str]:
    # One thread: on a busy machine those of a tiny model wait for each other most of the time.
    return {"LOGS": str(place.logs), "TMPDIR": str(place.tmp), "OMP_NUM_THREADS": "1"}


def need(case: Case) -> None:
    if case.missing:
        pytest.skip(f"not installed: {', '.join(case.missing)} (pip install '.[integrations]')")


def guarded() -> list[object]:
    found = []
    for case in CASES:
        for tier in ("auto", *(TIERS[1:] if case.name in IN_ALL_TIERS else ())):
            marks = () if (case.name, tier) in FAST else pytest.mark.slow
            found.append(pytest.param(case, tier, id=f"{case.name}-{tier}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "tier"), guarded())
def test_a_training_saves_in_its_trial_and_its_project_folder_stays(
    place: Place, case: Case, tier: str
) -> None:
    need(case)
    case.prepare(place.work)
    assert not case.saved(place.work)
    before, segments, scratch = folder_hash(place.work), orphaned_segments(), abandoned_scratch()
    words = ["tune", "--json", "--trials", "2", "--block-seconds", "0.3", "--out", place.run]
    words += ["--guard", tier, "--writable", place.logs, "--", *case.command]
    done = feedtune(*words, cwd=place.work, **env(place))
    log = (place.run / "command.log").read_text()
    assert done.returncode == 0, done.stderr + log
    result = result_of(place.run)
    assert result["outcome"] != "failed", result
    assert result["guard"]["tier"] in (TIERS if tier == "auto" else (tier,))
    assert result["starts"] == 1, log
    assert "Traceback" not in log
    assert place.saves() >= 2, done.stderr
    assert folder_hash(place.work) == before
    assert not case.saved(place.work)
    assert not wait_until_gone(str(place.base))
    assert not appeared(segments, orphaned_segments)
    assert not appeared(scratch, abandoned_scratch)
    left = {path.name for path in place.tmp.iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor_")}  # torch's cache


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_training_by_itself_saves(place: Place, case: Case) -> None:
    need(case)
    case.prepare(place.work)
    run_bare(case.command, place.work, place.logs, 2 * SAVE_EVERY)
    assert case.saved(place.work)
    assert place.saves()
