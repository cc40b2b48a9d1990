"""A task with parameters of two types, and one that never gets a gradient."""

from __future__ import annotations

import torch
from mlp_task import WIDTHS, MLPTask
from torch import nn


class Mixed(nn.Module):
    """float32 first, float64 then; the shift is used, but nothing is learnt for it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTHS[0], 6)
        self.act = nn.Tanh()
        self.shift = nn.Parameter(torch.ones(6))
        self.second = nn.Linear(6, WIDTHS[-1]).double()

    def forward(self, x):
        y = self.act(self.first(x.float())) + self.shift.detach()
        return self.second(y.double())


class MixedTask(MLPTask):
    """AdamW moves what has a gradient of zero, by its weight decay, but not what has none."""

    def model(self):
        return Mixed()

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
