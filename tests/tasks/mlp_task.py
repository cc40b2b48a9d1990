"""A task in float64 that is small enough to be written out by hand (see oracle.py)."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTHS = (5, 7, 6, 4, 3)
SAMPLES = 600


class MLPTask:
    """Linear layers l0 … l3 with tanh t0 … t2 between them; mean squared error."""

    def model(self) -> nn.Module:
        layers: dict[str, nn.Module] = {}
        for k, (inside, outside) in enumerate(itertools.pairwise(WIDTHS)):
            layers[f"l{k}"] = nn.Linear(inside, outside)
            if k < len(WIDTHS) - 2:
                layers[f"t{k}"] = nn.Tanh()
        model = nn.Sequential()
        for name, layer in layers.items():
            model.add_module(name, layer)
        return model.double()

    def data(self, split):
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        x = torch.randn(SAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64)
        y = torch.sin(x @ torch.ones(WIDTHS[0], WIDTHS[-1], dtype=torch.float64))
        return TensorDataset(x, y)

    def loss(self, output, target):
        return ((output - target) ** 2).mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class ShortEpochs(MLPTask):
    """The same on 42 samples: five mini-batches of 8 in an epoch, and 2 samples left."""

    def data(self, split):
        return TensorDataset(*(part[:42] for part in super().data(split).tensors))


class WeightedTask(MLPTask):
    """The same, where columns of the target count 1, 2 and 3 times, or not at all."""

    @staticmethod
    def counts(y):
        """How often each number of a target ``[m, 3]`` counts (a tensor, or NumPy's array)."""
        return (y > -0.9) * (y * 0 + 1).cumsum(1)

    def loss(self, output, target):
        counts = self.counts(target)
        return (counts * (output - target) ** 2).sum(), counts.sum()

    def metrics(self, output, target):
        counts = self.counts(target)
        return {"error": ((counts * (output - target).abs()).sum(), counts.sum())}

    def figures(self, means):
        return {"perplexity": math.exp(means["loss"])}


class ShortWeighted(WeightedTask, ShortEpochs):
    """On 42 samples."""
