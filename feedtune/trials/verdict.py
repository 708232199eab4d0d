"""From what a tuning has measured to its answer: outcome, verdict, snippet, ``result.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from feedtune.analysis.climb import Space
from feedtune.analysis.failures import last_line
from feedtune.analysis.policy import POLICY
from feedtune.analysis.stats import Gain, geometric_mean
from feedtune.records import BlockResult, Outcome
from feedtune.settings import LoaderSettings
from shard_tools.units import format_seconds

SCHEMA = "feedtune.tune/1"
_UNDECIDED = 1.10  # an interval that reaches so high has not shown that there is no gain
_WORKER_COUNTS_FOR_DATA_BOUND = 3  # fewer say nothing on what the loader could do


@dataclass
class Answer:
    """What a tuning has found out so far; a partial one makes a partial result."""

    hello: dict[str, Any] = field(default_factory=dict)
    own: LoaderSettings | None = None
    space: Space | None = None
    ceilings: dict[bool, float | None] = field(default_factory=dict)  # by pinned
    winner: LoaderSettings | None = None
    confirmed: dict[str, list[BlockResult]] = field(default_factory=dict)  # A: the user's, B: the winner's
    gain: Gain | None = None
    uneven: bool = False
    interrupted: bool = False
    cut_short: bool = False
    at_ceiling: bool = False  # the user's own settings reached it when they were measured once more
    beaten: bool = False  # every candidate was clearly slower than the user's own settings
    frozen: bool = False  # iterable data: the worker count was kept
    repeated: tuple[int, int, int] | None = None  # of it: first samples, repeated ones, at so many workers
    odd_ceiling: tuple[float, float] | None = (
        None  # a replay slower than the user's own settings: their rates
    )
    unguarded: bool = False  # the script trains when a spawned worker imports it
    isolated: str = ""  # a file that made every trial run in a start of its own
    note: str = ""

    @property
    def ceiling(self) -> float | None:
        """The higher of both kinds: what the script reaches when data is free."""
        return max((rate for rate in self.ceilings.values() if rate), default=None)

    @property
    def nothing_to_try(self) -> bool:
        """The user's own settings were the only ones allowed, and not because the user fixed them."""
        return self.frozen and self.space is not None and self.space.single and self.gain is None

    def starvation(self, rate: float | None) -> float | None:
        """``1 - rate / ceiling``; ``None`` where either is unknown."""
        return None if rate is None or self.ceiling is None else 1 - rate / self.ceiling


@dataclass(frozen=True)
class Facts:
    """What stands in the result beside the answer."""

    machine: dict[str, Any]
    command: list[str]
    run: str
    starts: int
    seconds: float
    guard: str
    guard_notes: list[str]
    trackers: list[str]
    cloned: bool


@dataclass(frozen=True)
class Side:
    """One setting's figures over its blocks; speed and starvation have worker starts in them where paid."""

    settings: LoaderSettings
    rate: float | None
    speed: float | None
    starvation: float | None
    edge_s: float | None

    @classmethod
    def of(cls, settings: LoaderSettings, blocks: Sequence[BlockResult], answer: Answer) -> Side:
        """The figures of blocks that ran with the settings."""
        measured = [b for b in blocks if b.measured]
        if not measured:
            return cls(settings, None, None, None, None)
        rate = geometric_mean([b.rate or 0.0 for b in measured])
        speed = geometric_mean([b.speed for b in measured])
        edges = [b.edge_s for b in measured if b.edge_s is not None]
        return cls(settings, rate, speed, answer.starvation(speed), median(edges) if edges else None)

    def as_dict(self) -> dict[str, Any]:
        """The side as it stands in the document."""
        return {
            "settings": self.settings.as_dict(),
            "rate": self.rate,
            "rate_with_edges": self.speed,
            "starvation": self.starvation,
        }

    @property
    def edge_share(self) -> float:
        """Share of an epoch that worker starts take."""
        return 1 - self.speed / self.rate if self.speed and self.rate else 0.0


