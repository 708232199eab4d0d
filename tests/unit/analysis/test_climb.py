"""Which settings are asked for, in which order, and when the climb ends."""

from __future__ import annotations

import random

import pytest

from feedtune.analysis.climb import make_space, next_seed
from feedtune.settings import LoaderSettings
from shard_tools.errors import BadInput


def climb(space, own, rate_of, failing=()) -> dict[LoaderSettings, float | None]:
    """Settings in the order in which they were asked for, with what they brought."""
    rates: dict[LoaderSettings, float | None] = {}
    for _ in range(200):
        settings = next_seed(space, own, rates)
        if settings is None:
            return rates
        assert space.contains(settings)
        assert settings not in rates
        rates[settings] = None if settings.num_workers in failing else rate_of(settings)
    raise AssertionError("never ends")


def latency_bound(settings: LoaderSettings) -> float:
    """Each worker adds its own share: time is spent waiting, not computing."""
    return max(1, settings.num_workers) * 7.5


def cpu_bound(settings: LoaderSettings) -> float:
    """Two cores; more workers than that only get into each other's way."""
    return 10 * min(2, max(1, settings.num_workers)) * (0.98 if settings.num_workers > 2 else 1)


def in_memory(settings: LoaderSettings) -> float:
    """The transfer between processes costs more than the fetch."""
    return 1000.0 if settings.num_workers == 0 else 50.0 + settings.num_workers


def space_of(own: LoaderSettings, **changes):
    return make_space(own, **{"cuda": False, "cores_per_rank": 2, **changes})


def random_space(source: random.Random):
    own = LoaderSettings(source.choice([0, 0, 1, 4, 5, 10, 70]), source.choice([None, 2, 3, 8]))
    fixed = {}
    if source.random() < 0.3:
        fixed["num_workers"] = source.choice([0, 1, 4, 7, 100])
    if source.random() < 0.3:
        fixed["prefetch_factor"] = source.choice([1, 2, 5, 16])
    if source.random() < 0.3:
        fixed["pin_memory"] = source.random() < 0.5
    space = make_space(
        own,
        cuda=source.random() < 0.5,
        cores_per_rank=source.choice([1, 2, 8, 192]),
        max_workers=source.choice([1, 2, 16, 64]),
        fixed=fixed,
    )
    return own, space, fixed


def test_any_climb_ends_inside_its_space_without_repeats() -> None:
    for seed in range(400):
        source = random.Random(seed)
        own, space, fixed = random_space(source)
        rates = climb(space, own, lambda _, s=source: s.uniform(1, 100), failing=source.sample(range(70), 5))
        for settings in rates:
            for name, value in fixed.items():
                if name != "prefetch_factor" or settings.num_workers:
                    assert getattr(settings, name) == value


def test_no_workers_come_last_unless_they_are_the_users_own_or_the_best() -> None:
    for seed in range(400):
        source = random.Random(seed)
        own, space, _ = random_space(source)
        asked = list(climb(space, own, lambda t, s=source: s.uniform(1, 100) if t.num_workers else 0.5))
        zeros = [i for i, settings in enumerate(asked) if settings.num_workers == 0 and settings != own]
        assert zeros == list(range(len(asked)))[len(asked) - len(zeros) :]


def test_the_users_own_settings_come_first() -> None:
    own = LoaderSettings(5, 3)
    assert next(iter(climb(space_of(own), own, latency_bound))) == own


def test_the_climb_goes_on_while_doubling_pays() -> None:
    own = LoaderSettings(0)
    rates = climb(space_of(own), own, latency_bound)
    workers = [settings.num_workers for settings in rates]
    assert workers[:7] == [0, 2, 4, 8, 16, 32, 64]
    assert max(rates, key=rates.get).num_workers == 64


def test_the_climb_does_not_pass_the_users_bound() -> None:
    own = LoaderSettings(0)
    rates = climb(space_of(own, max_workers=16), own, latency_bound)
    assert max(settings.num_workers for settings in rates) == 16


def test_the_climb_ends_where_the_cpu_is_the_limit() -> None:
    own = LoaderSettings(0)
    rates = climb(space_of(own), own, cpu_bound)
    assert max(settings.num_workers for settings in rates) == 4
    assert max(rates, key=rates.get).num_workers == 2


def test_the_climb_ends_where_settings_fail() -> None:
    own = LoaderSettings(0)
    rates = climb(space_of(own), own, latency_bound, failing=(8,))
    # Nothing beyond the failure but the rung beside the best.
    assert max(settings.num_workers for settings in rates) == 8
    assert LoaderSettings(6) in rates


def test_no_workers_come_last_where_the_user_allows_no_others() -> None:
    own = LoaderSettings(8)
    asked = list(climb(space_of(own, max_workers=0), own, lambda s: 1.0 + s.num_workers))
    assert [settings.num_workers == 0 for settings in asked] == [False] * (len(asked) - 1) + [True]


def test_the_neighbours_of_the_best_keep_the_users_prefetch() -> None:
    """Only the best itself is tried with a deeper queue: one thing changes at a time."""

    def best_at_twelve(settings: LoaderSettings) -> float:
        workers = settings.num_workers
        return min(10 * workers, 144 - 2 * workers) + 5 * (settings.prefetch_factor or 0)

    own = LoaderSettings(0)
    rates = climb(space_of(own), own, best_at_twelve)
    assert {LoaderSettings(12, 4), LoaderSettings(12, 8)} <= set(rates)
    beside = [settings for settings in rates if settings.num_workers in (8, 16, 24)]
    assert beside == [LoaderSettings(8), LoaderSettings(16), LoaderSettings(24)]


