"""Tasks with what a checkpoint must remember besides weights and momenta."""

from __future__ import annotations

import torch
from mlp_task import ShortEpochs
from torch import nn
from torch.utils.data import TensorDataset
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


class Fading(Shaken):
    """Uses a buffer that isn't persistent and fades, and numbers that the trace makes constants."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(6), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.9)
        counts = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return super().forward(x * self.seen[:5].clone()) * counts


class FadingTask(ShortEpochs):
    def model(self):
        return Fading().double()


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


class Center(nn.Module):
    """Has a buffer, and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0

    def forward(self, output):
        self.calls += 1
        self.mean += 0.1 * (output.detach().mean(0) - self.mean)
        return (output - self.mean).square().mean()


class RememberingTask:
    """Its loss anneals by the number of its calls."""

    def __init__(self):
        self.seen, self.history, self.still = 0, [], 3
        self.center = Center()

    def model(self):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        return TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 3)

    def loss(self, output, target):
        self.seen += 1
        self.history.append(1.0)
        near = self.center(output)
        return nn.functional.cross_entropy(output, target) + near / self.seen

    def optimizer(self, parameters):
        return Counting(parameters, lr=0.01)


class Counting(torch.optim.SGD):
    """Counts its steps in a plain attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def step(self, closure=None):
        """As SGD."""
        self.steps += 1
        return super().step(closure)
