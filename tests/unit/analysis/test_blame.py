"""Which class a training is of, and which rank makes it."""

from __future__ import annotations

import json
import random

import pytest
from simulated_ranks import Job, on

from feedtune.analysis.align import line_up
from feedtune.analysis.blame import lone_steps
from feedtune.analysis.budget import measure_budget
from feedtune.analysis.classes import TrainingClass, classify, tell_other
from feedtune.analysis.stats import rank_correlation
from feedtune.analysis.steps import StepSeen


def classified(job: Job, workers: int = 2, supply: dict | None = None, empty=None, **more) -> TrainingClass:
    return classified_ranks(job.run(), job.ranks, workers, supply, empty, **more)


def classified_ranks(
    ranks: dict, world: int, workers: int = 2, supply=None, empty=None, **more
) -> TrainingClass:
    timeline = line_up(ranks, workers, 2, world, **more)
    return classify(timeline, measure_budget(timeline), supply, empty)


def lengths(seed: int):
    """Elements of each rank's batches, drawn once."""
    draw, drawn = random.Random(seed), {}
    return lambda rank, step: drawn.setdefault((rank, step), draw.randint(200, 3000))


# Two ranks or four on two cores: each stretch of work varies by a fifth and is held up now and then.
NOISY = [
    {"ranks": ranks, "steps": steps, "noise": 0.2, "seed": seed, "buffers": buffers}
    for ranks, steps, seed, buffers in [(2, 100, 3, None), (2, 200, 4, 0.0005), (4, 100, 5, 0.0005)]
]


@pytest.mark.parametrize("noise", NOISY)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("late_s", [0.02, 0.05])
@pytest.mark.parametrize("where", ["wait", "made", "forward", "backward"])
def test_a_delay_on_one_rank_names_class_and_rank(where: str, late_s: float, last: bool, noise: dict) -> None:
    rank = noise["ranks"] - 1 if last else 0
    usual = {"wait": 0.0, "made": 0.005, "forward": 0.008, "backward": 0.01}[where]
    if where == "made":  # a loader works ahead: what it takes less than the step does not show
        late_s += 0.02
    found = classified(Job(**{where: on(rank, usual + late_s, usual)}, **noise))
    assert found.kind == ("imbalance/input" if where in ("wait", "made") else "imbalance/compute")
    assert found.rank == rank
    assert f"Rank {rank} comes last in" in found.evidence[0]


@pytest.mark.parametrize("noise", NOISY)
@pytest.mark.parametrize("cuda", [False, True])
def test_other_planted_causes_name_their_class(noise: dict, cuda: bool) -> None:
    n = lengths(noise["seed"])
    cases = {
        "healthy": Job(**{**noise, "noise": 0.1}, cuda=cuda),
        "data": Job(wait=0.03, **noise, cuda=cuda),
        "communication": Job(comm=0.025, **noise, cuda=cuda),
        "imbalance/lengths": Job(
            forward=lambda r, s: 4e-6 * n(r, s), backward=lambda r, s: 8e-6 * n(r, s), elements=n, **noise
        ),
    }
    for kind, job in cases.items():
        found = classified(job)
        assert (found.kind, found.rank) == (kind, None), found


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("buffers", [None, 0.0005])
@pytest.mark.parametrize("rank", [0, 1])
def test_batchnorm_and_accumulation_hide_no_late_rank(rank: int, buffers, accumulate: int) -> None:
    job = Job(wait=on(rank, 0.03), buffers=buffers, accumulate=accumulate, noise=0.1)
    found = classified(job)
    assert (found.kind, found.rank) == ("imbalance/input", rank)


def test_the_gain_is_the_step_without_the_loss() -> None:
    found = classified(Job(wait=on(1, 0.03)))
    assert found.share == pytest.approx(0.6)
    assert found.gain == pytest.approx(2.5)
    assert found.critical
    assert found.losses[0].culprit.votes == 1.0
    document = json.loads(json.dumps(found.as_dict()))
    assert (document["class"], document["rank"]) == ("imbalance/input", 1)
    assert document["losses"][0]["culprit"]["rank"] == 1


