"""What a training does between its steps, and what to do about it: pauses, and loaders that do not train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feedtune.analysis.policy import POLICY
from feedtune.analysis.steps import PAUSES, Figures
from shard_tools.units import format_seconds

_SCRIPTS_OWN = ("eval", "save", "eval_save", "epoch")  # pauses that are no start of a loader
_ANEW = (
    "A first batch waits for workers to start, which persistent_workers=True saves, and for what the data "
    "set does at its beginning, which longer epochs save."
)


def tell_pauses(job: Figures, ranks: Mapping[int, Figures]) -> tuple[str, ...]:
    """What keeps coming between the steps, where that takes long; the class is that of the steps."""
    pauses = sorted(job.pauses.items(), key=lambda one: -one[1])
    share = sum(job.pauses.values()) / job.seconds if job.seconds > 0 else 0.0
    if share < POLICY.material:
        return ()
    told = []
    for tag, seconds in pauses:
        if seconds < POLICY.pause * job.seconds:
            continue
        by = [rank for rank, one in ranks.items() if _spent(one, tag) >= seconds / 2]
        alone = f", rank {by[0]} alone" if len(by) == 1 < len(ranks) else ""
        told.append(f"{PAUSES.get(tag, 'first batches')} {seconds / job.seconds:.0%}{alone}")
    said = f"Between these steps {share:.0%} of the time passes with something else: {', '.join(told)}."
    anew = sum(seconds for tag, seconds in pauses if tag not in _SCRIPTS_OWN)
    return (said, _ANEW) if anew >= POLICY.material * job.seconds else (said,)


def _spent(rank: Figures, tag: str) -> float:
    """A rank's part of a pause; where one rank alone saves after an evaluation, all have had that."""
    tags = ("eval", "save", tag) if tag == "eval_save" else (tag,)
    return sum(rank.pauses.get(one, 0.0) for one in tags)


def advise(other: Mapping[str, Any], seconds: float) -> str | None:
    """Advice on a loader besides the recorded one.

    Args:
        other: one of the ``others`` of a rank in a ``feedtune.run/1`` document.
        seconds: of the rank's training.

    Returns:
        A sentence; ``None`` where it trains, where waiting for it takes next to none of the time, or where
        nothing about its workers makes it wait.
    """
    waited_s, first_s = other["wait_s"] + other["first_s"], other["first_s"]
    if other["trains"] or other["num_workers"] is None or waited_s <= POLICY.pause * seconds:
        return None
    takes = f"Waiting for it took {format_seconds(waited_s)}"
    if not other["num_workers"]:
        return f"{takes}: its batches are made in the training process; workers would make them beside it."
    if other["wait_s"] >= first_s:
        return f"{takes}: its {other['num_workers']} workers do not keep up with its loop."
    if other["persistent_workers"] or other["iterations"] == 1:
        return None
    return (
        f"{takes}, most of it for {other['iterations']} first batches: its workers start anew each time, "
        "which persistent_workers=True saves."
    )
