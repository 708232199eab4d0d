"""What the loop sees while blocks run: epochs of the length that the bare script has."""

from __future__ import annotations

from typing import Any


class View:
    """One epoch as the loop sees it: as many batches as the bare script would get.

    Args:
        machine: the block machine, where the batches come from.
        length: batches of an epoch, for ``len()``.
        remaining: batches left in this epoch; ``None`` where only the data's end tells.
    """

    def __init__(self, machine: Any, length: int | None, remaining: int | None) -> None:
        self._machine = machine
        self._remaining = remaining
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this loader's length is not known")
        return self._length

    def __iter__(self) -> View:
        return self

    def __next__(self) -> Any:
        machine = self._machine
        feed = machine.feed
        if self._remaining == 0 or (self._remaining is None and feed is not None and feed.at_epoch_end()):
            machine.pause("epoch")
            raise StopIteration
        try:
            batch = machine.next_batch()
        except StopIteration:
            machine.pause("restart")
            raise
        if self._remaining is not None:
            self._remaining -= 1
        return batch
