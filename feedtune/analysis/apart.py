"""What a training does between its steps, and what to do about it: pauses, and loaders that do not train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feedtune.analysis.policy import POLICY
from feedtune.analysis.steps import PAUSES, Figures

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
        by = [rank for rank, one in ranks.items() if one.pauses.get(tag, 0.0) >= seconds / 2]
        alone = f", rank {by[0]} alone" if len(by) == 1 < len(ranks) else ""
        told.append(f"{PAUSES.get(tag, 'first batches')} {seconds / job.seconds:.0%}{alone}")
    said = f"Between these steps {share:.0%} of the time passes with something else: {', '.join(told)}."
    anew = sum(seconds for tag, seconds in pauses if tag not in _SCRIPTS_OWN)
    return (said, _ANEW) if anew >= POLICY.material * job.seconds else (said,)


def advise(other: Mapping[str, Any], seconds: float) -> str | None:
    """Advice on a loader besides the recorded one.

    Args:
        other: one of the ``others`` of a rank in a ``feedtune.run/1`` document.
        seconds: of the rank's training, evaluations included.

    Returns:
        A sentence; ``None`` where it trains, where waiting for it takes next to none of the time, or where
        nothing about its workers makes it wait.
    """
    waited_s, first_s = other["wait_s"] + other["first_s"], other["first_s"]
    share = waited_s / seconds if seconds > 0 else 0.0
    if other["trains"] or share < POLICY.pause:
        return None
    takes = f"Waiting for it takes {share:.0%} of the time"
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
