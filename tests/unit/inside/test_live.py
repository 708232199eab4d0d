"""Blocks inside a live training: which batches the loop gets, and which loader is taken."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from live_driver import bare, block

from feedtune.analysis.limits import Needs, broken_limit
from feedtune.settings import LoaderSettings

SAMPLES, BATCH = 22, 4


def orders(count: int = SAMPLES):
    """The passes of the scenarios' sampler, one after the other."""
    from live_scenarios import order

    return (order(number, count) for number in itertools.count())


def batches_of(log: list[dict]) -> list[list[int]]:
    return [entry["indices"] for entry in log if entry["at"] == "batch"]


def expected(count: int, size: int = BATCH, drop_last: bool = False) -> list[list[int]]:
    """The first ``count`` batches that the bare script would get."""
    found: list[list[int]] = []
    for indices in orders():
        cut = [indices[i : i + size] for i in range(0, len(indices), size)]
        found += [batch for batch in cut if not drop_last or len(batch) == size]
        if len(found) >= count:
            return found[:count]
    raise AssertionError


def epoch_lengths(log: list[dict]) -> list[int]:
    """Batches of each epoch that came to its end."""
    whole = {entry["epoch"] for entry in log if entry["at"] == "epoch"}
    numbers = [entry["epoch"] for entry in log if entry["at"] == "batch"]
    return [numbers.count(epoch) for epoch in sorted(whole)]


BLOCKS = [block(workers) for workers in (0, 2, 3, 0, 1)]
FEW = BLOCKS[:3]


@pytest.mark.parametrize("name", ["plain", "with_workers", "persistent", "new_loader_each_epoch"])
def test_the_samplers_order_survives_every_swap(live, name) -> None:
    run = live(name)
    results = run.run(*BLOCKS)
    log = run.finish()
    got = batches_of(log)
    assert [result["steps"] for result in results] == [6] * len(BLOCKS)
    assert len(got) >= 6 * len(BLOCKS)
    assert got == expected(len(got))
    assert set(epoch_lengths(log)) == {6}


def test_a_batch_sampler_is_read_in_its_order(live) -> None:
    run = live("batch_sampler")
    run.run(*FEW)
    log = run.finish()
    got = batches_of(log)
    assert got == expected(len(got), drop_last=True)
    assert set(epoch_lengths(log)) == {5}


def test_a_loader_without_batches_of_its_own(live) -> None:
    run = live("unbatched")
    assert run.hello()["loader"]["batch_size"] is None
    run.run(*BLOCKS)
    log = run.finish()
    got = batches_of(log)
    assert [[index] for index in got] == expected(len(got), size=1)
    assert set(epoch_lengths(log)) == {SAMPLES}


def test_an_endless_iterator_made_in_the_constructor(live) -> None:
    run = live("infinite")
    assert run.hello()["loader"]["epoch_steps"] is None
    run.run(*FEW)
    got = batches_of(run.finish())
    assert got == expected(len(got))


def test_a_subclass_sees_every_batch_pass(live) -> None:
    run = live("subclass")
    run.run(*FEW)
    got = batches_of(run.finish())
    assert [[index - 1000 for index in batch] for batch in got] == expected(len(got))


def test_iterable_data_is_read_whole_in_each_epoch(live) -> None:
    run = live("iterable")
    assert run.hello()["loader"]["iterable"]
    results = run.run(*[block(workers, steps=12) for workers in (0, 2, 3)])
    got = batches_of(run.finish())
    for result in results:
        begin = result["first_step"]
        for whole in (got[begin : begin + 6], got[begin + 6 : begin + 12]):  # six batches are all the data
            assert sorted(itertools.chain(*whole)) == list(range(SAMPLES))


def test_an_epoch_left_early_loses_nothing_and_repeats_nothing(live) -> None:
    run = live("breaks_off")
    run.run(*FEW)
    log = run.finish()
    per_epoch = [
        [entry["indices"] for entry in log if entry["at"] == "batch" and entry["epoch"] == epoch]
        for epoch in range(max(entry["epoch"] for entry in log if entry["at"] == "batch"))
    ]
    assert {len(batches) for batches in per_epoch} == {4}


