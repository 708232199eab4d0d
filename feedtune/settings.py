"""Loader settings: the one object that presets, the search, control plans and reports share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shard_tools.errors import BadInput

DEFAULT_PREFETCH = 2  # torch's own, for any loader with workers
START_METHODS = ("fork", "spawn", "forkserver")
_KINDS = {
    "num_workers": "N", "prefetch_factor": "N", "pin_memory": "true|false", "in_order": "true|false",
    "multiprocessing_context": "|".join(START_METHODS),
}  # fmt: skip


@dataclass(frozen=True)
class LoaderSettings:
    """What a block runs with; names and meaning are those of ``torch.utils.data.DataLoader``.

    Attributes:
        num_workers: worker processes of each rank; 0 loads in the main process.
        prefetch_factor: batches in flight per worker; ``None`` if and only if there are no workers.
        pin_memory: copy batches into page-locked memory (CUDA only).
        in_order: deliver batches in the sampler's order; without it the fastest worker comes first.
        multiprocessing_context: how workers are started (fork, spawn, forkserver); ``None``: as the script
            or its platform has it.
    """

    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool = False
    in_order: bool = True
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise BadInput(f"num_workers={self.num_workers} is below zero")
        if self.num_workers == 0:
            # torch refuses some of these pairs with a ValueError; normalizing keeps every caller simple.
            object.__setattr__(self, "prefetch_factor", None)
            object.__setattr__(self, "in_order", True)
            object.__setattr__(self, "multiprocessing_context", None)
        if self.num_workers > 0 and self.prefetch_factor is None:
            object.__setattr__(self, "prefetch_factor", DEFAULT_PREFETCH)
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise BadInput(f"prefetch_factor={self.prefetch_factor} is below one")
        if self.multiprocessing_context not in (None, *START_METHODS):
            raise BadInput(f"multiprocessing_context={self.multiprocessing_context} is no start method")

    @property
    def in_flight(self) -> int:
        """Batches handed out to workers at any time, of one rank."""
        return self.num_workers * (self.prefetch_factor or 0)

    @property
    def cost(self) -> tuple[int, int, bool, bool, bool]:
        """Orders settings by what they take: processes, memory, page-locked memory; odd ones come last."""
        odd = (not self.in_order, self.multiprocessing_context is not None)
        return (self.num_workers, self.in_flight, self.pin_memory, *odd)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LoaderSettings:
        """Settings out of JSON; other keys are ignored (a rank reports more than it can be set to)."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})

    def with_values(self, **values: Any) -> LoaderSettings:
        """A copy with some values changed."""
        return replace(self, **values)

    def arguments(self) -> str:
        """The settings as DataLoader keyword arguments, for a snippet to paste."""
        parts = [f"num_workers={self.num_workers}"]
        if self.prefetch_factor is not None:
            parts.append(f"prefetch_factor={self.prefetch_factor}")
        parts.append(f"pin_memory={self.pin_memory}")
        if not self.in_order:
            parts.append("in_order=False")
        if self.multiprocessing_context is not None:
            parts.append(f'multiprocessing_context="{self.multiprocessing_context}"')
        return ", ".join(parts)


def parse_fixed(items: list[str]) -> dict[str, int | bool | str]:
    """Read ``--set name=value`` items: ``['prefetch_factor=2']`` -> ``{'prefetch_factor': 2}``.

    Raises:
        BadInput: unknown name, or a value of the wrong kind.
    """
    return dict(_parse_one(item) for item in items)


def _parse_one(item: str) -> tuple[str, int | bool | str]:
    name, equals, text = item.partition("=")
    kind = _KINDS.get(name)
    if not equals or kind is None:
        known = ", ".join(f"{known}={kind}" for known, kind in _KINDS.items())
        raise BadInput(f"--set {item}: not a setting", f"write one of {known}")
    if kind == "N":
        if not text.isdecimal():
            raise BadInput(f"--set {item}: '{text}' is not a whole number")
        if name == "prefetch_factor" and int(text) < 1:
            raise BadInput(f"--set {item}: prefetch_factor is 1 or more")
        return name, int(text)
    if text.lower() not in kind.split("|"):
        raise BadInput(f"--set {item}: '{text}' is none of {kind.replace('|', ', ')}")
    return name, text.lower() if name == "multiprocessing_context" else text.lower() == "true"
