"""The stock webdataset library reads our shards, and gets exactly the input."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shard_tools.pack import pack_folder
from shard_tools.verify import verify

CLIPART = Path("/usr/share/openclipart/png")
RESERVED = {"cls", "json"}


def stock(folder: Path) -> Iterator[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        import webdataset

        dataset = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
        yield from dataset


def read_back(folder: Path) -> dict[str, bytes]:
    files = {}
    for count, sample in enumerate(stock(folder)):
        assert sample["__key__"] == f"{count:09d}"
        document = json.loads(sample["json"])
        assert int(sample["cls"]) == document["label_index"]
        (ext,) = {name for name in sample if not name.startswith("__")} - RESERVED
        assert document["parts"] == {ext: document["path"]}
        assert document["path"] not in files
        files[document["path"]] = sample[ext]
    return files


def input_of(root: Path) -> dict[str, bytes]:
    found = {}
    for folder, _, names in os.walk(root, followlinks=True):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = file.read()
    return found


def test_p2_p3_p4_p12_p19_stock_webdataset_reads_exactly_the_input(tmp_path: Path) -> None:
    names = [
        b"cat/a.JPG", b"cat/a.jpg", b"cat/img.v1.jpg", b"cat/img.v2.jpg", b"cat/001.jpg", b"dog/001.jpg",
        b"Music/Track 2.0 (Clean).mp3", b"dog/.hidden", b"dog/noext", b"__x__/y.txt", b"dog/x.json",
        b"dog/x.cls", b"dog/\xff\xfe.dat", b"dog/new\nline.txt", "dog/😀.png".encode(), b"root.txt",
        b"dog/" + b"n" * 200 + b".txt",
    ]  # fmt: skip
    root = tmp_path / "src"
    for number, name in enumerate(names):
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(name * number)  # the first one is empty
    pack_folder(root, tmp_path / "out", shard_size=20_000)
    assert len(list((tmp_path / "out").glob("*.tar"))) > 1
    files = read_back(tmp_path / "out")
    assert len(files) == len(names)
    assert files == input_of(root)


@pytest.mark.skipif(not CLIPART.is_dir(), reason=f"{CLIPART} is not installed (Debian's openclipart-png)")
def test_a_real_collection_comes_back_byte_for_byte(tmp_path: Path) -> None:
    original = input_of(CLIPART)
    for form in ("wds", "lmdb"):
        result = pack_folder(CLIPART, tmp_path / form, form=form)
        assert result.manifest.samples == len(original)
        assert len(result.found.links) > 1000
        assert verify(tmp_path / form, CLIPART).identical
    assert read_back(tmp_path / "wds") == original