def document(answer: Answer, blocks: Sequence[BlockResult], facts: Facts) -> dict[str, Any]:
    """The document of ``result.json`` and ``--json``, schema ``feedtune.tune/1``."""
    baseline = [b for b in blocks if b.kind == "baseline"]
    own = Side.of(answer.own, answer.confirmed.get("A") or baseline, answer) if answer.own else None
    outcome = decide(answer, blocks, own)
    best = own
    if outcome == "gain" and answer.winner:
        best = Side.of(answer.winner, answer.confirmed["B"], answer)
    loader = answer.hello.get("loader", {})
    return {
        "schema": SCHEMA,
        "machine": facts.machine,
        "command": facts.command,
        "run": facts.run,
        "world_size": answer.hello.get("world"),
        "loader": {k: v for k, v in loader.items() if k not in ("number", "trained")},
        "starts": facts.starts,
        "seconds": round(facts.seconds, 3),
        "guard": {"tier": facts.guard, "notes": facts.guard_notes, "trackers_off": facts.trackers},
        "outcome": outcome,
        "ceiling": _ceiling(answer, facts.cloned),
        "baseline": own.as_dict() if own else None,
        "blocks": [block.as_dict() for block in blocks],
        "best": best.as_dict() if best else None,
        "gain": asdict(answer.gain) if outcome == "gain" and answer.gain else None,
        "compared": asdict(answer.gain) if answer.gain else None,
        "edge": _edge(answer, best),
        "verdict": _verdict(answer, outcome, own, best) or _no_answer(answer, blocks),
        "advice": [*_advice(answer, outcome, blocks, best), *_ceiling_advice(answer, facts.cloned)],
        "snippet": f"DataLoader(..., {best.settings.arguments()})" if best else None,
    }


def decide(answer: Answer, blocks: Sequence[BlockResult], own: Side | None) -> Outcome:
    """The outcome; ``data_bound`` needs a search that has really looked at worker counts."""
    if answer.gain is not None and answer.gain.proven and answer.winner != answer.own:
        return "gain"
    if own is None or own.rate is None or (answer.interrupted and answer.gain is None):
        return "failed"
    starved = answer.starvation(own.rate)  # worker starts are no matter of the ceiling
    if (starved is not None and starved < POLICY.gpu_bound) or (answer.at_ceiling and answer.gain is None):
        return "gpu_bound"
    if answer.nothing_to_try:
        return "no_gain"
    if answer.gain is None and not answer.beaten:
        return "failed"
    if answer.gain is not None and answer.gain.high >= _UNDECIDED and answer.winner != answer.own:
        return "no_gain"  # not proven; the verdict says how wide the interval is
    counts = {b.settings.num_workers for b in blocks if b.kind == "candidate" and b.measured}
    if starved is not None and starved >= POLICY.critical and len(counts) >= _WORKER_COUNTS_FOR_DATA_BOUND:
        return "data_bound"
    return "no_gain"


def _ceiling(answer: Answer, cloned: bool) -> dict[str, Any]:
    pinned, pageable = answer.ceilings.get(True), answer.ceilings.get(False)
    kind = "pinned" if (pinned or 0) > (pageable or 0) else "pageable"
    return {
        "rate": answer.ceiling,
        "kind": kind if answer.ceiling else None,
        "pinned": pinned,
        "pageable": pageable,
        "per_element": answer.uneven,
        "cloned": cloned,
    }


def _ceiling_advice(answer: Answer, cloned: bool) -> list[str]:
    """What the replays of cached batches have shown beside their rate."""
    found = []
    pinned, pageable = answer.ceilings.get(True), answer.ceilings.get(False)
    if pinned and pageable and pageable < pinned / POLICY.min_gain:
        found.append(
            f"With data for free, copying batches to the GPU out of pageable memory still costs "
            f"{1 - pageable / pinned:.0%} of the speed: pin_memory=True."
        )
    if cloned:
        found.append(
            "The loop changes its batches in place: each replayed one was a clone, and the time that cloning "
            "took is not in the ceiling."
        )
    return found


