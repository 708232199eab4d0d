"""Rules of the mechanism that only the whole command can show."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tuning import BIN, SCRIPTS, feedtune, result_of, wait_until_gone

QUICK = ["--trials", "1", "--max-workers", "1", "--block-seconds", "0.2"]
SECRET = "s3cr3t-of-the-user"

# Leaves one file in its folder, and tells what it was started with.
WRITES = """
import os, sys
open("trace", "w").write("written")
print("arguments", sys.argv[1:])
print("input", repr(sys.stdin.read()))
print("variables", sorted(name for name in os.environ if name.startswith(("FEED", "PYTHONPATH"))), flush=True)
"""


def script(folder: Path) -> Path:
    """The latency-bound training, after a few words of its own."""
    path = folder / "train.py"
    path.write_text(WRITES + (SCRIPTS / "latency.py").read_text())
    return path


@pytest.mark.parametrize("guard", ["overlay", "python"])
@pytest.mark.slow
def test_only_pythonpath_needs_to_survive_a_launcher(tmp_path: Path, guard: str) -> None:
    """``srun --export``, mpirun and pdsh drop other variables."""
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    path = script(work)
    dropped = f'exec env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" {sys.executable} {path}'
    words = ["tune", "--out", run, "--guard", guard, *QUICK, "--", "bash", "-c", dropped]
    done = feedtune(*words, cwd=work)
    assert done.returncode == 0, done.stderr
    assert result_of(run)["guard"]["tier"] == guard
    assert "FEEDTUNE_RUN_ID" not in (run / "command.log").read_text(), "nothing was dropped"
    assert [file.name for file in work.iterdir()] == ["train.py"], "the write guard was lost on the way"
    assert not wait_until_gone(str(run))


@pytest.mark.slow
def test_what_a_run_says_and_keeps(tmp_path: Path) -> None:
    """The first line says what is guarded and what is not; nothing secret is stored; input is empty."""
    state, work = tmp_path / "state", tmp_path / "work"
    work.mkdir()
    path = script(work)
    command = [sys.executable, path, "--api-key", SECRET, "--epochs", "3"]
    done = feedtune("tune", "--json", *QUICK, "--", *command, cwd=work, XDG_STATE_HOME=str(state))
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    for part in ("trial mode", "is ended", "throw-away", "network and database writes are NOT blocked"):
        assert part in first
    document = json.loads(done.stdout)
    assert f"({document['guard']['tier']} guard)" in first
    for tracker in ("Weights & Biases", "MLflow", "Comet", "Neptune", "ClearML"):
        assert tracker in first
        assert tracker in document["guard"]["trackers_off"]
    # The run folder is outside the work folder, named after the time and the script.
    (run,) = (state / "feedtune" / "runs").iterdir()
    assert run.name.endswith("-train")
    assert document["run"] == str(run)
    log = (run / "command.log").read_text()
    assert f"arguments ['--api-key', '{SECRET}', '--epochs', '3']" in log
    assert "input ''" in log
    for file in run.iterdir():
        assert file.name == "command.log" or SECRET not in file.read_text(errors="replace"), file
    assert document["command"][-4:] == ["--api-key", "***", "--epochs", "3"]
    assert not (run / "boot").exists()


@pytest.mark.slow
def test_no_step_within_the_start_timeout_names_how_far_it_came(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\nimport torch.utils.data\nprint('compiling', flush=True)\ntime.sleep(600)\n")
    words = ["tune", "--out", tmp_path / "run", "--start-timeout", "8", "--", sys.executable, path]
    done = feedtune(*words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "no training step within 8 s: it never made a torch DataLoader" in done.stderr
    assert "--start-timeout SECONDS" in done.stderr
    assert "Traceback" not in done.stderr
    assert not wait_until_gone(str(path))


@pytest.mark.slow
def test_a_rank_that_never_fetches_takes_no_part(tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", SCRIPTS / "silent.py"]
    done = feedtune("tune", "--out", run, *QUICK, "--", *torchrun, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = result_of(run)
    assert document["world_size"] == 2
    assert document["starts"] == 1
    for block in document["blocks"]:
        assert list(block["first_steps"]) == ["0"]
        assert block["rate"]
    assert not wait_until_gone(str(run))
