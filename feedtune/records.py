"""The few shapes that carry everything: frozen, standard library only.

``None`` means not measured, ``0.0`` means measured zero. Units stand in the names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from feedtune.settings import LoaderSettings

BlockKind = Literal["baseline", "ceiling", "probe", "candidate", "confirm"]
BlockState = Literal["ok", "failed", "excluded", "unstable"]
Reason = Literal[
    "script_ended", "script_failed", "loader_failed", "worker_died", "rank_died", "hang", "too_few_steps",
    "ranks_diverged", "opened_in_main", "duplicates", "ram", "shm", "gpu_memory", "descriptors", "spread",
    "above_bound",
]  # fmt: skip
Outcome = Literal["gain", "no_gain", "gpu_bound", "data_bound", "failed"]


class StepRecord(NamedTuple):
    """One step of one rank, from that rank's clock.

    Attributes:
        step: number of the batch inside its block, from 0.
        enter_s: the loop asked for the batch (monotonic seconds).
        return_s: the loop got it.
        tag: why the stretch before ``enter_s`` is no training (eval, save, epoch, restart), or ``None``.
        elements: number of tensor elements in the batch.
        clone_s: time spent cloning a cached batch that the loop changes in place.
        parts: what the step's time was spent on, where it was taken down (``feedtune.inside.stepclock``).
    """

    step: int
    enter_s: float
    return_s: float
    tag: str | None
    elements: int
    clone_s: float
    parts: dict[str, Any] | None = None


class Reading(NamedTuple):
    """What a sampler beside the training has read at one moment about one thing.

    Attributes:
        t_s: when the sampler's tick began (monotonic seconds of the host, the clock of the step records).
        source: what was read: ``process``, ``gpu``, ``disk``, ...; feedtune/beside/readings.py lists them.
        of: which one: a pid, a GPU's number, a device's name; ``""`` where there is one only.
        values: by name, units in the names; ``None`` means not measured.
    """

    t_s: float
    source: str
    of: str
    values: dict[str, float | int | str | None]


@dataclass(frozen=True)
class BlockPlan:
    """What every rank does in block ``k``; written once, so that all ranks read the same.

    Attributes:
        kind: see DESIGN: baseline, ceiling, probe, candidate or confirm.
        settings: loader settings; for a ceiling block only ``pin_memory`` matters.
        warmup: steps that are not measured: one full turnover of what is in flight.
        cycle: measured steps are a whole multiple of this (the worker count).
        target_s: measured seconds wanted; at least ``min_cycles`` cycles are measured whatever they take.
        max_s: no further chunk is granted so many seconds after the first batch.
        cache: how many batches to keep for the ceiling, while this block runs.
        cache_bytes: upper bound of the memory they may take in each rank.
        replay: for a ceiling block, the steps of the cache that every rank has kept; empty for all.
        stop_below: stop early when the rate lies below this (steps/s); 0 never stops.
        step_s: longest time a step is predicted to take; 0: not known yet.
        no_sync: DDP does not synchronize gradients: what they cost is the difference.
    """

    k: int
    kind: BlockKind
    settings: LoaderSettings
    warmup: int
    cycle: int
    target_s: float
    max_s: float
    min_cycles: int = 3
    cache: int = 0
    cache_bytes: int = 0
    replay: tuple[int, ...] = ()
    stop_below: float = 0.0
    step_s: float = 0.0
    no_sync: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        return {**asdict(self), "replay": list(self.replay)}


@dataclass(frozen=True)
class BlockResult:
    """What a block measured.

    Attributes:
        rate: steps of the job a second over whole worker cycles, at most what the workers can make.
        spread: coefficient of variation of the rate over sub-stretches of whole cycles.
        starvation: ``1 - rate / ceiling``; ``None`` before the ceiling is known.
        wait_share: share of the measured time in which the slowest rank waited in ``next()``.
        edge_s: what starting the workers costs: creation to the end of the warm-up, minus what its steps
            take at the steady rate.
        rate_with_edges: the rate over an epoch of the script, worker starts included; equal to ``rate`` where
            the script keeps its workers or has none.
        worker_s: time that a worker takes to fetch and collate one batch, measured in the workers.
        rereads: the block saw data that an earlier block had read (iterable datasets restart).
        elements: mean tensor elements a batch.
        swap_s: time that changing to the block and away from it took: worker starts, first batch, ends.
        predicted_swap_s: what that was predicted to take; ``None`` before anything was known.
        detail: what went wrong, or how it was measured, in one sentence.
        stack: last stack or traceback of a block that has failed.
        tags: how often each kind of excluded stretch was cut out.
        first_steps: job step at which each rank started the block (equal on all, or the ranks diverged).
    """

    k: int
    kind: BlockKind
    settings: LoaderSettings
    state: BlockState = "ok"
    reason: Reason | None = None
    steps: int = 0
    seconds: float = 0.0
    rate: float | None = None
    spread: float | None = None
    starvation: float | None = None
    wait_share: float | None = None
    edge_s: float | None = None
    rate_with_edges: float | None = None
    worker_s: float | None = None
    rereads: bool = False
    elements: float | None = None
    swap_s: float | None = None
    predicted_swap_s: float | None = None
    detail: str = ""
    stack: str = ""
    tags: dict[str, int] = field(default_factory=dict)
    first_steps: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BlockResult:
        """A result out of JSON."""
        return cls(**{**data, "settings": LoaderSettings.from_dict(data["settings"])})

    @property
    def measured(self) -> bool:
        """Whether the block has a rate to work with."""
        return self.rate is not None and self.state in ("ok", "unstable")

    @property
    def speed(self) -> float:
        """What settings are compared by: the rate over an epoch, worker starts included; 0 without one."""
        return self.rate_with_edges or self.rate or 0.0
