"""Baseline and ceilings: how they are planned, and what their blocks make of the ceiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from feedtune.machine import read_machine
from feedtune.records import BlockPlan, BlockResult
from feedtune.rundir import RunDir
from feedtune.settings import LoaderSettings
from feedtune.trials.measuring import Trials
from feedtune.trials.options import TuneOptions

PINNED, PAGEABLE, BASELINE = 4154.0, 3003.0, 2900.0  # images/s, as they were measured on one H200


class FakeSession:
    """Remembers plans; each block has the rate of its kind."""

    def __init__(self, elements: float | None = 100.0) -> None:
        self.plans: list[BlockPlan] = []
        self.starts = 1
        self.isolate = False
        self.repeated = None
        self.elements = elements

    def run(self, plan: BlockPlan) -> BlockResult:
        self.plans.append(plan)
        rate = BASELINE
        if plan.kind == "ceiling":
            rate = PINNED if plan.settings.pin_memory else PAGEABLE
        return BlockResult(
            0, plan.kind, plan.settings, rate=rate, steps=12, seconds=1.2, edge_s=0.1,
            elements=self.elements if plan.kind == "ceiling" else 100.0,
        )  # fmt: skip


def trials(folder: Path, session: FakeSession, world: int = 1) -> Trials:
    machine = replace(read_machine(), ram_available_bytes=8_000_000_000)
    made = Trials(TuneOptions(["train"]), RunDir(folder / "run"), session, machine, lambda _: None)
    loader = {"epoch_steps": 100, "persistent_workers": False, "iterable": False, "start_method": "fork"}
    made.answer.hello = {"world": world, "loader": loader}
    return made


@pytest.mark.parametrize("world", [1, 4])
def test_the_cache_takes_a_twentieth_of_free_memory_over_all_ranks(tmp_path, world) -> None:
    session = FakeSession()
    trials(tmp_path, session, world).baseline(LoaderSettings(2))
    assert session.plans[0].cache_bytes * world == 400_000_000


@pytest.mark.parametrize("workers", [0, 1, 2, 8])
def test_at_least_ten_batches_pass_in_the_block_that_caches(tmp_path, workers) -> None:
    session = FakeSession()
    trials(tmp_path, session).baseline(LoaderSettings(workers))
    (plan,) = session.plans
    assert plan.cache == 10
    assert plan.min_cycles * plan.cycle >= 10
    assert plan.min_cycles >= 3


def test_a_gpu_gets_both_kinds_of_ceiling_and_the_higher_one_is_the_ceiling(tmp_path) -> None:
    """Against the pageable one alone, a pageable baseline would look bound by the GPU."""
    session = FakeSession()
    made = trials(tmp_path, session)
    baseline = made.baseline(LoaderSettings(2))
    made.ceilings(True, baseline)
    assert [plan.settings.pin_memory for plan in session.plans] == [False, False, True]
    assert made.answer.ceilings == {False: PAGEABLE, True: PINNED}
    assert made.answer.ceiling == PINNED
    assert made.starvation(baseline) == pytest.approx(1 - BASELINE / PINNED)
    assert made.blocks[0].starvation == pytest.approx(1 - BASELINE / PINNED)


def test_without_a_gpu_there_is_nothing_to_pin_for(tmp_path) -> None:
    session = FakeSession()
    made = trials(tmp_path, session)
    made.ceilings(False, made.baseline(LoaderSettings(2)))
    assert made.answer.ceilings == {False: PAGEABLE}


@pytest.mark.parametrize(
    ("elements", "rate", "uneven"), [(90.0, 0.9 * PAGEABLE, True), (97.0, PAGEABLE, False)]
)
def test_uneven_batches_make_it_a_rate_per_element(tmp_path, elements, rate, uneven) -> None:
    """Cached batches that are a tenth smaller than the baseline's say nothing on its steps."""
    made = trials(tmp_path, FakeSession(elements))
    made.ceilings(False, made.baseline(LoaderSettings(2)))
    assert made.answer.ceiling == pytest.approx(rate)
    assert made.answer.uneven == uneven


@pytest.mark.parametrize("iterable", [True, False])
def test_blocks_of_iterable_data_say_that_they_read_again(tmp_path, iterable) -> None:
    """Iterable data restarts with each block: later ones find warm what the first one has read."""
    made = trials(tmp_path, FakeSession())
    made.answer.hello["loader"]["iterable"] = iterable
    own = LoaderSettings(2)
    first = made.baseline(own)
    made.ceilings(False, first)
    later = [made.run(made.plan("candidate", own)), made.run(made.plan("confirm", own))]
    assert not first.rereads
    assert [block.rereads for block in later] == [iterable, iterable]


def test_a_replay_slower_than_real_data_is_no_ceiling(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(f"{__name__}.PAGEABLE", 0.5 * BASELINE)
    made = trials(tmp_path, FakeSession())
    baseline = made.baseline(LoaderSettings(2))
    made.ceilings(False, baseline)
    assert made.answer.ceiling is None
    assert made.answer.odd_ceiling == (0.5 * BASELINE, BASELINE)
    assert made.starvation(baseline) is None
