"""``shard-tools verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from shard_tools.verify import Verification


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Folder that pack wrote.")],
    against: Annotated[
        Optional[Path], typer.Option(metavar="SRC", help="Compare every file with this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Read a whole pack and check every digest, key, label and path; exit code 1 if anything is wrong.

    With --against, every file of SRC must lie in the pack byte for byte, and nothing else.

    Example: shard-tools verify /nvme/photos --against /data/photos
    """
    from shard_tools.console import Progress
    from shard_tools.verify import verify as run

    progress = Progress("verify", unit="samples")
    try:
        result = run(folder, against, progress.add)
    finally:
        progress.close()
    if as_json:
        _print_json(result, against)
    else:
        _print(result.samples, result.payload_bytes, result.shards, against)
        from shard_tools.cli.show import line, listing

        listing("WRONG", [_sentence(p.file, p.sample, p.path, p.what) for p in result.problems])
        if result.identical:
            line(f"identical: every file of {against} lies in {folder}, byte for byte")
        elif result.whole:
            line(f"whole: every digest of {folder} is right")
    if not result.whole:
        raise typer.Exit(1)


def _print_json(result: Verification, against: Path | None) -> None:
    from dataclasses import asdict

    from shard_tools.console import print_json

    named = against is not None
    print_json(
        {
            "schema": "shard_tools.verify/1",
            **asdict(result),
            "compared": (result.compared or 0) if named else None,  # a damaged manifest lets none be compared
            "problems": [{**asdict(problem), "file": problem.file or None} for problem in result.problems],
            "whole": result.whole,
            "identical": result.identical if named else None,
        }
    )


def _print(samples: int, payload_bytes: int, shards: int, against: Path | None) -> None:
    from shard_tools.cli.show import line
    from shard_tools.units import format_bytes

    what = "hashed" if against is None else "hashed and compared"
    line(f"{what} {samples:,} samples, {format_bytes(payload_bytes)}, in {shards:,} shards")


def _sentence(file: str, sample: int | None, path: str | None, what: str) -> str:
    parts = [file] if file else []
    if sample is not None:
        parts.append(f"sample {sample}")
    if path is not None:
        parts.append(path)
    return f"{', '.join(parts)}: {what}"