def test_one_rank_alone_is_short_of_data_or_healthy() -> None:
    found = classified(Job(ranks=1, wait=0.01))
    assert (found.kind, found.share) == ("data", pytest.approx(10 / 29))
    assert found.evidence == ("The loop waits for data: 10 ms of a step of 29 ms, 34.5% ± 0.0%.",)
    assert classified(Job(ranks=1, wait=0.001)).kind == "healthy"


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("where", ["other", "late_other"])
def test_waits_for_another_loader_of_the_step_are_waits_for_data(where: str, cuda: bool) -> None:
    found = classified(Job(**{where: 0.03}, cuda=cuda, noise=0.1))
    assert (found.kind, found.rank) == ("data", None)
    found = classified(Job(**{where: on(1, 0.03)}, cuda=cuda, noise=0.1))
    assert (found.kind, found.rank) == ("imbalance/input", 1)
    assert "it waits 30 ms a step for its data, the others 0 ms" in found.evidence[0]
    alone = classified(Job(ranks=1, **{where: 0.03}, cuda=cuda))
    assert (alone.kind, alone.share) == ("data", pytest.approx(30 / 49))


@pytest.mark.parametrize(("own", "other", "told"), [(0.002, 0.03, True), (0.03, 0.002, False)])
def test_the_loader_that_is_waited_for_is_named(own: float, other: float, told: bool) -> None:
    timeline = line_up(Job(wait=on(1, own), other=on(1, other)).run(), 2, 2, 2)
    found = classify(timeline, measure_budget(timeline))
    assert (found.kind, found.rank) == ("imbalance/input", 1)
    loaders = [
        {"site": "a.py:7", "dataset": "Quick", "wait_s": 0.1},
        {"site": "b.py:9", "dataset": "Slow", "wait_s": 3.0},
    ]
    said = " ".join(tell_other(found, timeline, {0: [], 1: loaders}))
    assert ("30 ms of 32 ms a step is the wait for another loader" in said) == told
    assert ("Slow at b.py:9" in said) == told
    assert not tell_other(found, timeline, {0: loaders, 1: []})


def test_loaders_that_are_equally_slow_are_no_single_ranks_fault() -> None:
    """One is slower by a hair: the other has its queue full, and waits for the slow one in every step."""
    made = on(1, 0.040, 0.039)
    assert classified(Job(made=made)).rank == 1  # from the steps alone
    found = classified(Job(made=made), supply={0: 0.039, 1: 0.040})
    assert (found.kind, found.rank) == ("data", None)
    assert found.share == pytest.approx(19 / 40)  # what is left is rank 1's own
    slow = classified(Job(made=on(1, 0.040, 0.004)), supply={0: 0.004, 1: 0.040})
    assert (slow.kind, slow.rank) == ("imbalance/input", 1)


@pytest.mark.parametrize(
    ("late_s", "made_s", "kind", "rank", "seconds", "hidden_s"),
    [
        (0.010, 0.040, "data", None, 0.000, 0.010),  # 29 ms of work would wait for batches as 40 do
        (0.020, 0.040, "imbalance/compute", 0, 0.000, 0.020),  # and 39 ms, with hardly a wait to be seen
        (0.020, 0.030, "imbalance/compute", 0, 0.020, 0.000),  # batches are ready: they may be made faster
        (0.020, 0.010, "imbalance/compute", 0, 0.020, 0.000),
    ],
)
def test_without_a_ranks_extra_work_the_job_is_as_fast_as_its_workers(
    late_s: float, made_s: float, kind: str, rank: int | None, seconds: float, hidden_s: float
) -> None:
    job = Job(made=made_s, after=on(0, late_s), comm=0.0)
    short = 1.0 if hidden_s else 0.0
    found = classified(job, supply={0: made_s, 1: made_s}, empty={0: short, 1: short})
    assert (found.kind, found.rank) == (kind, rank)
    assert found.gain == (None if kind != "data" and hidden_s else pytest.approx(1 / (1 - found.share)))
    (work,) = [one for one in found.losses if one.kind == "imbalance/compute"]
    assert work.seconds == pytest.approx(seconds, abs=0.001)
    assert work.hidden_s == pytest.approx(hidden_s, abs=0.001)
    said = " ".join(found.evidence)
    assert ("Besides, rank 0's work: 10 ms a step" in said) == (kind == "data")
    assert ("None of it is won alone: the workers need 40 ms" in said) == (late_s == hidden_s == 0.02)