def _edge(answer: Answer, side: Side | None) -> dict[str, Any] | None:
    """What starting workers costs: seen at every swap, amortized over the epoch's steps."""
    steps = answer.hello.get("loader", {}).get("epoch_steps")
    if side is None or side.edge_s is None or not side.rate or not steps:
        return None
    epoch_s = steps / side.rate
    return {
        "seconds": side.edge_s,
        "epoch_steps": steps,
        "share": side.edge_s / (epoch_s + side.edge_s),
        "rate_with_edges": steps / (epoch_s + side.edge_s),
        "paid_each_epoch": not answer.hello["loader"]["persistent_workers"] and side.settings.num_workers > 0,
    }


def _verdict(answer: Answer, outcome: Outcome, side: Side | None, best: Side | None) -> str:
    """The answer in one sentence; empty where there is none."""
    own = side.settings.arguments() if side else ""
    starved = side.starvation if side else None
    if outcome == "gpu_bound":
        steady = answer.starvation(side.rate) if side else None
        return (
            f"No gain to be had from the loader: your settings ({own}) reach "
            f"{min(1.0, 1 - (steady or 0)):.1%} of what this script does when data is free."
        )
    if outcome == "gain" and answer.gain and side and best:
        gain = answer.gain
        edges = max(side.edge_share, best.edge_share) >= POLICY.edge_share
        return (
            f"{best.settings.arguments()} trains {gain.ratio:.2f}x as fast as your settings (95 % interval "
            f"{gain.low:.2f} to {gain.high:.2f}): {best.speed:.2f} instead of {side.speed:.2f} steps/s"
            f"{' over an epoch, worker starts included' if edges else ''}{_less_starved(starved, best)}."
        )
    if outcome == "data_bound":
        return (
            f"No gain: no loader setting beats yours ({own}), and training still starves for "
            f"{_percent(starved)} of its time; preparing the data is the limit, not the loader."
        )
    if outcome == "no_gain" and answer.nothing_to_try:
        return f"Nothing to try beside yours ({own}): the worker count decides what iterable data yields."
    if outcome == "no_gain" and answer.gain is None:
        return f"No gain, keep yours ({own}): every candidate was slower."
    if outcome == "no_gain" and answer.gain and answer.gain.high >= _UNDECIDED and answer.winner:
        gain = answer.gain
        return (
            f"No gain proven: {answer.winner.arguments()} measured {gain.ratio:.2f}x, but with a 95 % "
            f"interval of {gain.low:.2f} to {gain.high:.2f}; keep yours ({own}), or tune again on a quieter "
            "machine or with more --pairs."
        )
    if outcome == "no_gain" and answer.gain:
        gain = answer.gain
        return (
            f"No gain, keep yours ({own}): the best candidate measured {gain.ratio:.3f}x "
            f"(95 % interval {gain.low:.3f} to {gain.high:.3f})."
        )
    return ""


def _less_starved(before: float | None, best: Side) -> str:
    """The verdict's words on starvation; none where it is unknown."""
    if before is None or best.starvation is None:
        return ""
    return f", starvation {_percent(best.starvation)} instead of {_percent(before)}"


def _no_answer(answer: Answer, blocks: Sequence[BlockResult]) -> str:
    """Why there is no answer, in one sentence."""
    if answer.interrupted:
        return "No answer: interrupted before the answer."
    failed = [f"{b.settings.arguments()}: {b.detail}" for b in blocks if b.state == "failed" and b.detail]
    why = last_line(answer.note) or (failed[-1] if failed else "no candidate could be measured")
    if answer.cut_short and not answer.note and not failed:
        why = "the budget was over before a candidate could be measured; give --budget more seconds"
    return f"No answer: {why.rstrip('.')}."


