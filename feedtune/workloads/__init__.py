"""Built-in training scripts and the data they run on: ordinary scripts that know nothing of any tuning."""

from __future__ import annotations

import os
from pathlib import Path

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"})


def image_files(folder: Path) -> list[Path]:
    """Every image below a folder by its suffix, sorted; hidden files and folders are left out."""
    found = []
    for base, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(base, name)
            for name in names
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
        ]
    return sorted(found)
