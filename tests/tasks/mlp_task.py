"""A task in float64 that is small enough to be written out by hand (see oracle.py)."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTHS = (5, 7, 6, 4, 3)


class MLPTask:
    """Linear layers l0 … l3 with tanh t0 … t2 between them; mean squared error."""

    sizes: ClassVar = {"train": 600, "test": 72}

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
        x = torch.randn(self.sizes[split], WIDTHS[0], generator=generator, dtype=torch.float64)
        y = torch.sin(x @ torch.ones(WIDTHS[0], WIDTHS[-1], dtype=torch.float64))
        return TensorDataset(x, y)

    def loss(self, output, target):
        return ((output - target) ** 2).mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class FlatTask(MLPTask):
    """The same, where a layer's parameters are views of one tensor, the weight behind the bias."""

    def model(self):
        model = super().model()
        for layer in model:
            if found := [*layer.parameters()][::-1]:
                flat = nn.utils.parameters_to_vector(found).detach()
                nn.utils.vector_to_parameters(flat, found)
        return model


class ShortEpochs(MLPTask):
    """The same on 42 samples: five mini-batches of 8 in an epoch, and 2 samples left."""

    def data(self, split):
        return TensorDataset(*(part[:42] for part in super().data(split).tensors))


class LongEpoch(MLPTask):
    """The same on 2400 samples: what it has, again and again."""

    def data(self, split):
        return TensorDataset(*(part.repeat(4, 1) for part in super().data(split).tensors))


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


class Frozen(MLPTask):
    """Its first layer isn't trained."""

    def model(self):
        model = super().model()
        model.l0.requires_grad_(False)
        return model


class FrozenSum(Frozen):
    """The same, as a sum and how many numbers are in it."""

    def loss(self, output, target):
        return ((output - target) ** 2).sum(), target.numel()


class TiedV(MLPTask):
    """Square layers; those that share a device in a V of four stages have the same weight."""

    WIDTH = 5
    TIES: ClassVar = {"l3.weight": "l0.weight", "l2.weight": "l1.weight"}

    def model(self):
        model = nn.Sequential()
        for k in range(4):
            model.add_module(f"l{k}", nn.Linear(self.WIDTH, self.WIDTH))
            if k < 3:
                model.add_module(f"t{k}", nn.Tanh())
        for later, first in self.TIES.items():
            tied = model.get_parameter(first)
            setattr(model.get_submodule(later.split(".")[0]), later.split(".")[1], tied)
        return model.double()

    def data(self, split):
        x, _ = super().data(split).tensors
        mixed = torch.arange(self.WIDTH**2, dtype=torch.float64).reshape(self.WIDTH, self.WIDTH)
        return TensorDataset(x, torch.sin(x @ mixed.sin()))


class TiedLoop(TiedV):
    """The same in a loop of four stages over two devices."""

    TIES: ClassVar = {"l2.weight": "l0.weight", "l3.weight": "l1.weight"}


class TiedAll(TiedV):
    """One weight everywhere."""

    TIES: ClassVar = dict.fromkeys(("l1.weight", "l2.weight", "l3.weight"), "l0.weight")


class TiedShort(TiedV):
    """On 42 samples, and the columns of the target count differently."""

    counts = staticmethod(WeightedTask.counts)
    loss = WeightedTask.loss

    def data(self, split):
        return TensorDataset(*(part[:42] for part in super().data(split).tensors))


class TiedShortLoop(TiedShort):
    """The same in a loop."""

    TIES: ClassVar = TiedLoop.TIES
