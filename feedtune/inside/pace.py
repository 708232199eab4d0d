"""Which steps are taken down in full, so that it never costs more than a small share of the training."""

from __future__ import annotations

import math
from typing import Optional

ALL_OF = 512  # steps that are always taken down in full
_WINDOW = 128  # steps of a row that are, or are not
_SHARE = 0.005  # of the training's time
_MOST = 64  # one window in so many at least


class Pace:
    """Windows of steps, of which one in ``every`` is taken down in full.

    ``every`` is a power of two, and windows begin at the same steps on all ranks: what the rank with the
    dearest steps takes down, all others do, too.
    """

    def __init__(self) -> None:
        self.every = 1
        self._full = True
        self._window = -1
        self._begun: Optional[tuple[float, float]] = None  # moment and cost at the begin of a full window

    def full(self, step: int, now_s: float, cost_s: float) -> bool:
        """Whether to take a step down in full.

        Args:
            step: number of the step in the training.
            now_s: moment of the monotonic clock.
            cost_s: what all steps before it have cost.
        """
        window = step // _WINDOW if step >= ALL_OF else 0
        if window != self._window:
            if self._begun is not None:
                self._follow(now_s - self._begun[0], cost_s - self._begun[1])
            self._window = window
            self._full = window % self.every == 0
            self._begun = (now_s, cost_s) if self._full else None
        return self._full

    def _follow(self, seconds: float, cost_s: float) -> None:
        ratio = cost_s / max(seconds, 1e-9) / _SHARE
        self.every = 1 << min(math.ceil(math.log2(max(ratio, 1.0))), _MOST.bit_length() - 1)
