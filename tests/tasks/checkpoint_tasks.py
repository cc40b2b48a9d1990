"""Tasks with what a checkpoint must remember besides weights and momenta."""

from __future__ import annotations

import torch
from mlp_task import ShortEpochs
from torch import nn
from whole_model_tasks import Grouped


class Shaken(nn.Module):
    """Dropout on two stages, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.l1 = nn.Linear(6, 4)
        self.act = nn.Tanh()
        self.drop2 = nn.Dropout(0.3)
        self.l2 = nn.Linear(4, 3)

    def forward(self, x):
        x = self.drop(self.norm(self.l0(x)))
        return self.l2(self.drop2(self.act(self.l1(x))))


class ShakenTask(ShortEpochs):
    def model(self):
        return Shaken().double()


class Cycled(ShortEpochs):
    """A schedule that also moves the momentum."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)


class Stepped(Grouped):
    """Groups by name, and a schedule that counts."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 10], gamma=0.5)


class Odd(ShortEpochs):
    """An optimizer that keeps what no file can hold."""

    def optimizer(self, parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        for group in optimizer.param_groups:
            group["rule"] = self
        return optimizer


class Idle(nn.Module):
    """Has a layer that its forward doesn't use."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(5, 6)
        self.unused = nn.Linear(2, 2)
        self.l1 = nn.Linear(6, 3)

    def forward(self, x):
        return self.l1(torch.tanh(self.l0(x)))


class IdleTask(ShortEpochs):
    def model(self):
        return Idle().double()
