"""From what was measured to the answer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from feedtune.analysis.climb import make_space
from feedtune.analysis.stats import Gain
from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings
from feedtune.trials.verdict import Answer, Facts, Side, decide, document

OWN = LoaderSettings(0)
BEST = LoaderSettings(8, 4)
PROVEN = Gain(2.0, 1.9, 2.1)
NOTHING = Gain(1.004, 0.98, 1.03)
FACTS = Facts(
    machine={"cores": 2},
    command=["python", "train.py"],
    run="/runs/1",
    starts=1,
    seconds=42.12345,
    guard="overlay",
    guard_notes=[],
    trackers=["MLflow"],
    cloned=False,
)
HELLO = {
    "world": 2,
    "loader": {
        "number": 0,
        "trained": True,
        "epoch_steps": 100,
        "persistent_workers": False,
        "site": "t.py:3",
    },
}


def block(
    settings: LoaderSettings, rate: float | None = 10.0, kind: str = "candidate", **changes
) -> BlockResult:
    return replace(BlockResult(0, kind, settings, rate=rate, steps=12, seconds=1.2, edge_s=0.01), **changes)


def blocks() -> list[BlockResult]:
    return [block(OWN, 10.0, "baseline"), *(block(LoaderSettings(w), 10.0 + w) for w in (0, 2, 4, 8))]


def confirmed(**changes) -> dict[str, list[BlockResult]]:
    """Two pairs; ``changes`` are those of the winner's blocks."""
    return {
        "A": [block(OWN, rate, "confirm") for rate in (8.0, 12.5)],
        "B": [block(BEST, 20.0, "confirm", **changes) for _ in range(2)],
    }


def answer(**changes) -> Answer:
    values = {
        "hello": HELLO,
        "own": OWN,
        "space": make_space(OWN, cuda=False, cores_per_rank=2),
        "ceilings": {False: 40.0},
        "winner": BEST,
        "confirmed": confirmed(),
        "gain": PROVEN,
    }
    return Answer(**{**values, **changes})


def decided(**changes) -> dict:
    return document(answer(**changes), blocks(), FACTS)


def test_a_gain() -> None:
    found = decided()
    assert found["outcome"] == "gain"
    assert found["best"] == {
        "settings": BEST.as_dict(),
        "rate": pytest.approx(20.0),
        "rate_with_edges": pytest.approx(20.0),
        "starvation": pytest.approx(0.5),
    }
    assert found["baseline"] == {
        "settings": OWN.as_dict(),
        "rate": pytest.approx(10.0),
        "rate_with_edges": pytest.approx(10.0),
        "starvation": pytest.approx(0.75),
    }
    assert found["gain"] == {"ratio": 2.0, "low": 1.9, "high": 2.1}
    assert found["snippet"] == "DataLoader(..., num_workers=8, prefetch_factor=4, pin_memory=False)"
    assert "2.00x" in found["verdict"]
    assert "1.90 to 2.10" in found["verdict"]
    assert "20.00 instead of 10.00" in found["verdict"]
    assert "50.0% instead of 75.0%" in found["verdict"]


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        (
            [block(OWN, None, "ceiling", state="failed", reason="too_few_steps", detail="30 steps")],
            " (30 steps).",
        ),
        ([], "."),
    ],
)
def test_a_gain_without_a_ceiling_says_so_once(failed: list[BlockResult], why: str) -> None:
    found = document(answer(ceilings={False: None}), [*blocks(), *failed], FACTS)
    assert found["outcome"] == "gain"
    assert "starvation" not in found["verdict"]
    assert found["verdict"].endswith("instead of 10.00 steps/s.")
    assert [line for line in found["advice"] if "tarvation" in line] == [
        f"Starvation is unknown: no ceiling was measured{why}"
    ]


def test_no_gain_keeps_what_the_user_has() -> None:
    found = decided(gain=NOTHING, ceilings={False: 10.5})
    assert found["outcome"] == "no_gain"
    assert found["gain"] is None
    assert found["compared"] == {"ratio": 1.004, "low": 0.98, "high": 1.03}
    assert found["best"] == found["baseline"]
    assert found["snippet"] == "DataLoader(..., num_workers=0, pin_memory=False)"
    assert "keep yours" in found["verdict"]


