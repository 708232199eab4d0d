from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import lmdb
import pytest

from shard_tools import lmdb_store, tar_store
from shard_tools.errors import BadAnswer
from shard_tools.lmdb_store.value import part_head, payload_span, split_value
from shard_tools.manifest import TEMPORARY, ShardIndex
from shard_tools.plan import Plan, make_plan
from shard_tools.scan import walk
from shard_tools.tar_store.header import file_header, header, parse_header, pax_size


def plan_of(root: Path, form: str, size: int = 10**9) -> Plan:
    return make_plan(root, walk(root).files, form, size, None)


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_contract_what_is_written_is_read(
    form: str, tree: Path, tmp_path: Path, contents: object, names: list[bytes]
) -> None:
    store = {"wds": tar_store, "lmdb": lmdb_store}[form]
    plan = plan_of(tree, form)
    info = store.write_shard(plan.shard(0), tmp_path)
    path = tmp_path / (info.name + TEMPORARY)
    assert path.stat().st_size == info.bytes
    if form == "wds":
        assert plan.shard_bytes[0] == info.bytes
    found = list(store.read_shard(path))
    index = ShardIndex(tmp_path / (info.index + TEMPORARY))
    assert len(found) == len(index) == info.samples == len(names)
    original = contents(tree)  # type: ignore[operator]
    for stored, row in zip(found, index, strict=True):
        ext, data = next(iter(stored.parts.items()))
        assert list(stored.parts) == [ext, "cls", "json"]
        assert data == original[row.path]
        assert row.offset == stored.offset
    assert {row.path for row in index} == set(original)
    index.close()


def test_p8_the_tar_is_plain_ustar_without_extras(tree: Path, tmp_path: Path) -> None:
    info = tar_store.write_shard(plan_of(tree, "wds").shard(0), tmp_path)
    path = tmp_path / (info.name + TEMPORARY)
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert not any(member.pax_headers for member in members)
        assert {(member.mtime, member.uid, member.gid, member.mode) for member in members} == {
            (0, 0, 0, 0o644)
        }
    listed = subprocess.run(["tar", "tf", path], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == [member.name for member in members]
    assert listed.stderr == ""


def test_a_sample_larger_than_the_buffer(tmp_path: Path) -> None:
    root = tmp_path / "src"
    root.mkdir()
    large = os.urandom(3 * 2**20 + 7)
    (root / "large.bin").write_bytes(large)
    (root / "small.bin").write_bytes(b"x")
    for store, form in ((tar_store, "wds"), (lmdb_store, "lmdb")):
        info = store.write_shard(plan_of(root, form).shard(0), tmp_path)
        found = list(store.read_shard(tmp_path / (info.name + TEMPORARY)))
        assert [sample.parts["bin"] for sample in found] == [large, b"x"]


def test_sizes_over_8_gib_take_a_pax_record() -> None:
    size = 8**11 + 5
    head = file_header(b"000000001.bin", size)
    with tarfile.open(fileobj=io.BytesIO(head + bytes(1024)), mode="r:") as archive:
        archive._loaded = True  # type: ignore[attr-defined]  # the data itself is not there
        assert archive.firstmember is not None
        assert archive.firstmember.size == size
        assert archive.firstmember.name == "000000001.bin"
    assert pax_size(head[512:1024]) == size
    with pytest.raises(ValueError, match="no size"):
        pax_size(b"11 path=ab\n")


def test_a_header_says_when_it_is_damaged() -> None:
    block = bytearray(header(b"000000001.jpg", 77))
    member = parse_header(bytes(block))
    assert member is not None
    assert (member.name, member.size, member.kind) == (b"000000001.jpg", 77, b"0")
    assert parse_header(bytes(512)) is None
    block[3] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        parse_header(bytes(block))


@pytest.mark.parametrize("cut", [0, 100, 512, 1500, -512, -1])
def test_a_truncated_tar_is_damage(tree: Path, tmp_path: Path, cut: int) -> None:
    info = tar_store.write_shard(plan_of(tree, "wds").shard(0), tmp_path)
    path = tmp_path / (info.name + TEMPORARY)
    os.truncate(path, cut if cut >= 0 else info.bytes + cut)
    with pytest.raises(BadAnswer):
        list(tar_store.read_shard(path))


def test_p15_a_full_map_grows_and_loses_nothing(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard_tools.lmdb_store.writer.TRANSACTION_BYTES", 50_000)
    shard = plan_of(many, "lmdb").shard(0)
    info = lmdb_store.write_shard(shard, tmp_path, map_bytes=2**16)
    found = list(lmdb_store.read_shard(tmp_path / (info.name + TEMPORARY)))
    assert [sample.number for sample in found] == list(range(400))
    assert {sample.parts["bin"] for sample in found} == {path.read_bytes() for path in many.rglob("*.bin")}


def test_p15_the_map_is_large_enough_from_the_plan(tree: Path, many: Path, tmp_path: Path) -> None:
    """The planned map is never grown: its size is the one asked for first."""
    for root in (tree, many):
        shard = plan_of(root, "lmdb").shard(0)
        info = lmdb_store.write_shard(shard, tmp_path)
        assert info.bytes < shard.planned_bytes * 1.25 + 2**20


def test_p16_a_put_that_stores_nothing_is_an_error(many: Path) -> None:
    from shard_tools.lmdb_store import writer

    class Deaf:
        def put(self, *_: object, **__: object) -> bool:
            return False

    shard = plan_of(many, "lmdb").shard(0)
    from shard_tools.scan import SourceReader

    with SourceReader(many) as source, pytest.raises(BadAnswer, match="refused key 0"):
        writer._transaction(Deaf(), shard, 0, source, bytearray(2**16))


def test_lmdb_shards_have_the_format_that_older_readers_open(many: Path, tmp_path: Path) -> None:
    info = lmdb_store.write_shard(plan_of(many, "lmdb").shard(0), tmp_path)
    path = tmp_path / (info.name + TEMPORARY)
    # Meta page: 16 bytes of page header, the magic, then the data version (1 for LMDB 0.9).
    assert path.read_bytes()[16:24] == (0xBEEFC0DE).to_bytes(4, "little") + (1).to_bytes(4, "little")
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        assert env.stat()["entries"] == 400
        assert txn.get((7).to_bytes(8, "big")) is not None
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("shard")) == [
        "shard-000000.index.tmp",
        "shard-000000.lmdb.tmp",
    ]


def test_values_are_length_prefixed_parts() -> None:
    value = part_head(b"jpg", 3) + b"abc" + part_head(b"cls", 0)
    assert split_value(value) == {"jpg": b"abc", "cls": b""}
    start, end = payload_span(value)
    assert value[start:end] == b"abc"
    for broken in (value[:-1], value[:9], value + value):
        with pytest.raises(BadAnswer):
            split_value(broken)


def test_what_is_no_lmdb_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "x.lmdb").write_bytes(b"nothing" * 2000)
    with pytest.raises(BadAnswer):
        list(lmdb_store.read_shard(tmp_path / "x.lmdb"))
