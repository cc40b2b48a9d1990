"""What the claims are tried on: small enough to train many times, hard enough that systems differ.

Images are made of scikit-learn's digits, text is what ships with Python: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from timeprest.profiles.tasks.task import Split
from timeprest.profiles.zoo.resnet import BasicBlock
from timeprest.profiles.zoo.text import CharGPT, Text, Windows
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CANVAS = 10
FRAGMENTS = 1
NOISE = 0.1
WIDTHS = (16, 16, 32, 32, 32, 48, 48, 48)
POOLED = (1, 4, 7)
"""Of the convolutions without norms; pooling follows behind some."""
VIEWS = {"train": 4, "test": 2}
"""Pictures of each digit: other places, other clutter."""


@cache
def cluttered(split: Split) -> TensorDataset:
    """Digits anywhere on a canvas, with pieces of other digits and noise: ``[1, 10, 10]``, label.

    Drawn once with a seed of their own, so that every stage has the same.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    parts = train_test_split(
        digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    x, y = (parts[0], parts[2]) if split == "train" else (parts[1], parts[3])
    images = torch.tensor(x, dtype=torch.float32) / 16
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    pictures = torch.empty(VIEWS[split] * len(images), 1, CANVAS, CANVAS)
    for k in range(len(pictures)):
        canvas = pictures[k, 0]
        canvas.normal_(0.0, NOISE, generator=generator)
        for _ in range(FRAGMENTS):
            piece = images[below(len(images)), below(5) :, below(5) :][:4, :4]
            row, column = below(CANVAS - 3), below(CANVAS - 3)
            canvas[row : row + piece.shape[0], column : column + piece.shape[1]] += piece
        row, column = below(CANVAS - 7), below(CANVAS - 7)
        canvas[row : row + 8, column : column + 8] += images[k % len(images)]
    labels = torch.tensor(y, dtype=torch.int64).repeat(VIEWS[split])
    return TensorDataset((pictures - pictures.mean()) / pictures.std(), labels)


class Images:
    """The cluttered digits; subclasses have the network."""

    def data(self, split: Split) -> TensorDataset:
        return cluttered(split)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).double().mean()}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


class Plain(Images):
    """Eight convolutions without any norm, as VGG has them."""

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        inside = 1
        for k, width in enumerate(WIDTHS):
            convolution = nn.Conv2d(inside, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            layers += [convolution, nn.ReLU()]
            if k in POOLED:
                layers.append(nn.MaxPool2d(2))
            inside = width
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inside, 10))


class Normed(Images):
    """A residual network with batch norms: eight convolutions in four blocks."""

    def model(self) -> nn.Module:
        stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks = [
            BasicBlock(16, 16, 1),
            BasicBlock(16, 32, 2),
            BasicBlock(32, 32, 1),
            BasicBlock(32, 48, 2),
        ]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)]
        return nn.Sequential(*stem, *blocks, *head)


class Characters(Text):
    """The next character of Python's help texts: six blocks of width 32."""

    def model(self) -> nn.Module:
        return CharGPT(len(self.alphabet), width=32, heads=2, depth=6)

    def data(self, split: Split) -> Windows:
        border = len(self.codes) * 9 // 10
        # A test set of a size that can be evaluated often.
        return Windows(self.codes[:border] if split == "train" else self.codes[border:][:16_001])


plain = Plain()
normed = Normed()
characters = Characters()
