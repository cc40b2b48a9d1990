"""DenseNet-121 with bottlenecks and compression ("BC", Huang et al. 2017, table 1)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from .layers import convolution, linear
from .synthetic import SyntheticTask
from .vision import image_task

LEAST = 32
"""Pixels that leave one position behind the five halvings."""
GROWTH = 32
"""Channels that each dense layer adds."""
BLOCKS = (6, 12, 24, 16)
"""Dense layers of each block."""


class DenseLayer(nn.Module):
    """``[m, c, h, w]`` → ``[m, c + GROWTH, h, w]``: the input and, behind it, new channels.

    Handing on the concatenation instead of a list of all layers' channels lets one tensor cross
    a cut between two layers; the next layer would concatenate them anyway.
    """

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inside)
        self.relu1 = nn.ReLU()
        self.conv1 = convolution(inside, 4 * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * GROWTH)
        self.relu2 = nn.ReLU()
        self.conv2 = convolution(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` with the new channels."""
        y = self.conv1(self.relu1(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu2(self.norm2(y)))], 1)


def _block(inside: int, count: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict((f"denselayer{k + 1}", DenseLayer(inside + k * GROWTH)) for k in range(count))
    )


def _transition(inside: int) -> nn.Sequential:
    """Half the channels, half the side."""
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(inside),
            relu=nn.ReLU(),
            conv=convolution(inside, inside // 2, 1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


class DenseNet(nn.Module):
    """Images ``[m, 3, size, size]`` → class scores ``[m, classes]``."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        width = 2 * GROWTH
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=convolution(3, width, 7, 2, 3, bias=False),
            norm0=nn.BatchNorm2d(width),
            relu0=nn.ReLU(),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        for k, count in enumerate(BLOCKS, start=1):
            parts[f"denseblock{k}"] = _block(width, count)
            width += count * GROWTH
            if k < len(BLOCKS):
                parts[f"transition{k}"] = _transition(width)
                width //= 2
        parts["norm5"] = nn.BatchNorm2d(width)
        parts["relu5"] = nn.ReLU()
        self.features = nn.Sequential(parts)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = torch.flatten(self.avgpool(self.features(images)), 1)
        logits: Tensor = self.classifier(x)
        return logits


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of target `densenet121`. Raises TargetError for a wrong argument."""
    return image_task(name, argument, lambda s: DenseNet(s.classes), least=LEAST)
