"""``shard-tools info``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def info(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Folder that pack wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a pack holds, from its manifest.

    Example: shard-tools info /nvme/photos
    """
    from dataclasses import asdict

    from shard_tools.console import print_json
    from shard_tools.manifest import read_manifest

    manifest = read_manifest(folder)
    if as_json:
        print_json({"schema": "shard_tools.info/1", **asdict(manifest)})
        return
    from shard_tools.cli.show import table
    from shard_tools.units import format_bytes, format_count

    sizes = [shard.bytes for shard in manifest.shards]
    counts = [shard.samples for shard in manifest.shards]
    mix = [shard.label_entropy_bits for shard in manifest.shards]
    table(
        [
            ("format", manifest.format),
            ("samples", format_count(manifest.samples)),
            ("payload", format_bytes(manifest.payload_bytes)),
            ("shards", f"{len(sizes):,}, {format_bytes(sum(sizes))} in all"),
            ("bytes a shard", f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"),
            ("samples a shard", f"{min(counts):,} to {max(counts):,}"),
            ("classes", format_count(len(manifest.classes))),
            ("label entropy a shard", f"{min(mix):.2f} to {max(mix):.2f} bits"),
            ("order", "as the paths" if manifest.seed is None else f"shuffled, seed {manifest.seed}"),
        ]
    )
