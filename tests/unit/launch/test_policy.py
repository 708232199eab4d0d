from __future__ import annotations

from pathlib import Path

import pytest

from feedtune.launch.policy import default_policy
from feedtune.launch.rules import COVER, THROUGH, kind_at, policy_rules


def kind(path: object, policy: object) -> str:
    from dataclasses import asdict

    return kind_at(str(path), policy_rules(asdict(policy)))  # type: ignore[call-overload]


def test_project_below_tmp_is_covered_and_tmp_passes(tmp_path: Path) -> None:
    project, run = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    run.mkdir()
    policy = default_policy(["python", "train.py"], project, {"HOME": str(tmp_path)}, [run])
    assert kind(project / "a", policy) == COVER
    assert kind("/tmp/elsewhere", policy) == THROUGH
    assert kind("/dev/shm/x", policy) == THROUGH
    assert kind("/home/someone", policy) == COVER
    assert kind(run / "steps", policy) == THROUGH


def test_git_top_and_script_folder_and_named_folders_are_protected(tmp_path: Path) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "sub").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    (tmp_path / "data").mkdir()
    command = ["python", "../../code/train.py", f"--data={tmp_path}/data", "--steps", "3"]
    policy = default_policy(command, tmp_path / "repo" / "sub", {}, [])
    for name in ("repo/other", "code/ckpt", "data/x"):
        assert kind(tmp_path / name, policy) == COVER, name


def test_output_folder_that_is_still_to_be_made_is_not_left_behind(tmp_path: Path) -> None:
    """A script that finds its output folder resumes from it: a trial must not leave one in /tmp."""
    policy = default_policy(["python", "t.py", "--out", "/tmp/not-there-yet/run1"], tmp_path, {}, [])
    assert kind("/tmp/not-there-yet/run1", policy) == COVER


@pytest.mark.parametrize(
    "word", ["/dev/null", "/dev/shm", "/proc/self/status", "https://a/b", "s3://x/y", "-x"]
)
def test_kernel_folders_and_addresses_are_never_covered(word: str, tmp_path: Path) -> None:
    policy = default_policy(["python", "t.py", word], tmp_path, {}, [])
    assert kind("/dev/null", policy) == THROUGH
    assert kind("/dev/shm/x", policy) == THROUGH
    assert kind("/proc/self/status", policy) == THROUGH


def test_caches_pass_through_also_inside_the_project(tmp_path: Path) -> None:
    for name in ("hf", ".cache"):
        (tmp_path / name).mkdir()
    policy = default_policy(["t"], tmp_path, {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}, [])
    assert kind(tmp_path / "hf" / "x", policy) == THROUGH
    assert kind(tmp_path / ".cache" / "x", policy) == THROUGH
    assert kind(tmp_path / "x", policy) == COVER


@pytest.mark.parametrize("value", ["/", "{home}"])
def test_a_careless_tmpdir_does_not_switch_the_guard_off(value: str, tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    (home / "data").mkdir(parents=True)
    project.mkdir()
    env = {"HOME": str(home), "TMPDIR": value.format(home=home)}
    policy = default_policy(["t"], project, env, [])
    assert str(home) not in policy.passthrough
    assert "/" not in policy.passthrough


def test_protected_wins_a_tie_with_passthrough_and_loses_it_to_writable(tmp_path: Path) -> None:
    policy = default_policy(["t"], tmp_path, {"TMPDIR": str(tmp_path)}, [])
    assert kind(tmp_path, policy) == COVER
    assert kind(tmp_path, default_policy(["t"], tmp_path, {}, [tmp_path])) == THROUGH


def test_links_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    policy = default_policy(["t"], tmp_path / "link", {}, [])
    assert str(tmp_path / "real") in policy.protect