def _advice(answer: Answer, outcome: Outcome, blocks: Sequence[BlockResult], best: Side | None) -> list[str]:
    """What else the figures say, each with the next thing to do."""
    found = []
    starved = best.starvation if best else None
    if outcome in ("gain", "data_bound", "no_gain") and starved is not None and starved >= POLICY.critical:
        found.append(
            f"Training still waits {_percent(starved)} of its time for data: make the data cheaper to read "
            "and decode (smaller images, a faster decoder, shards: shard-tools pack SRC DST)."
        )
    if answer.odd_ceiling:
        found.append(
            "Starvation is unknown: replayed batches came to {:.2f} steps/s, below your settings' {:.2f}; "
            "something else slowed the replay down, tune again.".format(*answer.odd_ceiling)
        )
    elif best and best.rate and answer.ceiling is None:
        why = [b.detail for b in blocks if b.kind == "ceiling" and b.state == "failed" and b.detail]
        found.append(f"Starvation is unknown: no ceiling was measured{f' ({why[-1]})' if why else ''}.")
    found += _semantic_advice(answer, best if outcome == "gain" else None)
    space = answer.space
    if outcome == "gain" and best and space and len(space.workers) > 1:
        most = max(space.workers)
        if best.settings.num_workers == most:
            found.append(
                f"The best stands at the most workers that were tried; try --max-workers {2 * most}."
            )
    edge = _edge(answer, best)
    if edge and edge["paid_each_epoch"] and edge["share"] >= POLICY.edge_share:
        found.append(
            f"Starting the workers costs {format_seconds(edge['seconds'])} an epoch "
            f"({edge['share']:.0%} of it): persistent_workers=True keeps them, if no attribute of your "
            "dataset changes between epochs and the loader is made once."
        )
    failed = {b.settings.arguments(): b for b in blocks if b.state == "failed" and b.kind == "candidate"}
    for settings, block in failed.items():
        found.append(f"{settings} failed ({block.reason}): {block.detail.rstrip('.')}.")
    excluded = [b for b in blocks if b.state == "excluded" and b.reason != "duplicates"]
    if excluded:
        found.append(f"{len(excluded)} settings were not run: {excluded[0].reason}: {excluded[0].detail}.")
    if answer.cut_short:
        found.append("The budget ended the search early; --budget SECONDS gives it more.")
    return found


def _semantic_advice(answer: Answer, gain: Side | None) -> list[str]:
    """What could change, or has changed, what the training sees."""
    found = []
    loader = answer.hello.get("loader", {})
    if answer.frozen:
        found.append(
            f"The data is iterable ({loader.get('dataset')}): its worker count, which decides what comes, "
            "was kept; --allow-semantic tries others."
        )
    if answer.repeated:
        first, again, workers = answer.repeated
        found.append(
            f"{loader.get('dataset')} is not split between its workers: with {workers} of them, {again} of "
            f"the first {first} samples came from more than one, so an epoch repeats its samples; "
            "split it in __iter__ with torch.utils.data.get_worker_info() before raising num_workers."
        )
    if answer.unguarded:
        found.append(
            'Start methods were not tried: the script has no if __name__ == "__main__", so a worker that is '
            "spawned would train, too."
        )
    if answer.isolated:
        found.append(
            f"Fetching without workers leaves {answer.isolated} open in the main process: open it in "
            "__getitem__ of each worker, or workers that are forked later share its position."
        )
    if gain and not gain.settings.in_order:
        found.append(
            "in_order=False delivers batches as they are ready: their order changes from run to run."
        )
    if gain and loader.get("iterable") and answer.own and gain.settings.num_workers != answer.own.num_workers:
        found.append("The worker count of iterable data changes its order, and each worker's random numbers.")
    return found


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{max(share, 0.0):.1%}"
