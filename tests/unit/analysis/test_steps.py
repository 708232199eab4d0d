"""What ``feedtune run`` makes of the steps that it has seen."""

from __future__ import annotations

import pytest
from simulated_ranks import measured

from feedtune.analysis.apart import tell_pauses
from feedtune.analysis.steps import Counted, StepSeen


def steps(count: int, wait_s: float = 0.25, work_s: float = 0.75, tags: dict | None = None, **first) -> list:
    """Steps of one rank; ``tags``: step -> (tag, seconds that it takes besides the work before it).

    ``first``: ``made_s`` and ``first_s`` of each iteration's first batch: step 0, and those tagged epoch.
    """
    found, now = [], 100.0
    made_s, first_s = first.get("made_s", 0.0), first.get("first_s", wait_s)
    for step in range(count):
        tag, more = (tags or {}).get(step, (None, 0.0))
        begins = step == 0 or tag == "epoch"
        now += more + (made_s if begins and step else 0.0)
        back = now + (first_s if begins else wait_s)
        found.append(StepSeen(step, now, back, tag, made_s if begins else None))
        now = back + work_s
    return found


def test_a_steady_training() -> None:
    found = measured({0: steps(101)}, 0, None)
    assert found.steps == 101
    assert found.seconds == pytest.approx(100.25)
    assert found.measured_steps == 98  # two steps of warm-up; the last has no end
    assert found.rate == pytest.approx(1.0)
    assert found.waits.share == pytest.approx(0.25)
    assert found.waits.median_s == found.waits.max_s == pytest.approx(0.25)
    assert found.first == Counted(1, pytest.approx(0.25))
    assert found.excluded == {}
    assert found.settled


def test_the_first_batch_of_an_iteration_is_never_in_the_mean() -> None:
    tags = dict.fromkeys(range(20, 100, 20), ("epoch", 0.0))
    found = measured({0: steps(100, tags=tags, made_s=3.0, first_s=50.0)}, 0, None)
    assert found.waits.max_s == pytest.approx(0.25)
    assert found.rate == pytest.approx(1.0)
    assert found.first == Counted(5, pytest.approx(5 * 53.0))
    assert found.excluded == {"epoch": Counted(4, pytest.approx(0.0))}  # the making is in ``first``


def test_pauses_are_cut_out_and_counted_less_the_work_of_the_step_before() -> None:
    tags = {30: ("eval", 40.0), 60: ("save", 7.0), 80: ("save", 5.0)}
    found = measured({0: steps(100, tags=tags)}, 0, None)
    assert found.rate == pytest.approx(1.0)
    assert found.waits.share == pytest.approx(0.25)
    assert found.excluded == {
        "eval": Counted(1, pytest.approx(40.0)),
        "save": Counted(2, pytest.approx(12.0)),
    }
    assert found.seconds == pytest.approx(99.25 + 52.0)


def test_a_full_turnover_is_left_out_after_a_pause_and_cycles_are_whole() -> None:
    """After a pause the queue is full: four workers deliver eight batches at once, then four a cycle."""
    records, now = [], 0.0
    for step in range(160):
        since = step % 80
        tag = "eval" if step == 80 else None
        now += 10.0 if tag else 0.0
        wait_s = 4.0 if since >= 8 and since % 4 == 0 else 0.0
        records.append(StepSeen(step, now, now + wait_s, tag, 0.0 if step == 0 else None))
        now += wait_s
    found = measured({0: records}, 4, 2)
    assert found.settled
    assert found.measured_steps % 4 == 0
    assert found.rate == pytest.approx(1.0)
    assert found.waits.share == pytest.approx(1.0)


def test_pauses_that_come_before_the_queue_has_turned_over_are_told() -> None:
    tags = dict.fromkeys(range(10, 100, 10), ("eval", 10.0))
    found = measured({0: steps(100, tags=tags)}, 8, 2)
    assert not found.settled
    assert found.rate == pytest.approx(1.0)
    assert found.measured_steps == 10 * 8


def test_an_iteration_for_every_batch_has_no_rate() -> None:
    tags = dict.fromkeys(range(1, 20), ("epoch", 0.0))
    found = measured({0: steps(20, tags=tags, first_s=2.0)}, 2, 2)
    assert found.rate is None
    assert found.waits is None
    assert found.measured_steps == 0
    assert found.first == Counted(20, pytest.approx(40.0))


@pytest.mark.parametrize("count", [1, 2])
def test_a_few_steps_are_no_rate(count: int) -> None:
    found = measured({0: steps(count)}, 0, None)
    assert found.steps == count
    assert found.rate is None
    assert found.waits is None


