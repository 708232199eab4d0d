"""Whatever fails in a script, the tuning ends with an answer: a failed block with its cause, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from tuning import BIN, SCRIPTS, feedtune, folder_hash, result_of, wait_until_gone

import feedtune as package

SCHEMA = json.loads((Path(package.__file__).parent / "docs" / "schemas" / "feedtune.tune-1.json").read_text())
QUICK = ["--trials", "2", "--max-workers", "2", "--block-seconds", "0.3", "--budget", "200"]
TORCHRUN = [BIN / "torchrun", "--standalone", "--nproc_per_node=2"]


def tuned(work: Path, run: Path, *words: str | Path, **env: str) -> dict:
    """Tune quickly; the result, after looking for what must not be left."""
    work.mkdir(exist_ok=True)
    before, shared = folder_hash(work), set(os.listdir("/dev/shm"))
    done = feedtune("tune", "--out", run, *QUICK, *words, cwd=work, OMP_NUM_THREADS="1", **env)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert folder_hash(work) == before
    assert wait_until_gone(str(run)) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("torch_")]
    assert not list(run.glob("stack.*"))
    assert not (run / "boot").exists()
    document = result_of(run)
    jsonschema.validate(document, SCHEMA)
    return document


def one_failed(document: dict) -> dict:
    """The one failed block: with two workers; blocks after it were measured in a new start."""
    failed = [block for block in document["blocks"] if block["state"] == "failed"]
    assert [block["settings"]["num_workers"] for block in failed] == [2]
    assert document["starts"] == 2
    after = document["blocks"][document["blocks"].index(failed[0]) + 1 :]
    assert [block for block in after if block["rate"]]
    assert document["outcome"] in ("no_gain", "gain", "data_bound")
    assert any(failed[0]["detail"] in line for line in document["advice"])
    return failed[0]


def fails(tmp_path: Path, mode: str, ranks: int, *words: str) -> dict:
    launcher = [sys.executable] if ranks == 1 else TORCHRUN
    command = ["--hang-timeout", "4", *words, "--", *launcher, SCRIPTS / "failing.py"]
    return one_failed(tuned(tmp_path / "work", tmp_path / "run", *command, MODE=mode))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_killed_by_the_system_is_named(tmp_path: Path, ranks: int) -> None:
    block = fails(tmp_path, "killed", ranks)
    assert block["reason"] == "worker_died"
    assert "a worker process was killed" in block["detail"]
    assert "DataLoader worker" in block["stack"]  # raised wherever the loop is at that moment


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_t7_a_bus_error_of_a_worker_is_a_full_shm(tmp_path: Path, ranks: int) -> None:
    block = fails(tmp_path, "bus", ranks)
    assert block["reason"] == "shm"
    assert "/dev/shm is full" in block["detail"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_exception_in_getitem_is_told_as_the_script_raised_it(tmp_path: Path, ranks: int) -> None:
    block = fails(tmp_path, "exception", ranks)
    assert block["reason"] == "loader_failed"
    assert "cannot be decoded" in block["detail"]
    assert "in fail" in block["stack"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_out_of_memory_is_named(tmp_path: Path, ranks: int) -> None:
    block = fails(tmp_path, "memory", ranks)
    assert block["reason"] == "gpu_memory"
    assert "CUDA out of memory" in block["detail"]
    assert "in fail_in_loop" in block["stack"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_hangs_is_found_with_its_place(tmp_path: Path, ranks: int) -> None:
    block = fails(tmp_path, "hang_worker", ranks)
    assert block["reason"] == "hang"
    assert "a worker of rank" in block["detail"]
    assert "failing.py:" in block["detail"]
    assert "fail (" in block["stack"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_hangs_is_found_with_its_rank_and_place(tmp_path: Path, ranks: int) -> None:
    block = fails(tmp_path, "hang_loop", ranks)
    assert block["reason"] == "hang"
    assert f"rank {ranks - 1} hangs in its loop, in fail_in_loop" in block["detail"]
    if ranks == 2:
        assert "rank 0 hangs" not in block["detail"]
    assert "fail_in_loop" in block["stack"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    block = fails(tmp_path, "rank_killed", 2)
    assert block["reason"] == "rank_died"
    assert block["detail"].startswith("rank 1 was ended by SIGKILL")


@pytest.mark.slow
def test_a_rank_that_leaves_its_loop_alone_is_named(tmp_path: Path) -> None:
    block = fails(tmp_path, "exit", 2)
    assert block["reason"] == "ranks_diverged"
    assert block["detail"].startswith("rank 1 ended its training after")


@pytest.mark.slow
def test_ranks_with_unequal_numbers_of_batches_are_named(tmp_path: Path) -> None:
    words = ["--hang-timeout", "4", "--pairs", "4", "--", *TORCHRUN, SCRIPTS / "uneven.py"]
    document = tuned(tmp_path / "work", tmp_path / "run", *words)
    failed = [block for block in document["blocks"] if block["state"] == "failed"]
    assert failed
    for block in failed:
        assert block["reason"] == "ranks_diverged"
        assert block["detail"].startswith("rank 0 ended its training after 125 steps") or block[
            "detail"
        ].startswith("rank 1 ended its training after 100 steps")


@pytest.mark.slow
def test_baseline_that_always_fails_shows_the_scripts_own_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["tune", "--out", run, *QUICK, "--", sys.executable, SCRIPTS / "failing.py"]
    done = feedtune(*words, cwd=tmp_path, MODE="exception", FROM="2", OWN="2")
    assert done.returncode == 4
    assert "the baseline failed 3 times (loader_failed)" in done.stderr
    assert "ValueError: sample" in done.stderr
    assert wait_until_gone(str(run)) == []
    assert result_of(run)["outcome"] == "failed"


@pytest.mark.slow
def test_without_py_spy_the_place_comes_from_faulthandler(tmp_path: Path) -> None:
    """A PATH without py-spy, and an interpreter beside which there is none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(os.path.realpath(sys.executable))
    code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from feedtune.cli import main; main()"
    root = str(Path(package.__file__).parents[1])
    (tmp_path / "work").mkdir()
    run = tmp_path / "run"
    words = ["tune", "--out", str(run), *QUICK, "--hang-timeout", "4", "--", sys.executable]
    done = subprocess.run(
        [
            str(folder / "python"),
            "-c",
            code,
            ":".join([root, *sys.path]),
            *words,
            str(SCRIPTS / "failing.py"),
        ],
        cwd=tmp_path / "work",
        env={**os.environ, "PATH": "/usr/bin:/bin", "MODE": "hang_worker", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    block = one_failed(result_of(run))
    assert "a worker of rank 0 hangs in fail (" in block["detail"]


@pytest.mark.slow
def test_t12_iterable_data_that_is_not_split_is_found_and_keeps_its_worker_count(tmp_path: Path) -> None:
    words = ["--", sys.executable, SCRIPTS / "iterable.py"]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, WORKERS="2")
    assert {b["settings"]["num_workers"] for b in document["blocks"] if b["kind"] == "candidate"} == {2}
    assert any("is not split between its workers" in line for line in document["advice"])
    assert any("--allow-semantic" in line for line in document["advice"])


@pytest.mark.slow
@pytest.mark.parametrize("split", ["", "1"])
def test_t12_more_workers_of_data_that_is_not_split_are_no_gain(tmp_path: Path, split: str) -> None:
    words = ["--allow-semantic", "--trials", "4", "--", sys.executable, SCRIPTS / "iterable.py"]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, WORKERS="1", SPLIT=split)
    more = [b for b in document["blocks"] if b["settings"]["num_workers"] == 2 and b["kind"] == "candidate"]
    assert more
    if split:
        assert all(block["state"] in ("ok", "unstable") for block in more)
        assert document["best"]["settings"]["num_workers"] == 2
        assert not any("not split" in line for line in document["advice"])
    else:
        assert all(block["reason"] == "duplicates" for block in more)
        assert document["best"]["settings"]["num_workers"] == 1