def test_loaders_that_are_late_in_bursts_at_different_steps_are_all_short() -> None:
    job = Job(wait=lambda rank, step: 0.06 if step % 4 == rank else 0.0, ranks=4)
    found = classified(job, workers=4)
    assert (found.kind, found.rank) == ("data", None)


def test_a_rank_that_is_late_in_bursts_is_named() -> None:
    found = classified(Job(wait=on(1, 0.08, 0.0, 4), noise=0.1), workers=4)
    assert (found.kind, found.rank) == ("imbalance/input", 1)


def test_a_rank_whose_work_is_late_in_bursts_is_named() -> None:
    """In the steps between, who is last is chance."""
    found = classified(Job(forward=on(1, 0.08, 0.008, 4), noise=0.1, seed=2))
    assert (found.kind, found.rank) == ("imbalance/compute", 1)


def test_two_causes_of_about_the_same_size_are_mixed() -> None:
    found = classified(Job(wait=on(1, 0.02), comm=0.018))
    assert found.kind == "mixed"
    assert [one.kind for one in found.losses[:2]] == ["imbalance/input", "communication"]
    assert found.rank is None
    assert len(found.evidence) == 2
    both = classified(Job(wait=on(1, 0.02), forward=on(1, 0.028, 0.008)))
    assert (both.kind, both.rank) == ("mixed", 1)
    assert classified(Job(wait=on(1, 0.03), comm=0.012)).kind == "imbalance/input"


@pytest.mark.parametrize("where", ["forward", "after"])
def test_one_long_step_decides_nothing(where: str) -> None:
    """What it takes is more than all that is planted in the 200 others."""
    once = {where: lambda rank, step: 20.0 if (rank, step) == (0, 120) else 0.008}
    late = Job(wait=on(1, 0.02 + 0.008 * (where == "after")), steps=200, **once)
    found = classified(late)
    assert (found.kind, found.rank) == ("imbalance/input", 1)
    assert found.lone == (2 if where == "after" else 1)  # the others wait for it in their next step
    assert found.share == pytest.approx(0.5, abs=0.01)
    assert "left out" in found.evidence[-1]
    assert classified(Job(forward=once[where], steps=200)).kind == "healthy"


def test_one_long_step_takes_its_round_with_it() -> None:
    once = Job(wait=lambda _, step: 20.0 if step == 121 else 0.0, accumulate=4, steps=200)
    assert classified(once).kind == "healthy"


def test_bursts_are_no_lone_steps() -> None:
    def lone(**more) -> set:
        return lone_steps(line_up(Job(ranks=1, steps=330, **more).run(), 32, 2, 1))

    assert lone(wait=on(0, 2.0, 0.0, 32)) == set()
    assert lone(wait=on(0, 2.0, 0.0, 200)) == {200}


def test_ranks_that_are_late_in_turns_by_chance_are_healthy_until_it_is_much() -> None:
    def turns(seconds: float) -> Job:
        draw = random.Random(1)
        return Job(forward=lambda *_: 0.01 + seconds * draw.random(), elements=lambda *_: 100)

    few = classified(turns(0.012))
    assert few.losses[0].kind == "imbalance/turns"
    assert few.losses[0].share > 0.1
    assert few.kind == "healthy"
    much = classified(turns(0.06))
    assert (much.kind, much.rank, much.gain) == ("unknown", None, None)
    assert "in turns" in much.evidence[0]


