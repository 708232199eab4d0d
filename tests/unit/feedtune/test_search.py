"""The study: the climb first, the sampler after it, everything kept in a journal."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest

from feedtune.analysis.climb import make_space, next_seed
from feedtune.records import BlockResult
from feedtune.search import Search
from feedtune.settings import LoaderSettings

OWN = LoaderSettings(0)


def search_all(folder, rate_of, trials: int = 40, own: LoaderSettings = OWN, **changes) -> Search:
    space = make_space(own, **{"cuda": False, "cores_per_rank": 2, "max_workers": 8, **changes})
    search = Search(folder / "study.journal", space, own)
    for k in range(trials):
        settings = search.ask()
        if settings is None:
            break
        assert space.contains(settings)
        assert settings not in search.rates
        rate = rate_of(settings)
        if rate is None:
            result = BlockResult(k, "candidate", settings, state="failed", reason="hang")
        else:
            result = BlockResult(k, "candidate", settings, rate=rate)
        search.tell(settings, result)
    return search


def test_the_users_own_come_first_and_nothing_comes_twice(tmp_path) -> None:
    search = search_all(tmp_path, lambda s: 10.0 + s.num_workers)
    assert next(iter(search.rates)) == OWN
    assert max(search.rates, key=search.rates.get).num_workers == 8


def test_a_space_of_one_is_asked_for_once(tmp_path) -> None:
    search = search_all(tmp_path, lambda _: 5.0, fixed={"num_workers": 0})
    assert list(search.rates) == [OWN]


def test_the_search_ends_after_one_sampled_setting_in_vain(tmp_path) -> None:
    space = make_space(OWN, cuda=False, cores_per_rank=2)
    search = search_all(tmp_path, lambda s: 10.0 - abs(s.num_workers - 2), max_workers=64)
    climbed: dict = {}
    while (settings := next_seed(space, OWN, climbed)) is not None:
        climbed[settings] = 10.0 - abs(settings.num_workers - 2)
    assert len(search.rates) == len(climbed) + 1


def test_a_sampled_setting_that_is_better_keeps_the_search_going(tmp_path) -> None:
    found = iter(range(1, 100))
    search = search_all(tmp_path, lambda _: 10.0 * 1.1 ** next(found), trials=20, max_workers=64)
    assert len(search.rates) == 20


def test_sampled_worker_counts_stay_within_a_rung_of_the_best(tmp_path) -> None:
    search = search_all(tmp_path, lambda s: 10.0 - abs(s.num_workers - 2), trials=12, max_workers=64)
    assert max(settings.num_workers for settings in search.rates) <= 4


def test_failures_and_exclusions_are_told_and_not_asked_for_again(tmp_path) -> None:
    search = search_all(tmp_path, lambda s: None if s.num_workers > 2 else 10.0)
    assert {rate for s, rate in search.rates.items() if s.num_workers > 2} == {None}


def test_every_trial_stands_in_the_journal(tmp_path) -> None:
    search = search_all(tmp_path, lambda s: 10.0 + s.num_workers, trials=6)
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal = tmp_path / "study.journal"
    assert journal.stat().st_mode & 0o777 == 0o600
    study = optuna.load_study(study_name="feedtune", storage=JournalStorage(JournalFileBackend(str(journal))))
    done = [t for t in study.trials if t.value is not None]
    assert [t.value for t in done] == [rate for rate in search.rates.values() if rate]
    assert [t.user_attrs["block"] for t in done] == list(range(6))
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_excluded_settings_are_a_constraint(tmp_path) -> None:
    space = make_space(OWN, cuda=False, cores_per_rank=2)
    search = Search(tmp_path / "study.journal", space, OWN)
    settings = search.ask()
    out = BlockResult(-1, "candidate", settings, state="excluded", reason="shm", detail="too much")
    search.tell(settings, out)
    assert search.rates == {settings: None}
    assert search.ask() != settings


def every(space) -> list[LoaderSettings]:
    """All settings of a space."""
    found = {
        LoaderSettings(*values)
        for values in product(space.workers, space.prefetch, space.pin, space.orders, space.contexts)
    }
    return sorted(found, key=lambda settings: (settings.cost, str(settings)))


def test_all_settings_come_back_as_they_were_queued(tmp_path) -> None:
    """The study's conditional space and the settings are one to one."""
    own = LoaderSettings(3, 5, True)
    space = make_space(
        own, cuda=True, cores_per_rank=2, max_workers=3, any_order=True, start_methods=["spawn", "forkserver"]
    )
    search = Search(tmp_path / "study.journal", space, own)
    for settings in every(space):
        search._queued = settings
        search._study.enqueue_trial(search._params(settings))
        trial = search._study.ask()
        assert search._suggest(trial) == settings
        search._study.tell(trial, 1.0)
        names = {"num_workers", "pin_memory"}
        if settings.num_workers:
            names |= {"prefetch_factor", "in_order", "start_method"}
        assert set(trial.params) == names


def test_settings_that_are_dropped_are_no_result_and_may_come_again(tmp_path) -> None:
    space = make_space(OWN, cuda=False, cores_per_rank=2)
    search = Search(tmp_path / "study.journal", space, OWN)
    settings = search.ask()
    search.drop()
    assert search.rates == {}
    assert [trial.state.name for trial in search._study.trials] == ["FAIL"]
    assert search.ask() == settings
    search.tell(settings, BlockResult(0, "candidate", settings, rate=3.0))
    assert search.rates == {settings: 3.0}


def random_search(source: random.Random):
    """A space of any kind, and the user's own settings."""
    own = LoaderSettings(
        source.choice([0, 0, 1, 2, 5, 16]),
        source.choice([None, 2, 3, 16]),
        source.random() < 0.5,
        source.random() < 0.7,
        source.choice([None, "fork", "spawn"]),
    )
    choices = {
        "num_workers": [0, 3], "prefetch_factor": [1, 5], "pin_memory": [True, False],
        "in_order": [True, False], "multiprocessing_context": ["forkserver"],
    }  # fmt: skip
    space = make_space(
        own,
        cuda=source.random() < 0.5,
        cores_per_rank=source.choice([1, 2, 8]),
        max_workers=source.choice([0, 1, 8, 64]),
        fixed={name: source.choice(values) for name, values in choices.items() if source.random() < 0.25},
        same_workers=source.random() < 0.3,
        any_order=source.random() < 0.5,
        start_methods=source.choice([(), ("spawn", "forkserver")]),
    )
    return own, space


@pytest.mark.parametrize("seed", range(15))
def test_any_search_ends_inside_its_space_without_repeats(tmp_path, seed) -> None:
    source = random.Random(seed)
    own, space = random_search(source)
    search = Search(tmp_path / "study.journal", space, own)
    for k in range(25):
        settings = search.ask()
        if settings is None:
            assert k  # something is always asked for
            return
        assert space.contains(settings)
        assert settings not in search.rates
        assert k or settings == own or not space.contains(own)
        rate = source.choice([None, source.uniform(1, 100)])
        failed = {"state": "failed", "reason": "hang"} if rate is None else {}
        search.tell(settings, BlockResult(k, "candidate", settings, rate=rate, **failed))


@pytest.mark.parametrize("own", [LoaderSettings(5, 3), LoaderSettings(10, 16)])
def test_settings_off_the_ladders_are_in_the_space(tmp_path, own) -> None:
    search = search_all(tmp_path, lambda s: 1.0 + s.num_workers, own=own)
    assert next(iter(search.rates)) == own
