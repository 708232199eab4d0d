from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
import xxhash

from shard_tools.convert import unpack
from shard_tools.errors import BadAnswer, BadInput
from shard_tools.manifest import ShardIndex, read_manifest, write_manifest
from shard_tools.pack import pack_folder
from shard_tools.verify import verify


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def accept(folder: Path, name: str) -> None:
    """Let the manifest agree with a changed shard, so that only the checks within it can find the change."""
    manifest = read_manifest(folder)
    data = (folder / name).read_bytes()
    shards = tuple(
        replace(info, bytes=len(data), digest=xxhash.xxh3_128_hexdigest(data)) if info.name == name else info
        for info in manifest.shards
    )
    write_manifest(folder, replace(manifest, shards=shards))


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_one_flipped_byte_in_any_file_is_found(form: str, tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pack_folder(tree, folder, form=form)
    assert verify(folder).whole
    for name in sorted(os.listdir(folder)):
        size = (folder / name).stat().st_size
        for position in [*range(0, size, size // 40 + 1), size - 1]:
            flip(folder / name, position)
            assert not verify(folder).whole, (name, position)
            flip(folder / name, position)
    assert verify(folder, tree).identical


def test_the_damaged_sample_is_named(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pack_folder(tree, folder)
    index = ShardIndex(folder / "shard-000000.index")
    row = next(row for row in index if row.path == "dog/001.jpg")
    index.close()
    flip(folder / "shard-000000.tar", row.offset + 3)
    problems = verify(folder, tree).problems
    assert [(problem.what, problem.path) for problem in problems] == [
        ("is damaged: its digest is wrong", None),
        ("is damaged: its payload's digest is wrong", "dog/001.jpg"),
    ]


def test_the_damaged_sample_is_named_in_lmdb_too(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pack_folder(tree, folder, form="lmdb")
    path = folder / "shard-000000.lmdb"
    flip(path, path.read_bytes().index(b"dog/deep/er/001.jpg") + 2)
    problems = verify(folder, tree).problems
    assert [(problem.what, problem.path) for problem in problems] == [
        ("is damaged: its digest is wrong", None),
        ("is damaged: its payload's digest is wrong", "dog/deep/er/001.jpg"),
    ]


def test_p5_a_key_that_opens_again_is_found(many: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pack_folder(many, folder)
    path = folder / "shard-000000.tar"
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    members.append(members.pop(2))  # the first sample's .json goes to the end
    out = io.BytesIO()
    for member, data in members:
        out.write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
    path.write_bytes(out.getvalue() + bytes(1024))
    accept(folder, path.name)
    found = [problem.what for problem in verify(folder).problems if problem.sample == 0]
    assert "opens again: its parts do not stand together" in found


def test_a_changed_label_and_a_lost_key_are_found_in_lmdb(many: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pack_folder(many, folder, form="lmdb")
    path = folder / "shard-000000.lmdb"
    with lmdb.open(str(path), subdir=False, lock=False, map_size=2**24) as env, env.begin(write=True) as txn:
        value = txn.get((7).to_bytes(8, "big"))
        at = value.index(b"\x03cls") + 4 + 8
        txn.put((7).to_bytes(8, "big"), value[:at] + b"%d" % (9 - int(value[at : at + 1])) + value[at + 1 :])
        assert txn.delete((9).to_bytes(8, "big"))
    accept(folder, path.name)
    found = {(problem.sample, problem.what) for problem in verify(folder).problems}
    assert (7, "has another label than its path") in found
    assert (None, "holds 399 samples, not 400") in found
    assert (10, "stands where sample 9 should") in found


def test_missing_and_foreign_files_are_found(many: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pack_folder(many, folder, shard_size=200_000)
    (folder / "shard-000001.tar").unlink()
    (folder / "shard-000002.index").unlink()
    (folder / "shard-000099.tar").write_bytes(b"")
    os.truncate(folder / "shard-000003.tar", 5000)
    found = {(problem.file, problem.what) for problem in verify(folder).problems}
    assert ("shard-000001.tar", "is missing") in found
    assert ("shard-000002.index", "is missing") in found
    assert ("shard-000099.tar", "does not belong to this pack") in found
    assert any(file == "shard-000003.tar" and "bytes" in what for file, what in found)


def test_every_difference_to_the_source_is_named(many: Path, tmp_path: Path) -> None:
    pack_folder(many, tmp_path / "out")
    (many / "class0" / "0000.bin").write_bytes((0).to_bytes(4, "big") * 699 + b"diff")
    (many / "class1" / "0001.bin").unlink()
    (many / "class2" / "new.bin").write_bytes(b"new")
    result = verify(tmp_path / "out", many)
    assert not result.identical
    assert {(problem.path, problem.what) for problem in result.problems} == {
        ("class0/0000.bin", "differs from the source"),
        ("class1/0001.bin", "is not in the source, or twice in the pack"),
        ("class2/new.bin", "is missing from the pack"),
    }


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_p2_p19_unpack_gives_back_every_path_and_byte(
    form: str, tree: Path, tmp_path: Path, contents: object
) -> None:
    pack_folder(tree, tmp_path / "out", form=form)
    unpack(tmp_path / "out", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tree)  # type: ignore[operator]
    with pytest.raises(BadInput, match="not an empty folder"):
        unpack(tmp_path / "out", tmp_path / "again")


def test_unpack_never_leaves_its_folder(tmp_path: Path) -> None:
    from shard_tools.convert import _write

    for path in ("../x", "/etc/x", "a/../../x", "a//x", "./x"):
        with pytest.raises(BadAnswer, match="leads out of"):
            _write(tmp_path / "out", path, b"", set())
    assert os.listdir(tmp_path) == []


def test_unpack_refuses_damage(many: Path, tmp_path: Path) -> None:
    pack_folder(many, tmp_path / "out")
    flip(tmp_path / "out" / "shard-000000.tar", 600)
    with pytest.raises(BadAnswer, match=r"sample 0 of .* is damaged"):
        unpack(tmp_path / "out", tmp_path / "again")
