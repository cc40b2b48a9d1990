"""AlexNet in its single-tower form (Krizhevsky 2014, "One weird trick")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import convolution, linear
from .synthetic import SyntheticTask
from .vision import image_task

LEAST = 63
"""Pixels that leave one position behind the last pooling."""
DEVIATION = 0.01
"""Of the linear layers' initial weights (Krizhevsky et al. 2012, section 5)."""
RATE = 0.001
"""Learning rate; ten times as much overshoots in a net without normalisation."""


class AlexNet(nn.Module):
    """Images ``[m, 3, size, size]`` → class scores ``[m, classes]``."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            convolution(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            convolution(192, 384, 3, padding=1),
            nn.ReLU(),
            convolution(384, 256, 3, padding=1),
            nn.ReLU(),
            convolution(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            linear(256 * 6 * 6, 4096, DEVIATION),
            nn.ReLU(),
            nn.Dropout(),
            linear(4096, 4096, DEVIATION),
            nn.ReLU(),
            linear(4096, classes, DEVIATION),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of target `alexnet`. Raises TargetError for a wrong argument."""
    return image_task(name, argument, lambda s: AlexNet(s.classes), least=LEAST, rate=RATE)
