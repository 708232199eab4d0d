"""Signs of how far the command came, for the driver's error messages."""

from __future__ import annotations

import contextlib
import os


def mark(folder: str, name: str) -> None:
    """Leave a sign of how far any process of the command came, for the driver's error messages."""
    with contextlib.suppress(OSError):  # the run is ending and its folder is gone
        os.close(os.open(os.path.join(folder, "seen", name), os.O_CREAT | os.O_WRONLY, 0o600))
