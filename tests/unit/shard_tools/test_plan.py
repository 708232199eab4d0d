from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shard_tools.errors import BadInput
from shard_tools.plan import make_plan, member_ext, sample_json, shuffled, tar_bytes
from shard_tools.records import Entry


def entries(count: int, size: int = 1000) -> list[Entry]:
    return [Entry(f"class{number % 4}/{number:05d}.jpg", size, 0) for number in range(count)]


@pytest.mark.parametrize(
    ("path", "ext"),
    [
        ("a/b.JPG", "jpg"),
        ("Track 2.0 (Clean).mp3", "mp3"),
        ("img.v1.jpg", "jpg"),
        ("x.tar.gz", "gz"),
        ("noext", "bin"),
        (".hidden", "bin"),
        (".hidden.jpg", "jpg"),
        ("end.", "bin"),
        ("a.b/c", "bin"),
        ("x.ÄÖ", "bin"),
        ("x.a word", "bin"),
        ("x.json", "data.json"),
        ("x.cls", "data.cls"),
    ],
)
def test_p2_member_extensions_are_safe(path: str, ext: str) -> None:
    assert member_ext(path) == ext


def test_json_gives_back_any_path() -> None:
    path = os.fsdecode(b'dog/\xff "q" \n \xf0\x9f\x98\x80.dat')
    document = json.loads(sample_json(path, "dog", 3, "dat"))
    assert document == {"path": path, "label": "dog", "label_index": 3, "parts": {"dat": path}}
    assert json.loads(sample_json("x.dat", None, -1, "dat"))["label"] is None


def test_p10_the_shuffle_is_global_seeded_and_independent_of_the_scan_order() -> None:
    files = entries(400)
    order = shuffled(files, 7)
    assert order == shuffled(files[::-1], 7)
    assert order != shuffled(files, 8)
    assert sorted(order) == sorted(files)
    grown = [entry for entry in shuffled([*files, Entry("new/1.jpg", 1, 0)], 7) if entry.path != "new/1.jpg"]
    assert grown == order
    # Class-sorted input: each shard of the plan holds all four classes about evenly.
    plan = make_plan(Path("/x"), sorted(files), "wds", 200_000, 0)
    mixes = [plan.shard(number).label_mix() for number in range(len(plan))]
    assert len(mixes) > 4
    assert all(classes == 4 and entropy > 1.7 for classes, entropy in mixes)


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_p8_headers_and_padding_count_towards_the_shard_size(form: str) -> None:
    plan = make_plan(Path("/x"), entries(3000, size=3), form, 500_000, 0)
    assert max(plan.shard_bytes) <= 500_000
    assert min(plan.shard_bytes) > 0.9 * max(plan.shard_bytes)
    assert plan.cuts[0] == 0
    assert plan.cuts[-1] == 3000
    if form == "wds":
        assert len(plan) == -(-3000 * tar_bytes(3, 100) // (500_000 - 1024))


def test_p9_no_shard_is_empty_even_for_samples_larger_than_the_size() -> None:
    plan = make_plan(Path("/x"), entries(5, size=9999), "wds", 1000, 0)
    assert plan.cuts == [0, 1, 2, 3, 4, 5]


def test_the_fingerprint_tells_all_that_decides_the_bytes() -> None:
    files = entries(10)
    base = make_plan(Path("/x"), files, "wds", 10_000, 0).fingerprint()
    assert make_plan(Path("/y"), files[::-1], "wds", 10_000, 0).fingerprint() == base
    others = [
        make_plan(Path("/x"), files, "lmdb", 10_000, 0),
        make_plan(Path("/x"), files, "wds", 20_000, 0),
        make_plan(Path("/x"), files, "wds", 10_000, 1),
        make_plan(Path("/x"), files[1:], "wds", 10_000, 0),
        make_plan(Path("/x"), [files[0]._replace(mtime_ns=1), *files[1:]], "wds", 10_000, 0),
    ]
    assert base not in {plan.fingerprint() for plan in others}


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="no files"):
        make_plan(Path("/x"), [], "wds", 10_000, 0)
    with pytest.raises(BadInput, match="no shard format"):
        make_plan(Path("/x"), entries(1), "zip", 10_000, 0)
