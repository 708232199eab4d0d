"""``feedtune report``."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("report")(report)


def report(
    run: Path = typer.Argument(..., help="Run folder, or its result.json."),
    as_json: bool = typer.Option(False, "--json", help="Print the result document on stdout."),
) -> None:
    """Print the result of a run again.

    Example: feedtune report ~/.local/state/feedtune/runs/20260101-120000-train
    """
    from feedtune.report.terminal import print_tune
    from feedtune.report.watched import print_run
    from feedtune.rundir import read_result
    from shard_tools.console import print_json

    document = read_result(run)
    if as_json:
        print_json(document)
    elif document["schema"] == "feedtune.run/1":
        print_run(document)
    else:
        print_tune(document)
