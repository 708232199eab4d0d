"""Start-up folders that outlive their run."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from feedtune.launch import lasting
from feedtune.launch.lasting import lasting_folder

CONFIG = {"mode": "apply", "settings": {"num_workers": 2}}


def test_it_is_made_once_and_used_again(tmp_path: Path) -> None:
    parent = tmp_path / "apply"
    one = lasting_folder(parent, CONFIG)
    made = (one.path / "config.json").stat().st_ino
    (one.path / "_feedtune_apply" / "__pycache__").mkdir()
    (one.path / "_feedtune_apply" / "__pycache__" / "x.pyc").touch()
    two = lasting_folder(parent, CONFIG)
    assert two.path == one.path
    assert (two.path / "config.json").stat().st_ino == made
    assert list(parent.iterdir()) == [one.path]
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    assert two.environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{one.path}:/mine"


def test_other_settings_leave_the_folder_of_a_training_that_runs(tmp_path: Path) -> None:
    one = lasting_folder(tmp_path / "apply", CONFIG)
    two = lasting_folder(tmp_path / "apply", {**CONFIG, "settings": {"num_workers": 3}})
    assert two.path != one.path
    assert (one.path / "sitecustomize.py").exists()


def test_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    one = lasting_folder(tmp_path / "apply", CONFIG)
    (one.path / "_feedtune_apply" / "hook.py").unlink()
    two = lasting_folder(tmp_path / "apply", CONFIG)
    assert two.path == one.path
    assert (two.path / "_feedtune_apply" / "hook.py").exists()
    assert list((tmp_path / "apply").iterdir()) == [one.path]


def test_starts_at_the_same_time_get_one_whole_folder(tmp_path: Path) -> None:
    """Each of them sees none before it has made its own."""
    number = 8
    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(lambda _: lasting_folder(tmp_path / "apply", CONFIG), range(number)))
    assert len({boot.path for boot in found}) == 1
    assert list((tmp_path / "apply").iterdir()) == [found[0].path]
    assert lasting._content(found[0].path)["config.json"]


def test_nothing_of_the_users_environment_lies_in_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("API_TOKEN", "s3cr3t")
    boot = lasting_folder(tmp_path / "apply", CONFIG)
    files = [path for path in boot.path.rglob("*") if path.is_file()]
    assert files
    assert not any(b"s3cr3t" in path.read_bytes() for path in files)
