"""Images as training data: files opened with Pillow, cropped at random, normalized."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from feedtune.workloads import image_files
from shard_tools.errors import BadInput

# Mean and deviation of ImageNet's channels, as most vision models are trained with.
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
DEVIATION = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


class Photos(Dataset[tuple[Image.Image, int]]):
    """Images of class folders, or of a flat folder as one class; items are an RGB image and a class index.

    Raises:
        BadInput: the folder is missing or has no images; for an item, that its file cannot be decoded.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise BadInput(f"there is no data folder {folder}", "give --data a folder of images or of shards")
        files = image_files(folder)
        # Pictures beside the class folders (a logo, a contact sheet) belong to no class.
        files = [file for file in files if file.parent != folder] or files
        if not files:
            raise BadInput(f"no images below {folder}", "give --data a folder of class folders with images")
        names = [file.relative_to(folder).parts[0] if file.parent != folder else "" for file in files]
        self.classes = sorted(set(names))
        index = {name: label for label, name in enumerate(self.classes)}
        self.samples = [(str(file), index[name]) for file, name in zip(files, names, strict=True)]

    def __len__(self) -> int:
        """Images."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Open and decode one image."""
        path, label = self.samples[index]
        try:
            with Image.open(path) as image:
                return image.convert("RGB"), label
        # Pillow reports damage as any of these, by format.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadInput(f"cannot decode {path}: {error}", "remove or replace this file") from error


class Augmented(Dataset[tuple[Tensor, int]]):
    """Random crops of another dataset's images, flipped half of the time, as normalized tensors."""

    def __init__(self, images: Any, size: int) -> None:
        self.images = images
        self.size = size

    def __len__(self) -> int:
        """Images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image, 3 x size x size of float32, and its class index."""
        image, label = self.images[index]
        if label < 0 and not self.images.classes:
            label = 0  # shards of a flat folder have no labels: one class, as for the folder itself
        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.asarray(image))
        box = random_box(image.width, image.height)
        image = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(MEAN).div_(DEVIATION), int(label)


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """A random crop of 8 to 100 % of the area and a shape of 3:4 to 4:3; the middle where none fits."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
