"""``feedtune demo``: small files to a measured better training, with the real parts everywhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedtune.rundir import default_runs_folder
from feedtune.settings import LoaderSettings
from feedtune.trials.options import TuneOptions
from feedtune.trials.tune import tune
from feedtune.trials.workload import vision_command
from shard_tools.errors import BadAnswer, BadInput
from shard_tools.units import format_bytes, format_count, format_seconds

_PHOTOS = 2000
_SHORT_SIDE = 256
_TRAINING: dict[str, Any] = {"model": "tiny", "batch_size": 16, "image_size": 128}
_BUDGET_S = 75.0
_TRIALS = 8


def demo(data: Path | None, nproc: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Make or take a small-file folder, pack it, verify it, tune a training on it; then the same resized.

    The photographs and shards are removed at the end; the two run folders stay.

    Args:
        data: folder of images; ``None`` makes 2,000 photographs.
        nproc: ranks of the training.
        tell: receives lines for a person.

    Returns:
        The ``feedtune.demo/1`` document.
    """
    if data is not None and not data.is_dir():
        raise BadInput(f"{data}: no such folder", "name a folder of image files, or leave --data out")
    home = _new_folder()
    bulk = home / "data"
    bulk.mkdir()
    try:
        return _steps(data, nproc, home, bulk, tell)
    finally:
        shutil.rmtree(bulk, ignore_errors=True)


def _new_folder() -> Path:
    base = default_runs_folder() / time.strftime("%Y%m%d-%H%M%S-demo")
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}.{number}")
    path.mkdir(mode=0o700, parents=True)
    return path


def _steps(
    data: Path | None, nproc: int, home: Path, bulk: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    from feedtune.workloads.demo_data import make_photos, resize_photos

    begun = time.monotonic()
    document: dict[str, Any] = {"schema": "feedtune.demo/1"}
    if data is None:
        data = bulk / "photos"
        start = time.monotonic()
        make_photos(data, _PHOTOS)
        tell(f"made {_PHOTOS:,} photographs in {format_seconds(time.monotonic() - start)}")
    document["pack"] = _pack(data, bulk / "shards", tell)
    tell(f"tuning a training of {nproc} ranks on the shards:")
    command = vision_command(bulk / "shards", nproc=nproc, **_TRAINING)
    options = TuneOptions(command, out=home / "tune", budget_s=_BUDGET_S, trials=_TRIALS)
    document["tune"] = tuned = tune(options, tell)
    tell(f"the same images resized to {_SHORT_SIDE} pixels, the same settings:")
    resize_photos(data, bulk / "small", _SHORT_SIDE)
    document["resized_pack"] = _pack(bulk / "small", bulk / "small-shards", tell)
    best = LoaderSettings.from_dict(tuned["best"]["settings"])
    command = vision_command(bulk / "small-shards", nproc=nproc, settings=best, **_TRAINING)
    options = TuneOptions(
        command, out=home / "tune-resized", budget_s=_BUDGET_S, trials=1, pairs=2, fixed=_fixed(best)
    )
    document["resized"] = resized = tune(options, tell)
    document["resized_ratio"] = resized["baseline"]["rate"] / tuned["best"]["rate"]
    document["seconds"] = round(time.monotonic() - begun, 3)
    return document


def _fixed(settings: LoaderSettings) -> dict[str, int | bool]:
    values = settings.as_dict()
    return {name: value for name, value in values.items() if value is not None}


def _pack(source: Path, destination: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Pack and verify against the source; the figures of both."""
    from shard_tools.pack import pack_folder
    from shard_tools.verify import verify

    start = time.monotonic()
    packed = pack_folder(source, destination).manifest
    packed_s = time.monotonic() - start
    start = time.monotonic()
    checked = verify(destination, source)
    verified_s = time.monotonic() - start
    if not checked.identical:
        raise BadAnswer(f"the shards of {source} differ from it: {checked.problems[0]}")
    tell(
        f"packed {format_count(packed.samples)} files, {format_bytes(packed.payload_bytes)}, into "
        f"{len(packed.shards)} shards in {format_seconds(packed_s)}; verified identical in "
        f"{format_seconds(verified_s)}"
    )
    return {
        "samples": packed.samples,
        "payload_bytes": packed.payload_bytes,
        "shards": len(packed.shards),
        "pack_seconds": round(packed_s, 3),
        "verify_seconds": round(verified_s, 3),
        "identical": checked.identical,
    }