def test_a_ratio_that_is_sure_but_not_worth_it_is_no_gain() -> None:
    assert decided(gain=Gain(1.015, 1.01, 1.02), ceilings={False: 10.5})["outcome"] == "no_gain"


def test_the_users_own_settings_are_never_a_gain() -> None:
    """However sure the interval of settings against themselves looks."""
    own = {"A": confirmed()["A"], "B": [block(OWN, 20.0, "confirm") for _ in range(2)]}
    found = decided(winner=OWN, confirmed=own, ceilings={False: 10.5})
    assert found["outcome"] == "no_gain"
    assert found["gain"] is None
    assert found["best"] == found["baseline"]
    side = Side.of(OWN, own["A"], answer(ceilings={False: 10.5}))
    assert decide(answer(winner=OWN, ceilings={False: 10.5}), blocks(), side) == "no_gain"
    assert decide(answer(ceilings={False: 10.5}), blocks(), side) == "gain"


def test_data_bound_needs_a_search_that_looked() -> None:
    found = decided(gain=NOTHING)
    assert found["outcome"] == "data_bound"
    assert found["gain"] is None
    assert found["best"]["settings"] == OWN.as_dict()
    assert any("shard-tools pack" in line for line in found["advice"])
    few = [block(OWN, 10.0, "baseline"), block(LoaderSettings(2)), block(LoaderSettings(2, 4))]
    assert document(answer(gain=NOTHING), few, FACTS)["outcome"] == "no_gain"


def test_gpu_bound_before_any_search() -> None:
    found = decided(gain=None, winner=None, confirmed={}, ceilings={False: 10.1})
    assert found["outcome"] == "gpu_bound"
    assert found["best"] == found["baseline"]
    assert found["baseline"]["rate"] == pytest.approx(10.0)
    assert "99.0%" in found["verdict"]


def test_gpu_bound_where_only_the_second_look_says_so() -> None:
    """A baseline just below the ceiling; its settings as a candidate are at it, and end the search."""
    found = decided(gain=None, winner=None, confirmed={}, ceilings={False: 10.3}, at_ceiling=True)
    assert found["outcome"] == "gpu_bound"
    assert found["best"] == found["baseline"]


@pytest.mark.parametrize(
    "changes",
    [
        {"gain": None, "interrupted": True},
        {"gain": None, "note": "the confirmation failed (hang): no sign of life"},
        {"gain": None, "winner": None},
    ],
)
def test_no_answer_is_failed(changes) -> None:
    found = decided(confirmed={}, **changes)
    assert found["outcome"] == "failed"
    assert found["gain"] is None
    assert found["compared"] is None
    assert found["verdict"].startswith("No answer: ")


def test_a_baseline_that_never_was_is_failed() -> None:
    failed = block(OWN, None, "baseline", state="failed", reason="hang")
    found = document(Answer(hello=HELLO, own=OWN), [failed], FACTS)
    assert found["outcome"] == "failed"
    assert found["baseline"]["rate"] is None


def test_an_empty_answer_still_makes_a_document() -> None:
    found = document(Answer(interrupted=True), [], FACTS)
    assert found["outcome"] == "failed"
    assert (found["baseline"], found["best"], found["snippet"]) == (None, None, None)
    assert "interrupted" in found["verdict"]


def test_an_interruption_after_the_interval_keeps_the_answer() -> None:
    assert decided(interrupted=True)["outcome"] == "gain"
    assert decided(interrupted=True, gain=None)["outcome"] == "failed"


@pytest.mark.parametrize(
    ("ceilings", "rate", "kind"),
    [
        ({False: 30.0, True: 40.0}, 40.0, "pinned"),
        ({False: 40.0, True: 30.0}, 40.0, "pageable"),
        ({False: 40.0, True: None}, 40.0, "pageable"),
        ({False: None}, None, None),
        ({}, None, None),
    ],
)
def test_the_ceiling_is_the_higher_of_both(ceilings, rate, kind) -> None:
    found = decided(ceilings=ceilings)["ceiling"]
    assert (found["rate"], found["kind"]) == (rate, kind)
    assert (found["pinned"], found["pageable"]) == (ceilings.get(True), ceilings.get(False))


