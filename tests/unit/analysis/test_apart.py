"""What is said of loaders that do not train."""

from __future__ import annotations

import pytest

from feedtune.analysis.apart import advise

OTHER = {
    "trains": False, "num_workers": 2, "persistent_workers": False, "iterations": 5, "wait_s": 1.0,
    "first_s": 6.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Waiting for it took 7.0 s, most of it for 5 first batches: its workers start anew"),
        ({"num_workers": 0}, "took 7.0 s: its batches are made in the training process"),
        ({"wait_s": 14.0}, "took 20.0 s: its 2 workers do not keep up"),
        ({"wait_s": 14.0, "persistent_workers": True}, "its 2 workers do not keep up"),
        ({"persistent_workers": True}, None),
        ({"iterations": 1}, None),
        ({"trains": True}, None),
        ({"num_workers": None}, None),
        ({"first_s": 0.9}, None),
    ],
)
def test_what_makes_a_training_wait_for_its_validation(changes: dict, said: str | None) -> None:
    found = advise({**OTHER, **changes}, 100.0)
    assert said in found if said else found is None
