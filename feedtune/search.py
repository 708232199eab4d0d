"""The Optuna study: where trials are asked for, told, and kept; the only importer of Optuna."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from feedtune.analysis.climb import Space, next_seed
from feedtune.analysis.policy import POLICY
from feedtune.records import BlockResult
from feedtune.settings import LoaderSettings

_TRIES_FOR_NEW = 20  # the space is small: a sampler that only repeats itself has seen it all

_OWN_METHOD = "own"  # workers start as the script or its platform has it
_PATIENCE = 1  # sampled settings in vain, after the climb has found its place


class Search:
    """Asks for settings one at a time: first the climb, then a TPE sampler over what is left.

    Args:
        journal: the study's journal file.
        space: the values that may be tried.
        own: the user's settings, tried first.
        seed: seed of the sampler.
    """

    def __init__(self, journal: Path, space: Space, own: LoaderSettings, seed: int = 0) -> None:
        journal.touch(mode=0o600)  # Optuna would let others read it
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.own = own
        self.rates: dict[LoaderSettings, float | None] = {}
        self._study = optuna.create_study(
            study_name="feedtune",
            storage=JournalStorage(JournalFileBackend(str(journal))),
            direction="maximize",
            # The climb has explored; the sampler starts to exploit at once.
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=4),
        )
        self._trial: optuna.Trial | None = None
        self._queued: LoaderSettings | None = None
        self._in_vain = 0  # sampled settings in a row that did not beat the best

    def ask(self) -> LoaderSettings | None:
        """New settings to measure, or ``None`` when nothing is left to try."""
        self._queued = next_seed(self.space, self.own, self.rates)
        if self._queued is not None:
            self._study.enqueue_trial(self._params(self._queued))
        elif self._in_vain >= _PATIENCE:
            return None
        for _ in range(_TRIES_FOR_NEW):
            trial = self._study.ask()
            settings = self._suggest(trial)
            if settings not in self.rates:
                self._trial = trial
                return settings
            known = self.rates[settings]
            self._study.tell(trial, known, state=None if known is not None else TrialState.FAIL)
        return None

    def drop(self) -> None:
        """The settings of the last ``ask`` will not be measured."""
        assert self._trial is not None
        self._study.tell(self._trial, state=TrialState.FAIL)
        self._trial = None

    def tell(self, settings: LoaderSettings, result: BlockResult) -> None:
        """Record what the settings of the last ``ask`` brought."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        trial.set_user_attr("block", result.k)
        trial.set_user_attr("state", result.state)
        if result.state == "excluded":
            trial.set_constraint(result.reason or "excluded", 1.0)
        rate = result.speed if result.measured else None
        best = max((known for known in self.rates.values() if known), default=0.0)
        self.rates[settings] = rate
        if self._queued is None:
            better = rate is not None and rate > best * (1 + POLICY.near_best)
            self._in_vain = 0 if better else self._in_vain + 1
        if rate is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, rate)

    def _params(self, settings: LoaderSettings) -> dict[str, int | bool | str]:
        """Settings as the study's parameters; worker counts and prefetch as rungs of their ladders."""
        params: dict[str, int | bool | str] = {"num_workers": self.space.workers.index(settings.num_workers)}
        if settings.prefetch_factor is not None:
            params["prefetch_factor"] = self.space.prefetch.index(settings.prefetch_factor)
            params["in_order"] = settings.in_order
            params["start_method"] = settings.multiprocessing_context or _OWN_METHOD
        params["pin_memory"] = settings.pin_memory
        return params

    def _top_rung(self) -> int:
        """One rung above the best: beyond it, more workers had ceased to pay."""
        best = max((s for s in self.rates if self.rates[s]), key=lambda s: self.rates[s] or 0.0, default=None)
        counts = [s.num_workers for s in (best, self._queued) if s is not None]
        rungs = [self.space.workers.index(count) for count in counts if count in self.space.workers]
        return min(max(rungs, default=0) + 1, len(self.space.workers) - 1)

    def _suggest(self, trial: optuna.Trial) -> LoaderSettings:
        workers = self.space.workers[trial.suggest_int("num_workers", 0, self._top_rung())]
        pin = bool(trial.suggest_categorical("pin_memory", list(self.space.pin)))
        if not workers:  # torch refuses the others without workers: a conditional space
            return LoaderSettings(0, None, pin)
        prefetch = self.space.prefetch[trial.suggest_int("prefetch_factor", 0, len(self.space.prefetch) - 1)]
        in_order = bool(trial.suggest_categorical("in_order", list(self.space.orders)))
        methods = [context or _OWN_METHOD for context in self.space.contexts]
        method = str(trial.suggest_categorical("start_method", methods))
        return LoaderSettings(workers, prefetch, pin, in_order, None if method == _OWN_METHOD else method)