@pytest.mark.parametrize(
    ("ceilings", "share"),
    [({True: 4154.0, False: 3003.0}, "28%"), ({True: 4154.0, False: 4150.0}, None), ({False: 3003.0}, None)],
)
def test_what_copying_out_of_pageable_memory_costs_is_told_apart(ceilings, share) -> None:
    lines = [line for line in decided(ceilings=ceilings)["advice"] if "pageable memory" in line]
    assert [share in line for line in lines] == ([True] if share else [])


@pytest.mark.parametrize("cloned", [True, False])
def test_replays_that_had_to_be_cloned_are_told(cloned) -> None:
    found = document(answer(), blocks(), replace(FACTS, cloned=cloned))
    assert found["ceiling"]["cloned"] == cloned
    assert any("changes its batches in place" in line for line in found["advice"]) == cloned


def test_without_a_ceiling_starvation_is_unknown_and_not_zero() -> None:
    found = decided(ceilings={})
    assert found["baseline"]["starvation"] is None
    assert "starvation" not in found["verdict"]


def test_the_edge_is_spread_over_the_epoch() -> None:
    found = decided(confirmed=confirmed(edge_s=1.25, rate_with_edges=16.0))
    assert found["edge"]["seconds"] == 1.25
    assert found["edge"]["share"] == pytest.approx(0.2)  # 1.25 s beside 100 steps at 20 a second
    assert found["edge"]["rate_with_edges"] == pytest.approx(16.0)
    assert found["edge"]["paid_each_epoch"]
    assert found["best"]["rate"] == pytest.approx(20.0)
    assert found["best"]["rate_with_edges"] == pytest.approx(16.0)
    assert any("persistent_workers=True" in line for line in found["advice"])
    assert "16.00 instead of 10.00 steps/s over an epoch" in found["verdict"]


def test_t4_worker_starts_are_named_with_their_cure() -> None:
    """pytorch #15849, lightning #2875: a quarter of every epoch goes into starting workers."""
    found = decided(confirmed=confirmed(edge_s=5 / 3, rate_with_edges=15.0))
    assert found["edge"]["share"] == pytest.approx(0.25)
    (line,) = [line for line in found["advice"] if "Starting the workers" in line]
    assert "25% of it" in line
    assert "persistent_workers=True" in line
    # A cost that nobody would notice is no advice.
    small = decided(confirmed=confirmed(edge_s=0.02))
    assert not any("Starting the workers" in line for line in small["advice"])


def test_a_loader_that_keeps_its_workers_gets_no_such_advice() -> None:
    hello = {"world": 2, "loader": {**HELLO["loader"], "persistent_workers": True}}
    found = decided(hello=hello, confirmed=confirmed(edge_s=1.25))
    assert not found["edge"]["paid_each_epoch"]
    assert not any("persistent_workers" in line for line in found["advice"])


def test_candidates_that_were_all_beaten_need_no_confirmation() -> None:
    found = decided(gain=None, winner=None, confirmed={}, beaten=True, ceilings={False: 10.5})
    assert (found["outcome"], found["gain"]) == ("no_gain", None)
    assert "every candidate was slower" in found["verdict"]


def test_excluded_settings_and_a_short_budget_are_said() -> None:
    out = block(LoaderSettings(64), None, state="excluded", reason="shm", detail="160 MB of 67.1 MB free")
    found = document(answer(cut_short=True), [*blocks(), out], FACTS)
    assert any("160 MB of 67.1 MB" in line for line in found["advice"])
    assert any("--budget" in line for line in found["advice"])


def test_settings_that_failed_are_said_once_each_with_their_cause() -> None:
    dead = "rank 0: a worker process was killed: RuntimeError: DataLoader worker is killed by signal: Killed."
    failed = {"state": "failed", "reason": "worker_died", "detail": dead}
    tried = [block(LoaderSettings(w), None, **failed) for w in (4, 4, 8)]
    confirm = block(BEST, None, "confirm", state="failed", reason="hang", detail="no sign of life")
    lines = [
        line for line in document(answer(), [*blocks(), *tried, confirm], FACTS)["advice"] if "failed" in line
    ]
    assert lines == [
        f"{LoaderSettings(workers).arguments()} failed (worker_died): {dead}" for workers in (4, 8)
    ]


