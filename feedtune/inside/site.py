"""Where a loader is made in the user's code, and what makes it the same loader in another run."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from .identity import batch_size_of

_OWN = os.path.dirname(os.path.abspath(__file__))
_COPY = f"{os.sep}_feedtune_"  # this package in a start-up folder; one run can start inside another


def call_site() -> tuple[tuple[str, int, int], ...]:
    """The three innermost frames outside torch and this package: ``((file, line, instruction), ...)``."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, int, int]] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) and _COPY not in name and f"{os.sep}torch{os.sep}" not in name:
            found.append((name, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def identify(loader: Any, site: tuple[tuple[str, int, int], ...] | None = None) -> dict[str, Any]:
    """What is the same about a loader in every run of a script, as JSON.

    Args:
        loader: the loader.
        site: where it was made; by default as noted in the loader when it was made.
    """
    frames = site if site is not None else loader.__dict__.get("_feedtune_site") or ()
    return {
        "frames": [[_real(name), line] for name, line, _ in frames],
        "dataset": type(loader.dataset).__name__,
        "sampler": _sampler(loader),
        "batch_size": batch_size_of(loader),
    }


def _real(name: str) -> str:
    """The path without links; names such as ``<string>`` are no paths."""
    return name if name.startswith("<") else os.path.realpath(name)


def _sampler(loader: Any) -> str:
    """Types of the samplers, outside in, as in ``BatchSampler(RandomSampler)``.

    Libraries hand every loader of theirs a batch sampler; only what lies inside tells training (shuffled)
    from evaluation.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    names: list[str] = []
    while sampler is not None and len(names) < 4:
        names.append(type(sampler).__name__)
        inside = getattr(sampler, "__dict__", {})  # not getattr: a property would run the user's code
        sampler = inside.get("batch_sampler", inside.get("sampler"))
    return "(".join(names) + ")" * (len(names) - 1)
