"""Real photographs for the tests that open them."""

from __future__ import annotations

from pathlib import Path

import pytest

BACKGROUNDS = Path("/usr/share/backgrounds/mate")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 JPEGs of 500x375 in four class folders, cropped out of real photographs."""
    from PIL import Image

    sources = [p for p in sorted(BACKGROUNDS.rglob("*.jpg")) if p.stat().st_size < 1_500_000]
    if not sources:
        pytest.skip("Debian's mate-backgrounds is not installed")
    images = [Image.open(path).convert("RGB") for path in sources]
    folder = tmp_path_factory.mktemp("photos")
    for i in range(240):
        image = images[i % len(images)]
        left, top = (i * 37) % max(1, image.width - 500), (i * 53) % max(1, image.height - 375)
        path = folder / f"class{i % 4}" / f"{i:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        image.crop((left, top, left + 500, top + 375)).save(path, quality=90)
    return folder
