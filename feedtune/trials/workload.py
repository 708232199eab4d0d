"""Command lines of the built-in vision training, an ordinary script that knows nothing of the hook."""

from __future__ import annotations

import sys
from pathlib import Path

from feedtune.settings import LoaderSettings

_EPOCHS = 1_000_000  # a trial is ended from outside


def vision_command(
    data: Path,
    *,
    nproc: int,
    model: str,
    batch_size: int,
    image_size: int = 224,
    settings: LoaderSettings | None = None,
) -> list[str]:
    """The training on a folder or on shards, under torchrun where there are several ranks.

    Args:
        data: folder of images, or a folder that shard-tools has packed.
        nproc: ranks.
        model: ``tiny``, ``resnet18`` or ``resnet50``.
        batch_size: samples a rank and step.
        image_size: edge of the square that the model gets, in pixels.
        settings: loader settings to start with; ``None`` keeps torch's defaults.
    """
    words = ["-m", "feedtune.workloads.vision", "--data", str(data), "--model", model]
    words += ["--batch-size", str(batch_size), "--image-size", str(image_size), "--epochs", str(_EPOCHS)]
    if settings is not None:
        words += ["--num-workers", str(settings.num_workers)]
        words += ["--prefetch-factor", str(settings.prefetch_factor)] if settings.prefetch_factor else []
        words += ["--pin-memory"] if settings.pin_memory else []
    if nproc == 1:
        return [sys.executable, *words]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={nproc}",
        *words,
    ]
