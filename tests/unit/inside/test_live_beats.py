"""Signs of life of a real loop: what it does that is no step, and when it trains again."""

from __future__ import annotations

from itertools import pairwise

from live_driver import block

from feedtune.trials.server import ControlServer


def test_a_block_that_the_scripts_end_cuts_off_ends_before_the_last_step(live) -> None:
    run = live("ends_slowly")
    (result,) = run.run(block(0, steps=1000))
    assert run.ended() == 0
    (trained,) = [entry["now"] for entry in run.log() if entry["at"] == "trained"]
    records = [record for _, record in run.records()]
    assert result["partial"]
    assert result["end_s"] < trained
    assert len(records) == result["steps"] == result["total"] - result["first_step"] - 1
    assert records[-1].return_s <= result["end_s"]


def test_each_pause_ends_with_the_next_step(live, monkeypatch) -> None:
    """A hang in the first batch of an epoch must not be taken for a long evaluation."""
    seen: list[str | None] = []
    monkeypatch.setattr(ControlServer, "_on_unknown", lambda _, message, __: seen.append(message["doing"]))
    run = live("plain")
    run.run(block(0, steps=30))
    run.finish()
    assert seen.count("epoch") >= 4
    for before, after in pairwise(seen):
        assert (before is None) or (after is None)
