"""A task in single precision, with layers that autocast treats each in its way."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Mixed(nn.Module):
    """Convolution, norm, a tied pair of linear layers on one stage, and a skip."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(24, 32)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 24)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        x = self.norm(self.conv(x)).flatten(1)
        return self.out(x + self.down(self.act(self.up(x))))


class Single:
    """Random data in float32."""

    def model(self):
        return Mixed()

    def data(self, split):
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        x = torch.randn(40, 3, 6, generator=generator)
        return TensorDataset(x, x.flatten(1)[:, :5].argmax(1))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