ITERABLE = {"world": 1, "loader": {**HELLO["loader"], "iterable": True, "dataset": "Stream"}}


def test_iterable_data_keeps_its_worker_count_and_says_so() -> None:
    found = decided(hello=ITERABLE, frozen=True)
    assert any(
        "The data is iterable (Stream)" in line and "--allow-semantic" in line for line in found["advice"]
    )
    assert not any("iterable" in line for line in decided()["advice"])


def test_nothing_to_try_beside_the_users_own() -> None:
    space = make_space(OWN, cuda=False, cores_per_rank=2, same_workers=True)
    found = decided(hello=ITERABLE, frozen=True, space=space, winner=None, confirmed={}, gain=None)
    assert (found["outcome"], found["gain"], found["best"]) == ("no_gain", None, found["baseline"])
    assert found["verdict"].startswith("Nothing to try beside yours (num_workers=0")
    # The same space by the user's own wish is the A/A test, and its failure is one.
    fixed = decided(space=space, winner=None, confirmed={}, gain=None)
    assert fixed["outcome"] == "failed"


def test_nothing_to_try_at_the_ceiling_is_gpu_bound() -> None:
    space = make_space(OWN, cuda=False, cores_per_rank=2, same_workers=True)
    changes = {"frozen": True, "space": space, "winner": None, "confirmed": {}, "gain": None}
    assert decided(hello=ITERABLE, ceilings={False: 10.1}, **changes)["outcome"] == "gpu_bound"


def test_data_that_is_not_split_is_named_with_its_figures() -> None:
    found = decided(hello=ITERABLE, repeated=(128, 64, 2))
    (line,) = [line for line in found["advice"] if "not split" in line]
    assert line.startswith("Stream is not split between its workers: with 2 of them, 64 of the first 128")
    assert "get_worker_info()" in line
    again = block(
        LoaderSettings(4), 30.0, state="excluded", reason="duplicates", detail="64 of the first 128"
    )
    lines = document(answer(hello=ITERABLE, repeated=(128, 64, 2)), [*blocks(), again], FACTS)["advice"]
    assert not any("were not run" in line for line in lines)  # it was


def test_a_file_that_isolated_the_trials_is_named() -> None:
    found = decided(isolated="/data/train.bin")
    assert any("/data/train.bin" in line and "__getitem__" in line for line in found["advice"])


def test_a_gain_that_changes_what_is_seen_says_what() -> None:
    any_order = BEST.with_values(in_order=False)
    changed = {"A": confirmed()["A"], "B": [block(any_order, 20.0, "confirm") for _ in range(2)]}
    found = decided(winner=any_order, confirmed=changed)
    assert any("in_order=False delivers" in line for line in found["advice"])
    assert "in_order=False" in found["snippet"]
    assert not any("in_order" in line for line in decided()["advice"])
    assert any("worker count of iterable data" in line for line in decided(hello=ITERABLE)["advice"])
    same = decided(hello=ITERABLE, own=BEST.with_values(prefetch_factor=2))
    assert not any("worker count of iterable data" in line for line in same["advice"])
    none = decided(winner=any_order, confirmed=changed, gain=NOTHING)
    assert not any("in_order" in line for line in none["advice"])


def test_the_note_of_a_failed_confirmation_is_the_verdict() -> None:
    note = "the confirmation failed (hang): no sign of life for 60 s: rank 0 hangs in its loop"
    found = decided(gain=None, confirmed={}, note=note, cut_short=True)
    assert (found["outcome"], found["verdict"]) == ("failed", f"No answer: {note}.")


def test_every_document_is_json() -> None:
    for changes in (
        {}, {"gain": NOTHING}, {"gain": None, "interrupted": True}, {"ceilings": {}}, {"repeated": (2, 1, 2)},
    ):  # fmt: skip
        found = decided(**changes)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
