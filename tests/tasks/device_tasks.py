"""Models with tensors that aren't parameters: made in the forward, or kept in a list besides."""

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
