"""Which settings to measure next before a sampler takes over: the user's own, a climb, the neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from feedtune.analysis.policy import POLICY
from feedtune.settings import DEFAULT_PREFETCH, LoaderSettings

# Latency-bound data wants far more workers than cores, so the ladder does not end at the core count.
WORKER_LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PREFETCH_LADDER = (1, 2, 4, 8)
DEFAULT_MAX_WORKERS = 64
_WORKERS_ON_FEW_CORES = 32  # beyond this a small machine is busy with its workers alone


@dataclass(frozen=True)
class Space:
    """What may be searched: the values of each setting, in rising order, the user's own among them.

    Attributes:
        start: where the climb over worker counts begins.
        orders: values of ``in_order``, the user's own first.
        contexts: values of ``multiprocessing_context``, the user's own first.
    """

    workers: tuple[int, ...]
    prefetch: tuple[int, ...]
    pin: tuple[bool, ...]
    start: int
    orders: tuple[bool, ...] = (True,)
    contexts: tuple[str | None, ...] = (None,)

    @property
    def single(self) -> bool:
        """Whether the user has fixed every setting."""
        return (
            len(self.workers) == 1
            and len(self.pin) == 1
            and (self.workers == (0,) or len(self.prefetch) == len(self.orders) == len(self.contexts) == 1)
        )

    def contains(self, settings: LoaderSettings) -> bool:
        """Whether the settings lie in the space."""
        if settings.num_workers not in self.workers or settings.pin_memory not in self.pin:
            return False
        return settings.num_workers == 0 or (
            settings.prefetch_factor in self.prefetch
            and settings.in_order in self.orders
            and settings.multiprocessing_context in self.contexts
        )


def default_max_workers(cores_per_rank: int) -> int:
    """Most workers of a rank that are tried unasked: 32, or four a core up to 64."""
    return min(DEFAULT_MAX_WORKERS, max(_WORKERS_ON_FEW_CORES, 4 * cores_per_rank))


def make_space(
    own: LoaderSettings,
    *,
    cuda: bool,
    cores_per_rank: int,
    max_workers: int = DEFAULT_MAX_WORKERS,
    fixed: Mapping[str, int | bool | str] | None = None,
    same_workers: bool = False,
    any_order: bool = False,
    start_methods: Sequence[str] = (),
) -> Space:
    """The space around the user's own settings.

    Args:
        own: the settings as the script has them; always inside, unless another value is fixed.
        cuda: whether ``pin_memory`` means anything here.
        cores_per_rank: cores that one rank can count on.
        max_workers: upper bound of workers a rank.
        fixed: settings that the user holds fast.
        same_workers: keep the worker count: it decides what iterable data yields.
        any_order: ``in_order=False`` may be tried.
        start_methods: start methods of workers that may be tried beside the user's own.
    """
    fixed = fixed or {}
    workers = {w for w in WORKER_LADDER if w <= max_workers} | {own.num_workers}
    prefetch = set(PREFETCH_LADDER) | {own.prefetch_factor or DEFAULT_PREFETCH}
    pin = {own.pin_memory, True} if cuda else {own.pin_memory}
    pin |= {False} if cuda else set()
    start = max(w for w in WORKER_LADDER if w <= min(max(2, cores_per_rank), max_workers))
    space = Space(
        tuple(sorted(workers)),
        tuple(sorted(prefetch)),
        tuple(sorted(pin)),
        start,
        tuple(dict.fromkeys((own.in_order, own.in_order and not any_order))),
        tuple(dict.fromkeys((own.multiprocessing_context, *start_methods))),
    )
    if same_workers:
        space = replace(space, workers=(own.num_workers,), start=own.num_workers)
    return _hold(space, fixed)


def _hold(space: Space, fixed: Mapping[str, int | bool | str]) -> Space:
    """The space with the user's fixed settings as its only values."""
    if "num_workers" in fixed:
        space = replace(space, workers=(int(fixed["num_workers"]),), start=int(fixed["num_workers"]))
    if "prefetch_factor" in fixed:
        space = replace(space, prefetch=(int(fixed["prefetch_factor"]),))
    if "pin_memory" in fixed:
        space = replace(space, pin=(bool(fixed["pin_memory"]),))
    if "in_order" in fixed:
        space = replace(space, orders=(bool(fixed["in_order"]),))
    if "multiprocessing_context" in fixed:
        space = replace(space, contexts=(str(fixed["multiprocessing_context"]),))
    return space


