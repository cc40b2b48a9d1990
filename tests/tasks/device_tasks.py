"""Models with tensors that aren't parameters; and one of layers for autocast."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Positions(nn.Module):
    """torch.export alone takes it, and writes the device of what is made there into the graph."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x):
        y = torch.tanh(self.first(x)) + torch.arange(4, device=x.device)
        if x.shape[1] == 4:
            y = y + torch.ones(4, device=x.device) * self.shift
        return self.second(y)


class Recurrent(nn.Module):
    """A GRU keeps its weights in a list besides."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        y, _ = self.gru(x.unsqueeze(1))
        return self.out(y[:, -1])


class PositionsTask:
    def model(self):
        return Positions()

    def data(self, split):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sin())

    def loss(self, output, target):
        return (output - target).square().mean()

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.02)


class RecurrentTask(PositionsTask):
    def model(self):
        return Recurrent()


# In single precision -----------------------------------------------------------------------------


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
