"""``feedtune run`` and ``feedtune run --ceiling`` on DDP: a watched training ends as it does by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from applying import SCHEMAS, script
from tuning import BIN, FEEDTUNE, SCRIPTS, Footprint, environment, feedtune, folder_hash, result_of

WAYS, CEILING = SCRIPTS / "ddp_ways.py", SCRIPTS / "ceiling.py"
GPUS = {"COMM_HOOK": "1"}  # gradients are seen as on GPUs


def checked(run: Path) -> dict[str, Any]:
    """The document of a run, which is as its schema says."""
    document = result_of(run)
    jsonschema.validate(document, json.loads((SCHEMAS / "feedtune.run-1.json").read_text()))
    return document


def torchrun(ranks: int) -> list[str | Path]:
    return [BIN / "torchrun", "--standalone", f"--nproc_per_node={ranks}"]


class Ways:
    """The ways to use DDP, by themselves and watched, at the same time."""

    def __init__(self, base: Path, *command: str | Path, **env: str) -> None:
        self.base = base
        self.run = base / "run"
        started = [
            self._start(name, before, command, env)
            for name, before in (("bare", []), ("watched", [*FEEDTUNE, "run", "--out", self.run, "--"]))
        ]
        for process in started:
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors

    def _start(self, name: str, before: Any, command: Any, env: dict[str, str]) -> subprocess.Popen[str]:
        logs = self.base / name
        logs.mkdir()
        return subprocess.Popen(
            [str(word) for word in (*before, *command)],
            env=environment(LOGS=str(logs), OMP_NUM_THREADS="1", **env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self, name: str) -> list[dict[str, Any]]:
        """What each way has ended with, on each rank."""
        return [json.loads(path.read_text()) for path in sorted((self.base / name).glob("ways.rank*"))]


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, GPUS])
def test_every_way_to_use_ddp_ends_as_it_does_by_itself(tmp_path: Path, env: dict[str, str]) -> None:
    ways = Ways(tmp_path, *torchrun(2), WAYS, **env)
    bare, watched = ways.ends("bare"), ways.ends("watched")
    assert len(bare) == 2
    assert len(bare[0]) >= 30
    assert watched == bare
    (training,) = checked(ways.run)["trainings"]
    for rank in training["ranks"]:
        assert rank["ddp"]["models"] >= 30
        assert rank["ddp"]["why"] is not None
    assert training["job"]["budget"]["parts"]["communication_s"] is None
    numbers = [json.loads(line) for line in (ways.run / "steps.rank0.jsonl").read_text().splitlines()]
    assert [row[1] for row in numbers] == sorted(row[1] for row in numbers)


@pytest.mark.slow
def test_nor_does_it_change_anything_on_three_ranks(tmp_path: Path) -> None:
    """Where the mean is no exact division."""
    ways = Ways(tmp_path, *torchrun(3), WAYS, **GPUS)
    assert len(ways.ends("bare")) == 3
    assert ways.ends("watched") == ways.ends("bare")
    checked(ways.run)


@pytest.mark.slow
def test_nor_does_it_in_ranks_that_are_spawned(tmp_path: Path) -> None:
    ways = Ways(tmp_path, sys.executable, WAYS, "before_any_loader", "loader_first", "own_hook", SPAWN="1")
    assert len(ways.ends("bare")) == 2
    assert ways.ends("watched") == ways.ends("bare")
    (training,) = checked(ways.run)["trainings"]
    assert [rank["ddp"]["models"] for rank in training["ranks"]] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "hook", "why", "env"),
    [
        ("loader_first", "gradients", None, {}),
        ("own_hook", "user", None, {}),
        ("builtin_hook", "gradients", None, {}),
        ("sparse_gradients", "gradients", None, {}),
        ("joined", "gradients", "waits for them later", {}),
        ("sharded_optimizer", "gradients", "waits for them later", {}),
        ("averaged_by_hand", "none", None, {}),
        ("fully_sharded", "none", None, {}),
        ("loader_first", "own", None, GPUS),
        ("own_hook", "user", None, GPUS),
        ("builtin_hook", "none", "built-in", GPUS),
        ("sparse_gradients", "none", "sparse", GPUS),
        ("joined", "none", "joined", GPUS),
    ],
)
def test_what_is_not_seen_is_told(
    tmp_path: Path, way: str, hook: str, why: str | None, env: dict[str, str]
) -> None:
    command = [*torchrun(2), WAYS, way]
    done = feedtune("run", "--out", tmp_path / "run", "--", *command, cwd=tmp_path, LOGS=str(tmp_path), **env)
    assert done.returncode == 0, done.stderr
    (training,) = checked(tmp_path / "run")["trainings"]
    for rank in training["ranks"]:
        assert rank["ddp"]["hook"] == hook
        assert (rank["ddp"]["why"] is None) if why is None else (why in rank["ddp"]["why"])
        seen = rank["ddp"]["models"] and why is None
        assert (rank["budget"]["parts"]["communication_s"] is not None) == bool(seen)


def started_ceiling(tmp_path: Path, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """``run --ceiling`` in a work folder, in which nothing changes."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "last.pt").write_text("of the day before")
    before, footprint = folder_hash(work), Footprint(tmp_path)
    words = ["run", "--ceiling", "--out", tmp_path / "run", "--", *command]
    done = feedtune(*words, cwd=work, OMP_NUM_THREADS="1", **footprint.env, **env)
    assert folder_hash(work) == before
    assert not footprint.wait()
    return done


