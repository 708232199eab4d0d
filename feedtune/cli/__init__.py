"""The ``feedtune`` command; every command is one short file here, its docstring is its help."""

from __future__ import annotations

import typer

from feedtune import __version__
from shard_tools.console import run_app

app = typer.Typer(
    name="feedtune",
    help="Find out why GPUs starve for data, and prove what cures it, on the training script you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        print(f"feedtune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    from feedtune.cli import apply, demo, report, run, tune

    tune.register(app)
    apply.register(app)
    run.register(app)
    report.register(app)
    demo.register(app)
    run_app(app, "feedtune")
