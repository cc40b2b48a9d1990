"""Cutting a traced model into pieces that run one after the other.

The profiler makes a piece of every layer, the runtime one of every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import TraceError
from .graph import TracedModel, nodes_in, values


@dataclass(frozen=True)
class Piece:
    """A part of the model as a module of its own, under the model's own parameter names.

    Attributes:
        module: called with the values of `inputs` in order; returns those of `outputs` as a
            tuple, and behind them the model's result where `has_result`.
        inputs: names of the values it takes: other pieces' outputs and the model's inputs.
        outputs: names of the values that other pieces, or the result, take from it.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    has_result: bool


def cut(traced: TracedModel, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Cut the model into pieces; the last one also makes the model's result.

    Args:
        groups: for each piece the positions of its layers, rising. Every layer in one group;
            no group may need a value of a later one.

    Raises:
        ValueError: the groups don't partition the layers, or need a later group's value.
    """
    group_of = {layer: g for g, group in enumerate(groups) for layer in group}
    if sorted(k for group in groups for k in group) != list(range(len(traced.layers))):
        raise ValueError("every layer must be in exactly one group")
    group_of[len(traced.layers)] = last = len(groups) - 1
    takes: list[list[fx.Node]] = [[] for _ in groups]
    gives: list[list[fx.Node]] = [[] for _ in groups]
    for value in values(traced):
        made_in = None if value.producer is None else group_of[value.producer]
        users = sorted({group_of[k] for k in value.consumers} - {made_in})
        if made_in is not None and users:
            if users[0] < made_in:
                raise ValueError(f"value {value.node.name!r} would go to an earlier piece")
            gives[made_in].append(value.node)
        for g in users:
            takes[g].append(value.node)
    return [_build(traced, group, takes[g], gives[g], g == last) for g, group in enumerate(groups)]


def _build(
    traced: TracedModel,
    group: Sequence[int],
    takes: list[fx.Node],
    gives: list[fx.Node],
    has_result: bool,
) -> Piece:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node.op != "get_attr":
                raise TraceError(f"value {node.name!r} is used before it is made")
            copies[node] = graph.node_copy(node)
        return copies[node]

    inside = {node for k in group for node in traced.layers[k].nodes}
    if has_result:
        inside |= _packing(traced)
    for node in traced.module.graph.nodes:
        if node in inside:
            for source in node.all_input_nodes:
                copy_of(source)
            copies[node] = graph.node_copy(node, copy_of)
    result: tuple[Any, ...] = tuple(copies[node] for node in gives)
    if has_result:
        answer = traced.result.args[0]
        for source in nodes_in(answer):
            copy_of(source)
        result = (*result, fx.map_arg(answer, copy_of))
    graph.output(result)
    module = fx.GraphModule(traced.module, graph)
    return Piece(module, tuple(n.name for n in takes), tuple(n.name for n in gives), has_result)


def _packing(traced: TracedModel) -> set[fx.Node]:
    """The nodes that build the result's container."""
    owned = traced.owner()
    return {
        node
        for node in traced.module.graph.nodes
        if node not in owned and node.op not in ("placeholder", "get_attr", "output")
    }


def encode(value: Any, name: str) -> torch.Tensor:
    """A value between pieces as a tensor: sizes become int64 tensors.

    Raises:
        TraceError: neither a tensor nor a number nor a size.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, int)):
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Size):
        return torch.tensor(tuple(value), dtype=torch.int64)
    raise TraceError(
        f"value {name!r} is a {type(value).__name__}: only tensors, numbers and sizes can go "
        f"from layer to layer; compute it inside the module that uses it"
    )


def decode(tensor: torch.Tensor, kind: str) -> Any:
    """The value that `encode` was given, by its kind: "tensor", "number" or "size"."""
    if kind == "number":
        return tensor.item()
    if kind == "size":
        return torch.Size(tensor.tolist())
    return tensor


def kind_of(value: Any) -> str:
    """What `decode` needs to know of a value."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "size" if isinstance(value, torch.Size) else "number"
