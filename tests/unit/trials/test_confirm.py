"""Whether a confirmation is worth its time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings
from feedtune.trials.options import TuneOptions
from feedtune.trials.tune import Tuning
from feedtune.trials.verdict import Answer

OWN, OTHER = LoaderSettings(1), LoaderSettings(2)


def block(
    settings: LoaderSettings, rate: float, kind: str = "candidate", rereads: bool = True
) -> BlockResult:
    return BlockResult(0, kind, settings, rate=rate, spread=0.0, steps=12, seconds=1.0, rereads=rereads)


def confirmed(blocks: list[BlockResult]) -> Answer:
    """The answer after a confirmation whose own blocks are never run."""
    tuning = Tuning.__new__(Tuning)
    tuning.options = TuneOptions(["train"], pairs=0)
    tuning.answer = Answer(space=SimpleNamespace(single=False))
    tuning.trials = SimpleNamespace(candidates=lambda: blocks)
    tuning._confirm(OWN)
    return tuning.answer


@pytest.mark.parametrize(("rereads", "beaten"), [(True, True), (False, False)])
def test_blocks_that_read_again_are_compared_with_their_like(rereads, beaten, monkeypatch) -> None:
    """The first block of iterable data read cold; its settings read again are much faster than any other."""
    monkeypatch.setattr("feedtune.trials.tune.paired_gain", lambda *_: None)
    blocks = [
        block(OWN, 5.0, "baseline", rereads=False),
        block(OWN, 20.0, rereads=rereads),
        block(OTHER, 10.0, rereads=rereads),
    ]
    answer = confirmed(blocks)
    assert answer.beaten == beaten
    assert (answer.winner is None) == beaten
