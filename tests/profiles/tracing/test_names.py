"""Modules, parameters and buffers may be called whatever the model likes."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.by_hand.pieces import run_pieces
from helpers.models.front_ends import positional
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import GraphBody
from torch import fx, nn

OF_FX = [
    name
    for name in sorted({*dir(fx.GraphModule(nn.Module(), fx.Graph()))} - {*dir(nn.Module())})
    if not name.startswith("__")
]
"""What torch.fx's own modules have besides what every module has: graph, code, meta, …"""

OF_PYTHON = ["lambda", "if", "None", "torch", "operator", "device", "print", "self", "given_0"]
OF_MODULES = ["type", "half", "apply", "forward", "parameters", "train"]
"""Of these add_module takes none, but an assignment does."""


class Named(nn.Module):
    """A layer, a weight or a buffer of this name."""

    def __init__(self, name, what):
        super().__init__()
        self.what, self.name = what, name
        if what == "module":
            self._modules[name] = nn.Linear(4, 4)
        elif what == "nested":
            self._modules[name] = Named(name, "module")
        elif what == "parameter":
            self._parameters[name] = nn.Parameter(torch.randn(4))
        else:
            self._buffers[name] = torch.randn(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        if self.what in ("module", "nested"):
            x = self._modules[self.name](x)
        else:
            kind = self._parameters if self.what == "parameter" else self._buffers
            x = torch.relu(x) * kind[self.name]
        return self.last(torch.relu(x))


def check(model, front_end):
    x = torch.randn(3, 4)
    traced = trace(model, "it", positional(x), front_end=front_end)
    assert traced.front_end == front_end
    groups = [[k] for k in range(len(traced.layers))]
    result, _ = run_pieces(traced, groups, (x,), 0)
    assert torch.equal(result, model(x))
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    body = traced.module
    held = dict(body.named_parameters()) | dict(body.named_buffers())
    assert held.keys() == own.keys()
    assert all(held[name] is own[name] for name in own)
    assert torch.equal(copy.deepcopy(body)(x), model(x))


@pytest.mark.parametrize("what", ["module", "nested", "parameter", "buffer"])
@pytest.mark.parametrize("name", ["code", "graph", "meta", "print_readable", "recompile", "_graph"])
def test_what_is_called_as_torch_fx_calls_its_own_is_traced(name, what):
    check(Named(name, what), "fx")
    check(Named(name, what), "export")


def test_so_is_every_other_name():
    for name in (*OF_FX, *OF_PYTHON):
        check(Named(name, "module"), "fx")
    for name in OF_MODULES:
        check(Named(name, "nested"), "fx")
        check(Named(name, "parameter"), "fx")


def test_the_children_of_a_sequential_may_be_called_so():
    for name in ("code", "graph", "meta", "lambda"):
        model = nn.Sequential()
        model.add_module(name, nn.Linear(4, 4))
        model.add_module("last", nn.Linear(4, 4))
        check(model, "sequential")


def test_a_body_has_no_names_of_its_own():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    body = GraphBody(nn.Module(), graph)
    assert set(dir(body)) - set(dir(nn.Module())) == {"fx.graph"}
