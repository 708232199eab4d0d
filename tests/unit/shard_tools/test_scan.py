from __future__ import annotations

import os
from pathlib import Path

import pytest

from shard_tools.errors import BadInput
from shard_tools.records import Entry, label_of
from shard_tools.scan import SourceReader, report_on, walk


def test_p19_every_file_is_counted_and_odd_ones_are_named(tree: Path, names: list[bytes]) -> None:
    report = report_on(walk(tree))
    assert report.files == len(names)
    assert sum(report.extensions.values()) == len(names)
    assert sum(report.classes.values()) + report.unlabelled == len(names)
    assert report.classes["__x__"] == 1
    assert report.hidden == [".git/config", "cat/.hidden"]
    assert report.without_extension == [".git/config", "cat/.hidden", "cat/noext"]
    assert report.not_utf8 == [os.fsdecode(b"dog/\xff\xfe latin \xe9.dat")]
    assert len(report.long_names) == 1
    assert report.empty_files == 1
    assert {"cat/img.v1.jpg", "cat/img.v2.jpg", "cat/archive.tar.gz"} <= set(report.dotted)


def test_p4_case_folded_collisions_are_found_with_both_paths(tree: Path) -> None:
    assert report_on(walk(tree)).case_collisions == [["cat/a.JPG", "cat/a.jpg"]]


def test_links_are_followed_and_what_cannot_be_packed_is_listed(tmp_path: Path) -> None:
    root = tmp_path / "src"
    (root / "a").mkdir(parents=True)
    (root / "a" / "1.txt").write_text("one")
    (root / "a" / "link.txt").symlink_to("1.txt")
    (root / "a" / "broken").symlink_to("nowhere")
    (root / "a" / "circle").symlink_to("circle")
    (root / "a" / "up").symlink_to("..")
    (root / "b").symlink_to("a")
    (root / "empty").mkdir()
    os.mkfifo(root / "a" / "pipe")
    found = walk(root)
    assert [entry.path for entry in found.files] == ["a/1.txt", "a/link.txt", "b/1.txt", "b/link.txt"]
    assert found.links == ["a/link.txt", "b/link.txt"]
    assert found.linked_folders == ["b"]
    assert found.link_cycles == ["a/up", "b/up"]
    assert found.broken_links == ["a/broken", "a/circle", "b/broken", "b/circle"]
    assert found.special == ["a/pipe", "b/pipe"]
    assert found.empty_folders == ["empty/"]


def test_a_missing_folder_and_a_file_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="there is no folder"):
        walk(tmp_path / "none")
    with pytest.raises(BadInput, match="is not a folder"):
        walk(tmp_path / "file")


@pytest.mark.parametrize("size", [2, 4, 9])
def test_a_file_that_changes_its_size_is_an_error(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with SourceReader(tmp_path) as source:
        room = memoryview(bytearray(16))
        source.read_into(Entry("f", 3, 0), room)
        assert bytes(room[:3]) == b"abc"
        assert b"".join(map(bytes, source.chunks(Entry("f", 3, 0), room[:2]))) == b"abc"
        with pytest.raises(BadInput, match="changed its size"):
            source.read_into(Entry("f", size, 0), room)
        with pytest.raises(BadInput, match="changed its size"):
            list(source.chunks(Entry("f", size, 0), room[:2]))
        with pytest.raises(BadInput, match="has gone"):
            source.read_into(Entry("g", size, 0), room)


def test_label_is_the_first_folder() -> None:
    assert label_of("cat/x/1.jpg") == "cat"
    assert label_of("1.jpg") is None
