"""``feedtune apply``: a tuned training's settings for the next start of the same script, and nothing else."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feedtune.launch.lasting import lasting_folder
from feedtune.rundir import read_result
from feedtune.settings import LoaderSettings
from shard_tools.errors import BadInput, Missing


@dataclass(frozen=True)
class Tuned:
    """What a tuning says of a training.

    Attributes:
        run: its folder.
        settings: the best settings; the user's own without a gain.
        identity: how to find the loader again.
        gain: whether the settings have proven faster.
        outcome: the tuning's outcome.
        command: the tuned command, secrets taken out.
    """

    run: Path
    settings: LoaderSettings
    identity: Mapping[str, Any]
    gain: bool
    outcome: str
    command: Sequence[str]


def read_tuned(run: Path) -> Tuned:
    """What a run folder says.

    Raises:
        BadInput: no run folder, or no tuning in it that has an answer.
    """
    again = "tune the training first: feedtune tune -- CMD"
    if not run.exists():
        raise BadInput(
            f"{run}: no such run folder", f"name the folder that feedtune tune has printed, or {again}"
        )
    document = read_result(run)
    if document["schema"] != "feedtune.tune/1":
        raise BadInput(f"{run} is a measurement, it has no settings to apply", again)
    try:
        return _tuned(run, document, again)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"the result.json of {run} is not whole ({error!r})", again) from error


def _tuned(run: Path, document: Mapping[str, Any], again: str) -> Tuned:
    if document["best"] is None:
        raise BadInput(f"{run} has no settings to apply: {document['verdict']}", again)
    identity = document["loader"].get("identity")
    if identity is None:
        raise BadInput(f"{run} does not say which DataLoader was tuned: an older feedtune made it", again)
    return Tuned(
        run=(run if run.is_dir() else run.parent).resolve(),
        settings=LoaderSettings.from_dict(document["best"]["settings"]),
        identity=identity,
        gain=document["gain"] is not None,
        outcome=document["outcome"],
        command=document["command"],
    )


def environment(tuned: Tuned, base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a training gets the settings.

    Raises:
        BadInput: the run folder's name would split PYTHONPATH.
        Missing: the start-up folder cannot be made.
    """
    if os.pathsep in str(tuned.run):
        raise BadInput(f"{tuned.run}: a '{os.pathsep}' in its path would split PYTHONPATH", "move the folder")
    config = {"mode": "apply", "settings": tuned.settings.as_dict(), "identity": dict(tuned.identity)}
    try:
        boot = lasting_folder(tuned.run / "apply", config)
    except OSError as error:
        raise Missing(
            f"cannot write to the run folder {tuned.run}: {error.strerror}",
            "copy the folder to a place of your own, and apply that",
        ) from error
    return {name: value for name, value in boot.environment(base).items() if name != "FEEDTUNE_APPLIED"}


def to_say(tuned: Tuned) -> str | None:
    """What has to be said of settings that are no gain."""
    if tuned.gain:
        return None
    return (
        f"feedtune apply: the tuning found no gain ({tuned.outcome}); "
        f"these are your own settings: {tuned.settings.arguments()}"
    )


def paste(tuned: Tuned, command: Sequence[str]) -> str:
    """What to write into one's own code instead, and how to apply without."""
    frames = tuned.identity["frames"]
    place = f"{frames[0][0]}:{frames[0][1]}" if frames else "your script"
    words = shlex.join(command or tuned.command)
    return "\n".join(
        [
            f"# DataLoader, at {place}",
            f"DataLoader(..., {tuned.settings.arguments()})",
            "",
            "# Lightning: the same arguments in the DataLoader that train_dataloader() returns, or that",
            "# trainer.fit() is given",
            "",
            "# Hugging Face Trainer",
            f"TrainingArguments(..., {_training_arguments(tuned.settings)})",
            "",
            "# or the script as it is",
            f"feedtune apply {shlex.quote(str(tuned.run))} -- {words}",
        ]
    )


def _training_arguments(settings: LoaderSettings) -> str:
    parts = [f"dataloader_num_workers={settings.num_workers}"]
    if settings.prefetch_factor is not None:
        parts.append(f"dataloader_prefetch_factor={settings.prefetch_factor}")
    parts.append(f"dataloader_pin_memory={settings.pin_memory}")
    return ", ".join(parts)
