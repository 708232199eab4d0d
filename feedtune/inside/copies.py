"""What copying a batch to the GPU takes, where the copies themselves cannot be seen (compiled steps)."""

from __future__ import annotations

import contextlib
from typing import Any, Optional

from .replay import tensors

_MOST = 16 << 20  # bytes of a batch that are copied to time it
_ROOM = 512 << 20  # bytes that have to be free on the GPU


class CopyRate:
    """Copies a part of a batch once, on a stream of its own, without waiting for it.

    Args:
        batch: as the loop has got it.
        device: index of the GPU that trains.

    Attributes:
        bytes: of the batch, in the host's memory.
        pinned: they are pinned.
    """

    def __init__(self, batch: Any, device: int) -> None:
        host = [one for one in tensors(batch) if one.is_cpu and one.numel()]
        self.bytes = sum(one.nbytes for one in host)
        self.pinned = bool(host) and host[0].is_pinned()
        self._copied = 0
        self._events: tuple[Any, ...] = ()
        with contextlib.suppress(RuntimeError):  # no memory is left
            if host:
                self._time(max(host, key=lambda one: one.nbytes), device)

    def _time(self, largest: Any, device: int) -> None:
        import torch

        if torch.cuda.mem_get_info(device)[0] < _ROOM or torch.cuda.is_current_stream_capturing():
            return
        part = largest.detach().reshape(-1)[: max(1, _MOST // largest.element_size())]
        cuda: Any = torch.cuda  # whose types lack much
        with cuda.stream(cuda.Stream(device)):
            target = torch.empty_like(part, device=f"cuda:{device}", pin_memory=False)
            events = [cuda.Event(enable_timing=True) for _ in range(2)]
            torch.ops.aten.copy_(target, part, True)  # a first one takes longer; a tap would see Tensor.copy_
            events[0].record()
            torch.ops.aten.copy_(target, part, True)
            events[1].record()
        self._copied, self._events = part.nbytes, tuple(events)

    def seconds(self) -> Optional[float]:
        """Of a whole batch, at the rate of the part; ``None``: not known, or not yet."""
        if not self.bytes:
            return 0.0
        if not self._events or not self._events[1].query():
            return None
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3 * self.bytes / self._copied