def test_noise_of_two_percent_does_not_pull_the_climb_along() -> None:
    """Eight workers read a little higher than four by chance: the search goes on beside four."""
    own = LoaderSettings(0)
    noisy = {0: 10.0, 2: 50.0, 4: 100.0, 8: 101.5}
    rates = climb(space_of(own), own, lambda s: noisy.get(s.num_workers, 90.0))
    assert {LoaderSettings(3), LoaderSettings(6)} <= set(rates)
    assert not {s.num_workers for s in rates} & {12, 16}
    assert LoaderSettings(4, 4) in rates
    assert LoaderSettings(8, 4) not in rates


def test_the_neighbours_of_the_best_are_asked_for() -> None:
    own = LoaderSettings(0)
    rates = climb(space_of(own), own, lambda s: 100 - abs(s.num_workers - 12))
    assert {LoaderSettings(w) for w in (8, 16, 12)} <= set(rates)
    assert any(settings.prefetch_factor == 4 for settings in rates)


def test_pinning_is_searched_only_where_it_means_something() -> None:
    own = LoaderSettings(0)
    assert {s.pin_memory for s in climb(space_of(own), own, latency_bound)} == {False}
    assert {s.pin_memory for s in climb(space_of(own, cuda=True), own, latency_bound)} == {False, True}


@pytest.mark.parametrize(
    ("name", "value"), [("num_workers", 7), ("prefetch_factor", 5), ("pin_memory", True)]
)
def test_what_the_user_fixes_is_respected(name, value) -> None:
    own = LoaderSettings(2)
    space = space_of(own, cuda=True, fixed={name: value})
    asked = [s for s in climb(space, own, latency_bound) if s.num_workers or name != "prefetch_factor"]
    assert asked
    assert {getattr(settings, name) for settings in asked} == {value}


def test_what_can_change_what_is_learned_is_not_tried_unasked() -> None:
    own = LoaderSettings(2)
    for settings in climb(space_of(own), own, latency_bound):
        assert (settings.in_order, settings.multiprocessing_context) == (True, None)
    for settings in climb(space_of(own, same_workers=True), own, latency_bound):
        assert settings.num_workers == 2
    orders = {s.in_order for s in climb(space_of(own, any_order=True), own, latency_bound)}
    assert orders == {True, False}


def test_the_users_own_order_and_start_method_stay() -> None:
    own = LoaderSettings(2, 2, False, False, "spawn")
    for any_order in (False, True):
        asked = [s for s in climb(space_of(own, any_order=any_order), own, latency_bound) if s.num_workers]
        assert asked[0] == own
        assert {s.multiprocessing_context for s in asked} == {"spawn"}
        assert {s.in_order for s in asked} == {False}


def test_start_methods_are_tried_at_the_best_alone() -> None:
    own = LoaderSettings(0)
    space = space_of(own, start_methods=["spawn", "forkserver"])
    rates = climb(space, own, lambda s: latency_bound(s) * (1.5 if s.multiprocessing_context else 1))
    others = [settings for settings in rates if settings.multiprocessing_context]
    assert {s.multiprocessing_context for s in others} == {"spawn", "forkserver"}
    assert {s.num_workers for s in others} <= {max(s.num_workers for s in rates)}


@pytest.mark.parametrize(
    ("name", "value"), [("in_order", False), ("multiprocessing_context", "forkserver"), ("num_workers", 0)]
)
def test_what_the_user_fixes_of_the_rest_is_respected(name, value) -> None:
    own = LoaderSettings(2)
    space = space_of(own, fixed={name: value}, any_order=True, start_methods=["spawn"])
    asked = [s for s in climb(space, own, latency_bound) if s.num_workers or name == "num_workers"]
    assert asked
    assert {getattr(settings, name) for settings in asked} == {value}


def test_a_space_without_workers_has_no_order_and_no_start_method() -> None:
    own = LoaderSettings(0)
    space = space_of(own, same_workers=True, any_order=True, start_methods=["spawn"])
    assert space.single
    assert space.contains(LoaderSettings(0, 4, False, False, "spawn"))
    assert list(climb(space, own, latency_bound)) == [own]
    assert not space_of(LoaderSettings(2), same_workers=True, any_order=True).single


def test_a_space_of_one_holds_nothing_else() -> None:
    own = LoaderSettings(3, 2)
    space = space_of(own, fixed={"num_workers": 3, "prefetch_factor": 2})
    assert space.single
    assert list(climb(space, own, latency_bound)) == [own]
    assert space_of(own, fixed={"num_workers": 0}).single
    assert not space_of(own, fixed={"num_workers": 3}).single


def test_t13_prefetch_without_workers_cannot_be_asked_for() -> None:
    """pytorch #68576: DataLoader(num_workers=0, prefetch_factor=2) is a ValueError."""
    assert LoaderSettings(0, 4).prefetch_factor is None
    assert LoaderSettings(4, 8).with_values(num_workers=0) == LoaderSettings(0)
    for seed in range(200):
        source = random.Random(seed)
        own, space, _ = random_space(source)
        for settings in climb(space, own, lambda _, s=source: s.uniform(1, 100)):
            assert (settings.prefetch_factor is None) == (settings.num_workers == 0)
    with pytest.raises(BadInput):
        LoaderSettings(1, 0)


@pytest.mark.parametrize("own", [LoaderSettings(0), LoaderSettings(4), LoaderSettings(16, 8)])
def test_t14_in_memory_data_is_tried_without_workers_and_they_lose(own) -> None:
    """pytorch #154318: in-memory data is 3 to 124 times slower with workers."""
    rates = climb(space_of(own), own, in_memory)
    assert max(rates, key=rates.get) == LoaderSettings(0)
