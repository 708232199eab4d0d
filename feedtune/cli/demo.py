"""``feedtune demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo")(demo)


def demo(
    data: Optional[Path] = typer.Option(
        None, "--data", metavar="DIR", help="Folder of images; by default 2,000 are made."
    ),
    nproc: int = typer.Option(2, "--nproc", min=1, help="Ranks of the training."),
    as_json: bool = typer.Option(False, "--json", help="Print the result document on stdout, nothing else."),
) -> None:
    """Show the whole way on real files: pack, verify, tune a training of two ranks, compare.

    Example: feedtune demo --data ~/photos
    """
    from feedtune.report.terminal import print_demo
    from feedtune.trials.demo import demo as run_demo
    from shard_tools.console import print_json, say

    document = run_demo(data, nproc, say)
    if as_json:
        print_json(document)
    else:
        print_demo(document)
