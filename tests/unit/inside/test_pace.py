"""Taking steps down costs a small share of the training, however short its steps are."""

from __future__ import annotations

import itertools

import pytest

from feedtune.inside.pace import Pace


def run(step_s: float, cost_s: float, steps: int = 200_000) -> list[bool]:
    """Which of the steps are taken down in full, where each of these costs the same."""
    pace, now, cost, found = Pace(), 0.0, 0.0, []
    for step in range(steps):
        found.append(pace.full(step, now, cost))
        cost += cost_s * found[-1]
        now += step_s + cost_s * found[-1]
    return found


@pytest.mark.parametrize("step_s", [1e-4, 5e-4, 2e-3, 8e-3, 0.02, 1.0])
@pytest.mark.parametrize("cost_s", [2e-5, 6e-5, 1.5e-4])
def test_a_long_run_pays_half_a_percent(step_s: float, cost_s: float) -> None:
    found = run(step_s, cost_s)
    share = sum(found) * cost_s / (len(found) * step_s)
    assert share < max(0.006, cost_s / step_s / 50)  # one window in 64 is seen whatever it costs
    assert all(found[:512])
    if cost_s < 0.005 * step_s:
        assert all(found)


def test_ranks_of_unequal_cost_share_the_windows_of_the_dearest() -> None:
    dear, cheap = run(2e-3, 1.5e-4), run(2e-3, 6e-5)
    assert sum(dear) < sum(cheap) < len(cheap)
    assert all(other for one, other in zip(dear, cheap, strict=True) if one)


def test_windows_are_rows_of_steps() -> None:
    lengths = {
        full: {len(list(group)) for key, group in itertools.groupby(run(2e-3, 1.5e-4)) if key is full}
        for full in (True, False)
    }
    assert min(lengths[True]) >= 128


def test_a_pause_makes_the_next_windows_no_cheaper_for_ever() -> None:
    """An evaluation of a minute falls into a window; the one after it is measured anew."""
    pace, now, cost, found = Pace(), 0.0, 0.0, []
    for step in range(100_000):
        found.append(pace.full(step, now, cost))
        cost += 1e-4 * found[-1]
        now += 2e-3 + 60.0 * (step % 5000 == 600)
    assert sum(found) < 0.3 * len(found)
