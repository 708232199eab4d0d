from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

NAMES: list[bytes] = [
    b"cat/a.JPG",
    b"cat/a.jpg",
    b"cat/img.v1.jpg",
    b"cat/img.v2.jpg",
    b"cat/.hidden",
    b"cat/noext",
    b"cat/Track 2.0 (Clean).mp3",
    b"cat/001.jpg",
    b"dog/001.jpg",
    b"dog/deep/er/001.jpg",
    b"dog/x.json",
    b"dog/x.cls",
    b"dog/empty.bin",
    b"dog/new\nline.txt",
    b"dog/quo\"te's.txt",
    "dog/emoji 😀.png".encode(),
    "dog/ümläut.ÄÖ".encode(),
    b"dog/\xff\xfe latin \xe9.dat",
    b"__x__/y.txt",
    b".git/config",
    b"root.txt",
    b"cat/archive.tar.gz",
    b"cat/" + b"long" * 60 + b".txt",
    b"cat/block.bin",
]


def content(name: bytes, number: int) -> bytes:
    if name.endswith(b"empty.bin"):
        return b""
    size = 512 if name.endswith(b"block.bin") else 37 * number + 5
    return (name + bytes(range(256)) * (size // 200 + 1))[:size]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with every kind of file name that readers trip over."""
    root = tmp_path / "src"
    for number, name in enumerate(NAMES):
        path = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name, number))
    return root


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """400 files of 3 kB in ten classes: a few shards of 64 kB."""
    root = tmp_path / "many"
    for number in range(400):
        path = root / f"class{number % 10}" / f"{number:04d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(4, "big") * (700 + number))
    return root


def files_of(root: Path) -> dict[str, bytes]:
    """Relative path -> bytes of everything in a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    return files_of


@pytest.fixture
def names() -> list[bytes]:
    return NAMES
