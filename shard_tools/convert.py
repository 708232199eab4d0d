"""Turn a pack back into files: the original relative paths with the original bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from shard_tools.errors import BadAnswer, BadInput
from shard_tools.manifest import ShardIndex, read_manifest, target_error, write_file
from shard_tools.records import Manifest, ShardInfo


def unpack(folder: Path, out: Path, on_samples: Callable[[int], None] | None = None) -> Manifest:
    """Write every sample's payload to its original path under ``out``, checking its digest.

    Args:
        folder: the pack.
        out: folder to make; must not exist, or be empty.
        on_samples: called with the number of samples of each shard that is done.

    Raises:
        BadInput: there is no pack, or ``out`` holds something.
        BadAnswer: the pack is damaged, or a path in it leads out of ``out``.
    """
    manifest = read_manifest(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} is not an empty folder", "choose a folder that does not exist yet")
    for info in manifest.shards:
        _unpack_shard(folder, manifest, info, out)
        if on_samples:
            on_samples(info.samples)
    return manifest


def _unpack_shard(folder: Path, manifest: Manifest, info: ShardInfo, out: Path) -> None:
    if manifest.format == "wds":
        from shard_tools.tar_store import read_shard
    else:
        from shard_tools.lmdb_store import read_shard
    index = ShardIndex(folder / info.index)
    made: set[str] = set()
    try:
        for stored in read_shard(folder / info.name):
            row = index[stored.number - info.first]
            data = next(iter(stored.parts.values()))
            if xxhash.xxh3_128_digest(data) != row.digest:
                raise BadAnswer(
                    f"sample {stored.number} of {info.name} is damaged", "run `shard-tools verify`"
                )
            _write(out, row.path, data, made)
    finally:
        index.close()


def _write(out: Path, path: str, data: bytes, made: set[str]) -> None:
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise BadAnswer(f"the path {path!r} leads out of {out}", "the pack was not made by this tool")
    parent = out.joinpath(*parts[:-1])
    if str(parent) not in made:
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise target_error(parent, error) from error
        made.add(str(parent))
    write_file(Path(os.path.join(out, path)), data)
