"""Loader settings: what belongs together, what is refused."""

from __future__ import annotations

import pytest

from feedtune.settings import LoaderSettings, parse_fixed
from shard_tools.errors import BadInput


def test_prefetch_exists_if_and_only_if_there_are_workers() -> None:
    assert LoaderSettings(0, 4).prefetch_factor is None
    assert LoaderSettings(3).prefetch_factor == 2
    assert LoaderSettings(3, 5).prefetch_factor == 5
    assert LoaderSettings(0, 4) == LoaderSettings(0)


@pytest.mark.parametrize("values", [(-1, None), (1, 0), (2, -3)])
def test_impossible_settings(values) -> None:
    with pytest.raises(BadInput, match="below"):
        LoaderSettings(*values)


def test_what_is_in_flight() -> None:
    assert LoaderSettings(4, 3).in_flight == 12
    assert LoaderSettings(0).in_flight == 0


def test_changed_copies() -> None:
    assert LoaderSettings(4, 8).with_values(num_workers=0) == LoaderSettings(0)
    assert LoaderSettings(0).with_values(num_workers=4) == LoaderSettings(4, 2)
    assert LoaderSettings(4, 8).with_values(pin_memory=True) == LoaderSettings(4, 8, True)


def test_cost_orders_processes_then_memory_then_pinning() -> None:
    rising = [
        LoaderSettings(0), LoaderSettings(0, None, True), LoaderSettings(2, 1), LoaderSettings(2, 2),
        LoaderSettings(2, 2, True), LoaderSettings(3, 1),
    ]  # fmt: skip
    assert sorted(rising, key=lambda s: s.cost) == rising


def test_through_json_and_back() -> None:
    for settings in (
        LoaderSettings(0),
        LoaderSettings(8, 4, True),
        LoaderSettings(8, 4, True, False, "forkserver"),
    ):
        assert LoaderSettings.from_dict(settings.as_dict()) == settings
    assert LoaderSettings.from_dict({"num_workers": 2}) == LoaderSettings(
        2
    )  # of a version without the others
    said = {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False, "batch_size": 4, "site": "x.py:1"}
    assert LoaderSettings.from_dict(said) == LoaderSettings(2)


def test_order_and_start_method_mean_nothing_without_workers() -> None:
    """torch refuses a start method there, and has no order to keep."""
    assert LoaderSettings(0, None, False, False, "spawn") == LoaderSettings(0)
    assert LoaderSettings(2, 2, False, False, "spawn").with_values(num_workers=0) == LoaderSettings(0)
    assert LoaderSettings(2, 2, False, False, "spawn") != LoaderSettings(2)
    for method in ("fork", "spawn", "forkserver", None):
        assert LoaderSettings(2, multiprocessing_context=method).multiprocessing_context == method
    with pytest.raises(BadInput, match="multiprocessing_context=thread is no start method"):
        LoaderSettings(2, multiprocessing_context="thread")


def test_what_is_odd_costs_most_among_equals() -> None:
    rising = [
        LoaderSettings(2, 2), LoaderSettings(2, 2, False, True, "spawn"), LoaderSettings(2, 2, False, False),
        LoaderSettings(2, 2, True), LoaderSettings(2, 3),
    ]  # fmt: skip
    mixed = list(reversed(rising))
    assert sorted(mixed, key=lambda s: s.cost) == rising


def test_the_snippet_is_what_torch_takes() -> None:
    assert LoaderSettings(0).arguments() == "num_workers=0, pin_memory=False"
    assert LoaderSettings(2, 1, False, False, "spawn").arguments() == (
        'num_workers=2, prefetch_factor=1, pin_memory=False, in_order=False, multiprocessing_context="spawn"'
    )
    assert LoaderSettings(8, 4, True).arguments() == "num_workers=8, prefetch_factor=4, pin_memory=True"


def test_fixed_values() -> None:
    assert parse_fixed([]) == {}
    items = ["num_workers=4", "prefetch_factor=2", "pin_memory=True"]
    assert parse_fixed(items) == {"num_workers": 4, "prefetch_factor": 2, "pin_memory": True}
    assert parse_fixed(["in_order=False", "multiprocessing_context=Spawn"]) == {
        "in_order": False, "multiprocessing_context": "spawn",
    }  # fmt: skip
    assert parse_fixed(["num_workers=2", "num_workers=3"]) == {"num_workers": 3}
    assert parse_fixed(["pin_memory=false", "num_workers=0"]) == {"pin_memory": False, "num_workers": 0}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("workers=4", "not a setting"),
        ("num_workers", "not a setting"),
        ("=4", "not a setting"),
        ("num_workers=", "not a whole number"),
        ("num_workers=-1", "not a whole number"),
        ("num_workers=four", "not a whole number"),
        ("prefetch_factor=2.5", "not a whole number"),
        ("prefetch_factor=0", "prefetch_factor is 1 or more"),
        ("pin_memory=1", "none of true, false"),
        ("in_order=yes", "none of true, false"),
        ("in_order=true|false", "none of true, false"),
        ("multiprocessing_context=", "none of fork, spawn, forkserver"),
        ("num_workers=²", "not a whole number"),
        ("multiprocessing_context=thread", "none of fork, spawn, forkserver"),
    ],
)
def test_wrong_fixed_values_name_the_item(item, text) -> None:
    with pytest.raises(BadInput, match=text) as caught:
        parse_fixed([item])
    assert item in str(caught.value)
    assert caught.value.exit_code == 2