def next_seed(
    space: Space, own: LoaderSettings, rates: Mapping[LoaderSettings, float | None]
) -> LoaderSettings | None:
    """The next settings of the climb; ``None`` when it is over.

    Order: the user's own settings, unlabelled; doublings of the worker count while they pay; the rungs
    beside the best; its prefetch and pinning; one rung below the start, if the best is there; no
    workers at all, last, since workers forked later would share what the dataset opens in the main
    process.

    Args:
        space: what may be searched.
        own: the user's settings.
        rates: what was measured; ``None`` for settings that failed or were excluded.
    """
    for settings in _order(space, own, rates):
        if space.contains(settings) and settings not in rates:
            return settings
    return None


def _order(
    space: Space, own: LoaderSettings, rates: Mapping[LoaderSettings, float | None]
) -> list[LoaderSettings]:
    base = LoaderSettings(
        max(1, space.start),
        own.prefetch_factor if own.prefetch_factor in space.prefetch else _default(space.prefetch),
        space.pin[-1],
        space.orders[0],
        space.contexts[0],
    )
    order = [own]
    climb = _climb(space, base, rates)
    order += climb
    if climb and climb[-1] not in rates:
        return order  # still climbing
    best = _best(rates)
    if best is None or best.num_workers == 0:
        return [*order, base.with_values(num_workers=1), LoaderSettings(0, None, space.pin[-1])]
    index = space.workers.index(best.num_workers) if best.num_workers in space.workers else 0
    for neighbour in (index + 1, index - 1):
        if 0 <= neighbour < len(space.workers) and space.workers[neighbour] > 0:
            order.append(base.with_values(num_workers=space.workers[neighbour]))
    order.append(best.with_values(prefetch_factor=(best.prefetch_factor or DEFAULT_PREFETCH) * 2))
    order += [best.with_values(pin_memory=pin) for pin in space.pin if pin != best.pin_memory]
    order += [best.with_values(in_order=value) for value in space.orders]
    order += [best.with_values(multiprocessing_context=context) for context in space.contexts]
    if best.num_workers <= space.start:
        lower = [w for w in space.workers if 0 < w < space.start]
        order += [base.with_values(num_workers=w) for w in lower[-1:]]
    return [*order, LoaderSettings(0, None, own.pin_memory)]


def _best(rates: Mapping[LoaderSettings, float | None]) -> LoaderSettings | None:
    """The cheapest settings within 2 % of the highest rate: noise alone must not pull the search along."""
    highest = max((rate for rate in rates.values() if rate), default=0.0)
    near = [s for s, rate in rates.items() if rate and rate >= highest * (1 - POLICY.near_best)]
    return min(near, key=lambda s: s.cost, default=None)


def _default(prefetch: tuple[int, ...]) -> int:
    return DEFAULT_PREFETCH if DEFAULT_PREFETCH in prefetch else prefetch[0]


def _climb(
    space: Space, base: LoaderSettings, rates: Mapping[LoaderSettings, float | None]
) -> list[LoaderSettings]:
    """The doublings so far and, while they pay, the next one."""
    found: list[LoaderSettings] = []
    best = 0.0
    workers = base.num_workers
    while workers <= max(space.workers):
        rung = max((w for w in space.workers if 0 < w <= workers), default=None)
        if rung is None:
            return found  # nothing but no workers at all
        settings = base.with_values(num_workers=rung)
        found.append(settings)
        if settings not in rates:
            return found
        rate = rates[settings]
        if rate is None or rate < best * (1 + POLICY.ladder_step):
            return found
        best = max(best, rate)
        workers *= 2
    return found
