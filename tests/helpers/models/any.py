"""Models that the profiler and the cutter must take, and some that they can't."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Skips, a tensor with several consumers, a concatenation, in-place operations."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.right = nn.Conv2d(4, 4, 1)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        left = self.act(self.left(x))
        right = torch.sigmoid(self.right(x))
        x = torch.cat([left, right, x * 2], 1)
        return self.head(self.pool(x).view(x.size(0), -1))


class PreActivation(nn.Module):
    """The in-place ReLU changes what the skip adds later: part of the model's meaning."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        y = self.body(self.relu(x))
        return self.head(torch.tanh(y) + x)


class ChangedView(nn.Module):
    """The same through a view, which the in-place ReLU takes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.flat = nn.Flatten()
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        y = self.body(self.relu(self.flat(x)))
        return self.head(torch.tanh(y) + x)


class ChangedSlice(nn.Module):
    """The in-place ReLU takes a part of what another layer takes whole."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Linear(2, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.body(self.relu(x.narrow(1, 0, 2))) + self.head(x)


class Sizes(nn.Module):
    """Sizes and a shape that are read in one layer and used in others."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.mix = nn.Linear(6, 6)
        self.recur = nn.GRU(6, 6, batch_first=True)
        self.out = nn.Linear(6, 13)

    def forward(self, tokens):
        batch, time = tokens.shape
        x = self.embed(tokens)
        shape = x.shape
        flat = self.mix(x.reshape(batch * time, 6))
        x, last = self.recur(flat.view(shape))
        return self.out(x + last.transpose(0, 1).expand(batch, time, 6))


class Types(nn.Module):
    """A tensor's type and its device are asked for by later layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.place = nn.Embedding(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x, kinds):
        x = torch.tanh(self.first(x))
        places = self.place(torch.arange(8, device=x.device)).sum(0)
        y = self.second(x) + places
        return self.third(y) + kinds.to(x.dtype).unsqueeze(-1)


class TwoInputs(nn.Module):
    """Two inputs, one of them used late; the result is a dict."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x, mask):
        x = torch.tanh(self.first(x))
        x = functional.dropout(self.drop(x), 0.5, training=self.training)
        y = self.second(x)
        return {"scores": self.third(y * mask), "hidden": x}


class Tied(nn.Module):
    """The embedding's weights serve in the last layer too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.body(self.embed(tokens))))


class Branches(nn.Module):
    """Control flow that depends on a tensor: nothing can trace it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        if x.sum() > 0:  # the line that an error must name
            return self.layer(x)
        return x


class Plain(nn.Module):
    """Traces, but fails on its inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)


EXAMPLES = {
    "residual": (Residual, lambda m: (torch.randn(m, 3, 6, 6, dtype=torch.float64),)),
    "changes": (PreActivation, lambda m: (torch.randn(m, 4, dtype=torch.float64),)),
    "changes a view": (ChangedView, lambda m: (torch.randn(m, 4, dtype=torch.float64),)),
    "changes a slice": (ChangedSlice, lambda m: (torch.randn(m, 4, dtype=torch.float64),)),
    "sizes": (Sizes, lambda m: (torch.randint(0, 13, (m, 5)),)),
    "types": (
        Types,
        lambda m: (torch.randn(m, 4, dtype=torch.float64), torch.randint(0, 3, (m,))),
    ),
    "two inputs": (
        TwoInputs,
        lambda m: (
            torch.randn(m, 4, dtype=torch.float64),
            (torch.rand(m, 8) > 0.5).double(),
        ),
    ),
    "tied": (Tied, lambda m: (torch.randint(0, 9, (m, 7)),)),
}


def flat(value):
    """The tensors in a result."""
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
