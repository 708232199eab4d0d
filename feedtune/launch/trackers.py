"""Experiment trackers are switched off in trials: a trial is no experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_OFF = {
    "Weights & Biases": {"WANDB_MODE": "disabled"},
    "Comet": {"COMET_MODE": "DISABLED", "COMET_DISABLE_AUTO_LOGGING": "1"},
    "Neptune": {"NEPTUNE_MODE": "debug"},
    "ClearML": {"CLEARML_OFFLINE_MODE": "1"},
}


def without_trackers(env: Mapping[str, str], scratch: Path) -> tuple[dict[str, str], list[str]]:
    """The environment with trackers off, and their names for the report.

    Args:
        env: the command's environment.
        scratch: a folder for trackers that can only be sent elsewhere (MLflow).
    """
    changed = dict(env)
    for variables in _OFF.values():
        changed.update(variables)
    changed["MLFLOW_TRACKING_URI"] = f"file://{scratch}/mlruns"
    return changed, [*_OFF, "MLflow"]
