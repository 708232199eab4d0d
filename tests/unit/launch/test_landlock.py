from __future__ import annotations

from pathlib import Path

from feedtune.launch.landlock import is_writable, writable_paths


def test_a_passthrough_folder_with_a_protected_one_inside_is_given_by_its_entries(tmp_path: Path) -> None:
    for name in ("a", "b/project", "b/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("b/project")
    policy = {"passthrough": [str(tmp_path)], "protect": [str(tmp_path / "b/project")], "writable": []}
    found = writable_paths(policy)
    assert found == [str(tmp_path / name) for name in ("a", "b/other", "file")]
    assert not is_writable(str(tmp_path), found, policy)
    assert is_writable(str(tmp_path / "a" / "deep"), found, policy)
    assert not is_writable(str(tmp_path / "b/project/x"), found, policy)


def test_a_run_folder_inside_the_project_is_writable(tmp_path: Path) -> None:
    (tmp_path / "project" / "run").mkdir(parents=True)
    policy = {
        "passthrough": [], "protect": [str(tmp_path / "project")], "writable": [str(tmp_path / "project/run")]
    }  # fmt: skip
    assert writable_paths(policy) == [str(tmp_path / "project/run")]


def test_a_protected_folder_that_is_itself_passed_through_stays_out(tmp_path: Path) -> None:
    policy = {"passthrough": [str(tmp_path)], "protect": [str(tmp_path)], "writable": []}
    assert writable_paths(policy) == []
