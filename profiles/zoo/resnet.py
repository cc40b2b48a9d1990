"""Residual nets (He et al. 2016); bottlenecks stride in their 3×3 convolution ("v1.5")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import convolution, linear
from .synthetic import SyntheticTask
from .vision import image_task

LEAST = 32
"""Pixels that leave one position behind the five halvings."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut: ``[m, inside, h, w]`` → ``[m, width, h', w']``."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = convolution(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inside, width, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut plus what the convolutions make of `x`."""
        y = self.relu1(self.bn1(self.conv1(x)))
        result: Tensor = self.relu2(self.bn2(self.conv2(y)) + self.downsample(x))
        return result


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut: → ``[m, 4 width, h', w']``."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = convolution(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = convolution(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inside, 4 * width, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut plus what the convolutions make of `x`."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        result: Tensor = self.relu3(self.bn3(self.conv3(y)) + self.downsample(x))
        return result


def _shortcut(inside: int, outside: int, stride: int) -> nn.Sequential:
    """A projection where shapes change (He et al., option B); else empty, the identity."""
    if inside == outside and stride == 1:
        return nn.Sequential()
    return nn.Sequential(
        convolution(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
    )


class ResNet(nn.Module):
    """Images ``[m, 3, size, size]`` → class scores ``[m, classes]``."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], blocks: tuple[int, ...], classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = convolution(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _group(block, 64, 64, blocks[0], 1)
        self.layer2 = _group(block, 64 * block.expansion, 128, blocks[1], 2)
        self.layer3 = _group(block, 128 * block.expansion, 256, blocks[2], 2)
        self.layer4 = _group(block, 256 * block.expansion, 512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = linear(512 * block.expansion, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _group(
    block: type[BasicBlock | Bottleneck], inside: int, width: int, count: int, stride: int
) -> nn.Sequential:
    first = block(inside, width, stride)
    rest = [block(width * block.expansion, width, 1) for _ in range(count - 1)]
    return nn.Sequential(first, *rest)


NETS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
"""Kind of block and blocks in each group (He et al. 2016, table 1)."""


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of the target `name`, a key of NETS. Raises TargetError."""
    return image_task(name, argument, lambda s: ResNet(*NETS[name], s.classes), least=LEAST)
