"""Photographs made on the spot, and resized copies."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feedtune.workloads.demo_data import CLASSES, make_photos, resize_photos
from shard_tools.errors import BadInput


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "photos"
    make_photos(folder, 40, seed=3)
    return folder


def test_photos_have_the_entropy_of_photographs(photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))
    assert len(files) == 40
    assert {path.parent.name for path in files} == set(CLASSES)
    sizes = [path.stat().st_size for path in files]
    assert 30_000 < np.mean(sizes) < 80_000
    assert min(sizes) > 15_000
    with Image.open(files[0]) as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (500, 375), "RGB")


def test_photos_all_differ_and_repeat_with_the_seed(photos: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    make_photos(tmp_path / "again", 40, seed=3, workers=1, progress=seen.append)
    assert digests(tmp_path / "again") == digests(photos)
    assert sum(seen) == 40
    assert len(set(digests(photos).values())) == 40
    make_photos(tmp_path / "other", 2, seed=4)
    assert not set(digests(tmp_path / "other").values()) & set(digests(photos).values())


def test_a_folder_in_use_is_left_alone(photos: Path) -> None:
    before = digests(photos)
    for make in (lambda: make_photos(photos, 1), lambda: resize_photos(photos, photos)):
        with pytest.raises(BadInput, match="not empty"):
            make()
    assert digests(photos) == before


@pytest.mark.parametrize(("count", "size"), [(0, (500, 375)), (1, (8, 375)), (1, (500, 2000))])
def test_sizes_out_of_range_are_refused(tmp_path: Path, count: int, size: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="cannot make"):
        make_photos(tmp_path / "x", count, size=size)
    assert list(tmp_path.iterdir()) == []


def test_resized_copies_keep_paths_and_shape(photos: Path, tmp_path: Path) -> None:
    resize_photos(photos, tmp_path / "small", 120)
    assert digests(tmp_path / "small").keys() == digests(photos).keys()
    for path in (tmp_path / "small").rglob("*.jpg"):
        with Image.open(path) as image:
            assert image.size == (160, 120)


def test_other_formats_become_jpegs_and_small_ones_keep_their_size(tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    Image.new("RGBA", (50, 20), (200, 10, 10, 128)).save(tmp_path / "in/deep/a.png")
    Image.new("RGB", (300, 900), (1, 2, 3)).save(tmp_path / "in/deep/a.jpg")
    (tmp_path / "in/notes.txt").write_text("not an image")
    resize_photos(tmp_path / "in", tmp_path / "out", 100)
    assert sorted(digests(tmp_path / "out")) == ["deep/a.jpg", "deep/a.png.jpg"]
    sizes = {}
    for path in (tmp_path / "out/deep").iterdir():
        with Image.open(path) as image:
            sizes[path.name] = (image.format, image.size)
    assert sizes == {"a.jpg": ("JPEG", (100, 300)), "a.png.jpg": ("JPEG", (50, 20))}


def test_a_damaged_image_ends_the_resize_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/bad.jpg").write_bytes(b"no jpeg")
    with pytest.raises(BadInput, match=r"bad\.jpg") as caught:
        resize_photos(tmp_path / "in", tmp_path / "out")
    assert "remove" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_no_images_to_resize(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no images below"):
        resize_photos(tmp_path, tmp_path / "out")
