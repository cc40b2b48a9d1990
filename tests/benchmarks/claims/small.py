"""What TiMePReSt and its reproduction trained, in small: ResNet-50 on pictures, TinyLlama on text.

Pictures are made of scikit-learn's digits, text is what ships with Python.
"""

from __future__ import annotations

from functools import cache

import torch
from timeprest.profiles.tasks.task import Split
from timeprest.profiles.zoo.resnet import Bottleneck
from timeprest.profiles.zoo.text import CONTEXT
from timeprest.tests.benchmarks.claims.tasks import VIEWS, Characters, Images
from timeprest.tests.benchmarks.objective.tasks import scanned
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SIZE = 12
"""Pixels of coloured pictures."""
THIN = (8, 16, 16, 32)
"""Widths of the bottlenecks' 3×3 convolutions."""


@cache
def coloured(split: Split) -> TensorDataset:
    """Digits in colours on others that change over the picture, with noise: ``[3, 12, 12]``."""
    images, labels = scanned(split).tensors
    images, labels = images.repeat(VIEWS[split], 1, 1), labels.repeat(VIEWS[split])
    drawn = torch.Generator().manual_seed(7 + (split == "test"))
    ink = 0.5 + torch.rand(len(images), 3, 1, 1, generator=drawn)
    corners = torch.randn(len(images), 3, 2, 2, generator=drawn)
    written, shades = (
        functional.interpolate(each, SIZE, mode="bilinear") for each in (images[:, None], corners)
    )
    noise = torch.randn(len(images), 3, SIZE, SIZE, generator=drawn)
    return TensorDataset(4 * written * ink + shades + noise / 2, labels)


class Bottlenecks(Images):
    """ResNet-50, a bottleneck where it has three to six, and about a tenth as wide."""

    def model(self) -> nn.Module:
        stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks, inside = list[Bottleneck](), 16
        for k, width in enumerate(THIN):
            blocks.append(Bottleneck(inside, width, 2 if k else 1))
            # As in the reproduction; a block is its shortcut at first.
            nn.init.zeros_(blocks[-1].bn3.weight)
            inside = Bottleneck.expansion * width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10)]
        return nn.Sequential(*stem, nn.MaxPool2d(2), *blocks, *head)

    def data(self, split: Split) -> TensorDataset:
        return coloured(split)


class Rotary(nn.Module):
    """Causal self-attention over ``[m, time, width]`` with rotary positions (2104.09864)."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // heads // 2
        angles = torch.arange(CONTEXT)[:, None] / 10_000 ** (torch.arange(half) / half)
        angles = torch.cat([angles, angles], 1)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """By each position's angles."""
        first, second = x.chunk(2, -1)
        return x * self.cosines + torch.cat([-second, first], -1) * self.sines

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            self.turned(query), self.turned(key), value, is_causal=True
        )
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class LlamaBlock(nn.Module):
    """RMSNorm, attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Rotary(width, heads)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        found: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return found


class Llama(Characters):
    """TinyLlama with four of its 22 blocks, of width 32, on characters."""

    def model(self) -> nn.Module:
        count, width = len(self.alphabet), 32
        blocks = [LlamaBlock(width, heads=4) for _ in range(4)]
        head = [nn.RMSNorm(width), nn.Linear(width, count, bias=False)]
        return nn.Sequential(nn.Embedding(count, width), *blocks, *head)


bottlenecks = Bottlenecks()
llama = Llama()
