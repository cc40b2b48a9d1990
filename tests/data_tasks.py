"""Tasks whose data aren't the same whenever they are asked for."""

from __future__ import annotations

import numpy as np
import torch
from mlp_task import MLPTask
from torch.utils.data import Dataset, TensorDataset


class _Changed(MLPTask):
    """A generator without a seed has a hand in one split."""

    split = "train"

    def data(self, split):
        x, y = super().data(split).tensors
        if split == self.split:
            x, y = self.changed(x, y, np.random.default_rng())
        return TensorDataset(x, y)


class UnseededTargets(_Changed):
    def changed(self, x, y, generator):
        return x, torch.from_numpy(generator.normal(size=tuple(y.shape)))


class UnseededInputs(_Changed):
    def changed(self, x, y, generator):
        return torch.from_numpy(generator.normal(size=tuple(x.shape))), y


class UnseededOrder(_Changed):
    """Inputs and targets belong together, and lie elsewhere each time."""

    def changed(self, x, y, generator):
        order = torch.from_numpy(generator.permutation(len(x)))
        return x[order], y[order]


class UnseededLength(_Changed):
    def changed(self, x, y, generator):
        self.times = getattr(self, "times", 0) + 1
        length = len(x) - int(generator.integers(1_000_000)) % 200 - self.times
        return x[:length], y[:length]


class UnseededTest(UnseededTargets):
    split = "test"


class UnseededTestLength(UnseededLength):
    split = "test"


class _Drawing(Dataset):
    def __init__(self, data, targets):
        self.data, self.targets = data, targets

    def __len__(self):
        return len(self.data)

    def __getitem__(self, k):
        x, y = self.data[k]
        noise = torch.randn(())
        return x + 0.1 * noise, y + noise * self.targets


class Augmented(MLPTask):
    """Inputs are changed at random with torch's own generator, targets aren't."""

    targets = 0

    def data(self, split):
        return _Drawing(super().data(split), self.targets)


class Mixed(Augmented):
    """Targets are, too."""

    targets = 1
