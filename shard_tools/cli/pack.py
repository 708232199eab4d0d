"""``shard-tools pack``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from shard_tools.pack import PackResult


class Format(str, Enum):
    """Shard formats."""

    wds = "wds"
    lmdb = "lmdb"


def pack(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder; its first level is the classes.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make for the shards.")],
    form: Annotated[Format, typer.Option("--format", help="wds = tar, lmdb = LMDB.")] = Format.wds,
    shard_size: Annotated[str, typer.Option(help="Largest shard, headers counted: 64MB, 1GiB.")] = "64MB",
    seed: Annotated[int, typer.Option(help="Seed of the global shuffle.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle, or keep order.")] = True,
    workers: Annotated[Optional[int], typer.Option(min=1, help="Processes; default: one a core.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier pack at DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Pack a folder into shards of tar (WebDataset) or LMDB.

    DST appears only when it is whole. A run that was stopped keeps its finished shards in the hidden folder
    .DST.shard-tools-work beside DST, and the same command goes on from there, with any number of workers.

    Example: shard-tools pack /data/photos /nvme/photos --format wds --shard-size 64MB
    """
    from shard_tools.console import Progress
    from shard_tools.pack import pack_folder
    from shard_tools.units import parse_size

    size = parse_size(shard_size)
    progress = Progress("pack", unit="samples")
    try:
        result = pack_folder(
            source,
            destination,
            form=form.value,
            shard_size=size,
            seed=seed if shuffle else None,
            workers=workers,
            force=force,
            on_samples=progress.add,
        )
    finally:
        progress.close()
    if as_json:
        _print_json(source, destination, result)
    else:
        _print(source, destination, result)


def _print_json(source: Path, destination: Path, result: PackResult) -> None:
    from dataclasses import asdict

    from shard_tools.console import print_json

    print_json(
        {
            "schema": "shard_tools.pack/1",
            "source": str(source),
            "destination": str(destination),
            "kept_shards": result.kept,
            "links": result.found.links,
            "not_packed": result.found.not_packed(),
            "manifest": asdict(result.manifest),
        }
    )


def _print(source: Path, destination: Path, result: PackResult) -> None:
    from shard_tools.cli.show import line, listing, quoted
    from shard_tools.units import format_bytes

    made = result.manifest
    kept = f" ({result.kept} kept from an earlier run)" if result.kept else ""
    line(
        f"packed {made.samples:,} samples, {format_bytes(made.payload_bytes)}, into {len(made.shards):,} "
        f"shards{kept}, {format_bytes(made.bytes)}: {destination}"
    )
    listing("links to files, packed as the files they point to", result.found.links)
    for kind, names in result.found.not_packed().items():
        listing(f"NOT PACKED, {kind.replace('_', ' ')}", names)
    line(f"next: shard-tools verify {quoted(destination)} --against {quoted(source)}")
