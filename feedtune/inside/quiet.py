"""Our own code inside the training's: whatever is wrong with it, the training goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, Optional


class Quiet:
    """Calls things that may fail; the first failure is told once, and ends all that calls through it.

    Attributes:
        off: something has failed.
        failed: told what it was.
        cost_s: what the calls took, on all threads.
    """

    def __init__(self) -> None:
        self.off = False
        self.cost_s = 0.0
        self.failed: Optional[Callable[[Exception], None]] = None

    def __call__(self, call: Callable[..., Any], *values: Any) -> Any:
        """What the call returns; ``None`` where it fails, and after that."""
        if self.off:
            return None
        begun = time.monotonic()
        try:
            return call(*values)
        except Exception as error:  # told below
            if of_a_signal(error):
                raise
            self.give_up(error)
            return None
        finally:
            self.cost_s += time.monotonic() - begun

    def give_up(self, error: Exception) -> None:
        """Something has failed."""
        self.off = True
        if self.failed is not None:
            self.failed(error)


def of_a_signal(error: Exception) -> bool:
    """Whether a signal handler of the script's has raised it, while our code ran."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(getattr(one, "__func__", one), "__code__", None) for one in handlers} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None
