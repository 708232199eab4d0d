"""How a tuning begins: what is refused, what a person reads, what a connection may carry."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import feedtune
from feedtune.cli.tune import tune as tune_command
from feedtune.trials import waiting
from feedtune.trials.lines import loader_line
from feedtune.trials.options import TuneOptions
from feedtune.trials.session import started_inside_a_launcher

PACKAGE = Path(feedtune.__file__).parent


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"PMI_SIZE": "8"}, "mpirun"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "torchrun"),
        ({"SLURM_NTASKS": "4"}, None),  # a batch script: srun comes after feedtune
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "8"}, None),
        ({}, None),
    ],
)
def test_a_start_once_a_rank_is_seen(env, launcher) -> None:
    assert started_inside_a_launcher(env) == launcher


def test_a_start_may_take_a_quarter_of_an_hour() -> None:
    assert TuneOptions(["train"]).start_timeout_s == 900
    option = inspect.signature(tune_command).parameters["start_timeout"].default
    assert (option.default, option.param_decls) == (900, ("--start-timeout",))


def test_a_hang_is_a_minute_of_silence_or_ten_predicted_steps() -> None:
    assert TuneOptions(["train"]).hang_timeout_s == 60
    option = inspect.signature(tune_command).parameters["hang_timeout"].default
    assert (option.default, option.param_decls) == (60, ("--hang-timeout",))
    assert waiting._STEPS_OF_HANG == 10


@pytest.mark.parametrize("trained", [True, False])
def test_a_choice_without_an_optimizer_step_is_said(trained) -> None:
    loader = {
        "dataset": "Photos", "site": "train.py:7", "num_workers": 2, "batch_size": 8, "epoch_steps": 40,
        "trained": trained,
    }  # fmt: skip
    line = loader_line({"world": 2, "loader": loader})
    assert "Photos at train.py:7, num_workers=2, batch size 8, 40 batches an epoch, 2 ranks" in line
    assert ("no optimizer step was seen" in line) != trained


@pytest.mark.parametrize(
    "module", ["inside/client.py", "trials/server.py", "launch/guardian.py", "launch/process.py"]
)
def test_what_comes_over_a_connection_is_never_unpickled_nor_executed(module) -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "torch", "yaml"}
    tree = ast.parse((PACKAGE / module).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not imported & forbidden
    assert not called & {"eval", "exec", "compile", "__import__"}
    assert "json" in imported
