"""Signs of how far the command came, for the driver's error messages."""

from __future__ import annotations

import contextlib
import os

# With no optimizer step after so many batches, the loader with most batches is taken, said openly.
BATCHES_WITHOUT_OPTIMIZER = 200


def mark(folder: str, name: str) -> None:
    """Leave a sign of how far any process of the command came, for the driver's error messages."""
    with contextlib.suppress(OSError):  # the run is ending and its folder is gone
        os.close(os.open(os.path.join(folder, "seen", name), os.O_CREAT | os.O_WRONLY, 0o600))


def note(folder: str, name: str, line: str) -> None:
    """Add a line to a sign; of many processes each line stays whole."""
    with contextlib.suppress(OSError):
        sign = os.open(os.path.join(folder, "seen", name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.write(sign, os.fsencode(line + "\n"))
        os.close(sign)
