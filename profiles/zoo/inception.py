"""Inception-v3 with its auxiliary head (Szegedy et al. 2016, "Rethinking the Inception …")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import convolution, linear
from .synthetic import SyntheticTask, class_accuracy, class_loss
from .vision import ImageSettings, image_task

SIZE = 299
LEAST = 75
"""Pixels that leave one position before the last pooling."""
AUXILIARY_WEIGHT = 0.4
"""Of the auxiliary head's loss, beside 1 for the main one."""
POOLED = (32, 64, 64)
"""Channels behind the pooling of each block A; the last has 64: block B takes 288."""
WIDTHS = (128, 160, 160, 192)
"""Channels between the 7×7 convolutions of each block C."""


class Unit(nn.Module):
    """A convolution, its normalisation and ReLU."""

    def __init__(
        self,
        inside: int,
        outside: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = convolution(inside, outside, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outside, eps=0.001)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """``[m, inside, h, w]`` → ``[m, outside, h', w']``."""
        result: Tensor = self.relu(self.bn(self.conv(x)))
        return result


def _wide(inside: int, outside: int, length: int) -> Unit:
    return Unit(inside, outside, (1, length), padding=(0, length // 2))


def _high(inside: int, outside: int, length: int) -> Unit:
    return Unit(inside, outside, (length, 1), padding=(length // 2, 0))


class Branches(nn.Module):
    """Modules beside each other, in the sequence in which they are set."""

    def forward(self, x: Tensor) -> Tensor:
        """The branches' channels, one behind the other."""
        return torch.cat([branch(x) for branch in self.children()], 1)


class InceptionA(Branches):
    """5×5 and pairs of 3×3 side by side (figure 5): → ``[m, 224 + pool, h, w]``."""

    def __init__(self, inside: int, pool: int) -> None:
        super().__init__()
        self.branch1x1 = Unit(inside, 64, 1)
        self.branch5x5 = nn.Sequential(Unit(inside, 48, 1), Unit(48, 64, 5, padding=2))
        self.branch3x3 = nn.Sequential(
            Unit(inside, 64, 1), Unit(64, 96, 3, padding=1), Unit(96, 96, 3, padding=1)
        )
        self.branch_pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), Unit(inside, pool, 1))


class InceptionB(Branches):
    """Half the side (figure 10): ``[m, inside, h, w]`` → ``[m, inside + 480, h', w']``."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branch3x3 = Unit(inside, 384, 3, 2)
        self.branch3x3dbl = nn.Sequential(
            Unit(inside, 64, 1), Unit(64, 96, 3, padding=1), Unit(96, 96, 3, 2)
        )
        self.branch_pool = nn.MaxPool2d(3, 2)


class InceptionC(Branches):
    """7×7 taken apart into 1×7 and 7×1 (figure 6): ``[m, 768, h, w]`` → the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch1x1 = Unit(768, 192, 1)
        self.branch7x7 = nn.Sequential(
            Unit(768, width, 1), _wide(width, width, 7), _high(width, 192, 7)
        )
        self.branch7x7dbl = nn.Sequential(
            Unit(768, width, 1),
            _high(width, width, 7),
            _wide(width, width, 7),
            _high(width, width, 7),
            _wide(width, 192, 7),
        )
        self.branch_pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), Unit(768, 192, 1))


class InceptionD(Branches):
    """Half the side again: ``[m, 768, h, w]`` → ``[m, 1280, h', w']``."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3 = nn.Sequential(Unit(768, 192, 1), Unit(192, 320, 3, 2))
        self.branch7x7x3 = nn.Sequential(
            Unit(768, 192, 1), _wide(192, 192, 7), _high(192, 192, 7), Unit(192, 192, 3, 2)
        )
        self.branch_pool = nn.MaxPool2d(3, 2)


class Fork(Branches):
    """1×3 beside 3×1: ``[m, inside, h, w]`` → ``[m, 768, h, w]``."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.wide = _wide(inside, 384, 3)
        self.high = _high(inside, 384, 3)


class InceptionE(Branches):
    """Branches that fork at their end (figure 7): → ``[m, 2048, h, w]``."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branch1x1 = Unit(inside, 320, 1)
        self.branch3x3 = nn.Sequential(Unit(inside, 384, 1), Fork(384))
        self.branch3x3dbl = nn.Sequential(
            Unit(inside, 448, 1), Unit(448, 384, 3, padding=1), Fork(384)
        )
        self.branch_pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), Unit(inside, 192, 1))


class AuxiliaryHead(nn.Module):
    """``[m, 768, side, side]`` → class scores ``[m, classes]``."""

    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        # 17 positions become 5, as in the paper; with fewer, pooling stretches them to 5.
        self.pool = nn.AvgPool2d(5, 3) if side >= 17 else nn.AdaptiveAvgPool2d(5)
        self.conv0 = Unit(768, 128, 1)
        self.conv1 = Unit(128, 768, 5)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = linear(768, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores from the middle of the net."""
        x = self.avgpool(self.conv1(self.conv0(self.pool(x))))
        logits: Tensor = self.fc(torch.flatten(x, 1))
        return logits


def _middle(size: int) -> int:
    """Side of what the auxiliary head sees, for images of side `size` (17 for 299)."""
    side = (size - 1) // 2 - 2
    side = (side - 1) // 2 - 2
    return ((side - 1) // 2 - 1) // 2


class InceptionV3(nn.Module):
    """Images ``[m, 3, size, size]`` → (scores, auxiliary scores), each ``[m, classes]``."""

    def __init__(self, size: int = SIZE, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Unit(3, 32, 3, 2),
            Unit(32, 32, 3),
            Unit(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            Unit(64, 80, 1),
            Unit(80, 192, 3),
            nn.MaxPool2d(3, 2),
        )
        into = (192, *(224 + pool for pool in POOLED[:-1]))
        self.mixed5 = nn.Sequential(*map(InceptionA, into, POOLED))
        self.mixed6 = nn.Sequential(InceptionB(288), *map(InceptionC, WIDTHS))
        self.aux = AuxiliaryHead(_middle(size), classes)
        self.mixed7 = nn.Sequential(InceptionD(), InceptionE(1280), InceptionE(2048))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout()
        self.fc = linear(2048, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores of a batch of images, from the end and from the middle of the net."""
        x = self.mixed6(self.mixed5(self.stem(images)))
        auxiliary = self.aux(x)
        x = torch.flatten(self.dropout(self.avgpool(self.mixed7(x))), 1)
        return self.fc(x), auxiliary


def both_losses(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy of the main scores, and 0.4 times that of the auxiliary ones."""
    logits, auxiliary = output
    return class_loss(logits, labels) + AUXILIARY_WEIGHT * class_loss(auxiliary, labels)


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of target `inception_v3`. Raises TargetError for a wrong argument."""

    def build(settings: ImageSettings) -> nn.Module:
        return InceptionV3(settings.size, settings.classes)

    def correct(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return class_accuracy(output[0], labels)

    return image_task(
        name, argument, build, least=LEAST, size=SIZE, criterion=both_losses, correct=correct
    )
