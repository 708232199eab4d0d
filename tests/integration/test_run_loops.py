"""``feedtune run`` on loops of every kind: which steps it records, and what it leaves alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from applying import SCHEMAS, identity_of, script, tuned
from tuning import FEEDTUNE, SCRIPTS, feedtune, result_of

LONG = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader, Dataset, dataloader

    class Numbers(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.ones(2)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(loader, steps):
        for _, batch in zip(range(steps), loader):
            model(batch).sum().backward()
            optimizer.step()
"""


def test_after_enough_steps_the_class_is_as_torch_made_it(tmp_path: Path) -> None:
    text = (
        LONG
        + """
    loader = DataLoader(Numbers(), batch_size=2)
    own = dataloader._BaseDataLoaderIter.__next__
    train(loader, 8)
    watched = dataloader._BaseDataLoaderIter.__next__
    train(loader, 8)
    left = dataloader._BaseDataLoaderIter.__next__
    print(watched is own, left is own.__wrapped__)
    print(os.environ.get("PYTHONPATH"), [name for name in os.environ if "FEEDTUNE" in name])
    """
    )
    path = script(tmp_path, text)
    words = ["--steps", "10", "--out", tmp_path / "run", "--", sys.executable, path]
    done = feedtune("run", *words, cwd=tmp_path, PYTHONPATH="/mine")
    assert done.stdout == "True True\n/mine []\n", done.stderr
    document = result_of(tmp_path / "run")
    assert document["steps_asked"] == 10
    assert document["trainings"][0]["job"]["steps"] == 10
    lines = (tmp_path / "run" / "steps.rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)[0] for line in lines] == list(range(10))


@pytest.mark.slow
def test_a_run_folder_that_goes_costs_the_report_and_nothing_else(tmp_path: Path) -> None:
    text = (
        LONG
        + f"""
    import shutil
    loader = DataLoader(Numbers(), batch_size=1)
    train(loader, 8)
    shutil.rmtree({str(tmp_path / "run")!r})
    for _ in range(20):
        train(loader, 40)
    print("trained on")
    sys.exit(7)
    """
    )
    path = script(tmp_path, text)
    done = feedtune("run", "--out", tmp_path / "run", "--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "trained on\n"
    assert "Traceback" not in done.stderr
    assert "could not be written" in done.stderr
    assert "was removed meanwhile" in done.stderr


MANY = (
    LONG
    + """
    def loader():
        return DataLoader(Numbers(), batch_size=4)

    def evaluate():
        with torch.no_grad():
            for batch in DataLoader(Numbers(), batch_size=20):
                model(batch)

    kind = sys.argv[1]
    if kind == "eval":
        for epoch in range(3):
            train(loader(), 10)
            evaluate()
    elif kind == "made":  # datasets made anew, each where the one before it lay
        class Counted(Numbers):
            def __init__(self, count):
                self.count = count
            def __len__(self):
                return self.count
        def make(count):
            return DataLoader(Counted(count), batch_size=4)
        for epoch in range(3):
            train(make(40), 10)
            for batch in make(20):
                model(batch)
    elif kind == "gan":
        import itertools, time
        class Slow(Numbers):
            def __getitem__(self, index):
                time.sleep(0.002)
                return torch.ones(2)
        for one, two in zip(loader(), DataLoader(Slow(), batch_size=4)):
            model(one + two).sum().backward()
            optimizer.step()
    elif kind == "stages":  # the first loader stays alive
        first, second = loader(), DataLoader(Numbers(), batch_size=1)
        train(first, 10)
        train(second, 40)
    elif kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader
        loader = StatefulDataLoader(Numbers(), batch_size=4)
        train(loader, 10)
        print(loader.num_workers)
    elif kind == "thread":
        import queue, threading
        ready = queue.Queue(2)
        def fill():
            for _ in range(4):
                for batch in loader():
                    ready.put(batch)
            ready.put(None)
        threading.Thread(target=fill).start()
        while (batch := ready.get()) is not None:
            model(batch).sum().backward()
            optimizer.step()
    elif kind == "fork":
        import torch.multiprocessing as mp
        def rank(number):
            os.environ.update(RANK=str(number), WORLD_SIZE="2")
            train(loader(), 10)
        mp.start_processes(rank, nprocs=2, start_method="fork")
    elif kind == "twice":
        train(loader(), 5)
        if os.fork() == 0:
            train(loader(), 5)
            sys.exit()
        os.wait()
    elif kind == "killed":
        import time
        train(loader(), 10)
        time.sleep(1.1)
        train(loader(), 3)
        os.kill(os.getpid(), 9)
"""
)


def watched(tmp_path: Path, kind: str, code: int = 0) -> dict:
    """The document of one training of ``MANY``."""
    words = ["--out", tmp_path / "run", "--", sys.executable, script(tmp_path, MANY), kind]
    done = feedtune("run", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == code, done.stderr
    document = result_of(tmp_path / "run")
    jsonschema.validate(document, json.loads((SCHEMAS / "feedtune.run-1.json").read_text()))
    assert (document["note"] is None) == (code == 0)
    return document


def test_evaluation_is_reported_apart(tmp_path: Path) -> None:
    (training,) = watched(tmp_path, "eval")["trainings"]
    assert training["job"]["steps"] == 30
    assert training["job"]["first"]["count"] == 3
    assert {tag: found["count"] for tag, found in training["job"]["excluded"].items()} == {"eval": 2}
    (other,) = training["ranks"][0]["others"]
    assert (other["batches"], other["iterations"], other["trains"]) == (6, 3, False)


@pytest.mark.slow
def test_loaders_made_anew_each_epoch_at_one_line_stay_apart(tmp_path: Path) -> None:
    (training,) = watched(tmp_path, "made")["trainings"]
    assert training["job"]["steps"] == 30
    (other,) = training["ranks"][0]["others"]
    assert (other["batches"], other["trains"]) == (15, False)


@pytest.mark.slow
def test_of_two_loaders_that_train_the_first_is_recorded_and_waits_for_both_count(tmp_path: Path) -> None:
    (training,) = watched(tmp_path, "gan")["trainings"]
    assert training["loader"]["dataset"] == "Numbers"
    assert training["job"]["steps"] == 10
    (other,) = training["ranks"][0]["others"]
    assert (other["dataset"], other["trains"]) == ("Slow", True)
    assert training["finding"]["class"] == "data"
    assert training["job"]["budget"]["parts"]["data_wait_s"] > 4 * 0.002


@pytest.mark.slow
def test_training_that_goes_on_with_another_loader_is_followed(tmp_path: Path) -> None:
    (training,) = watched(tmp_path, "stages")["trainings"]
    assert training["job"]["steps"] == 50
    assert training["job"]["excluded"]["restart"]["count"] == 1
    assert training["ranks"][0]["others"] == []


@pytest.mark.slow
def test_a_loader_that_asks_nothing_of_dataloader_is_watched_and_set(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    (training,) = watched(tmp_path, "stateful")["trainings"]
    assert training["job"]["steps"] == 10
    run = tuned(tmp_path / "tuned", identity_of(tmp_path / "run"), num_workers=3)
    words = ["apply", run, "--", sys.executable, tmp_path / "train.py", "stateful"]
    done = feedtune(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]
    assert done.stderr.count("feedtune apply: num_workers=3") == 1


@pytest.mark.slow
def test_waits_of_a_prefetching_thread_are_not_the_loops(tmp_path: Path) -> None:
    (training,) = watched(tmp_path, "thread")["trainings"]
    assert training["ranks"][0]["own_thread"] is False
    assert training["job"]["waits"] is None
    assert training["job"]["rate"] is not None


@pytest.mark.slow
def test_forked_ranks_write_their_last_steps(tmp_path: Path) -> None:
    """Their processes end without the handlers of ``atexit``."""
    (training,) = watched(tmp_path, "fork")["trainings"]
    assert [rank["steps"] for rank in training["ranks"]] == [10, 10]
    assert [rank["others"] for rank in training["ranks"]] == [[], []]


@pytest.mark.slow
def test_a_child_of_a_rank_writes_nothing(tmp_path: Path) -> None:
    (training,) = watched(tmp_path, "twice")["trainings"]
    assert training["job"]["steps"] == 5


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_what_it_had_written(tmp_path: Path) -> None:
    document = watched(tmp_path, "killed", code=137)
    (training,) = document["trainings"]
    assert (
        document["note"]
        == f"the command was ended by SIGKILL after {training['job']['steps']} recorded steps"
    )
    assert training["job"]["steps"] == 11
    assert training["ranks"][0]["others"] is None


@pytest.mark.slow
def test_an_applied_training_can_be_watched(tmp_path: Path) -> None:
    path = script(tmp_path, MANY)
    assert feedtune("run", "--out", tmp_path / "one", "--", sys.executable, path, "eval", cwd=tmp_path)
    run = tuned(tmp_path / "tuned", identity_of(tmp_path / "one"), num_workers=1)
    nested = [*FEEDTUNE, "apply", run, "--", sys.executable, path, "eval"]
    done = feedtune("run", "--out", tmp_path / "two", "--", *nested, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set on the DataLoader") == 1
    (training,) = result_of(tmp_path / "two")["trainings"]
    assert training["loader"]["num_workers"] == 1
    assert training["loader"]["identity"] == identity_of(tmp_path / "one")
    assert training["job"]["steps"] == 30


@pytest.mark.slow
def test_a_real_tuning_is_applied(tmp_path: Path) -> None:
    latency = [sys.executable, SCRIPTS / "latency.py"]
    words = ["--out", tmp_path / "run", "--trials", "2", "--max-workers", "8", "--block-seconds", "0.4"]
    done = feedtune("tune", *words, "--", *latency, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = result_of(tmp_path / "run")
    jsonschema.validate(document, json.loads((SCHEMAS / "feedtune.tune-1.json").read_text()))
    assert document["loader"]["identity"]["sampler"] == "BatchSampler(SequentialSampler)"
    applied = feedtune("apply", tmp_path / "run", "--", *latency, cwd=tmp_path, STEPS="20")
    assert applied.returncode == 0, applied.stderr
    settings = document["best"]["settings"]
    assert f"num_workers={settings['num_workers']}, " in applied.stderr
    assert "steps/s" in applied.stdout
