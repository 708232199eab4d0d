"""What to do about a loader that does not train, such as the validation's, where a training waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feedtune.analysis.policy import POLICY


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
