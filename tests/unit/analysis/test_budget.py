"""What a step's time goes to."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
from simulated_ranks import Job, measured, on

from feedtune.analysis.align import line_up
from feedtune.analysis.budget import Budget, Parts, TrainingBudget, measure_budget


def budget(job: Job, workers: int = 0, **more) -> TrainingBudget:
    return measure_budget(line_up(job.run(), workers, 2, job.ranks, **more))


def known(parts: Parts) -> dict:
    return {name: value for name, value in asdict(parts).items() if value is not None}


def ms(found: Budget) -> dict:
    return {name: None if v is None else v * 1000 for name, v in asdict(found.parts).items()}


def random_job(seed: int, **fixed) -> Job:
    """Anything that can happen at once: late data, late work, pauses of the collector, and any ranks."""
    draw = random.Random(seed)
    ranks = fixed.pop("ranks", draw.choice([1, 2, 3, 4, 5]))
    some = {
        "wait": on(draw.randrange(ranks), 0.03 * draw.random(), 0.02 * draw.random(), draw.choice([1, 3])),
        "forward": on(draw.randrange(ranks), 0.04, 0.01, draw.choice([1, 2])),
        "copy": draw.choice([0.0, 0.002]),
        "after": draw.choice([0.0, 0.003]),
        "buffers": draw.choice([None, 0.0005]),
        "call": draw.choice([None, 0.001]),
        "other": on(draw.randrange(ranks), draw.choice([0.0, 0.01]), 0.0, 3),
        "late_other": draw.choice([0.0, 0.004]),
        "gc": on(0, draw.choice([0.0, 0.01]), 0.0, 7),
        "late_gc": on(ranks - 1, draw.choice([0.0, 0.01]), 0.0, 5),
        "accumulate": draw.choice([1, 1, 4]),
        "cuda": draw.choice([False, True]),
    }
    return Job(ranks=ranks, noise=0.2, seed=seed, steps=draw.randint(40, 120), **{**some, **fixed})


def test_planted_parts_come_back() -> None:
    job = Job(
        wait=0.007, other=0.003, late_other=0.002, copy=0.002, comm=0.005, after=0.003, gc=0.001, steps=100
    )
    for found in (budget(job).job, *budget(job).ranks.values()):
        assert found.step_s == pytest.approx(0.042)
        assert ms(found) == pytest.approx(
            {
                "data_wait_s": 12.0,
                "h2d_s": 2.0,
                "compute_s": 19.0,
                "communication_s": 5.0,
                "straggle_s": 0.0,
                "stall_s": 1.0,
                "rest_s": 3.0,
            },
            abs=1e-6,
        )
        assert found.shares["data_wait"] == pytest.approx(12 / 42)
        assert found.flags == ()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("buffers", [None, 0.0005])
def test_a_late_ranks_data_are_the_jobs_loss_and_the_others_straggle(
    rank: int, buffers: float | None
) -> None:
    """With BatchNorm as well, where rank 0 goes on from its broadcast and the others wait for it."""
    found = budget(Job(ranks=3, wait=on(rank, 0.03), buffers=buffers))
    assert ms(found.job)["data_wait_s"] == pytest.approx(30.0)
    assert ms(found.job)["straggle_s"] == pytest.approx(0.0, abs=1e-6)
    for other, of in found.ranks.items():
        assert ms(of)["data_wait_s"] == pytest.approx(30.0 if other == rank else 0.0)
        assert ms(of)["straggle_s"] == pytest.approx(0.0 if other == rank else 30.0, abs=1e-6)
        assert ms(of)["compute_s"] == pytest.approx(19.0)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_late_ranks_work_is_straggle(where: str, cuda: bool) -> None:
    found = budget(Job(**{where: on(1, 0.05, 0.01)}, cuda=cuda))
    parts = ms(found.job)
    assert parts["straggle_s"] == pytest.approx(40.0)
    assert parts["data_wait_s"] == pytest.approx(0.0, abs=1e-6)
    assert parts["rest_s"] == pytest.approx(0.0, abs=1e-6)
    assert parts["compute_s"] == pytest.approx(ms(found.ranks[0])["compute_s"])
    assert ms(found.ranks[1])["compute_s"] == pytest.approx(parts["compute_s"] + 40.0)


@pytest.mark.parametrize(("works", "straggle"), [((50, 10, 20), 35.0), ((20, 14, 50, 10), 36.0)])
def test_straggle_is_measured_from_the_median_of_the_others(works: tuple, straggle: float) -> None:
    found = budget(Job(ranks=len(works), forward=lambda rank, _: works[rank] / 1000))
    assert ms(found.job)["straggle_s"] == pytest.approx(straggle)
    assert ms(found.job)["compute_s"] == pytest.approx(50 - straggle + 10 + 1)
    assert ms(found.job)["rest_s"] == pytest.approx(0.0, abs=1e-6)


def test_data_that_come_late_behind_another_ranks_work_cost_nothing() -> None:
    """Rank 0 waits for data before its broadcast, rank 1 works longer anyway."""
    found = budget(Job(wait=on(0, 0.02), forward=on(1, 0.05, 0.01)))
    assert ms(found.job)["data_wait_s"] == pytest.approx(0.0, abs=1e-6)
    assert ms(found.job)["straggle_s"] == pytest.approx(40.0)


def test_lateness_before_and_after_a_broadcast_is_not_counted_twice() -> None:
    """Rank 1 is late before it, rank 0 after it: the job is as slow as one of them, not as both."""
    found = budget(Job(wait=on(1, 0.03), forward=on(0, 0.038, 0.008), buffers=0.0005))
    assert found.job.step_s == pytest.approx(0.0503, abs=5e-4)
    assert ms(found.job)["data_wait_s"] == pytest.approx(0.0, abs=1e-6)
    assert ms(found.job)["straggle_s"] == pytest.approx(30.0)
    assert found.job.flags == ()


@pytest.mark.parametrize("seed", range(25))
def test_parts_and_rest_are_the_step_and_no_part_is_negative(seed: int) -> None:
    job = random_job(seed)
    found = budget(job)
    for one in (found.job, *found.ranks.values()):
        parts = asdict(one.parts)
        assert sum(value for value in parts.values() if value is not None) == pytest.approx(one.step_s, 1e-12)
        rest = parts.pop("rest_s")
        assert all(value is None or value >= 0 for value in parts.values())
        assert rest >= -0.01 * one.step_s, parts
        assert "inconsistent" not in one.flags
        halves = [value for value in asdict(one.half_widths).values() if value is not None]
        assert all(value >= 0 for value in halves)
    slowest = max(one.step_s for one in found.ranks.values())
    assert found.job.step_s == pytest.approx(slowest)
    assert json.loads(json.dumps(found.as_dict()))["job"]["parts"].keys() == asdict(found.job.parts).keys()


@pytest.mark.parametrize("seed", range(12))
def test_time_scales(seed: int) -> None:
    job = random_job(seed)
    ranks = job.run()

    def scaled(value):
        return [scaled(one) for one in value] if isinstance(value, list) else 8 * value

    slow = {
        rank: [
            one._replace(
                enter_s=8 * one.enter_s,
                return_s=8 * one.return_s,
                parts={
                    key: [[k, 8 * a, 8 * b] for k, a, b in value] if key == "y" else scaled(value)
                    for key, value in one.parts.items()
                },
            )
            for one in of
        ]
        for rank, of in ranks.items()
    }
    found, slowly = (measure_budget(line_up(of, 0, None, job.ranks)) for of in (ranks, slow))
    for one, other in [
        (found.job, slowly.job),
        *zip(found.ranks.values(), slowly.ranks.values(), strict=True),
    ]:
        assert other.step_s == pytest.approx(8 * one.step_s)
        for mine, its in ((one.parts, other.parts), (one.half_widths, other.half_widths)):
            for value, more in zip(asdict(mine).values(), asdict(its).values(), strict=True):
                assert more == (None if value is None else pytest.approx(8 * value, rel=1e-6, abs=1e-9))


@pytest.mark.parametrize("seed", range(12))
def test_the_order_of_ranks_does_not_matter(seed: int) -> None:
    job = random_job(seed, ranks=4, buffers=None)
    ranks = job.run()
    order = random.Random(seed).sample(range(4), 4)
    found = measure_budget(line_up(ranks, 2, 2, 4))
    other = measure_budget(line_up({order[rank]: ranks[rank] for rank in (2, 0, 3, 1)}, 2, 2, 4))
    assert known(other.job.parts) == pytest.approx(known(found.job.parts), rel=1e-9, abs=1e-12)
    for rank in ranks:
        assert known(other.ranks[order[rank]].parts) == pytest.approx(
            known(found.ranks[rank].parts), abs=1e-12
        )


def test_one_rank_waits_for_nobody() -> None:
    found = budget(Job(ranks=1, wait=0.012))
    assert found.job == found.ranks[0]
    assert ms(found.job)["data_wait_s"] == pytest.approx(12.0)
    assert (found.job.parts.communication_s, found.job.parts.straggle_s) == (0.0, 0.0)
    assert found.job.flags == ()
    assert found.data_at_least_s is None


def test_without_sync_points_compute_has_the_waits_and_the_jobs_data_wait_is_unknown() -> None:
    found = budget(Job(wait=on(1, 0.03, 0.01), without=("y",)))
    for one in (found.job, *found.ranks.values()):
        assert (one.parts.communication_s, one.parts.straggle_s) == (None, None)
        assert one.flags == ("syncs_unseen",)
    assert ms(found.ranks[0])["compute_s"] == pytest.approx(19.0 + 1.0 + 20.0)
    assert ms(found.ranks[1])["data_wait_s"] == pytest.approx(30.0)
    assert (found.job.parts.data_wait_s, found.job.parts.rest_s) == (None, None)
    assert found.data_at_least_s == pytest.approx(0.01)  # all ranks waited that long in the same steps


def test_where_not_all_waits_for_ranks_are_seen_none_is_taken_out_of_compute() -> None:
    found = budget(Job(wait=on(0, 0.03), buffers=0.001), syncs_seen=False)
    assert found.ranks[1].flags == ("syncs_unseen",)
    assert ms(found.ranks[1])["compute_s"] == pytest.approx(30.0 + 1.0 + 19.0 + 1.0)


def test_no_lower_bound_where_a_rank_was_not_seen() -> None:
    ranks = Job(ranks=3, wait=0.03, without=("y",)).run()
    del ranks[2]
    assert measure_budget(line_up(ranks, 0, None, 3)).data_at_least_s is None


def test_a_rank_that_left_no_record_is_told() -> None:
    ranks = Job(ranks=3, forward=on(2, 0.05, 0.01)).run()
    del ranks[2]
    found = measure_budget(line_up(ranks, 0, None, 3))
    assert "ranks_missing" in found.job.flags
    assert ms(found.job)["communication_s"] == pytest.approx(41.0)
    alone = measure_budget(line_up({0: ranks[0]}, 0, None, 3))
    assert "syncs_unseen" in alone.job.flags
    assert alone.job.parts.data_wait_s is None


def test_without_a_backward_compute_and_rest_are_unknown() -> None:
    found = budget(Job(wait=0.01, without=("b",)))
    for one in (found.job, *found.ranks.values()):
        assert (one.parts.compute_s, one.parts.rest_s) == (None, None)
        assert one.parts.data_wait_s == pytest.approx(0.01)
        assert one.flags == ("backward_unseen",)


def test_waits_of_another_thread_are_no_starvation() -> None:
    found = budget(Job(forward=on(1, 0.05, 0.01)), loop_waits=False)
    assert (found.job.parts.data_wait_s, found.job.parts.compute_s) == (None, None)
    assert ms(found.job)["straggle_s"] == pytest.approx(40.0)
    assert found.job.flags == ("waits_unseen",)


def test_what_is_never_copied_is_not_measured_and_what_is_never_collected_is_zero() -> None:
    parts = budget(Job()).job.parts
    assert parts.h2d_s is None
    assert parts.stall_s == 0.0


def test_waits_behind_queued_gpu_work_are_told_apart() -> None:
    found = budget(Job(wait=0.005, cuda=True, hidden=0.004))
    assert ms(found.ranks[0])["data_wait_s"] == pytest.approx(5.0)
    assert found.ranks[0].hidden_s == pytest.approx(0.004)
    assert found.job.hidden_s is None
    assert budget(Job(wait=0.005)).ranks[0].hidden_s is None


def test_parts_that_contradict_each_other_are_told() -> None:
    """A copy on a stream of its own runs beside the work."""
    ranks = Job(ranks=1).run()
    ranks[0] = [one._replace(parts={**one.parts, "h": 0.03}) for one in ranks[0]]
    found = measure_budget(line_up(ranks, 0, None, 1))
    assert found.job.parts.rest_s < 0
    assert found.job.flags == ("inconsistent",)


def test_a_killed_rank_leaves_half_of_the_steps() -> None:
    ranks = Job(wait=on(1, 0.03), steps=200).run()
    ranks[1] = ranks[1][:100]
    found = measure_budget(line_up(ranks, 0, None, 2))
    assert found.job.steps == 97
    assert ms(found.job)["data_wait_s"] == pytest.approx(30.0)


def test_whole_rounds_are_measured_where_ranks_meet_in_every_fourth_step_only() -> None:
    """Else the steps at the edges would bring waits without work, or work without waits."""
    for steps in range(40, 44):
        found = budget(Job(accumulate=4, forward=on(1, 0.05, 0.01), steps=steps))
        assert found.job.steps % 4 == 0
        assert found.job.step_s == pytest.approx(0.0605)
        assert ms(found.job)["straggle_s"] == pytest.approx(40.0)
        assert ms(found.ranks[0])["straggle_s"] == pytest.approx(40.0)
        assert ms(found.job)["rest_s"] == pytest.approx(0.0, abs=1e-6)


def test_the_budgets_step_is_that_of_the_rate() -> None:
    ranks = Job(noise=0.2, wait=on(0, 0.02, 0.0, 4), steps=163).run()
    found = measure_budget(line_up(ranks, 4, 2, 2))
    figures = measured(ranks, 4, 2)
    assert found.job.steps == figures.measured_steps
    assert found.job.step_s == pytest.approx(1 / figures.rate)


def test_the_uncertainty_covers_the_mean_of_longer_runs_as_often_as_it_says() -> None:
    truth = budget(Job(wait=0.02, noise=0.3, steps=3000, seed=1000)).job.parts.data_wait_s
    inside = 0
    for seed in range(60):
        job = budget(Job(wait=0.02, noise=0.3, steps=63, seed=seed)).job
        inside += abs(job.parts.data_wait_s - truth) <= job.half_widths.data_wait_s
    assert inside >= 48  # 57 expected; fewer than 48 come once in 10^4


@pytest.mark.parametrize(
    ("steps", "workers", "enough"), [(9, 0, True), (7, 0, False), (33, 4, True), (32, 4, False)]
)
def test_the_uncertainty_needs_five_stretches_of_whole_cycles(steps: int, workers: int, enough: bool) -> None:
    found = budget(Job(steps=steps, ranks=1), workers)
    assert (found.job.half_widths.data_wait_s is not None) is enough


def test_too_few_steps_are_no_budget() -> None:
    found = budget(Job(steps=2))
    assert found.job.steps == 0
    assert found.job.step_s is None
    assert set(asdict(found.job.parts).values()) == {None}
    assert found.job.shares["data_wait"] is None


def sparse(ranks: dict, every: int, missing: bool = False) -> dict:
    """As long runs are taken down: the first 512 steps, then one window of 128 in so many."""

    def full(step: int) -> bool:
        return step < 512 or step // 128 % every == 0

    return {
        rank: [
            one if full(one.step) else one._replace(parts=None) for one in of if full(one.step) or not missing
        ]
        for rank, of in ranks.items()
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("missing", [False, True])
def test_the_begin_of_a_long_run_weighs_no_more_than_its_steps(ranks: int, missing: bool) -> None:
    wait = {True: 0.05, False: 0.002}
    job = Job(ranks=ranks, wait=lambda _, step: wait[step < 500], steps=49 * 128, noise=0.05)
    records = job.run()
    whole = measure_budget(line_up(records, 0, None, ranks))
    found = measure_budget(line_up(sparse(records, 16, missing), 0, None, ranks))
    assert found.job.steps < 1200
    assert whole.job.parts.data_wait_s == pytest.approx(0.0058, rel=0.03)
    for one, other in ((found.job, whole.job), (found.ranks[0], whole.ranks[0])):
        assert one.step_s == pytest.approx(other.step_s, rel=0.02)
        assert known(one.parts) == pytest.approx(known(other.parts), rel=0.03, abs=5e-5)


def test_what_one_rank_did_late_in_a_long_run_weighs_as_much_as_it_took() -> None:
    job = Job(forward=lambda rank, step: 0.03 if rank and step >= 4500 else 0.008, steps=6000)
    records = job.run()
    found = measure_budget(line_up(sparse(records, 8), 0, None, 2))
    # Its begin is known to half the distance of two windows.
    assert found.job.parts.straggle_s == pytest.approx(0.022 / 4, rel=0.2)


def test_the_interval_is_that_of_stretches_that_stand_for_as_many_steps() -> None:
    records = Job(ranks=1, wait=0.01, steps=6000, noise=0.2).run()
    whole = measure_budget(line_up(records, 4, 2, 1)).job
    found = measure_budget(line_up(sparse(records, 16), 4, 2, 1)).job
    assert found.half_widths.data_wait_s is not None
    assert found.parts.data_wait_s == pytest.approx(0.01, abs=3 * found.half_widths.data_wait_s)
    assert found.half_widths.data_wait_s < 10 * whole.half_widths.data_wait_s


def test_a_lone_step_without_parts_changes_no_weight() -> None:
    records = Job(ranks=1, steps=300).run()
    records[0][100] = records[0][100]._replace(parts=None)
    weights = line_up(records, 0, None, 1).weights
    assert max(weights.values()) < 1.01
