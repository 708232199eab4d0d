"""``feedtune run``."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from feedtune.cli.behind import SETTINGS, check_behind

_BLOCK_S = 3.0  # measured seconds of a block with --ceiling


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("run", context_settings=SETTINGS)(run)


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
    ceiling: bool = typer.Option(
        False,
        "--ceiling",
        help="Also measure what it reaches when data is free. This is a trial: CMD is ended afterwards, and "
        "what it writes is thrown away.",
    ),
    writable: list[Path] = typer.Option(
        [],
        "--writable",
        help="With --ceiling: a folder that CMD really writes; may be repeated.",
        metavar="DIR",
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print the result document on stdout; CMD's stdout goes to RUN/command.log."
    ),
) -> None:
    """Run your training as it is, and report what each rank's steps spent their time on.

    Nothing is changed: CMD has the terminal, signals and exit code that it has without feedtune, and what
    it saves is saved. The report comes on stderr, after CMD's end.

    Example: feedtune run -- torchrun --nproc_per_node=4 train.py --epochs 90
    """
    from feedtune.launch.foreground import Foreground
    from feedtune.report.watched import print_run
    from feedtune.trials.observe import RunOptions, observe
    from shard_tools.console import print_json, say
    from shard_tools.errors import BadInput

    check_behind(command, "feedtune run -- python train.py")
    if ceiling:
        from feedtune.trials.ceiling import run_with_ceiling
        from feedtune.trials.options import TuneOptions, existing_folders

        options = TuneOptions(command or [], out, block_s=_BLOCK_S, writable=existing_folders(writable))
        document = run_with_ceiling(options, steps, say)
    elif writable:
        raise BadInput("--writable goes with --ceiling", "without it everything that CMD writes is written")
    else:
        # It is never left: feedtune ends with its command's code, whatever signals come meanwhile.
        document = observe(RunOptions(command or [], out, steps, keep_stdout=as_json), say, Foreground())
    if as_json:
        print_json(document)
    else:
        print_run(document, to_stderr=not ceiling)
    raise typer.Exit(document["exit_code"])
