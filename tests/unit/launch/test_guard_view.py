"""The copy-on-write view on its own, without anything wrapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from feedtune.inside.guard_change import Calls
from feedtune.inside.guard_raw import raw
from feedtune.inside.guard_view import View


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "sub" / "b").write_text("b")
    return folder


def view_at(tmp_path: Path) -> View:
    return View(str(tmp_path / "upper"), [str(tmp_path / "run")], [])


def test_nothing_redirected_costs_no_look_at_the_disk(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_at(tmp_path)
    monkeypatch.setattr(view, "canonical", None)
    path = str(project / "a")
    assert view.find(path) is path
    assert view.find(project) is project


def test_another_process_sees_a_change_through_the_shared_generation(project: Path, tmp_path: Path) -> None:
    first, second = view_at(tmp_path), view_at(tmp_path)
    assert second.find(str(project / "a")) == str(project / "a")
    Path(first.for_writing(str(project / "a"), os.O_WRONLY | os.O_TRUNC)).write_text("new")
    assert Path(second.find(str(project / "a"))).read_text() == "new"
    assert (project / "a").read_text() == "a"
    Calls(first).unlink(str(project / "sub" / "b"))
    assert not Path(second.find(str(project / "sub" / "b"))).exists()
    assert second.names(str(project / "sub")) == []


def test_a_folder_once_found_clean_is_looked_at_again_after_a_change(project: Path, tmp_path: Path) -> None:
    view = view_at(tmp_path)
    Calls(view).mkdir(str(tmp_path / "elsewhere"))
    for _ in range(2):
        assert view.find(str(project / "sub" / "b")) == str(project / "sub" / "b")
    Path(view.for_writing(str(project / "sub" / "b"), os.O_WRONLY)).write_text("new")
    assert Path(view.find(str(project / "sub" / "b"))).read_text() == "new"


def test_a_link_in_a_clean_folder_to_a_changed_file_is_followed(project: Path, tmp_path: Path) -> None:
    (project / "sub" / "link").symlink_to("../a")
    view = view_at(tmp_path)
    Path(view.for_writing(str(project / "a"), os.O_WRONLY | os.O_TRUNC)).write_text("new")
    view.find(str(project / "sub" / "b"))
    assert Path(view.find(str(project / "sub" / "link"))).read_text() == "new"


def test_deeper_rule_decides(tmp_path: Path) -> None:
    (tmp_path / "run" / "inner" / "log").mkdir(parents=True)
    paths = [str(tmp_path / "run"), str(tmp_path / "run/inner/log")]
    view = View(str(tmp_path / "upper"), paths, [str(tmp_path / "run/inner")])
    assert view.is_through(str(tmp_path / "run/x"))
    assert not view.is_through(str(tmp_path / "run/inner/x"))
    assert view.is_through(str(tmp_path / "run/inner/log/x"))


def test_a_path_into_the_mirror_means_the_path_it_stands_for(project: Path, tmp_path: Path) -> None:
    view = view_at(tmp_path)
    place = view.for_writing(str(project / "fresh"), os.O_WRONLY | os.O_CREAT)
    assert view.virtual(place) == str(project / "fresh")
    assert view.absolute(place) == str(project / "fresh")


def test_a_loop_of_links_is_an_error(project: Path, tmp_path: Path) -> None:
    (project / "x").symlink_to("y")
    (project / "y").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"):
        view_at(tmp_path).for_writing(str(project / "x"), os.O_WRONLY)


def test_a_file_that_another_process_has_copied_and_written_meanwhile_stays(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = view_at(tmp_path), view_at(tmp_path)
    send = raw.sendfile

    def other_comes_first(*args: object) -> int:
        monkeypatch.setattr(raw, "sendfile", send)
        monkeypatch.setattr(raw, "getpid", lambda: os.getpid() + 1)
        with open(second.for_writing(str(project / "a"), os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(" other")
        monkeypatch.setattr(raw, "getpid", os.getpid)
        return send(*args)

    monkeypatch.setattr(raw, "sendfile", other_comes_first)
    with open(first.for_writing(str(project / "a"), os.O_WRONLY | os.O_APPEND), "a") as file:
        file.write(" own")
    place = Path(first.find(str(project / "a")))
    assert place.read_text() == "a other own"
    assert [path.name for path in place.parent.iterdir()] == ["a"]
    assert (project / "a").read_text() == "a"
