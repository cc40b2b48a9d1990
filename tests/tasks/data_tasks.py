"""Tasks whose data change whenever they are asked for, or don't fill the last mini-batch."""

from __future__ import annotations

import numpy as np
import torch
from graph_task import GraphTask, Tokens
from mlp_task import MLPTask
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset


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


# Samples that don't fill the last mini-batch, with results of several forms --------------------

SAMPLES = 21


class FewSamples(MLPTask):
    """The small network on 21 samples."""

    def data(self, split):
        return Subset(super().data(split), range(SAMPLES))


class FewTokens(GraphTask):
    """The graph with skips on 22 sentences; its result is a dict."""

    def data(self, split):
        tokens = Tokens(1 if split == "train" else 2)
        tokens.tokens, tokens.masks = tokens.tokens[:22], tokens.masks[:22]
        return tokens


class Rows(nn.Module):
    """``[m, 3, 4]`` → ``[3 · m, 5]``, or with time first ``[3, m, 5]``."""

    def __init__(self, time_first):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 5)
        self.time_first = time_first

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return y.transpose(0, 1) if self.time_first else y.reshape(-1, 5)


class FlatTask:
    """A row of the result for every step of every sample, samples first."""

    time_first = False

    def model(self):
        return Rows(self.time_first).double()

    def data(self, split):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(SAMPLES, 3, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(0, 5, (SAMPLES, 3), generator=generator))

    def loss(self, output, target):
        if self.time_first:
            output, target = output.flatten(0, 1), target.transpose(0, 1)
        return functional.cross_entropy(output, target.flatten())

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target.flatten()).double().mean()}

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class TimeFirst(FlatTask):
    """Steps come before samples: nothing tells what is real of the result."""

    time_first = True
    metrics = None
