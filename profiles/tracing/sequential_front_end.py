"""Front end: the children of an nn.Sequential, each called as a whole; nothing is traced."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import TraceError
from .call import Call
from .fx import homes
from .graph import TracedModel
from .layers import group


def trace_sequential(model: nn.Module, call: Call, granularity: str) -> TracedModel:
    """A chain of the children; nested nn.Sequentials are opened.

    Raises:
        TraceError: not an nn.Sequential with one input, or a child gives something that
            can't go to the next one.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise TraceError("is not an nn.Sequential")
    if len(call.tensors) != 1:
        raise TraceError(f"an nn.Sequential takes one input, not {len(call.tensors)}")
    graph = fx.Graph()
    value: Any = graph.placeholder("input")
    at_hand: Any = call.tensors[0]
    with torch.no_grad():
        for path, child in _children(model, ""):
            node = graph.call_module(path, (value,))
            node.meta["nn_module_stack"] = {path: (path, type(child))}
            at_hand = child(at_hand)
            value = _unpacked(graph, node, at_hand, path)
    graph.output(value)
    layers = group(graph, granularity, homes, model)
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    return TracedModel(fx.GraphModule(model, graph), layers, inputs, "sequential", granularity)


def _children(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if type(child) is nn.Sequential:
            yield from _children(child, f"{path}.")
        else:
            yield path, child


def _unpacked(graph: fx.Graph, node: fx.Node, value: Any, path: str) -> Any:
    """What the next child takes, tuples and dicts taken apart: only tensors cross a cut."""
    if isinstance(value, Tensor):
        return node
    if type(value) in (tuple, list) and all(isinstance(v, Tensor) for v in value):
        return type(value)(graph.call_function(getitem, (node, k)) for k in range(len(value)))
    if type(value) is dict and all(isinstance(v, Tensor) for v in value.values()):
        return {key: graph.call_function(getitem, (node, key)) for key in value}
    raise TraceError(
        f"child {path!r} of the nn.Sequential gives a {type(value).__name__}: between children "
        "only tensors, and tuples, lists or dicts of tensors, can go"
    )