def test_a_rank_whose_batches_are_always_larger_is_late_for_its_work() -> None:
    found = classified(Job(forward=on(1, 0.03, 0.01), elements=lambda rank, _: 300 if rank else 100))
    assert (found.kind, found.rank) == ("imbalance/compute", 1)
    assert "3.00 times the elements" in found.evidence[0]


def test_sizes_that_are_counted_now_and_then_are_those_of_the_batches_between() -> None:
    """Where all are alike; the other rank's differ, and are all counted."""
    n = lengths(1)
    ranks = Job(
        forward=lambda r, s: 1e-5 * n(r, s) if r else 0.016, elements=lambda r, s: n(r, s) if r else 1600
    ).run()
    sparse = [
        one if one.step % 50 == 0 else one._replace(parts={k: v for k, v in one.parts.items() if k != "n"})
        for one in ranks[0]
    ]
    assert classified_ranks({**ranks, 0: sparse}, 2).kind == "imbalance/lengths"


def test_what_nothing_explains_is_unknown() -> None:
    found = classified(Job(after=0.03, wait=0.004))
    assert (found.kind, found.gain) == ("unknown", None)
    assert found.losses[0].kind == "rest"


def test_ranks_that_leave_an_exchange_apart_lose_what_no_rank_has() -> None:
    """More processes than cores: a rank that is not woken at once keeps the others waiting at the next."""
    found = classified(Job(skew=lambda rank, step: 0.02 if step % 2 == rank else 0.0))
    assert (found.kind, found.losses[0].kind) == ("unknown", "rest")
    assert found.losses[0].seconds == pytest.approx(0.02, rel=0.05)
    assert "at different times" in found.evidence[0]
    assert "Outside of data" in classified(Job(after=0.03)).evidence[0]


def test_collecting_garbage_is_named() -> None:
    found = classified(Job(gc=0.01))
    assert (found.kind, found.rank) == ("sched/gc", None)
    assert "different times" not in found.evidence[0]
    assert "rank" not in classified(Job(ranks=1, gc=0.01)).evidence[0]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 12])
def test_d4_ranks_that_collect_garbage_at_different_times_are_named(
    ranks: int, cuda: bool, late: bool
) -> None:
    """Each holds all others up: they straggle in turns, and none for its work."""

    def collects(rank: int, step: int) -> float:
        return 0.03 if step % ranks == rank else 0.0

    name = "late_gc" if late else "gc"
    found = classified(Job(ranks=ranks, cuda=cuda, noise=0.02, **{name: collects}))
    assert (found.kind, found.rank) == ("sched/gc", None)
    assert found.losses[0].seconds == pytest.approx(0.03, rel=0.05)
    assert "rank 1 " in found.evidence[0]
    assert ("more ranks" in found.evidence[0]) == (ranks > 8)
    each = 30 / ranks
    assert "at different times" in found.evidence[0]
    assert f"it would cost {each:.3g}"[:18] in found.evidence[0]


def test_one_rank_that_collects_garbage_is_named() -> None:
    assert (found := classified(Job(ranks=3, late_gc=on(2, 0.03, every=2)))).kind == "sched/gc"
    assert found.rank == 2


def test_without_waits_a_late_rank_is_named_but_not_its_class() -> None:
    found = classified(Job(forward=on(1, 0.05, 0.01)), loop_waits=False)
    assert (found.kind, found.rank) == ("unknown", 1)
    assert classified(Job(comm=0.03), loop_waits=False).kind == "communication"
    assert classified(Job(), loop_waits=False).kind == "unknown"


