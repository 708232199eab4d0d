"""Rules of the mechanism in live trainings: who is a rank, which loader it tunes, what a swap leaves."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from pathlib import Path

import pytest
from live_driver import block
from test_live import BATCH, SAMPLES, batches_of, epoch_lengths, expected

PATIENCE_S = 60.0  # only a failing test waits so long


def after(log: list[dict], result: dict, steps: int) -> list[dict]:
    """The batches of one block."""
    batches = [entry for entry in log if entry["at"] == "batch"]
    return batches[result["first_step"] : result["first_step"] + steps]


# --- Who is a rank, and what it leaves behind ------------------------------------------------------------


def test_hooks_of_torch_wait_for_the_first_loader(live) -> None:
    """At import torch is half built."""
    run = live("saves")
    run.hello()
    log = run.log()
    assert [entry["wrapped"] for entry in log if entry["at"] in ("before", "after")] == [False, True]


def test_the_rank_comes_from_torch_distributed_not_from_the_environment(live) -> None:
    hello = live("distributed_rank").hello()
    assert (hello["rank"], hello["world"]) == (0, 1)


def test_a_process_that_only_reads_batches_never_connects(live) -> None:
    run = live("evaluates_only", batches=150, once=True)
    assert run.ended() == 0
    assert len(batches_of(run.log())) == 152
    assert run.state.hellos == {}
    assert run.connections() == 0


def test_with_no_optimizer_step_the_loader_with_most_batches_is_taken_and_said(live) -> None:
    run = live("evaluates_only", batches=40, once=False)
    loader = run.hello()["loader"]
    assert not loader["trained"]
    assert loader["optimizer_steps"] == 0
    assert loader["epoch_steps"] == 40  # the other one has two
    assert len(batches_of(run.log())) >= 200
    (result,) = run.run(block(0))
    assert result["steps"] == 6


def test_a_helper_that_reads_batches_stays_untouched(live) -> None:
    run = live("helper_before_training")
    assert run.hello()["pid"] == run.pid
    run.run(block(0), block(1))
    log = run.finish()
    assert len(run.state.hellos) == 1
    assert run.connections() <= 1
    helper = [entry["indices"] for entry in log if entry["at"] == "helper"]
    assert len(helper) > 6
    whole = [list(range(i, min(i + BATCH, SAMPLES))) for i in range(0, SAMPLES, BATCH)]
    assert helper[:6] == whole


def test_a_claimed_rank_hands_nothing_of_ours_on(live) -> None:
    run = live("environment")
    (first,) = run.run(block(0))
    log = run.finish()
    before, during = after(log, {"first_step": 0}, 1), after(log, first, 6)
    assert before[0]["variables"]["FEEDTUNE_RUN_ID"] == "0123"  # it was there
    for entry in during:
        assert entry["variables"] == {"PYTHONPATH": "/of/the/user"}


def test_the_end_of_a_rank_is_seen_while_a_child_of_it_lives_on(live) -> None:
    """A child that kept the connection open would hide it."""
    run = live("child_that_stays")
    run.run(block(0, steps=20))
    run.begin(block(0, steps=1_000_000))
    (child,) = [entry["pid"] for entry in run.log() if entry["at"] == "child"]
    try:
        os.kill(run.pid, signal.SIGKILL)
        assert run.server.wait(lambda: run.pid in run.state.lost, PATIENCE_S)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_no_thread_of_ours_lives_in_a_rank(live) -> None:
    """Workers are forked from it: a thread that holds a lock then would hold it in them for ever."""
    run = live("threads")
    results = run.run(block(0), block(2), block(0, kind="baseline", cache=4, cache_bytes=1 << 20))
    results += run.run(block(0, kind="ceiling"))
    log = run.finish()
    for result in results:
        seen = {name for entry in after(log, result, 6) for name in entry["threads"]}
        assert seen <= {"MainThread", "QueueFeederThread"}


@pytest.mark.parametrize("epochs", [400, 4])
def test_what_a_script_has_printed_is_written_before_its_rank_is_kept(live, tmp_path, epochs) -> None:
    """At the end of all blocks, and at its own: the buffer goes with the process that is killed."""
    printed = tmp_path / "printed"
    run = live("prints", printed=str(printed), epochs=epochs)
    if epochs == 4:
        run.run(block(0, steps=1000))
        assert run.ended() == 0
        assert printed.read_text().splitlines()[-1] == "step 24"
    else:
        (result,) = run.run(block(0, steps=20))
        run.finish()
        assert printed.read_text().splitlines()[-1] == f"step {result['total']}"


# --- Which loader ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("differ", ["sampler", "batch_size"])
def test_loaders_over_one_dataset_made_at_one_line_are_told_apart(live, differ) -> None:
    run = live("one_line", differ=differ)
    run.run(block(0, steps=14), block(2, steps=14))
    log = run.finish()
    got = batches_of(log)
    assert got == expected(len(got)) if differ == "sampler" else {len(batch) for batch in got} <= {4, 2}
    evaluated = [entry["indices"] for entry in log if entry["at"] == "eval"]
    size = 2 * BATCH if differ == "batch_size" else BATCH
    assert len(evaluated) >= 6
    assert {len(batch) for batch in evaluated} == {size, SAMPLES % size}
    assert "eval" in {record.tag for _, record in run.records()}


def test_workers_run_on_over_the_seam_of_an_epoch(live) -> None:
    run = live("workers_by_pid")
    (result,) = run.run(block(2, steps=20))
    log = run.finish()
    pids = {pid for entry in after(log, result, 20) for pid in entry["made_by"]}
    assert len(pids) == 2
    assert len({entry["epoch"] for entry in after(log, result, 20)}) >= 3


def test_the_scripts_own_iterator_and_its_workers_end_at_take_over(live) -> None:
    run = live("workers_by_pid")
    (result,) = run.run(block(1, steps=8))
    log = run.finish()
    own = {pid for entry in after(log, {"first_step": 0}, result["first_step"]) for pid in entry["made_by"]}
    assert own
    assert after(log, {"first_step": 0}, 1)[0]["iterator"]
    for entry in after(log, result, 8):
        assert not entry["iterator"]
        assert not own & set(entry["children"])


def test_no_worker_lives_while_cached_batches_are_replayed(live) -> None:
    run = live("workers_by_pid")
    baseline, ceiling, last = run.run(
        block(3, kind="baseline", cache=4, cache_bytes=1 << 20), block(0, kind="ceiling"), block(2)
    )
    log = run.finish()
    assert [len(entry["children"]) for entry in after(log, baseline, 6)] == [3] * 6
    assert [entry["children"] for entry in after(log, ceiling, 6)] == [[]] * 6
    assert [len(entry["children"]) for entry in after(log, last, 6)] == [2] * 6


def test_an_lmdb_environment_of_a_block_without_workers_is_not_the_workers(live, tmp_path) -> None:
    """Used in a fork it hangs, or reads wrong data."""
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "store")) as store, store.begin(write=True) as transaction:
        for index in range(80):
            transaction.put(b"%d" % index, b"%d" % (7 * index))
    run = live("lazy_store", data=str(tmp_path / "store"), count=80)
    results = run.run(block(0, steps=10), block(2, steps=30), block(0), block(1))
    log = run.finish()
    assert [result["steps"] for result in results] == [10, 30, 6, 6]
    for entry in log:
        if entry["at"] == "batch":
            assert entry["values"] == [7 * index for index in entry["indices"]]


def test_uneven_batches_are_cached_until_there_are_fifty(live) -> None:
    run = live("two_sizes", rule=lambda *_: 0)
    (result,) = run.run(block(0, steps=12, kind="baseline", cache=10, cache_bytes=1 << 20))
    assert len(result["cached"]) == 50
    assert result["steps"] >= 50


# --- Loaders of all kinds --------------------------------------------------------------------------------


def test_an_iterable_that_can_be_read_once_is_named_with_its_way_out(live) -> None:
    run = live("one_shot", samples=40)
    run.run(block(0, steps=6), block(0, steps=30))
    assert run.state.failures
    text = run.state.failures[0]["text"]
    assert "yields nothing when it is read again" in text
    assert "--isolate" in text


def test_a_timeout_is_left_out_where_torch_refuses_it(live) -> None:
    run = live("waits_with_timeout")
    run.run(block(1), block(0), block(2))
    got = batches_of(run.finish())
    assert got == expected(len(got))


def test_iterable_data_that_tells_its_length(live) -> None:
    run = live("sized_iterable")
    assert run.hello()["loader"]["iterable"]
    run.run(block(0, steps=12), block(2, steps=12))
    log = run.finish()
    assert {entry["value"] for entry in log if entry["at"] == "length"} == {6}
    assert "Length of IterableDataset" not in run.errors()  # torch's word for more samples than were told


@pytest.mark.slow
def test_torchs_warning_on_worker_counts_comes_once(live) -> None:
    run = live("always_warns")
    run.run(block(201), block(202))
    run.finish()
    # From the constructor and from the one iterator that was the script's own, as without us.
    assert run.errors().count("will create 200 worker") == 2
    assert run.errors().count("will create") == 2


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
def test_a_stateful_loader_is_seen(live) -> None:
    """It has an __iter__ of its own and never calls the __init__ of torch's loader."""
    run = live("stateful")
    assert run.hello()["loader"]["epoch_steps"] == 6
    results = run.run(block(1), block(0), block(2), block(1, steps=20))
    log = run.finish()
    assert [result["steps"] for result in results] == [6, 6, 6, 20]
    assert set(epoch_lengths(log)) == {6}
    got = batches_of(log)
    for begin in range(0, len(got) - 6, 6):
        assert sorted(itertools.chain(*got[begin : begin + 6])) == list(range(SAMPLES))


@pytest.mark.skipif(importlib.util.find_spec("webdataset") is None, reason="webdataset is not installed")
def test_webdatasets_loader_is_seen(live) -> None:
    run = live("web_loader")
    assert run.hello()["loader"]["iterable"]
    first, second = run.run(block(1, steps=12), block(2, steps=12))
    got = batches_of(run.finish())
    for result in (first, second):
        begin = result["first_step"]
        whole = sorted(itertools.chain(*got[begin : begin + 12]))
        assert whole == sorted([*range(SAMPLES), *range(SAMPLES)])
