"""``feedtune tune`` on unmodified scripts: one start, true rates, nothing touched, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import jsonschema
import pytest
from tuning import BIN, FEEDTUNE, SCRIPTS, environment, feedtune, folder_hash, result_of, wait_until_gone

import feedtune as package

SCHEMAS = Path(package.__file__).parent / "docs" / "schemas"
SLEEP_A_BATCH = 32 * 0.004  # of one worker of latency.py


def bound(block: dict) -> float:
    """The rate that the sleeping alone allows."""
    return max(1, block["settings"]["num_workers"]) / SLEEP_A_BATCH


@pytest.mark.slow
def test_latency_bound_script_gets_many_workers_and_no_block_reads_above_its_bound(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["tune", "--json", "--out", run, "--trials", "5", "--max-workers", "16", "--block-seconds", "0.6"]
    done = feedtune(*words, "--", sys.executable, SCRIPTS / "latency.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == result_of(run)
    jsonschema.validate(document, json.loads((SCHEMAS / "feedtune.tune-1.json").read_text()))
    assert document["outcome"] == "gain"
    assert document["starts"] == 1
    assert document["baseline"]["settings"]["num_workers"] == 0
    assert document["best"]["settings"]["num_workers"] >= 16
    assert document["gain"]["low"] > 1
    for block in document["blocks"]:
        if block["kind"] != "ceiling" and block["rate"] is not None:
            assert block["rate"] <= 1.03 * bound(block), block
            assert block["steps"] % max(1, block["settings"]["num_workers"]) == 0
            if block[
                "worker_s"
            ]:  # the workers' own clock bounds the rate, and sleeping takes at least so long
                assert block["rate"] <= 1.0001 * block["settings"]["num_workers"] / block["worker_s"], block
                assert block["rate"] <= 1.0001 * bound(block), block
    with_workers = [b for b in document["blocks"] if b["rate"] and b["settings"]["num_workers"]]
    assert all(block["worker_s"] for block in with_workers)
    again = feedtune("report", "--json", run, cwd=tmp_path)
    assert json.loads(again.stdout) == document
    shown = feedtune("report", run, cwd=tmp_path)
    assert "GAIN" in shown.stdout
    assert document["snippet"] in shown.stdout


def test_two_gloo_ranks_change_at_the_same_step_and_the_work_folder_stays(
    tmp_path: Path, photos: Path
) -> None:
    work, logs, run = tmp_path / "work", tmp_path / "logs", tmp_path / "run"
    work.mkdir()
    logs.mkdir()
    (work / "train.py").write_text((SCRIPTS / "photos_ddp.py").read_text())
    (work / "last.pt").write_text("an older checkpoint")
    before = folder_hash(work)
    torchrun = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", "train.py", photos]
    words = ["tune", "--json", "--out", run, "--block-seconds", "0.6"]
    done = feedtune(*words, "--", *torchrun, cwd=work, LOGS=str(logs))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["world_size"] == 2
    assert document["starts"] == 1
    assert sorted((logs / "starts").read_text().split()) == ["0", "1"]
    assert document["ceiling"]["rate"] > 0
    candidates = [b for b in document["blocks"] if b["kind"] == "candidate" and b["rate"]]
    measured = {json.dumps(b["settings"]) for b in candidates}
    assert len(measured) >= 6, done.stderr
    for block in document["blocks"]:
        assert len(set(block["first_steps"].values())) <= 1, block
    # Each rank's own log: the ceiling replays batches that one worker made, so it does not show here.
    ranks = [(logs / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    common = min(map(len, ranks))
    assert common > 100
    assert ranks[0][:common] == ranks[1][:common]
    changes = [workers for workers, _ in groupby(line.split()[1] for line in ranks[0])]
    assert len(changes) >= 6
    assert folder_hash(work) == before
    assert not wait_until_gone(str(photos))


def start_tuning(tmp_path: Path, *words: str | Path) -> subprocess.Popen[str]:
    """A tuning in its own session that has measured its baseline."""
    process = subprocess.Popen(
        [*FEEDTUNE, "tune", "--out", str(tmp_path / "run"), "--", *map(str, words)],
        cwd=tmp_path,
        env=environment(LOGS=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " baseline " in line:
            return process
    raise AssertionError("no baseline was measured")


def torch_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "sem."))}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_a_partial_result_and_nothing_else(tmp_path: Path, number: int) -> None:
    segments = torch_segments()
    process = start_tuning(tmp_path, sys.executable, SCRIPTS / "latency.py")
    process.send_signal(number)
    assert process.stderr is not None
    rest = process.stderr.read()
    assert process.wait(30) == 130, rest
    process.stderr.close()
    assert "Traceback" not in rest
    document = result_of(tmp_path / "run")
    assert document["outcome"] == "failed"
    assert document["blocks"][0]["kind"] == "baseline"
    assert not wait_until_gone(str(tmp_path))
    assert not (tmp_path / "run" / "boot").exists()
    assert torch_segments() <= segments


@pytest.mark.slow
def test_sigkill_of_feedtune_ends_the_ranks_in_their_own_sessions(tmp_path: Path, photos: Path) -> None:
    segments = torch_segments()
    torchrun = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", SCRIPTS / "photos_ddp.py", photos]
    process = start_tuning(tmp_path, *torchrun)
    process.kill()
    process.wait(10)
    assert process.stderr is not None
    process.stderr.close()
    assert not wait_until_gone(str(photos))
    assert torch_segments() <= segments


@pytest.mark.slow
def test_a_a_is_no_gain_in_ten_of_ten(tmp_path: Path) -> None:
    """The baseline's own settings enter as an unlabelled candidate and go through the confirmation."""
    fixed = ["--set", "num_workers=4", "--set", "prefetch_factor=2", "--set", "pin_memory=false"]

    def outcome(number: int) -> str:
        run = tmp_path / f"run{number}"
        words = ["tune", "--out", run, *fixed, "--", sys.executable, SCRIPTS / "latency.py"]
        done = feedtune(*words, cwd=tmp_path, WORKERS="4", OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        document = result_of(run)
        assert sum(b["kind"] == "candidate" for b in document["blocks"]) == 1
        assert sum(b["kind"] == "confirm" for b in document["blocks"]) == 8
        compared = document["compared"]
        assert not (compared["low"] > 1 and compared["ratio"] >= 1.02), compared
        assert document["gain"] is None
        return str(document["outcome"])

    with ThreadPoolExecutor(2) as two_at_a_time:  # the script sleeps most of its time
        outcomes = list(two_at_a_time.map(outcome, range(10)))
    assert outcomes == ["no_gain"] * 10
