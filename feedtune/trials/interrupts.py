"""Ctrl-C, SIGTERM and a closed terminal: each ends a tuning once, and never breaks off its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, the first of these signals raises ``KeyboardInterrupt``, wherever the program is.

    Later ones are kept back, as is the first one after ``hold``: the tree has to end and the result to be
    written. A signal that is ignored already stays ignored (``nohup``, background jobs of a script).
    """

    def __init__(self) -> None:
        self._holding = False
        self._late = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in _NUMBERS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holding = True
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal gave
        if self._late and kind is None:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From now on signals wait until the context is left."""
        self._holding = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A short call into code that must not be broken off; a signal meanwhile is raised at its end."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before
        if self._late and not before:
            self._holding, self._late = True, False
            raise KeyboardInterrupt

    def _arrived(self, *_: object) -> None:
        if self._holding:
            self._late = True
            return
        self._holding = True
        raise KeyboardInterrupt
