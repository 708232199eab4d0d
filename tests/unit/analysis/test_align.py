"""Ranks' steps, lined up at their sync points."""

from __future__ import annotations

import pytest
from simulated_ranks import Job, measured, on

from feedtune.analysis.align import line_up
from feedtune.analysis.rounds import RankStep, Round, Sync, Work, rounds_of
from feedtune.analysis.steps import StepSeen, choose_steps


def work(seconds: float, wait_s: float = 0.0) -> Work:
    return Work(seconds, wait_s, 0.0, 0.0, 0.0, None)


def test_a_round_of_one_barrier_is_as_long_as_its_longest_interval() -> None:
    one = Round(0, 1, (True,), {0: (work(5.0, 4.0),), 1: (work(3.0, 1.0),)})
    assert one.passage() == 5.0
    assert one.passage(less_data=True) == 2.0
    assert one.path(0, less_data=True) == 1.0


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        ({0: 0.0, 1: 3.0}, {0: 2.0, 1: 2.0}, 5.0),  # rank 1 late: rank 0 goes on, and waits at the barrier
        ({0: 3.0, 1: 0.0}, {0: 2.0, 1: 2.0}, 5.0),  # rank 0 late: all wait for it
        ({0: 0.0, 1: 3.0}, {0: 5.0, 1: 2.0}, 5.0),  # late in turns, which costs nothing
        ({0: 3.0, 1: 0.0}, {0: 2.0, 1: 5.0}, 8.0),  # and which costs both
    ],
)
def test_a_broadcast_lets_rank_0_go_on(before: dict, after: dict, seconds: float) -> None:
    works = {rank: (work(before[rank]), work(after[rank])) for rank in before}
    assert Round(0, 1, (False, True), works).passage() == seconds


def test_a_broadcast_whose_source_is_not_seen_holds_nobody_up() -> None:
    works = {1: (work(3.0), work(1.0)), 2: (work(1.0), work(2.0))}
    assert Round(0, 1, (False, True), works).passage() == 4.0


def test_clocks_of_ranks_are_never_compared() -> None:
    ranks = Job(wait=on(1, 0.03), noise=0.1, buffers=0.001).run()
    moved = {
        rank: [
            one._replace(enter_s=one.enter_s + 7e3 * rank, return_s=one.return_s + 7e3 * rank) for one in of
        ]
        for rank, of in ranks.items()
    }
    for one, other in zip(line_up(ranks, 0, None, 2).rounds, line_up(moved, 0, None, 2).rounds, strict=True):
        for rank, works in one.works.items():
            assert works[0].seconds == pytest.approx(other.works[rank][0].seconds, abs=1e-9)


def test_intervals_reach_over_steps_without_a_sync_point() -> None:
    found = line_up(Job(accumulate=4, wait=0.002, steps=100).run(), 0, None, 2)
    assert {one.steps for one in found.rounds} == {4}
    assert {len(one.works[0]) for one in found.rounds} == {1}
    one = found.rounds[3].works[0][0]
    assert one.wait_s == pytest.approx(4 * 0.002)
    assert one.seconds == pytest.approx(4 * (0.002 + 0.018) + 0.001)
    assert len(found.measured) == 4 * len(found.rounds)


def test_the_work_in_an_interval_is_that_of_the_steps_it_reaches_over() -> None:
    job = Job(wait=0.004, copy=0.001, optimizer=0.002, after=0.003, gc=0.0005, steps=60)
    one = line_up(job.run(), 0, None, 2).rounds[5].works[1][0]
    assert one.seconds == pytest.approx(0.004 + 0.001 + 0.0005 + 0.018 + 0.002 + 0.003)
    assert one.busy_s == pytest.approx(0.001 + 0.018 + 0.002)  # with the step before's optimizer
    assert (one.copy_s, one.gc_s) == (pytest.approx(0.001), pytest.approx(0.0005))


def test_waits_for_another_loader_are_waits_of_the_interval_that_they_lie_in() -> None:
    """After the optimizer: of the interval that ends in the next step."""
    job = Job(wait=0.004, other=0.002, late_other=on(1, 0.03), steps=60)
    for one in line_up(job.run(), 0, None, 2).rounds:
        waits = {rank: sum(work.wait_s for work in works) for rank, works in one.works.items()}
        assert waits == {0: pytest.approx(0.006), 1: pytest.approx(0.036)}
        assert one.works[1][0].less(data=True, gc=False) == pytest.approx(0.019)
        assert one.works[1][0].busy_s == pytest.approx(0.019)
    called = line_up(Job(late_other=0.03, call=0.001, steps=60).run(), 0, None, 2).rounds
    assert {round(one.works[0][0].wait_s, 9) for one in called} == {0.0, 0.03}  # in turns


def test_two_barriers_a_step_make_two_rounds_a_step() -> None:
    found = line_up(Job(call=0.001, steps=60).run(), 0, None, 2)
    assert sum(one.steps for one in found.rounds) == len(found.measured) == 57
    assert len(found.rounds) == 2 * 57


def test_a_large_broadcast_at_which_rank_0_waits_too_joins_all() -> None:
    ranks = Job(wait=on(1, 0.03), buffers=0.001, steps=60).run()
    assert not any(one.joins[0] for one in line_up(ranks, 0, None, 2).rounds)
    both = {}
    for rank, of in ranks.items():
        both[rank] = []
        for one in of:
            if rank == 0:
                points = [list(point) for point in one.parts["y"]]
                points[0][2] += 0.03  # leaves with rank 1
                one = one._replace(parts={**one.parts, "y": points})
            both[rank].append(one)
    assert all(one.joins[0] for one in line_up(both, 0, None, 2).rounds)