def test_validation_is_left_alone_and_cut_out(live, zygote, tmp_path) -> None:
    run = live("with_validation")
    assert run.hello()["loader"]["epoch_steps"] == 6
    run.run(*[block(workers, steps=14) for workers in (0, 2, 3)])
    log = run.finish()
    stock = bare(zygote, tmp_path, "with_validation", epochs=3)
    validations = [entry["batches"] for entry in log if entry["at"] == "eval"]
    assert len(validations) >= 8
    assert all(batches == validations[0] for batches in validations)
    assert validations[0] == next(entry["batches"] for entry in stock if entry["at"] == "eval")
    got = batches_of(log)
    assert got == expected(len(got))
    # Validations follow steps 5, 10, ...: the record after one carries the tag, whose block began before it.
    starts = {result["k"]: result["first_step"] for result in run.state.results.values()}
    tagged = {starts[k] + record.step for k, record in run.records() if record.tag == "eval"}
    last = max(starts.values()) + 14
    seam = range(0, last, 6)  # a seam between two epochs has its own tag
    due = {step for step in range(5, last, 5) if step >= 2 and step not in (*starts.values(), *seam)}
    assert tagged == due


def test_validation_of_equal_length_made_at_the_same_line_gets_its_own_batches(live) -> None:
    run = live("twin_loaders")
    run.run(*[block(workers, steps=14) for workers in (0, 2)])
    log = run.finish()
    validations = [entry["batches"] for entry in log if entry["at"] == "eval"]
    assert len(validations) >= 4
    for batches in validations:
        assert sorted(itertools.chain(*batches)) == list(range(1000, 1000 + SAMPLES))
    got = batches_of(log)
    assert got == expected(len(got))
    assert "eval" in {record.tag for _, record in run.records()}


def test_data_and_loader_made_anew_each_epoch_go_on_in_the_same_block(live) -> None:
    run = live("everything_made_each_epoch")
    first, second = run.run(block(0, steps=14), block(2, steps=14))
    log = run.finish()
    assert (first["steps"], second["steps"]) == (14, 14)
    assert second["first_step"] == first["first_step"] + 14
    got = batches_of(log)
    assert got == expected(len(got))
    assert set(epoch_lengths(log)) == {6}
    assert len(run.state.hellos) == 1
    assert {record.tag for _, record in run.records()} <= {None, "epoch"}


def test_a_pause_in_a_block_is_none_of_its_time(live) -> None:
    """Else a long validation would end a block before its cycles are measured."""
    told = []

    def rule(*asked) -> int:
        told.append((set(asked[2]), asked[4]))
        return 0

    run = live("with_validation", rule=rule, pause_s=0.4)
    (result,) = run.run(block(0, steps=14))
    ((pauses, elapsed_s),) = told
    assert len(pauses) >= 2
    assert result["end_s"] - result["start_s"] > 0.8
    assert elapsed_s < 0.3


def test_a_block_that_ends_after_a_validation_says_so(live) -> None:
    run = live("with_validation")
    results = run.run(*[block(0, steps=steps) for steps in (4, 3, 2, 4, 3, 2, 4)])
    run.finish()
    ends = {result["first_step"] + result["steps"]: result["end_tag"] for result in results}
    told = {end for end, tag in ends.items() if tag == "eval"}
    assert told == {end for end in ends if end % 5 == 0}
    assert told


def test_a_save_before_an_epochs_end_keeps_its_tag(live) -> None:
    run = live("saves_at_the_end_of_each_epoch")
    (result,) = run.run(block(0, steps=20))
    run.finish()
    tagged = {result["first_step"] + record.step: record.tag for _, record in run.records() if record.tag}
    assert tagged
    assert set(tagged.values()) == {"save"}
    assert {step % 6 for step in tagged} == {0}


def test_the_worker_count_may_be_a_numpy_integer(live) -> None:
    run = live("numpy_worker_count")
    assert run.hello()["loader"]["num_workers"] == 1


