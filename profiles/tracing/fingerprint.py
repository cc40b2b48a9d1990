"""A digest of a traced model's graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .graph import TracedModel, fetch_attribute, operation_name, state_of_layer


def fingerprint(traced: TracedModel) -> str:
    """A digest of the graph: operations with their settings, parameter shapes, connections.

    The same in every process and for every set of weights; another graph has another one.
    """
    parts: list[Any] = []
    for layer in traced.layers:
        state = state_of_layer(traced, layer)
        parts.append(
            [
                layer.name,
                [_describe(traced, node) for node in layer.nodes],
                [[name, list(t.shape), str(t.dtype)] for name, t in state.items()],
            ]
        )
    owned = traced.owner()
    packing = [
        _describe(traced, node)
        for node in traced.module.graph.nodes
        if node not in owned and node.op not in ("placeholder", "get_attr", "output")
    ]
    parts += [packing, _argument(traced.result.args)]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(traced: TracedModel, node: fx.Node) -> list[Any]:
    if node.op == "call_module":
        module = traced.module.get_submodule(str(node.target))
        what = f"{type(module).__qualname__}({module.extra_repr()})"
    elif isinstance(node.target, (str, torch._ops.OpOverload)):
        what = str(node.target)
    else:
        what = f"{getattr(node.target, '__module__', '')}.{operation_name(node)}"
    # An operator with a body (torch.no_grad inside a model) has that body as an attribute.
    bodies = [
        str(body.graph)
        for source in node.all_input_nodes
        if source.op == "get_attr"
        and isinstance(body := fetch_attribute(traced.module, str(source.target)), fx.GraphModule)
    ]
    return [node.name, what, _argument(node.args), _argument(node.kwargs), *bodies]


def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Mapping):
        return {str(k): _argument(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_argument(v) for v in value]
    if isinstance(value, slice):
        return ["slice", _argument(value.start), _argument(value.stop), _argument(value.step)]
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return str(value)
    return type(value).__name__
