"""What no front end takes: the line that the furthest one failed at, and what would help."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.by_hand.pieces import run_pieces
from helpers.models.front_ends import positional
from timeprest.profiles.errors import TraceError
from timeprest.profiles.tracing.front_ends import trace
from torch import nn


class Asks(nn.Module):
    """Another way for large values."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        if float(x.sum()) > 0:  # asks
            x = x * 2
        return self.a(x)


class Early(nn.Module):
    """Symbolic tracing fails at its beginning, torch.export at its end."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for k in range(x.dim()):  # early
            x = x + k
        x = self.last(self.first(x))
        return x * int(x.max())  # late


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = Asks()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def refusal(model, *tensors, **settings):
    with pytest.raises(TraceError) as caught:
        trace(model, "it", positional(*(tensors or [torch.randn(2, 4)])), **settings)
    return str(caught.value)


def line_of(model, marked):
    import inspect

    lines, first = inspect.getsourcelines(type(model))
    return first + next(k for k, line in enumerate(lines) if line.rstrip().endswith(f"# {marked}"))


def test_the_line_is_that_of_the_front_end_that_got_furthest():
    told = refusal(Early())
    assert told.startswith(f"{__file__}:{line_of(Early(), 'late')}: `return x * int(x.max())")
    told = refusal(Early(), front_end="fx")
    assert told.startswith(f"{__file__}:{line_of(Early(), 'early')}: ")
    told = refusal(Early(), front_end="onnx")  # whose line is no model's
    assert told.startswith("it (Early.forward): no front end takes this")


def test_a_graph_that_does_something_else_got_further_than_none():
    class Knows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(x.dim()):
                x = self.a(x)
            return x * (1 if type(x) is torch.Tensor else 2)

    told = refusal(Knows())
    assert told.startswith("it (Knows.forward): no front end takes this (torch.export with")


def test_patterns_that_are_told_would_do():
    told = refusal(Blocks(Asks(), Asks()))
    assert "keep that part whole with --granularity 'blocks.*,head', or" in told
    (patterns,) = re.findall(r"--granularity '(.*?)'", told)
    model, x = Blocks(Asks(), Asks()), torch.randn(2, 4)
    traced = trace(model, "it", positional(x), granularity=patterns)
    assert [layer.name for layer in traced.layers] == ["first", "blocks.0", "blocks.1", "head"]


def test_where_no_pattern_does_none_is_told():
    assert "in a module of its own and keep it whole with --granularity NAME" in refusal(Early())
    # Kept whole, it would be the only layer.
    assert "--granularity NAME" in refusal(nn.ModuleDict({"a": Asks()})["a"])


class Pairs(nn.Module):
    """Each layer gives a tuple, which the next one takes whole."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, pair):
            return torch.relu(self.a(pair[0])), pair[1] + pair[0]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pairs.Layer() for _ in range(3))

    def forward(self, x):
        pair = x, x
        for layer in self.layers:
            pair = layer(pair)
        return pair


def test_where_a_tuple_goes_from_layer_to_layer_the_next_front_end_is_tried():
    model, x = Pairs(), torch.randn(2, 4)
    traced = trace(model, "it", positional(x), granularity="layers.*")
    assert traced.front_end == "export"
    assert "tuple" in traced.refusals[0]
    assert [layer.name for layer in traced.layers] == ["layers.0", "layers.1", "layers.2"]
    result, _ = run_pieces(traced, [[0], [1], [2]], (x,), 0)
    for found, wanted in zip(result, model(x), strict=True):
        assert torch.equal(found, wanted)
    # Also where nothing is run, as for a device that isn't there.
    unseen = trace(model, "it", positional(x), granularity="layers.*", verify=False)
    assert unseen.front_end == "export"
    told = refusal(model, x, granularity="layers.*", front_end="fx")
    assert "is a tuple: only tensors" in told
