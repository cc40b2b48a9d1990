"""Handwritten digits, 8×8 images, with a small convolutional network.

The images are of E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 10.24432/C50P49, CC BY
4.0), as scikit-learn has them; the file's head says so too.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..errors import TargetError
from ..tasks.task import Split

MEAN, DEVIATION = 0.305, 0.376
"""Of the pixels, scaled to 0 … 1."""

_TABLE = Path(__file__).with_name("digits.csv.gz")
_TRAIN = 1437
"""Images to train on, the first ones of the file; split as by scikit-learn's ``train_test_split(…,
test_size=0.2, random_state=0, stratify=labels)``."""


class DigitsNet(nn.Module):
    """Three convolutions and two linear layers: ``[m, 1, 8, 8]`` → ``[m, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.relu3 = nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.relu4 = nn.ReLU()
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.relu1(self.conv1(images))
        x = self.pool(self.relu2(self.conv2(x)))
        x = self.flatten(self.relu3(self.conv3(x)))
        return self.fc2(self.relu4(self.fc1(x)))  # type: ignore[no-any-return]


class Digits:
    """1,797 images, four in five to train on, the split fixed and the classes in balance.

    The loss is cross-entropy with labels smoothed by 0.1, in training and in evaluation.
    """

    def model(self) -> nn.Module:
        return DigitsNet()

    def data(self, split: Split) -> TensorDataset:
        rows = _table()[:_TRAIN] if split == "train" else _table()[_TRAIN:]
        pixels = torch.tensor(rows[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8)
        labels = torch.tensor(rows[:, -1], dtype=torch.int64)
        return TensorDataset((pixels / 16.0 - MEAN) / DEVIATION, labels)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, label_smoothing=0.1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).double().mean()}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # It learns whatever the plan's version differences are; with SGD, momentum 0.9 and a rate
        # of 0.05, training diverges where forwards are two versions behind their backwards.
        return torch.optim.Adam(parameters, lr=1e-3)


def make_task(name: str, argument: str | None) -> Digits:
    """The task. Raises TargetError for an argument."""
    if argument is not None:
        raise TargetError(f"{name} takes no argument: write just `{name}`")
    return Digits()


@cache
def _table() -> np.ndarray:
    """The images' pixels (0 … 16) and labels, a row each: ``[1797, 65]``."""
    return np.loadtxt(_TABLE, delimiter=",")
