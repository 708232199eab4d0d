"""Wrong use and bad input: a clear error, the right exit code, nothing left behind."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from tuning import SCRIPTS, feedtune, result_of, wait_until_gone

PYTHON = sys.executable


def fails(tmp_path: Path, code: int, *words: str | Path, says: str, **env: str) -> str:
    done = feedtune("tune", "--out", tmp_path / "run", *words, cwd=tmp_path, **env)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert "feedtune/" not in done.stderr, "a traceback of ours"
    assert not (tmp_path / "run" / "boot").exists()
    assert not wait_until_gone(str(tmp_path))
    return done.stderr


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(text)
    return path


def test_no_command(tmp_path: Path) -> None:
    fails(tmp_path, 2, says="no command to tune")


def test_command_without_dashes(tmp_path: Path) -> None:
    fails(tmp_path, 2, PYTHON, SCRIPTS / "latency.py", says="--")


def test_unknown_program(tmp_path: Path) -> None:
    fails(tmp_path, 2, "--", "no-such-program", says="no-such-program")


def test_command_that_fails_at_once_shows_its_own_error(tmp_path: Path) -> None:
    path = script(tmp_path, "raise RuntimeError('the dataset moved')\n")
    fails(tmp_path, 4, "--", PYTHON, path, says="the dataset moved")


def test_command_that_never_makes_a_loader(tmp_path: Path) -> None:
    fails(tmp_path, 3, "--", PYTHON, script(tmp_path, "import torch.utils.data\n"), says="never made")


def test_an_end_is_seen_where_whoever_started_feedtune_blocks_sigchld(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        fails(tmp_path, 3, "--", PYTHON, script(tmp_path, ""), says="never imported torch.utils.data")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.slow
def test_command_that_is_no_python(tmp_path: Path) -> None:
    fails(tmp_path, 3, "--", "true", says="no Python process")


def test_isolated_python_is_named(tmp_path: Path) -> None:
    fails(tmp_path, 3, "--", PYTHON, "-I", SCRIPTS / "latency.py", says="-I", STEPS="3")


@pytest.mark.slow
def test_loader_without_training(tmp_path: Path) -> None:
    text = "from torch.utils.data import DataLoader\nfor x in DataLoader(list(range(8))): pass\n"
    fails(tmp_path, 3, "--", PYTHON, script(tmp_path, text), says="optimizer")


@pytest.mark.slow
def test_training_that_is_too_short(tmp_path: Path) -> None:
    fails(tmp_path, 2, "--", PYTHON, SCRIPTS / "latency.py", says="more steps", STEPS="6")


def test_run_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other").touch()
    words = ["--", PYTHON, SCRIPTS / "latency.py"]
    fails(tmp_path, 2, *words, says="not empty")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["other"]


@pytest.mark.slow
def test_once_a_rank(tmp_path: Path) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    fails(tmp_path, 2, "--", PYTHON, SCRIPTS / "latency.py", says="put it in front", **rank)


def test_unknown_setting(tmp_path: Path) -> None:
    fails(tmp_path, 2, "--set", "workers=3", "--", PYTHON, SCRIPTS / "latency.py", says="--set workers=3")


def test_missing_data_folder(tmp_path: Path) -> None:
    fails(tmp_path, 2, "--data", tmp_path / "nowhere", says="no such folder")


@pytest.mark.slow
def test_empty_data_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails(tmp_path, 4, "--data", tmp_path / "empty", says="empty")


def test_missing_preset(tmp_path: Path) -> None:
    fails(tmp_path, 2, "--config", tmp_path / "no.toml", "--", PYTHON, "x.py", says="no.toml")


def test_report_of_a_folder_without_a_result(tmp_path: Path) -> None:
    done = feedtune("report", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "result.json" in done.stderr


@pytest.mark.slow
def test_failing_dataset_stops_with_the_scripts_own_error(tmp_path: Path) -> None:
    text = (SCRIPTS / "latency.py").read_text()
    text, count = re.subn(r"time\.sleep\(.*\)", "assert index < 300, 'broken file'", text)
    assert count == 1
    stderr = fails(tmp_path, 4, "--", PYTHON, script(tmp_path, text), says="broken file")
    assert "3 times" in stderr
    assert result_of(tmp_path / "run")["outcome"] == "failed"


@pytest.mark.slow
def test_interpreter_without_feedtune(tmp_path: Path) -> None:
    """The start-up folder is self-contained: the command's interpreter needs torch and nothing of ours."""
    import feedtune as package

    path = script(
        tmp_path,
        "import importlib.abc, sys\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('feedtune', 'shard_tools', 'optuna'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n" + (SCRIPTS / "latency.py").read_text(),
    )
    words = ["--trials", "2", "--", PYTHON, path]
    done = feedtune("tune", "--out", tmp_path / "run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "run")["starts"] == 1
    assert package.__file__
