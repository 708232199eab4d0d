"""Loader settings: the one object that presets, the search, control plans and reports share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shard_tools.errors import BadInput

DEFAULT_PREFETCH = 2  # torch's own, for any loader with workers


@dataclass(frozen=True)
class LoaderSettings:
    """What a block runs with; names and meaning are those of ``torch.utils.data.DataLoader``.

    Attributes:
        num_workers: worker processes of each rank; 0 loads in the main process.
        prefetch_factor: batches in flight per worker; ``None`` if and only if there are no workers.
        pin_memory: copy batches into page-locked memory (CUDA only).
    """

    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise BadInput(f"num_workers={self.num_workers} is below zero")
        if self.num_workers == 0 and self.prefetch_factor is not None:
            # torch refuses this pair with a ValueError; normalizing here keeps every caller simple.
            object.__setattr__(self, "prefetch_factor", None)
        if self.num_workers > 0 and self.prefetch_factor is None:
            object.__setattr__(self, "prefetch_factor", DEFAULT_PREFETCH)
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise BadInput(f"prefetch_factor={self.prefetch_factor} is below one")

    @property
    def in_flight(self) -> int:
        """Batches handed out to workers at any time, of one rank."""
        return self.num_workers * (self.prefetch_factor or 0)

    @property
    def cost(self) -> tuple[int, int, bool]:
        """Orders settings by what they take from the machine: processes, memory, page-locked memory."""
        return (self.num_workers, self.in_flight, self.pin_memory)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LoaderSettings:
        """Settings out of JSON; other keys are ignored (a rank reports more than it can be set to)."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})

    def with_values(self, **values: Any) -> LoaderSettings:
        """A copy with some values changed."""
        if values.get("num_workers") == 0:
            values["prefetch_factor"] = None
        return replace(self, **values)

    def arguments(self) -> str:
        """The settings as DataLoader keyword arguments, for a snippet to paste."""
        parts = [f"num_workers={self.num_workers}"]
        if self.prefetch_factor is not None:
            parts.append(f"prefetch_factor={self.prefetch_factor}")
        parts.append(f"pin_memory={self.pin_memory}")
        return ", ".join(parts)


def parse_fixed(items: list[str]) -> dict[str, int | bool]:
    """Read ``--set name=value`` items: ``['prefetch_factor=2']`` -> ``{'prefetch_factor': 2}``.

    Raises:
        BadInput: unknown name, or a value of the wrong kind.
    """
    fixed: dict[str, int | bool] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or name not in ("num_workers", "prefetch_factor", "pin_memory"):
            raise BadInput(
                f"--set {item}: not a setting",
                "write num_workers=N, prefetch_factor=N or pin_memory=true|false",
            )
        if name == "pin_memory":
            if text.lower() not in ("true", "false"):
                raise BadInput(f"--set {item}: '{text}' is neither true nor false")
            fixed[name] = text.lower() == "true"
        elif text.isdecimal():
            fixed[name] = int(text)
            if name == "prefetch_factor" and fixed[name] < 1:
                raise BadInput(f"--set {item}: prefetch_factor is 1 or more")
        else:
            raise BadInput(f"--set {item}: '{text}' is not a whole number")
    return fixed