@pytest.mark.slow
def test_two_ranks_against_free_data(tmp_path: Path) -> None:
    done = started_ceiling(tmp_path, *torchrun(2), CEILING)
    assert done.returncode == 0, done.stderr
    document = checked(tmp_path / "run")
    ceiling = document["ceiling"]
    assert ceiling["rate"] < ceiling["ceiling"]
    assert ceiling["au"] == pytest.approx(1 - ceiling["starvation"])
    assert ceiling["sync"]["pairs"] == 3
    assert ceiling["sync"]["exposed_s"] > 0
    (training,) = document["trainings"]
    for rank in training["ranks"]:
        assert rank["ddp"] == {"models": 1, "hook": "gradients", "why": None}
        assert rank["workers"]["all"]["fetch_s"] >= 4 * 0.001
    assert "run --ceiling" not in document["reading"]
    again = feedtune("report", tmp_path / "run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "ceiling (data is free)" in again.stdout + again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_one_process_against_free_data(tmp_path: Path, workers: str) -> None:
    done = started_ceiling(tmp_path, sys.executable, CEILING, WORKERS=workers)
    assert done.returncode == 0, done.stderr
    document = checked(tmp_path / "run")
    assert document["ceiling"]["sync"] is None
    assert document["ceiling"]["starvation"] > 0
    (training,) = document["trainings"]
    (rank,) = training["ranks"]
    assert (rank["workers"] is None) == (workers == "0")
    assert rank["ddp"]["models"] == 0
    steps = rank["budget"]["parts"]
    assert steps["data_wait_s"] >= 0.001
    assert steps["communication_s"] in (None, 0.0)


@pytest.mark.slow
def test_a_script_that_is_too_short_has_no_ceiling(tmp_path: Path) -> None:
    done = started_ceiling(tmp_path, sys.executable, CEILING, STEPS="16")
    document = checked(tmp_path / "run")
    assert document["ceiling"]["ceiling"] is None
    assert document["ceiling"]["starvation"] is None
    assert "let it train for more steps" in done.stderr


@pytest.mark.slow
def test_a_script_that_fails_is_named(tmp_path: Path) -> None:
    done = started_ceiling(tmp_path, sys.executable, CEILING, FAIL_AT="12")
    assert done.returncode == 4
    assert "this training fails" in done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    before, footprint = folder_hash(work), Footprint(tmp_path)
    words = [*FEEDTUNE, "run", "--ceiling", "--out", tmp_path / "run", "--", *torchrun(2), CEILING]
    process = subprocess.Popen(
        list(map(str, words)),
        cwd=work,
        env=environment(OMP_NUM_THREADS="1", **footprint.env),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "baseline" in line:
            break
    time.sleep(0.5)  # in the middle of the next block
    os.killpg(process.pid, signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, "".join(said) + rest
    assert folder_hash(work) == before
    assert not footprint.wait()
    document = checked(tmp_path / "run")
    assert document["exit_code"] == 128 + signal.SIGINT
    assert document["note"].startswith("interrupted")


KILLED = """
    import os, signal, time
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begun = time.monotonic()
    for step, batch in enumerate(DataLoader([torch.ones(2)] * 100_000, batch_size=2)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if step > 60 and dist.get_rank() == 1 and time.monotonic() - begun > 2.5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_of_a_rank_that_is_killed_both_ranks_steps_are_read(tmp_path: Path) -> None:
    command = [*torchrun(2), script(tmp_path, KILLED)]
    done = feedtune("run", "--out", tmp_path / "run", "--", *command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 1  # torchrun's own
    document = checked(tmp_path / "run")
    assert document["exit_code"] == 1
    (training,) = document["trainings"]
    assert [rank["rank"] for rank in training["ranks"]] == [0, 1]
    assert training["ranks"][1]["others"] is None
    assert training["job"]["steps"] > 60
    assert training["job"]["budget"]["parts"]["communication_s"] is not None
    assert "rank 0" in done.stderr
    assert "rank 1" in done.stderr
