"""``shard-tools unpack``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def unpack(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Folder that pack wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make for the files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write every file of a pack back to its original path, checking its digest.

    Example: shard-tools unpack /nvme/photos /data/photos-again
    """
    from shard_tools.console import Progress, print_json
    from shard_tools.convert import unpack as run

    progress = Progress("unpack", unit="samples")
    try:
        manifest = run(folder, out, progress.add)
    finally:
        progress.close()
    if as_json:
        print_json(
            {
                "schema": "shard_tools.unpack/1",
                "out": str(out),
                "files": manifest.samples,
                "bytes": manifest.payload_bytes,
            }
        )
        return
    from shard_tools.cli.show import line
    from shard_tools.units import format_bytes

    line(f"wrote {manifest.samples:,} files, {format_bytes(manifest.payload_bytes)}: {out}")
