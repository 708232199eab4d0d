"""``feedtune apply``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Optional

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("apply")(apply)


def apply(
    run: Path = typer.Argument(..., metavar="RUN", help="Run folder of feedtune tune."),
    command: Optional[list[str]] = typer.Argument(
        None, metavar="-- CMD...", help="Your training command.", show_default=False
    ),
    show: bool = typer.Option(
        False, "--print", help="Print what to paste into your own code, and start nothing."
    ),
) -> None:
    """Start your training with the settings that a tuning has found, without an edit.

    feedtune becomes CMD: same process, signals, exit code, input and output. Only the tuned DataLoader is
    made with other num_workers, prefetch_factor and pin_memory.

    Example: feedtune apply ~/.local/state/feedtune/runs/20260101-120000-train -- python train.py
    """
    from feedtune.cli.behind import check_behind
    from feedtune.launch.foreground import RESET, cannot_start, find_program
    from feedtune.trials.apply import environment, paste, read_tuned, to_say
    from shard_tools.console import say

    words = command or []
    check_behind(words, "feedtune apply RUN -- python train.py")
    if not show:
        find_program(words, "feedtune apply RUN -- torchrun --nproc_per_node=2 train.py")
    tuned = read_tuned(run)
    env = {} if show else environment(tuned, os.environ)
    line = to_say(tuned)
    if line:
        say(line)
    if show:
        print(paste(tuned, words))
        return
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        raise cannot_start(words, error) from error
