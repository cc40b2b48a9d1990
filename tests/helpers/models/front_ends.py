"""Models for each front end, with what they are called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timeprest.profiles.tracing.call import Call
from torch import Tensor, nn


@dataclass
class Scores:
    """A result with fields of its own, one of them unused."""

    scores: Tensor
    hidden: dict[str, Any]
    unused: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Body(nn.Module):
    """Linear, BatchNorm, dropout, and what `kind` asks for."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 3)

    def forward(self, x, mask=None, *, scale=None):
        y = torch.relu(self.drop(self.norm(self.a(x))))
        if self.kind == "branch on shape" and x.shape[0] > 1:
            y = y * 2
        if self.kind == "fixed batch":
            y = y.view(int(x.shape[0]), 2, 4).flatten(1)
        if mask is not None:
            y = y * mask
        if scale is not None:
            y = y + scale
        z = torch.tanh(self.b(y)) + y
        if self.kind == "pair":
            return Pair(self.c(z), z)
        if self.kind == "dict":
            return {"scores": self.c(z), "inside": [z, (y, None)]}
        return Scores(self.c(z), {"last": z, "both": [y, z * 2]})


class Choice(nn.Module):
    """Data-dependent control flow: no front end looks inside."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x) if x.sum() > 0 else self.down(x)


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.left(x)), x


class Join(nn.Module):
    def forward(self, both):
        return both[0] * both[1]


class WithChoice(nn.Module):
    """The control flow sits in one block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Choice(), Choice()])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


class Masked(nn.Module):
    """Token ids, a bool mask by name, positions made inside, tied embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Embedding(6, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, padding=None):
        if padding is None:
            padding = torch.zeros_like(tokens, dtype=torch.bool)
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        y, _ = self.mix(x, x, x, key_padding_mask=padding, need_weights=False)
        return self.head(self.norm(x + y))


def positional(*tensors):
    return Call(tensors, (None,) * len(tensors))


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _padding(m):
    padding = torch.zeros(m, 6, dtype=torch.bool)
    padding[:, 4:] = True
    return padding


def _masked_call(m):
    return Call((torch.randint(0, 11, (m, 6)), _padding(m)), (None, "padding"))


CASES = {
    "dataclass": ("fx", lambda: Body("dataclass"), lambda m: positional(doubles(m, 4))),
    "named tuple": ("fx", lambda: Body("pair"), lambda m: positional(doubles(m, 4))),
    "dict": ("fx", lambda: Body("dict"), lambda m: positional(doubles(m, 4), doubles(m, 8))),
    "by name": (
        "fx",
        lambda: Body("dict"),
        lambda m: Call((doubles(m, 4), doubles(m, 8)), (None, "scale")),
    ),
    "branch on shape": (
        "export",
        lambda: Body("branch on shape"),
        lambda m: Call((doubles(m, 4), doubles(m, 8)), (None, "scale")),
    ),
    "masked": ("fx", Masked, _masked_call),
    "fixed batch": (
        "export-static",
        lambda: Body("fixed batch"),
        lambda m: positional(doubles(m, 4)),
    ),
    "children": (
        "sequential",
        lambda: nn.Sequential(
            nn.Linear(4, 4),
            nn.Sequential(Choice(), Fork()),
            Join(),
            nn.BatchNorm1d(4),
            nn.Linear(4, 2),
        ),
        lambda m: positional(doubles(m, 4)),
    ),
}
"""name → (front end that takes it, model, its call with m samples)."""
