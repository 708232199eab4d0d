"""Records of ``feedtune run`` when somebody is killed or interrupted: what was handed on is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from applying import script
from tuning import BIN, FEEDTUNE, environment, feedtune, result_of, wait_until_gone

from feedtune.inside.linefiles import LineFile
from feedtune.inside.recordpipe import PIPE
from feedtune.launch.foreground import Foreground
from feedtune.trials.observe import RunOptions, observe

TRAINING = """
    import os, sys, time
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train(steps):
        for _ in range(steps):
            for batch in DataLoader([torch.ones(1)] * 32, batch_size=1):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                yield

    def train_until(path):
        \"\"\"Until that file holds something.\"\"\"
        for _ in train(10_000):
            time.sleep(0.001)
            if os.path.exists(path) and os.path.getsize(path):
                return
"""

KILLED = (
    TRAINING
    + """
    import signal
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    rank = dist.get_rank()
    own = os.path.join(sys.argv[1], f"steps.rank{rank}.jsonl")
    if rank == 0:
        train_until("/nothing")
    train_until(own)
    before = open(own).read()
    for _ in zip(range(3), train(1)):
        pass
    with open(sys.argv[2], "w") as file:
        file.write(before)
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_what_it_has_handed_on(tmp_path: Path) -> None:
    run, before = tmp_path / "run", tmp_path / "before"
    command = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", script(tmp_path, KILLED), run, before]
    done = feedtune("run", "--out", run, "--", *command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr  # torchrun's own
    for rank in (0, 1):
        text = (run / f"steps.rank{rank}.jsonl").read_text()
        assert text.endswith("\n")
        numbers = [json.loads(line)[0] for line in text.splitlines()]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 10
    assert text.startswith(before.read_text())
    (training,) = result_of(run)["trainings"]
    assert [rank["rank"] for rank in training["ranks"]] == [0, 1]
    assert not (run / PIPE).is_symlink()


class Started:
    """A watched training that has handed records on already, and the pipe that it does that by."""

    def __init__(self, folder: Path, text: str) -> None:
        self.run = folder / "run"
        self.code = folder / "code"
        train = [
            "sh",
            "-c",
            '"$@"; echo $? >"$0"',
            self.code,
            sys.executable,
            script(folder, text),
            folder / "go",
        ]
        self.process = subprocess.Popen(
            [str(word) for word in (*FEEDTUNE, "run", "--out", self.run, "--", *train)],
            env=environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        steps = self.run / "steps.rank0.jsonl"
        while not (steps.exists() and steps.stat().st_size):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        self.pipe = (self.run / PIPE).resolve()
        assert self.pipe.is_fifo()

    def end(self) -> None:
        """Of the whole tree, where a test has failed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


GOES_ON = (
    TRAINING
    + """
    train_until(sys.argv[1])
    steps = sum(1 for _ in train(40))  # more than are written at once
    print("trained", steps, "more", flush=True)
    sys.exit(7)
"""
)


@pytest.mark.slow
def test_sigkill_of_feedtune_costs_records_and_nothing_else(tmp_path: Path) -> None:
    started = Started(tmp_path, GOES_ON)
    try:
        started.process.kill()
        started.process.wait()
        (tmp_path / "go").write_text("on")
        assert started.process.stdout is not None
        assert started.process.stderr is not None
        assert started.process.stdout.read() == "trained 1280 more\n"
        assert started.process.stderr.read() == ""
        assert not wait_until_gone(str(started.run))
        assert started.code.read_text() == "7\n"
        assert not started.pipe.parent.exists()  # nothing stays in memory
    finally:
        started.end()
    about = json.loads((started.run / "rank0.json").read_text())
    assert about["others"] == []  # it went through its end


def test_an_interrupted_run_takes_its_pipe_away(tmp_path: Path) -> None:
    started = Started(tmp_path, GOES_ON)
    try:
        # To the whole group, as a terminal does it.
        os.killpg(started.process.pid, signal.SIGINT)
        _, errors = started.process.communicate(timeout=60)
    finally:
        started.end()
    assert started.process.returncode == 128 + signal.SIGINT, errors
    assert "rank 0" in errors
    assert not started.pipe.parent.exists()
    assert not (started.run / PIPE).is_symlink()
    assert result_of(started.run)["trainings"][0]["job"]["steps"] > 10


def observed(tmp_path: Path, path: Path) -> dict[str, Any]:
    with Foreground() as foreground:
        options = RunOptions([sys.executable, str(path)], tmp_path / "run")
        found = observe(options, lambda _: None, foreground)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return found


def test_of_a_training_that_fails_it_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, TRAINING + "    for _ in train(1):\n        pass\n    sys.exit(3)\n")
    document = observed(tmp_path, path)
    note = "the command failed (exit code 3) after 32 recorded steps; its own output says why"
    assert document["note"] == note, capfd.readouterr()


@pytest.mark.parametrize(
    ("last", "note"),
    [
        (
            "pass",
            "no optimizer of torch stepped; without one the loader with most batches is taken, after 200",
        ),
        ("optimizer.step()", "it ended before two optimizer steps fell between batches of one DataLoader"),
    ],
)
def test_why_a_training_was_not_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], last: str, note: str
) -> None:
    text = TRAINING + f"    for _ in DataLoader([1] * 40):\n        pass\n    {last}\n"
    document = observed(tmp_path, script(tmp_path, text))
    assert document["note"].startswith(f"no training was seen: {note}"), capfd.readouterr()


def test_of_files_that_were_kept_small_it_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineFile, "stretch", 16)
    monkeypatch.setattr(LineFile, "change_bytes", 4000)
    path = script(tmp_path, TRAINING + "    for _ in train(6):\n        pass\n")
    document = observed(tmp_path, path)
    assert document["exit_code"] == 0, capfd.readouterr()
    assert "records were left out, whole stretches of them" in document["note"]
    assert 0 < document["trainings"][0]["job"]["steps"] < 6 * 32
