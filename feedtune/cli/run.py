"""``feedtune run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("run")(run)


def run(
    command: Optional[list[str]] = typer.Argument(
        None, metavar="-- CMD...", help="Your training command.", show_default=False
    ),
    steps: Optional[int] = typer.Option(
        None,
        "--steps",
        min=1,
        help="Record so many steps, then only let it train.  [all]",
        show_default=False,
    ),
    out: Optional[Path] = typer.Option(
        None, "--out", help="Run folder; by default a new one in ~/.local/state/feedtune/runs.", metavar="RUN"
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print the result document on stdout; CMD's stdout goes to RUN/command.log."
    ),
) -> None:
    """Run your training as it is, and report how long each rank waited for data.

    Nothing is changed: CMD has the terminal, signals and exit code that it has without feedtune, and what
    it saves is saved. The report comes on stderr, after CMD's end.

    Example: feedtune run -- torchrun --nproc_per_node=4 train.py --epochs 90
    """
    from feedtune.report.watched import print_run
    from feedtune.trials.observe import RunOptions, observe
    from shard_tools.console import print_json, say
    from shard_tools.errors import BadInput

    if command and "--" not in sys.argv:
        raise BadInput("the command has to stand behind --", "feedtune run -- python train.py")
    document = observe(RunOptions(command or [], out, steps, keep_stdout=as_json), say)
    if as_json:
        print_json(document)
    else:
        print_run(document, to_stderr=True)
    raise typer.Exit(document["exit_code"])