def without_syncs(ranks: dict, rank: int, steps: set[int]) -> dict:
    changed = [
        one._replace(parts={**one.parts, "y": []}) if one.step in steps else one for one in ranks[rank]
    ]
    return {**ranks, rank: changed}


def test_a_step_whose_sync_points_do_not_match_is_left_out_and_counted() -> None:
    found = line_up(without_syncs(Job(steps=60).run(), 1, {20, 21, 40}), 0, None, 2)
    assert found.left_out == 3
    assert found.synced
    assert not {20, 21, 40} & set(found.measured)
    # The step after each shows where the next round begins, but no round of its own.
    assert len(found.rounds) == len(found.measured) == 57 - 3 - 2
    assert all(one.steps == 1 for one in found.rounds)


def test_ranks_that_hardly_ever_match_are_not_synced() -> None:
    found = line_up(without_syncs(Job(steps=60).run(), 1, set(range(5, 60))), 0, None, 2)
    assert found.mismatched
    assert not found.synced
    assert len(found.measured) == 57


@pytest.mark.parametrize("kind", ["gone", "unread"])
def test_one_record_without_its_parts_is_left_out(kind: str) -> None:
    ranks = Job(steps=60).run()
    one = ranks[0][30]
    none = [["gradients", 0.01, None]]
    ranks[0][30] = one._replace(parts=None if kind == "gone" else {**one.parts, "y": none})
    found = line_up(ranks, 0, None, 2)
    assert found.left_out == 1
    assert 30 not in found.measured


def test_records_of_nothing_but_waits_are_lined_up_without_rounds() -> None:
    ranks = {rank: [one._replace(parts=None) for one in of] for rank, of in Job(steps=60).run().items()}
    found = line_up(ranks, 0, None, 2)
    assert not found.synced
    assert not found.mismatched
    assert found.waits_seen
    assert len(found.measured) == 57


def test_waits_for_gradients_that_are_not_seen_make_the_other_points_useless() -> None:
    assert not line_up(Job(buffers=0.001).run(), 0, None, 2, syncs_seen=False).synced
    assert not line_up(Job(buffers=0.001, accumulate=10**6).run(), 0, None, 2).synced  # buffers alone


def test_under_cuda_a_step_is_as_long_as_on_the_gpu() -> None:
    ranks = Job(wait=0.005, cuda=True, hidden=0.004, steps=60).run()
    late = {
        rank: [one._replace(enter_s=one.enter_s + 0.05 * (one.step % 2)) for one in of]
        for rank, of in ranks.items()
    }  # the host runs ahead unevenly
    found = line_up(late, 0, None, 2)
    step = found.ranks[1][10]
    assert step.length_s == pytest.approx(0.025)
    assert step.wait_s == pytest.approx(0.005)
    assert found.ranks[1][12].hidden_s == pytest.approx(0.004)
    assert all(one.passage() == pytest.approx(0.024) for one in found.rounds)


def test_a_gpu_step_whose_wait_was_not_read_is_left_out() -> None:
    ranks = Job(cuda=True, steps=60).run()
    one = ranks[0][30]
    ranks[0][30] = one._replace(parts={key: v for key, v in one.parts.items() if key not in ("t", "s")})
    found = line_up(ranks, 0, None, 2)
    assert found.left_out == 1
    assert found.ranks[0][30].wait_s is None


def test_a_gap_in_the_steps_is_a_pause_of_all_ranks() -> None:
    ranks = Job(steps=100).run()
    ranks[1] = [one for one in ranks[1] if not 40 <= one.step < 45]
    chosen = choose_steps(ranks, 0, None)
    assert chosen.pauses == [40]  # the position of step 45
    assert 39 not in chosen.measured  # its end is not known
    assert [chosen.ranks[1][40].step, chosen.ranks[0][40].step] == [45, 45]
    figures = measured(ranks, 0, None)
    assert figures.steps == 95
    assert figures.rate == pytest.approx(50.0)
    assert all(one.passage() == pytest.approx(0.019) for one in line_up(ranks, 0, None, 2).rounds)


def test_ranks_without_a_common_step_measure_nothing() -> None:
    ranks = {0: [StepSeen(0, 0.0, 0.1)], 1: [StepSeen(5, 0.0, 0.1)]}
    assert measured(ranks, 0, None).steps == 0
    assert line_up(ranks, 0, None, 2).measured == []


def test_the_first_round_begins_at_the_last_barrier_of_the_first_step_that_has_one() -> None:
    points = (Sync("gradients", 1.0, 2.0), Sync("call", 3.0, 4.0), Sync("buffers", 5.0, 5.0))
    steps = [
        RankStep(0.0, 10.0, 0.5, None, None, None, 0.0, points, None),
        RankStep(10.0, 10.0, 0.5, None, None, None, 0.0, points, None),
    ]
    found = list(rounds_of([0, 1], {0: steps, 1: steps}))
    assert [(one.begin, one.end, len(one.joins)) for one in found] == [(0, 1, 2), (1, 1, 1)]
    assert [work.seconds for work in found[0].works[0]] == [1.0, 6.0]
    assert [work.wait_s for work in found[0].works[0]] == [0.0, 0.5]


def test_moments_in_the_wrong_order_make_no_negative_interval() -> None:
    points = (Sync("gradients", 2.0, 1.0), Sync("call", 1.5, 9.5))
    steps = [RankStep(10.0 * i, 10.0, 6.0, None, None, 4.0, 0.0, points, None) for i in range(3)]
    for one in rounds_of([0, 1, 2], {0: steps, 1: steps}):
        for work in one.works[0]:
            assert work.seconds >= work.wait_s >= 0
            assert work.busy_s >= 0
