"""Photographs made on the spot: JPEGs with the entropy of real ones, in a few seconds.

A picture is cut from banks of noise whose spectrum falls like that of natural scenes (amplitude about 1/f),
under a gradient of light, with objects that have hard edges, and a colour cast that tells its class. The
banks are computed once a process, since the Fourier transforms would cost more than everything else.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from feedtune.workloads import image_files
from shard_tools.errors import BadInput, Missing

CLASSES = (
    "beach", "city", "desert", "forest", "garden", "lake", "meadow", "mountain", "night", "street",
)  # fmt: skip

Item = TypeVar("Item")
Progress = Callable[[int], None]
Floats = npt.NDArray[np.float32]

_BANK_SIDE = 1024
_BANKS = 6


def make_photos(
    dir: Path,
    count: int = 2000,
    seed: int = 0,
    size: tuple[int, int] = (500, 375),
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``count`` JPEGs into ten class folders of ``dir``; equal arguments give equal bytes.

    Args:
        dir: the folder to make; it appears whole or not at all.
        count: pictures in total, dealt out to the classes in turn.
        seed: of everything random.
        size: width and height in pixels, at most 1024 each.
        workers: processes; by default the cores that this process may use.
        progress: called with the number of pictures done since the last call.

    Raises:
        BadInput: the folder exists and is not empty, or a size or count is out of range.
    """
    if count < 1 or not all(32 <= side <= _BANK_SIDE for side in size):
        raise BadInput(
            f"cannot make {count} pictures of {size[0]}x{size[1]}",
            f"take 1 or more, sides 32 to {_BANK_SIDE}",
        )
    with _whole_folder(dir) as temporary:
        for name in CLASSES[:count]:
            (temporary / name).mkdir()
        _run(partial(_make_one, temporary, seed, size), list(range(count)), workers, progress)


