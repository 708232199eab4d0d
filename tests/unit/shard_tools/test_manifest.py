from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shard_tools.errors import BadAnswer, BadInput
from shard_tools.manifest import ShardIndex, index_bytes, read_manifest, write_manifest
from shard_tools.records import Manifest, ShardInfo

INFO = ShardInfo("shard-000000.tar", "shard-000000.index", 0, 2, 4096, 30, "00" * 16, "11" * 16, 1, 0.0)
MANIFEST = Manifest("wds", 2, 30, 4096, 64_000_000, 0, ("cat", os.fsdecode(b"d\xff")), (INFO,))


def test_p11_the_manifest_is_whole_or_not_there(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert read_manifest(tmp_path) == MANIFEST


def test_the_manifest_holds_nothing_that_differs_between_runs(tmp_path: Path) -> None:
    document = json.loads(write_manifest(tmp_path, MANIFEST))
    assert set(document) == {
        "schema", "format", "samples", "payload_bytes", "bytes", "shard_size", "seed", "classes", "shards",
        "digest",
    }  # fmt: skip


def test_any_changed_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    data = write_manifest(tmp_path, MANIFEST)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        (tmp_path / "manifest.json").write_bytes(changed)
        with pytest.raises((BadAnswer, BadInput)):
            read_manifest(tmp_path)


def test_a_folder_without_a_manifest_and_a_newer_one_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no finished pack"):
        read_manifest(tmp_path)
    with pytest.raises(BadInput, match="there is no folder"):
        read_manifest(tmp_path / "none")
    (tmp_path / "manifest.json").write_text('{"schema": "shard_tools.manifest/2"}')
    with pytest.raises(BadInput, match="this version reads"):
        read_manifest(tmp_path)


def test_p18_the_index_keeps_any_name(tmp_path: Path) -> None:
    rows = [
        (512, 10, b"a" * 16, "cat/a b.jpg", 0),
        (2**40, 2**33, b"b" * 16, os.fsdecode(b"dog/\xff\n\xe9"), -1),
        (3, 0, b"c" * 16, "ümläut 😀", 2),
    ]
    path = tmp_path / "x.index"
    path.write_bytes(index_bytes(100, rows))
    index = ShardIndex(path)
    assert [tuple(row) for row in index] == rows
    assert index.first == 100
    assert index.location(1) == (2**40, 2**33, -1)
    index.close()


@pytest.mark.parametrize("damage", ["empty", "short", "long", "magic"])
def test_a_damaged_index_is_not_opened(tmp_path: Path, damage: str) -> None:
    data = index_bytes(0, [(512, 10, b"a" * 16, "a.jpg", 0)])
    changed = {"empty": b"", "short": data[:-1], "long": data + b"x", "magic": b"X" + data[1:]}[damage]
    (tmp_path / "x.index").write_bytes(changed)
    with pytest.raises(BadAnswer):
        ShardIndex(tmp_path / "x.index")