def test_a_batch_sampler_may_have_any_batch_size(live) -> None:
    loader = live("odd_batch_sampler").hello()["loader"]
    assert (loader["batch_size"], loader["epoch_steps"]) == (None, None)


def test_an_iterator_tells_its_length_in_a_block_too(live) -> None:
    run = live("length_of_iterator")
    run.run(block(0, steps=14))
    lengths = [entry["value"] for entry in run.finish() if entry["at"] == "length"]
    assert len(lengths) >= 3
    assert set(lengths) == {6}


def test_a_forked_child_of_the_rank_records_nothing(live) -> None:
    run = live("forks_a_helper")
    (result,) = run.run(block(0, steps=20))
    log = run.finish()
    assert [entry["status"] for entry in log if entry["at"] == "helper"] == [0]
    assert result["first_step"] < 12 < result["first_step"] + result["steps"]
    steps = Counter((k, record.step) for k, record in run.records())
    assert set(steps.values()) == {1}


def test_batches_out_of_order_are_neither_lost_nor_repeated(live) -> None:
    run = live("out_of_order")
    run.run(block(3, steps=15), block(3, steps=15), block(2, steps=40))
    got = [batch[0] for batch in batches_of(run.finish())]
    counts = Counter(got[: 3 * SAMPLES])  # three epochs, a few of their batches handed out early
    assert max(counts.values()) - min(counts.values()) <= 1
    assert got != [batch[0] for batch in expected(len(got), size=1)], "workers never overtook each other"


def test_what_a_rank_says_of_its_loader(live) -> None:
    run = live("with_workers")
    hello = run.hello()
    loader = hello["loader"]
    assert (hello["rank"], hello["world"], hello["pid"]) == (0, 1, run.pid)
    assert (loader["num_workers"], loader["prefetch_factor"], loader["pin_memory"]) == (2, 2, False)
    assert (loader["batch_size"], loader["epoch_steps"], loader["dataset"]) == (4, 6, "Numbers")
    assert "live_scenarios.py:" in loader["site"]
    assert loader["trained"]
    assert loader["open_files"] == []


def test_steps_are_recorded_with_their_block(live) -> None:
    run = live("plain")
    results = run.run(block(2, steps=8), block(1, steps=5))
    run.finish()
    records = run.records()
    assert [(k, record.step) for k, record in records] == [(0, s) for s in range(8)] + [
        (1, s) for s in range(5)
    ]
    assert results[1]["first_step"] == results[0]["first_step"] + 8
    for (_, before), (_, after) in itertools.pairwise(records):
        assert before.enter_s <= before.return_s <= after.enter_s
    assert {record.elements for _, record in records} <= {4, 2}


def test_workers_tell_how_long_a_batch_takes_them(live) -> None:
    run = live("two_training_loaders")  # four samples of at least a millisecond
    without, with_two = run.run(block(0), block(2))
    assert without["worker_s"] is None
    assert with_two["worker_s"] > 0.002  # read while the worker adds to it


def test_marks_lengthen_a_block_by_what_the_server_says(live) -> None:
    answers = {0: 4, 1: 3, 2: 0}
    asked = []

    def rule(_, step, pauses, pace_s, elapsed_s) -> int:
        asked.append((step, sorted(pauses), pace_s is not None, elapsed_s > 0))
        return answers[len(asked) - 1]

    run = live("plain", rule=rule)
    (result,) = run.run(block(1, steps=6))
    assert result["steps"] == 13
    assert [step for step, *_ in asked] == [6, 10, 13]
    assert all(pace and elapsed for _, _, pace, elapsed in asked)


def test_the_start_of_its_workers_is_none_of_a_blocks_time(live) -> None:
    """Else slow starts would leave no time to measure."""
    told = []

    def rule(*words) -> int:
        told.append(words[-1])
        return 0

    live("workers_start_slowly", rule=rule).run(block(1, steps=6))
    assert 0 < told[0] < 2.0


