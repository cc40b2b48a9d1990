"""VGG nets without normalisation (Simonyan and Zisserman 2015, table 1, columns A, D and E)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import convolution, linear
from .synthetic import SyntheticTask
from .vision import image_task

LEAST = 32
"""Pixels that leave one position behind the five poolings."""
CONVOLUTIONS = {"vgg11": (1, 1, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
"""Of each of the five groups; a pooling ends each."""
CHANNELS = (64, 128, 256, 512, 512)
"""Of each group's outputs."""
DEVIATION = 0.01
"""Of the linear layers' initial weights (Simonyan and Zisserman 2015, section 3.1)."""
RATE = 0.001
"""Learning rate; ten times as much overshoots in a net without normalisation."""


class VGG(nn.Module):
    """Images ``[m, 3, size, size]`` → class scores ``[m, classes]``."""

    def __init__(self, convolutions: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for count, outside in zip(convolutions, CHANNELS, strict=True):
            for _ in range(count):
                layers += [convolution(inside, outside, 3, padding=1), nn.ReLU()]
                inside = outside
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            linear(512 * 7 * 7, 4096, DEVIATION),
            nn.ReLU(),
            nn.Dropout(),
            linear(4096, 4096, DEVIATION),
            nn.ReLU(),
            nn.Dropout(),
            linear(4096, classes, DEVIATION),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of the target `name`, a key of CONVOLUTIONS. Raises TargetError."""
    return image_task(
        name, argument, lambda s: VGG(CONVOLUTIONS[name], s.classes), least=LEAST, rate=RATE
    )
