"""Residual networks for images: the usual ResNet-18 and ResNet-50, and a tiny one that a CPU trains quickly.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016; in the bottleneck the 3x3 convolution
carries the stride.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Blocks in each stage, channels of the first stage (they double at each further one), kind of block."""

    depths: tuple[int, ...]
    width: int
    bottleneck: bool = False


LAYOUTS = {
    "tiny": Layout((1, 1, 1), 16),
    "resnet18": Layout((2, 2, 2, 2), 64),
    "resnet50": Layout((3, 4, 6, 3), 64, bottleneck=True),
}


class Residual(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = width * 4 if bottleneck else width
        if bottleneck:
            convolutions = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        else:
            convolutions = [(channels, width, 3, stride), (width, out, 3, 1)]
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, step in convolutions:
            layers += [_conv(inputs, outputs, kernel, step), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        # The last activation comes after the sum.
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(_conv(channels, out, 1, stride), nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        """Features of N x C x H x W to N x out x H/stride x W/stride."""
        result: Tensor = self.relu(self.branch(images) + self.shortcut(images))
        return result


class ResNet(nn.Module):
    """Images, N x 3 x H x W, to logits, N x classes. H and W of 32 and more."""

    def __init__(self, layout: Layout, classes: int) -> None:
        super().__init__()
        channels = layout.width
        self.stem = nn.Sequential(
            _conv(3, channels, 7, 2),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks = []
        for stage, depth in enumerate(layout.depths):
            width = layout.width * 2**stage
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Residual(channels, width, stride, layout.bottleneck))
                channels = width * 4 if layout.bottleneck else width
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch."""
        result: Tensor = self.head(self.stages(self.stem(images)))
        return result


def build_model(name: str, classes: int) -> ResNet:
    """A freshly initialized network by its name in ``LAYOUTS``.

    Raises:
        KeyError: there is no network of that name.
    """
    model = ResNet(LAYOUTS[name], classes)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