def resize_photos(
    src: Path,
    dst: Path,
    short_side: int = 256,
    *,
    quality: int = 90,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write every image below ``src`` as a JPEG of a shorter side of ``short_side`` pixels, at the same path.

    JPEGs keep their names, others get ``.jpg`` appended, so that no two meet. Images that are small already
    keep their size; transparency and EXIF data go.

    Raises:
        BadInput: ``src`` has no image, an image cannot be decoded, or ``dst`` exists and is not empty.
    """
    files = image_files(src)
    if not files:
        raise BadInput(f"no images below {src}", "give a folder of JPEG, PNG, WebP, BMP, PPM or TIFF files")
    with _whole_folder(dst) as temporary:
        for folder in sorted({file.parent.relative_to(src) for file in files}):
            (temporary / folder).mkdir(parents=True, exist_ok=True)
        names = [str(file.relative_to(src)) for file in files]
        _run(partial(_resize_one, src, temporary, short_side, quality), names, workers, progress)


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name at the end, or goes when something fails."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} exists and is not empty", "name a new folder, or remove this one first")
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise BadInput(
            f"cannot make {target}: {error.strerror}", "name a folder that can be written"
        ) from error
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _run(
    job: Callable[[Item], None], items: list[Item], workers: int | None, progress: Progress | None
) -> None:
    """Run the job on every item in a pool of processes; the first error ends all."""
    workers = workers or len(os.sched_getaffinity(0))
    # Spawned, because a fork of a process that runs threads (torch, a progress bar) can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(items)), mp_context=context) as pool:
        try:
            for _ in pool.map(job, items, chunksize=16):
                if progress is not None:
                    progress(1)
        except BrokenProcessPool:
            raise Missing(
                "the processes that make pictures ended early: killed for memory, or not able to start",
                "take fewer workers; a script that calls this needs a file and its `if __name__` guard",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _make_one(folder: Path, seed: int, size: tuple[int, int], index: int) -> None:
    label = index % len(CLASSES)
    rng = np.random.default_rng((seed, index))
    picture = _compose(rng, _banks(seed), label, size)
    path = folder / CLASSES[label] / f"{CLASSES[label]}-{index:05d}.jpg"
    picture.save(path, "JPEG", quality=int(rng.integers(84, 93)))


@cache
def _banks(seed: int) -> list[Floats]:
    """Square fields of zero mean and unit deviation, from smooth to rough, that tile without a seam."""
    rng = np.random.default_rng((seed, 2**32))
    across = np.fft.rfftfreq(_BANK_SIDE).astype(np.float32)
    down = np.fft.fftfreq(_BANK_SIDE).astype(np.float32)
    frequency = np.hypot(down[:, None], across[None, :])
    frequency[0, 0] = np.inf
    fields = []
    for slope in np.linspace(1.7, 1.0, _BANKS):
        phases = rng.uniform(0, 2 * np.pi, frequency.shape)
        field = np.fft.irfft2(frequency**-slope * np.exp(1j * phases), s=(_BANK_SIDE, _BANK_SIDE))
        fields.append((field / field.std()).astype(np.float32))
    return fields


def _cut(rng: np.random.Generator, bank: Floats, size: tuple[int, int]) -> Floats:
    """A window of the bank, mirrored at random."""
    width, height = size
    x, y = (int(rng.integers(0, _BANK_SIDE - side + 1)) for side in size)
    window = bank[y : y + height, x : x + width]
    return window[:: int(rng.choice((-1, 1))), :: int(rng.choice((-1, 1)))]


def _compose(rng: np.random.Generator, banks: list[Floats], label: int, size: tuple[int, int]) -> Image.Image:
    """One picture in YCbCr: brightness in full, colour at a quarter of the size as JPEG keeps it anyway."""
    width, height = size
    rough = banks[int(rng.integers(3, _BANKS))]
    light = _cut(rng, banks[int(rng.integers(0, 3))], size) * rng.uniform(20, 40)
    light += _cut(rng, rough, size) * rng.uniform(14, 26)
    light += np.linspace(rng.uniform(-40, 40), rng.uniform(-40, 40), height, dtype=np.float32)[:, None]
    light += _objects(rng, size)
    light += 60 + 12 * label
    small = (max(1, width // 4), max(1, height // 4))
    angle = 2 * np.pi * label / len(CLASSES)
    planes = [_plane(light, size)]
    for cast in (np.cos(angle), np.sin(angle)):
        colour = _cut(rng, banks[int(rng.integers(0, _BANKS))], small) * rng.uniform(8, 20)
        planes.append(_plane(colour + (128 + 25 * cast), size))
    return Image.merge("YCbCr", planes)


def _plane(values: Floats, size: tuple[int, int]) -> Image.Image:
    plane = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return plane if plane.size == size else plane.resize(size, Image.Resampling.BILINEAR)


def _objects(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Brightness steps of some ellipses and polygons; hard edges cost a JPEG bytes, as in a photograph."""
    layer = Image.new("L", size, 128)
    draw = ImageDraw.Draw(layer)
    for _ in range(int(rng.integers(3, 12))):
        centre = rng.uniform(0, 1, 2) * size
        reach = rng.uniform(0.03, 0.3) * min(size)
        shade = int(128 + rng.uniform(-70, 70))
        if rng.random() < 0.4:
            draw.ellipse([*(centre - reach), *(centre + reach * rng.uniform(0.4, 1, 2))], fill=shade)
        else:
            turns = np.sort(rng.uniform(0, 2 * np.pi, int(rng.integers(3, 7))))
            corners = centre + reach * np.stack([np.cos(turns), np.sin(turns)], axis=1)
            draw.polygon([tuple(corner) for corner in corners.tolist()], fill=shade)
    return np.asarray(layer, dtype=np.float32) - 128


def _resize_one(src: Path, folder: Path, short_side: int, quality: int, name: str) -> None:
    target = folder / (name if name.lower().endswith((".jpg", ".jpeg")) else f"{name}.jpg")
    try:
        with Image.open(src / name) as image:
            # JPEGs are decoded at a fraction of their size where that still leaves more than is asked for.
            image.draft("RGB", (short_side * 2, short_side * 2))
            factor = min(1.0, short_side / min(image.size))
            size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
            small = image.convert("RGB").resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"cannot decode {src / name}: {error}", "remove or replace this file") from error
    small.save(target, "JPEG", quality=quality)
