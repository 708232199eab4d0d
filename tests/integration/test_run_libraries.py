"""``feedtune run`` and ``feedtune apply`` with real libraries: they train and save as they always do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from applying import identity_of, tuned
from library_cases import CASES, SAVE_EVERY, Case
from tuning import feedtune, result_of

STEPS = 2 * SAVE_EVERY


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path, because sockets are made below it."""
    folder = Path(tempfile.mkdtemp(prefix="ftrun"))
    yield folder
    shutil.rmtree(folder)


def start(base: Path, case: Case, name: str, *words: str | Path) -> str:
    """Train in a project folder of its own, and look for what it has saved; what came on stderr."""
    work, logs = base / name, base / f"{name}.logs"
    work.mkdir()
    logs.mkdir()
    case.prepare(work)
    assert not case.saved(work)
    env = {"STEPS": str(STEPS), "LOGS": str(logs), "OMP_NUM_THREADS": "1"}
    done = feedtune(*words, "--", *case.command, cwd=work, **env)
    assert done.returncode == 0, done.stderr
    assert case.saved(work)
    assert (logs / "saves").read_text()
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_that_is_watched_or_applied_saves_as_always(base: Path, case: Case) -> None:
    if case.missing:
        pytest.skip(f"not installed: {', '.join(case.missing)} (pip install '.[integrations]')")
    start(base, case, "watched", "run", "--out", base / "run")
    document = result_of(base / "run")
    assert document["note"] is None
    (training,) = document["trainings"]
    # A Lightning training goes on from its last checkpoint; accelerate fetches one batch ahead.
    assert training["job"]["steps"] in (STEPS, STEPS + 1, STEPS - SAVE_EVERY)
    assert len(training["ranks"]) == training["world_size"]
    workers = training["loader"]["num_workers"] + 1
    run = tuned(base / "tuned", identity_of(base / "run"), num_workers=workers)
    said = start(base, case, "applied", "apply", run)
    assert said.count(f"feedtune apply: num_workers={workers}, ") == 1