def test_a_script_that_ends_in_a_block_tells_what_it_has(live) -> None:
    run = live("short")
    (result,) = run.run(block(2, steps=1000))
    assert result["partial"]
    assert run.ended() == 0
    assert result["first_step"] + result["steps"] == 35  # the loop left the last one at an unknown time
    assert len(run.records()) == result["steps"]
    assert batches_of(run.log()) == expected(36)


def test_a_fetch_that_fails_is_told_with_its_traceback(live) -> None:
    run = live("fetch_fails")
    assert run.run(block(0), block(2)) != []
    assert "damaged sample" in run.state.errors[1][0]["text"]


def test_replayed_batches_do_not_show_what_the_loop_does_to_them(live) -> None:
    run = live("in_place")
    results = run.run(
        block(0, kind="baseline", steps=8, cache=4, cache_bytes=1 << 20),
        block(0, kind="ceiling", steps=20),
        block(1, steps=6),
    )
    log = run.finish()
    for entry in log:
        if entry["at"] == "batch":
            assert entry["values"] == [float(index) for index in entry["indices"]]
    assert [result["cloned"] for result in results] == [False, True, False]
    whole = [step for step in range(8) if (results[0]["first_step"] + step) % 6 != 5]
    assert results[0]["cached"] == whole[:4]  # not the partial one at the end of an epoch
    # The ceiling takes nothing from the sampler: the next block goes on where the baseline stopped.
    got = batches_of(log)
    begin, end = results[1]["first_step"], results[2]["first_step"]
    assert got[:begin] + got[end:] == expected(len(got) - 20)
    replayed = got[begin:end]
    assert replayed == replayed[:4] * 5
    assert replayed[:4] == [got[results[0]["first_step"] + step] for step in results[0]["cached"]]


@pytest.fixture
def fixed_width(tmp_path) -> str:
    """320 records of eight bytes: number ``i`` is ``7 * i``."""
    data = tmp_path / "data"
    data.write_bytes(b"".join(b"%8d" % (7 * index) for index in range(320)))
    return str(data)


@pytest.mark.parametrize("name", ["lazy_file", "lazy_files", "lazy_reader"])
def test_workers_after_a_block_without_share_no_file_position(live, fixed_width, name) -> None:
    run = live(name, data=fixed_width)
    results = run.run(block(0, steps=10), block(3, steps=60))
    assert not run.state.failures
    seen = [entry for entry in run.finish() if entry["at"] == "batch"]
    assert len(seen) >= 70
    for entry in seen:
        assert entry["values"] == [7 * index for index in entry["indices"]]
    assert [result["shared_files"] for result in results] == [[], []]


def test_a_file_that_all_copies_of_the_data_share_is_named_and_forbids_workers(live, fixed_width) -> None:
    run = live("global_file", data=fixed_width)
    hello = run.hello()
    (result,) = run.run(block(0, steps=10))
    run.finish()
    assert hello["loader"]["open_files"] == []  # nothing was open before the first fetch
    assert result["shared_files"] == [fixed_width]
    elements, size, tensors = result["sizes"]
    assert elements == 32
    needs = Needs(
        ranks=1,
        batch_bytes=size,
        tensors=tensors,
        worker_bytes=None,
        ram_bytes=1 << 40,
        shm_bytes=1 << 40,
        nofile=1 << 16,
        open_in_main=tuple(result["shared_files"]),
    )
    reason, text = broken_limit(LoaderSettings(2), needs)
    assert reason == "opened_in_main"
    assert fixed_width in text
    assert broken_limit(LoaderSettings(0), needs) is None


def test_two_training_loaders_the_one_with_the_longer_wait_is_tuned(live) -> None:
    run = live("two_training_loaders")
    hello = run.hello()
    assert hello["loader"]["number"] == 1
    assert len(hello["rivals"]) == 2
    run.run(*FEW)
    log = run.finish()
    # The other one trains too: its batches are no evaluation.
    assert {record.tag for _, record in run.records()} <= {None, "epoch"}
    got = batches_of(log)
    assert got == expected(len(got))
    fast = [entry["fast"] for entry in log if entry["at"] == "batch"]
    assert fast[:6] == [list(range(i, min(i + 4, 22))) for i in range(0, 22, 4)]