def test_a_job_is_as_slow_as_its_slowest_rank_and_waits_as_long_as_any() -> None:
    """The ranks leave each step together: what one waits for data, the other waits for it."""
    ranks = {0: steps(50, wait_s=0.1, work_s=0.9), 1: steps(50, wait_s=0.6, work_s=0.4)}
    found = measured(ranks, 0, None)
    assert found.rate == pytest.approx(1.0)
    assert found.waits.share == pytest.approx(0.6)
    assert measured({0: ranks[0]}, 0, None).waits.share == pytest.approx(0.1)


def test_a_pause_of_one_rank_is_one_of_the_job() -> None:
    """Rank 0 saves, rank 1 waits for it inside its next step."""
    saves = steps(60, tags={30: ("save", 9.0)})
    waits = [
        one if one.step < 30 else one._replace(enter_s=one.enter_s - 9.0, return_s=one.return_s - 9.0)
        for one in steps(60, tags={30: ("save", 9.0)})
    ]
    waits = [one._replace(tag=None) for one in waits]
    waits = [
        one if one.step <= 30 else one._replace(enter_s=one.enter_s + 9.0, return_s=one.return_s + 9.0)
        for one in waits
    ]
    assert waits[31].enter_s - waits[30].enter_s == pytest.approx(10.0)
    found = measured({0: saves, 1: waits}, 0, None)
    assert found.rate == pytest.approx(1.0)
    assert found.excluded == {"save": Counted(1, pytest.approx(9.0))}
    waiting = measured({0: saves, 1: waits}, 0, None, only=1)
    assert waiting.rate == pytest.approx(1.0)
    assert waiting.steps == 60
    assert waiting.excluded == {}


def told(ranks: dict) -> str:
    figures = {rank: measured(ranks, 0, None, only=rank) for rank in ranks}
    return " ".join(tell_pauses(measured(ranks, 0, None), figures))


def test_pauses_that_take_much_of_the_time_are_told_with_the_rank_that_has_them() -> None:
    saves = steps(60, tags=dict.fromkeys((20, 30, 40), ("save", 9.0)))
    waits = [one._replace(tag=None) for one in saves]
    assert told({0: saves}) == "Between these steps 31% of the time passes with something else: saves 31%."
    assert "saves 31%, rank 0 alone." in told({0: saves, 1: waits})
    assert "saves 31%." in told({0: saves, 1: saves})
    assert told({0: steps(60, tags={30: ("save", 3.0)})}) == ""
    assert told({0: steps(60, first_s=50.0)}) == ""  # the one that every training has
    both, evaluates = (
        [one._replace(tag=tag if one.tag else None) for one in saves] for tag in ("eval_save", "eval")
    )
    assert "evaluation and saves 31%." in told({0: both, 1: evaluates})
    assert "evaluation and saves 31%, rank 0 alone." in told({0: both, 1: waits})
    epochs = steps(60, tags=dict.fromkeys((20, 30, 40), ("epoch", 0.0)), first_s=9.0)
    assert told({0: epochs}).count("first batches") == told({0: epochs}).count("persistent_workers=True") == 1
    assert "persistent_workers" not in told({0: saves})


def test_ranks_that_ended_at_different_steps_are_measured_where_all_are() -> None:
    found = measured({0: steps(40), 1: steps(50)}, 0, None)
    assert found.steps == 40
    assert found.measured_steps == 37


def test_nobody_knows_what_was_in_a_gap() -> None:
    """Lines are missing before an evaluation, and in the midst of the training."""
    records = steps(100, tags={50: ("eval", 40.0), 70: ("save", 7.0)})
    found = measured({0: [one for one in records if one.step not in (48, 49, 20, 21)]}, 0, None)
    assert found.steps == 96
    assert found.rate == pytest.approx(1.0)
    assert found.excluded == {"save": Counted(1, pytest.approx(7.0))}


def test_waits_of_another_thread_are_not_the_loops() -> None:
    found = measured({0: steps(50)}, 0, None, loop_waits=False)
    assert found.waits is None
    assert found.rate == pytest.approx(1.0)


def test_percentiles() -> None:
    records, now = [], 0.0
    for step in range(104):
        wait_s = max(0, step - 2) / 1000  # 1 to 100 ms after the warm-up, and one step without an end
        records.append(StepSeen(step, now, now + wait_s))
        now += 1.0
    waits = measured({0: records[:103]}, 0, None).waits
    assert waits.median_s == pytest.approx(0.0495)
    assert waits.p95_s == pytest.approx(0.094)
    assert waits.max_s == pytest.approx(0.099)
