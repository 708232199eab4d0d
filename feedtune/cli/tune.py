"""``feedtune tune``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

import typer

from feedtune.cli.behind import SETTINGS, check_behind

PRESET_KEYS = {"budget": float, "trials": int, "pairs": int, "block_seconds": float, "max_workers": int}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("tune", context_settings=SETTINGS)(tune)


def tune(
    command: Optional[list[str]] = typer.Argument(
        None, metavar="-- CMD...", help="Your training command.", show_default=False
    ),
    data: Optional[Path] = typer.Option(
        None, "--data", help="Instead of CMD: tune the built-in vision training on DIR.", metavar="DIR"
    ),
    nproc: int = typer.Option(1, "--nproc", min=1, help="With --data: ranks."),
    model: str = typer.Option("resnet18", "--model", help="With --data: tiny, resnet18 or resnet50."),
    batch_size: int = typer.Option(32, "--batch-size", min=1, help="With --data: batch size of a rank."),
    out: Optional[Path] = typer.Option(
        None, "--out", help="Run folder; by default a new one in ~/.local/state/feedtune/runs.", metavar="RUN"
    ),
    budget: Optional[float] = typer.Option(
        None, "--budget", min=5, help="Seconds the tuning may take.  [120]", show_default=False
    ),
    trials: Optional[int] = typer.Option(
        None, "--trials", min=1, help="Settings to measure before the confirmation.  [12]", show_default=False
    ),
    pairs: Optional[int] = typer.Option(
        None, "--pairs", min=4, help="Interleaved pairs of the confirmation.  [4]", show_default=False
    ),
    block_seconds: Optional[float] = typer.Option(
        None, "--block-seconds", min=0.2, help="Measured seconds of a block.  [1.2]", show_default=False
    ),
    max_workers: Optional[int] = typer.Option(
        None,
        "--max-workers",
        min=0,
        help="Most workers a rank.  [32, or 4 a core up to 64]",
        show_default=False,
    ),
    fixed: list[str] = typer.Option(
        [],
        "--set",
        help="Hold a setting: num_workers=4, prefetch_factor=2, pin_memory=true, in_order=false, "
        "multiprocessing_context=spawn.",
        metavar="NAME=VALUE",
    ),
    writable: list[Path] = typer.Option(
        [], "--writable", help="Folder that the script really writes during trials.", metavar="DIR"
    ),
    guard: str = typer.Option(
        "auto", "--guard", help="Write guard: auto, overlay, python+landlock or python."
    ),
    start_timeout: float = typer.Option(
        900, "--start-timeout", min=1, help="Seconds until the first training steps."
    ),
    hang_timeout: float = typer.Option(
        60, "--hang-timeout", min=1, help="Seconds of silence after which a trial counts as hanging."
    ),
    isolate: bool = typer.Option(
        False, "--isolate", help="Start the script anew for each trial; also tries start methods of workers."
    ),
    allow_semantic: bool = typer.Option(
        False,
        "--allow-semantic",
        help="Also try what can change what is learned: in_order=False, worker counts of iterable data.",
    ),
    loader: Optional[str] = typer.Option(
        None, "--loader", help="The training loader, by where it is made.", metavar="FILE:LINE"
    ),
    config: Optional[Path] = typer.Option(
        None, "--config", help="TOML preset with a [tune] table; options win over it.", metavar="FILE"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result document on stdout, nothing else."),
) -> None:
    """Find the DataLoader settings that starve your training least, and prove the gain.

    CMD is started once, as it is; loader settings change inside the live training. It is ended when the
    answer is there, and its file writes go to a throw-away layer.

    Example: feedtune tune -- torchrun --nproc_per_node=4 train.py --epochs 90
    """  # fmt: skip
    from feedtune.report.terminal import print_tune
    from feedtune.trials.options import TuneOptions, existing_folders
    from feedtune.trials.tune import tune as run_tune
    from shard_tools.console import print_json, say

    words = _command(command, data, nproc, model, batch_size)
    preset = _preset(config)
    given: dict[str, Any] = {
        "budget_s": budget if budget is not None else preset.get("budget"),
        "trials": trials if trials is not None else preset.get("trials"),
        "pairs": pairs if pairs is not None else preset.get("pairs"),
        "block_s": block_seconds if block_seconds is not None else preset.get("block_seconds"),
        "max_workers": max_workers if max_workers is not None else preset.get("max_workers"),
    }
    options = TuneOptions(
        command=words,
        out=out,
        fixed=_fixed(fixed),
        writable=existing_folders(writable),
        guard=guard,
        start_timeout_s=start_timeout,
        hang_timeout_s=hang_timeout,
        isolate=isolate,
        allow_semantic=allow_semantic,
        loader=_loader(loader),
        **{key: value for key, value in given.items() if value is not None},
    )
    document = run_tune(options, say)
    if as_json:
        print_json(document)
    else:
        print_tune(document)
    if document["outcome"] == "failed":
        raise typer.Exit(4 if _script_failed(document) else 1)


def _command(
    command: list[str] | None, data: Path | None, nproc: int, model: str, batch_size: int
) -> list[str]:
    """The command to tune: the user's, or the vision workload under torchrun."""
    from shard_tools.errors import BadInput

    example = "feedtune tune -- torchrun --nproc_per_node=2 train.py"
    if command and data is not None:
        raise BadInput(
            "--data and a command exclude each other", f"one of: {example}; feedtune tune --data DIR"
        )
    if command:
        check_behind(command, example)
        return command
    if data is None:
        raise BadInput("no command to tune", f"put it behind --: {example}")
    if model not in ("tiny", "resnet18", "resnet50"):
        raise BadInput(f"--model {model}: no such model", "one of tiny, resnet18, resnet50")
    if not data.is_dir():
        raise BadInput(f"{data}: no such folder", "name a folder of images or a folder of shards")
    from feedtune.trials.workload import vision_command

    return vision_command(data, nproc=nproc, model=model, batch_size=batch_size)


def _preset(config: Path | None) -> dict[str, Any]:
    from feedtune.config import load_preset

    return {} if config is None else dict(load_preset(config, PRESET_KEYS))


def _fixed(items: list[str]) -> dict[str, int | bool | str]:
    from feedtune.settings import parse_fixed

    return parse_fixed(items)


def _script_failed(document: dict[str, Any]) -> bool:
    """Whether no candidate could be measured because the user's command failed each time."""
    tried = [block for block in document["blocks"] if block["kind"] not in ("baseline", "ceiling")]
    reasons = ("script_failed", "loader_failed", "rank_died")
    return bool(tried) and all(block["reason"] in reasons for block in tried)


def _loader(text: str | None) -> str | None:
    from shard_tools.errors import BadInput

    if text is None:
        return None
    name, _, line = text.rpartition(":")
    if not name or not line.isdecimal():
        raise BadInput(f"--loader {text}: not FILE:LINE", "as in --loader train.py:42")
    return f"{os.path.normpath(name)}:{line}"
