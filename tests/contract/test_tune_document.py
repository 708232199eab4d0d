"""The keys of ``feedtune.tune/1``: what readers of ``--json`` and ``result.json`` rely on."""

from __future__ import annotations

import pytest

from feedtune.analysis.stats import Gain
from feedtune.records import BlockResult
from feedtune.report.terminal import print_tune
from feedtune.settings import LoaderSettings
from feedtune.trials.verdict import Answer, Facts, document

PROMISED = {
    "schema", "machine", "command", "world_size", "starts", "seconds", "outcome", "ceiling", "baseline",
    "blocks", "best", "gain", "verdict", "snippet",
}  # fmt: skip
BLOCK = {"settings", "kind", "steps", "rate", "starvation", "state", "reason"}
SETTINGS = {"num_workers", "prefetch_factor", "pin_memory", "in_order", "multiprocessing_context"}
OWN, BEST = LoaderSettings(0), LoaderSettings(8, 4)


def confirm(settings: LoaderSettings, rate: float) -> BlockResult:
    return BlockResult(6, "confirm", settings, rate=rate, steps=12, seconds=1.2, edge_s=0.1)


def made(**changes) -> dict:
    values = {
        "hello": {"world": 2, "loader": {"epoch_steps": 10, "persistent_workers": False}},
        "own": OWN,
        "ceilings": {False: 40.0, True: 50.0},
        "winner": BEST,
        "confirmed": {"A": [confirm(OWN, 10.0)], "B": [confirm(BEST, 20.0)]},
        "gain": Gain(2.0, 1.9, 2.1),
    }
    blocks = [
        BlockResult(0, "baseline", OWN, rate=10.0, steps=12, seconds=1.2, edge_s=0.1),
        BlockResult(1, "ceiling", OWN, rate=40.0, steps=48, seconds=1.2),
        BlockResult(2, "candidate", BEST, rate=20.0, steps=24, seconds=1.2, edge_s=0.1),
        BlockResult(3, "candidate", OWN, state="failed", reason="hang", detail="[no] sign\nof life"),
        BlockResult(4, "confirm", BEST, rate=20.0, steps=24, seconds=1.2),
        BlockResult(5, "confirm", OWN, rate=10.0, steps=12, seconds=1.2),
    ]
    facts = Facts({"cores": 2}, ["python"], "/runs/[x]/1", 1, 40.0, "overlay", [], ["MLflow"], False)
    return document(Answer(**{**values, **changes}), blocks, facts)


OUTCOMES = {
    "gain": {},
    "no_gain": {"gain": Gain(1.0, 0.9, 1.1)},
    "gpu_bound": {"gain": None, "confirmed": {"A": [confirm(OWN, 49.9)]}},
    "failed": {"gain": None, "interrupted": True},
}


@pytest.mark.parametrize(("outcome", "changes"), OUTCOMES.items(), ids=OUTCOMES)
def test_every_outcome_has_every_key(outcome, changes) -> None:
    found = made(**changes)
    assert found["outcome"] == outcome
    assert found["schema"] == "feedtune.tune/1"
    assert set(found) >= PROMISED
    assert set(found["ceiling"]) >= {"rate", "kind", "pinned", "pageable"}
    for entry in found["blocks"]:
        assert set(entry) >= BLOCK
        assert set(entry["settings"]) == SETTINGS
    assert set(found["best"]["settings"]) == SETTINGS
    assert isinstance(found["verdict"], str)
    assert "\n" not in found["verdict"]
    assert found["snippet"].startswith("DataLoader(")


def test_the_gain_has_its_interval_and_nothing_else() -> None:
    assert made()["gain"] == {"ratio": 2.0, "low": 1.9, "high": 2.1}


@pytest.mark.parametrize("outcome", ["no_gain", "gpu_bound", "failed"])
def test_without_a_gain_the_best_is_the_baseline(outcome) -> None:
    found = made(**OUTCOMES[outcome])
    assert found["gain"] is None
    assert found["best"] == found["baseline"]
    assert found["best"]["settings"] == OWN.as_dict()


@pytest.mark.parametrize(("outcome", "changes"), OUTCOMES.items(), ids=OUTCOMES)
def test_every_outcome_can_be_printed(capsys, outcome, changes) -> None:
    print_tune(made(**changes))
    out = capsys.readouterr().out
    assert outcome.upper().replace("_", " ") in out
    assert "ceiling" in out
    assert "50.00" in out
    assert "failed: hang" in out
    assert "feedtune report /runs/[x]/1" in out
    assert ("Paste this" in out) == (outcome == "gain")


def test_a_document_of_nothing_can_be_printed(capsys) -> None:
    facts = Facts({}, ["python"], "/runs/1", 1, 4.0, "overlay", [], [], False)
    print_tune(document(Answer(interrupted=True), [], facts))
    assert "FAILED" in capsys.readouterr().out
