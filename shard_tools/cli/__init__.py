"""The command ``shard-tools``."""

from __future__ import annotations

from typing import Annotated

import typer

from shard_tools.cli.info import info
from shard_tools.cli.pack import pack
from shard_tools.cli.scan import scan
from shard_tools.cli.unpack import unpack
from shard_tools.cli.verify import verify
from shard_tools.console import run_app

app = typer.Typer(
    help="Pack folders of small files into verified shards, and prove that nothing is lost.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command in (scan, pack, verify, info, unpack):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"shard-tools {version('feedtune')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Pack folders of small files into verified shards, and prove that nothing is lost."""


def main() -> None:
    """Entry point of the console script."""
    run_app(app, "shard-tools")
