"""Tasks with batch norms: the first works on the data itself, so its statistics are known."""

from __future__ import annotations

import random
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

SAMPLES = 21


class Normed(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.first = nn.BatchNorm1d(3, momentum=momentum)
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.second = nn.BatchNorm1d(4)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.second(self.conv(self.first(x)))).flatten(1))


class Traced:
    """Front end: torch.fx."""

    momentum: float | None = 0.3

    def model(self):
        return Normed(self.momentum).double()

    def data(self, split):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 3, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(2 * x + 1, x.sum((1, 2)))

    def loss(self, output, target):
        return (output.squeeze(-1) - target).square().mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01)


class Mean(Traced):
    """Running statistics are the mean over all mini-batches."""

    momentum = None


class Looking(Normed):
    def forward(self, x):
        if x.shape[1] == 3 and x.shape[0] > 0:
            x = x + 0
        return super().forward(x)


class Exported(Traced):
    """Front end: torch.export."""

    def model(self):
        return Looking(self.momentum).double()


# Losses and layers that take the samples of a batch together, beside a batch norm -----------------


class Pair(nn.Module):
    """Two views of a sample, each [m, 4]; the samples' scores; and how evenly experts are used."""

    def __init__(self, normed=True, balanced=False, centered=False):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.centered = centered
        self.a, self.b, self.score = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 3)
        self.balanced = balanced

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        if self.centered:
            x = x - x.mean(0)
        scores = self.score(x)
        found = {"a": self.a(x), "b": self.b(x), "scores": scores}
        if self.balanced:
            found["balance"] = scores.softmax(1).mean(0).square().sum()
        return found


class Apart(Traced):
    """A mean over samples."""

    how: ClassVar[dict[str, bool]] = {}

    def model(self):
        return Pair(**self.how).double()

    def data(self, split):
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x[:, :3].argmax(1))

    def loss(self, output, target):
        near = (output["a"] - output["b"]).square().mean()
        return near + nn.functional.cross_entropy(output["scores"], target)


class Contrastive(Apart):
    def loss(self, output, target):
        found = output["a"] @ output["b"].t()
        own = nn.functional.cross_entropy(found, torch.arange(len(found)))
        return own + nn.functional.cross_entropy(output["scores"], target)


class ContrastiveAlone(Contrastive):
    how: ClassVar[dict[str, bool]] = {"normed": False}


class Summed(Apart):
    def loss(self, output, target):
        return nn.functional.cross_entropy(output["scores"], target, reduction="sum")


class BalancedInLoss(Apart):
    def loss(self, output, target):
        spread = output["scores"].softmax(1).mean(0).square().sum()
        near = (output["a"] - output["b"]).square().mean()
        return near + 0.01 * spread


class Balanced(Apart):
    how: ClassVar[dict[str, bool]] = {"balanced": True}

    def loss(self, output, target):
        return super().loss(output, target) + 0.1 * output["balance"]


class Centered(Apart):
    how: ClassVar[dict[str, bool]] = {"centered": True}


class CentredAlone(Apart):
    how: ClassVar[dict[str, bool]] = {"normed": False, "centered": True}


class Counting(Apart):
    """A mean by the weights of classes."""

    def loss(self, output, target):
        weights = torch.tensor([1.0, 2.0, 0.2]).to(output["scores"])
        return nn.functional.cross_entropy(output["scores"], target, weights)


class Clamped(Apart):
    """A hook on a parameter does to each micro-batch's gradient what it would to the whole."""

    def model(self):
        model = super().model()
        model.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model


class Noisy(Apart):
    """The loss adds noise to what it is given."""

    def loss(self, output, target):
        scores = output["scores"]
        return nn.functional.cross_entropy(scores + torch.randn_like(scores), target)


class Augmented(Apart):
    """Samples differ each time that they are read."""

    def data(self, split):
        class Drawn(TensorDataset):
            def __getitem__(self, k):
                x, y = super().__getitem__(k)
                return x + random.random(), y

        return Subset(Drawn(*super().data(split).tensors), range(24))


class Moving(Apart):
    """The loss keeps a mean of what it has seen, which is no part of it."""

    def __init__(self):
        self.seen = torch.zeros(3, dtype=torch.float64)

    def loss(self, output, target):
        self.seen.mul_(0.9).add_(output["scores"].detach().mean(0))
        return nn.functional.cross_entropy(output["scores"], target)


class Annealed(Apart):
    """The loss counts its calls, and has more of a penalty with each."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        scores = output["scores"]
        return nn.functional.cross_entropy(scores, target) + self.calls * 1e-4 * scores.abs().mean()


class InFours(Apart):
    """The loss compares samples in groups of four."""

    how: ClassVar[dict[str, bool]] = {"normed": False}

    def loss(self, output, target):
        groups = output["a"].view(-1, 4, 4)
        near = (groups - groups.mean(1, keepdim=True)).square().mean()
        return near + nn.functional.cross_entropy(output["scores"], target)


class Spectral(Apart):
    """Each forward has a buffer follow the largest singular value, and goes by it."""

    how: ClassVar[dict[str, bool]] = {"normed": False}

    def model(self):
        torch.manual_seed(0)
        model = super().model()
        model.score = nn.utils.parametrizations.spectral_norm(model.score)
        return model


class WeightAndSpectral(Spectral):
    """Of torch's two ways, the one by hooks for another layer."""

    def model(self):
        model = super().model()
        model.first = nn.utils.weight_norm(model.first)
        return model


class Auxiliary(Apart):
    """Gives more in training mode, as networks with auxiliary classifiers do."""

    def model(self):
        class Trained(Pair):
            def forward(self, x):
                if self.training:
                    return super().forward(x)
                return self.score(torch.tanh(self.norm(self.first(x))))

        return Trained().double()

    def loss(self, output, target):
        return super().loss(output, target) if isinstance(output, dict) else output.mean()


class Rescaled(Apart):
    """Drops samples out in training mode, as stochastic depth does."""

    def model(self):
        class Trained(Pair):
            def forward(self, x):
                found = super().forward(x)
                if self.training:
                    found["scores"] = found["scores"] * (torch.rand(len(x), 1) > 0.2)
                return found

        return Trained().double()
