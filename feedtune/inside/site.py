"""Where a loader is made in the user's code, and what makes it the same loader in another run."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from .identity import batch_size_of

Site = tuple[tuple[str, int, int], ...]

_OWN = os.path.dirname(os.path.abspath(__file__))
_COPY = f"{os.sep}_feedtune_"  # this package in a start-up folder; one run can start inside another


def call_site() -> Site:
    """The three innermost frames outside torch and this package: ``((file, line, instruction), ...)``."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, int, int]] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) and _COPY not in name and f"{os.sep}torch{os.sep}" not in name:
            found.append((name, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def note_made(loader: Any, site: Site) -> None:
    """Note in a loader where it was made, and what ``apply`` will know of it at that moment.

    Libraries go on to change it: accelerate puts another sampler in, after ``__init__``.
    """
    loader.__dict__["_feedtune_site"] = site
    loader.__dict__["_feedtune_identity"] = identify(loader, site)


def identity_of(loader: Any) -> dict[str, Any]:
    """The identity noted when a loader was made; as it looks now, where that was not seen."""
    noted: dict[str, Any] | None = loader.__dict__.get("_feedtune_identity")
    return identify(loader, ()) if noted is None else noted


def identify(loader: Any, site: Site) -> dict[str, Any]:
    """What is the same about a loader in every run of a script, as JSON.

    Args:
        loader: the loader, at the end of its ``__init__``.
        site: where it is made.
    """
    return {
        "frames": [[_real(name), line] for name, line, _ in site],
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