def test_without_sync_points_only_what_all_wait_for_at_once_is_known() -> None:
    found = classified(Job(wait=0.03, without=("y",)))
    assert (found.kind, found.share) == ("data", pytest.approx(0.6))
    assert "at least" in found.evidence[0]
    blind = classified(Job(wait=on(1, 0.03), without=("y",)))
    assert (blind.kind, blind.gain) == ("unknown", None)
    assert "not seen" in blind.evidence[0]


def test_no_steps_are_unknown() -> None:
    found = classified(Job(steps=2))
    assert (found.kind, found.evidence) == ("unknown", ("No steps were measured.",))


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_ranks_does_not_matter(seed: int) -> None:
    late = random.Random(seed).randrange(4)
    ranks = Job(ranks=4, wait=on(late, 0.02), forward=on(3 - late, 0.03, 0.02), noise=0.3, seed=seed).run()
    order = random.Random(seed).sample(range(4), 4)
    one = classified_ranks(ranks, 4)
    other = classified_ranks({order[rank]: ranks[rank] for rank in (3, 1, 0, 2)}, 4)
    assert (one.kind, one.share) == (other.kind, pytest.approx(other.share))
    assert (one.rank is None) == (other.rank is None)
    if one.rank is not None:
        assert order[one.rank] == other.rank


def test_a_rank_that_was_killed_half_way_is_still_named() -> None:
    ranks = Job(wait=on(1, 0.03), steps=200).run()
    ranks[1] = ranks[1][:90]
    assert classified_ranks(ranks, 2).rank == 1


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 200, 3000, 40000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)  # scipy.stats.spearmanr
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None


def gpu_steps(parts: dict, steps: int = 60) -> list[StepSeen]:
    """The same step again and again, on a GPU's timeline."""
    seconds = parts["t"]
    return [
        StepSeen(step, 100 + step * seconds, 100 + step * seconds + parts["s"], None, None, {**parts})
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("ahead_s", "kind", "straggle_s"), [(0.0318, "imbalance/input", 0.001), (0.005, "mixed", 0.0245)]
)
def test_a_host_that_works_while_its_gpu_waits_for_buffers(ahead_s, kind, straggle_s) -> None:
    """Two GPUs under NCCL, rank 0 late with its data, DDP with buffers, and a forward that keeps the host.

    Rank 1's GPU waits for rank 0's buffers meanwhile: without that wait its own work would have shown. Where
    the host had queued the work and was done, the GPU's work afterwards is all that there is.
    """
    late = {"t": 0.0615, "s": 0.0262, "y": [["buffers", 0.0273, 0.0274], ["gradients", 0.058, 0.0595]]}
    other = {"t": 0.0615, "s": 0.0, "y": [["buffers", 0.0012, 0.0274], ["gradients", 0.0335, 0.0595]]}
    ends = {"b": 0.06, "o": 0.0612}
    ranks = {
        0: gpu_steps({**late, **ends, "r": 0.058, "a": min(ahead_s, 0.0306)}),
        1: gpu_steps({**other, **ends, "r": 0.0335, "a": ahead_s}),
    }
    found = classified_ranks(ranks, 2)
    assert (found.kind, found.rank) == (kind, 0)
    budget = measure_budget(line_up(ranks, 2, 2, 2))
    assert budget.job.parts.data_wait_s == pytest.approx(0.0262, abs=0.002)
    assert budget.job.parts.straggle_s == pytest.approx(straggle_s, abs=0.002)


@pytest.mark.parametrize(
    ("made", "none", "told"), [(0.004, 0.0, True), (0.004, 0.5, False), (0.03, 0.0, False)]
)
def test_where_batches_are_ready_it_is_not_the_workers_that_are_waited_for(made, none, told) -> None:
    timeline = line_up(Job(ranks=1, wait=0.02).run(), 2, 2, 1)
    found = classify(timeline, measure_budget(timeline), {0: made}, {0: none})
    assert found.kind == "data"
    assert ("not what it waits for" in " ".join(found.evidence)) == told
