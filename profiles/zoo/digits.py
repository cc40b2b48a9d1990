"""Handwritten digits (scikit-learn's bundled 8×8 images) with a small convolutional network."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
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

_SPLIT = Path(__file__).with_name("digits_split.txt")
"""Numbers of the images to train on and of those to test with, each in its order: as scikit-learn
once drew them (``train_test_split(…, test_size=0.2, random_state=0, stratify=labels)``)."""


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
        table, numbers = _table(), _numbers()[split]
        pixels = torch.tensor(table[numbers, :-1], dtype=torch.float32).view(-1, 1, 8, 8)
        labels = torch.tensor(table[numbers, -1], dtype=torch.int64)
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
    """The images' pixels (0 … 16) and labels, a row each: ``[1797, 65]``.

    From scikit-learn's file where it lies: its own function for it first loads scipy and pandas,
    which takes a core two seconds, in the launcher and in what starts the workers too.
    """
    spec = find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


@cache
def _numbers() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in _SPLIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            numbers = found[line[2:]] = []
        else:
            numbers += map(int, line.split())
    return found