@pytest.mark.slow
def test_a_script_that_forks_between_epochs_keeps_its_workers(tmp_path: Path) -> None:
    """A child that frees what it has inherited of a loader must not end the workers of its parent."""
    logs = tmp_path / "logs"
    logs.mkdir()
    fixed = ["--set", "num_workers=2", "--set", "prefetch_factor=2"]
    words = ["--writable", logs, *fixed, "--hang-timeout", "8", "--", sys.executable, SCRIPTS / "forking.py"]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, LOGS=str(logs))
    assert [b["reason"] for b in document["blocks"] if b["state"] == "failed"] == []
    assert document["starts"] == 1
    assert (logs / "helper").read_text().count("ran") > 3
    assert "Exception ignored" not in (tmp_path / "run" / "command.log").read_text()


def test_iterable_data_without_workers_leaves_nothing_to_try(tmp_path: Path) -> None:
    words = ["--", sys.executable, SCRIPTS / "iterable.py"]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, WORKERS="0")
    assert document["outcome"] == "no_gain"
    assert "Nothing to try" in document["verdict"]


@pytest.mark.slow
def test_a_handle_shared_by_all_copies_of_the_data_isolates_the_trials(tmp_path: Path) -> None:
    records, wrong = tmp_path / "records", tmp_path / "log"
    records.write_bytes(b"".join(b"%016d" % i for i in range(20000)))
    wrong.mkdir()
    words = ["--writable", wrong, "--", sys.executable, SCRIPTS / "global_handle.py", records]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, WRONG=str(wrong / "samples"))
    assert list(wrong.iterdir()) == []
    workers = {b["settings"]["num_workers"] for b in document["blocks"] if b["rate"]}
    assert 2 in workers
    assert document["starts"] > len(workers)
    assert any(str(records) in line for line in document["advice"])


@pytest.mark.slow
def test_isolated_trials_also_try_start_methods(tmp_path: Path) -> None:
    fixed = ["--set", "num_workers=2", "--set", "prefetch_factor=2", "--budget", "600"]
    words = ["--isolate", *fixed, "--", sys.executable, SCRIPTS / "latency.py"]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, WORKERS="2", SAMPLE_S="0.001")
    methods = {b["settings"]["multiprocessing_context"] for b in document["blocks"] if b["rate"]}
    assert "spawn" in methods
    runs = [b for b in document["blocks"] if b["kind"] != "ceiling"]
    assert document["starts"] == len(runs)


@pytest.mark.slow
def test_start_methods_are_not_tried_where_a_spawned_worker_would_train(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    text = (SCRIPTS / "latency.py").read_text()
    script.write_text(text.replace('if __name__ == "__main__":', "if True:"))
    fixed = ["--set", "num_workers=2", "--set", "prefetch_factor=2", "--budget", "600"]
    words = ["--isolate", *fixed, "--", sys.executable, script]
    document = tuned(tmp_path / "work", tmp_path / "run", *words, WORKERS="1", SAMPLE_S="0.001")
    assert {b["settings"]["multiprocessing_context"] for b in document["blocks"]} == {None}
    assert any('no if __name__ == "__main__"' in line for line in document["advice"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--set", "multiprocessing_context=spawn"], "--isolate"),
        (["--set", "in_order=false"], "--allow-semantic"),
        (["--loader", "train.py"], "FILE:LINE"),
    ],
)
def test_settings_that_need_another_option_say_which(tmp_path: Path, words: list[str], text: str) -> None:
    done = feedtune("tune", *words, "--", "true", cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
