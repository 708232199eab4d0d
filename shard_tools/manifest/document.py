"""``manifest.json``: written last, with a digest over itself, and the same bytes in every rerun."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from shard_tools.errors import BadAnswer, BadInput
from shard_tools.manifest.durable import TEMPORARY, settle, write_file
from shard_tools.records import Manifest, ShardInfo

MANIFEST_NAME = "manifest.json"
SCHEMA = "shard_tools.manifest/1"


def render(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``; the same manifest has the same bytes everywhere."""
    document = {"schema": SCHEMA, **asdict(manifest)}
    body = json.dumps(document, indent=1, ensure_ascii=True)
    digest = xxhash.xxh3_128_hexdigest(body.encode("ascii"))
    return json.dumps({**document, "digest": digest}, indent=1, ensure_ascii=True).encode("ascii") + b"\n"


def write_manifest(folder: Path, manifest: Manifest) -> bytes:
    """Write ``manifest.json`` under a temporary name, make it durable, then rename it; returns its bytes."""
    data = render(manifest)
    write_file(folder / (MANIFEST_NAME + TEMPORARY), data)
    settle(folder / MANIFEST_NAME)
    return data


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a pack.

    Raises:
        BadInput: the folder is missing or holds no finished pack, or a newer version wrote it.
        BadAnswer: the manifest is damaged.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}", "name the folder that `shard-tools pack` wrote")
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(
            f"{folder} holds no finished pack: {MANIFEST_NAME} is missing",
            "name the folder that `shard-tools pack` wrote, or pack again",
        ) from None
    damaged = BadAnswer(f"{path} is damaged", "pack again, or restore it from a copy")
    try:
        document = json.loads(data)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError):
        raise damaged from None
    if schema != SCHEMA and str(schema).startswith("shard_tools.manifest/"):
        raise BadInput(f"{path} has the format {schema}, this version reads {SCHEMA}", "update the package")
    try:
        manifest = _parse(document)
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        raise damaged from None
    if render(manifest) != data:
        raise damaged
    return manifest


def _parse(document: dict[str, Any]) -> Manifest:
    fields = {key: value for key, value in document.items() if key not in ("schema", "digest")}
    fields["classes"] = tuple(fields["classes"])
    fields["shards"] = tuple(ShardInfo(**row) for row in fields["shards"])
    return Manifest(**fields)
