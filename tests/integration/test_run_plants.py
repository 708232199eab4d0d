"""Trainings with one planted fault: class and rank that ``feedtune run`` names, and what it measures of it.

Delays are sleeps, so that a machine which does other things can only add to them; classes are asked for where
the plant is far larger than that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from tuning import BIN, SCRIPTS, feedtune

import feedtune as package

SCHEMA = json.loads((Path(package.__file__).parent / "docs/schemas/feedtune.run-1.json").read_text())
DELAY_S, WORK_S, STEPS = 0.03, 0.02, 80
SLOW = pytest.mark.slow


def training(tmp_path: Path, ranks: int = 2, **env: str) -> dict:
    """The one training of a run of the planted script."""
    words = [BIN / "torchrun", "--standalone", f"--nproc_per_node={ranks}", SCRIPTS / "planted.py"]
    values = {"DELAY_S": str(DELAY_S), "WORK_S": str(WORK_S), "STEPS": str(STEPS), **env}
    done = feedtune("run", "--json", "--out", tmp_path / "run", "--", *words, cwd=tmp_path, **values)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, SCHEMA)
    assert document["note"] is None
    (found,) = document["trainings"]
    assert len(found["ranks"]) == found["world_size"] == ranks
    return found


@pytest.mark.parametrize(
    ("rank", "norm"), [(0, "1"), pytest.param(1, "0", marks=SLOW), pytest.param(1, "1", marks=SLOW)]
)
def test_a_slow_loader_on_one_rank_is_an_input_straggler(tmp_path: Path, rank: int, norm: str) -> None:
    """Also of rank 0 with BatchNorm, whose broadcast of buffers lets all ranks begin backward together."""
    found = training(tmp_path, PLANT="loader", RANK_PLANTED=str(rank), BATCHNORM=norm)
    assert (found["finding"]["class"], found["finding"]["rank"]) == ("imbalance/input", rank)
    budgets = {one["rank"]: one["budget"]["parts"] for one in found["ranks"]}
    # A batch of the slow loader takes DELAY_S + WORK_S, of which the training's own work hides WORK_S.
    assert budgets[rank]["data_wait_s"] > 0.6 * DELAY_S
    assert budgets[1 - rank]["straggle_s"] > 0.6 * DELAY_S
    assert found["job"]["budget"]["parts"]["data_wait_s"] > 0.6 * DELAY_S
    assert "inconsistent" not in found["job"]["budget"]["flags"]
    workers = {one["rank"]: one["workers"]["all"] for one in found["ranks"]}
    assert workers[rank]["wait_s"] > DELAY_S + WORK_S - 0.001
    assert workers[rank]["fetch_s"] > workers[1 - rank]["fetch_s"]


@SLOW
@pytest.mark.parametrize(
    ("plant", "rank", "ranks"), [("backward", 1, 2), ("backward", 0, 4), ("forward", 1, 2)]
)
def test_d5_slow_compute_on_one_rank_names_the_rank(
    tmp_path: Path, plant: str, rank: int, ranks: int
) -> None:
    """Its own backward looks as long as everybody's: the others wait for it inside theirs."""
    found = training(tmp_path, ranks, PLANT=plant, RANK_PLANTED=str(rank))
    assert (found["finding"]["class"], found["finding"]["rank"]) == ("imbalance/compute", rank)
    parts = {one["rank"]: one["budget"]["parts"] for one in found["ranks"]}
    assert parts[rank]["compute_s"] >= DELAY_S + WORK_S
    assert all(parts[other]["straggle_s"] > 0.6 * DELAY_S for other in parts if other != rank)


@SLOW
def test_slow_communication_is_no_rank_s_fault(tmp_path: Path) -> None:
    found = training(tmp_path, PLANT="comm")
    assert (found["finding"]["class"], found["finding"]["rank"]) == ("communication", None)
    assert found["job"]["budget"]["parts"]["communication_s"] >= DELAY_S
    assert {one["ddp"]["hook"] for one in found["ranks"]} == {"user"}


@SLOW
@pytest.mark.parametrize("ranks", [2, 4])
def test_d4_garbage_collection_at_different_times_names_the_ranks(tmp_path: Path, ranks: int) -> None:
    found = training(tmp_path, ranks, PLANT="gc")
    assert (found["finding"]["class"], found["finding"]["rank"]) == ("sched/gc", None)
    parts = found["job"]["budget"]["parts"]
    assert parts["stall_s"] > parts["straggle_s"]
    assert parts["rest_s"] > -0.05 * found["job"]["budget"]["step_s"]
    for rank in range(ranks):
        assert f"rank {rank} " in found["finding"]["evidence"][0]
    assert "at different times" in found["finding"]["evidence"][0]


@SLOW
@pytest.mark.parametrize("ranks", [2, 4])
def test_d7_uneven_lengths_are_told_from_a_slow_rank(tmp_path: Path, ranks: int) -> None:
    found = training(tmp_path, ranks, PLANT="lengths", STEPS="160")
    assert found["finding"]["class"] == "imbalance/lengths"
    assert found["finding"]["losses"][0]["rho"] >= 0.6
    assert found["finding"]["gain"] > 1.1


@SLOW
def test_data_that_is_slow_everywhere_is_no_rank_s_fault(tmp_path: Path) -> None:
    found = training(tmp_path, PLANT="all")
    assert (found["finding"]["class"], found["finding"]["rank"]) == ("data", None)


@SLOW
@pytest.mark.parametrize(
    ("plant", "found"), [("second", ("imbalance/input", 1)), ("second_all", ("data", None))]
)
def test_a_second_loader_of_the_step_is_data_too(tmp_path: Path, plant: str, found: tuple) -> None:
    """Where it is slow on all ranks, the slightly faster ones have full queues, and hardly wait."""
    training_found = training(tmp_path, PLANT=plant, RANK_PLANTED="1")
    assert (training_found["finding"]["class"], training_found["finding"]["rank"]) == found
    parts = training_found["job"]["budget"]["parts"]
    assert parts["data_wait_s"] > 0.6 * DELAY_S
    assert parts["rest_s"] < 0.3 * DELAY_S


@SLOW
def test_one_process_has_no_other_ranks_to_wait_for(tmp_path: Path) -> None:
    words = [sys.executable, SCRIPTS / "latency.py"]
    done = feedtune(
        "run", "--json", "--steps", "60", "--out", tmp_path / "run", "--", *words, cwd=tmp_path,
        WORKERS="1", STEPS="80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["trainings"]
    assert found["finding"]["class"] == "data"
    parts = found["ranks"][0]["budget"]["parts"]
    assert (parts["communication_s"], parts["straggle_s"]) == (0.0, 0.0)
    assert sum(value for value in parts.values() if value) == pytest.approx(
        found["ranks"][0]["budget"]["step_s"]
    )
