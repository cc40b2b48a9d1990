"""A traced model: torch.fx nodes in layers under the user's module names, and queries over them.

Layers are intervals of one topological order, so that the graph of layers has no cycle,
whatever the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..autograd.boundary import storage_key

OUTPUT = "output"
"""Stands for the model's result where a consumer's name is asked for."""


@dataclass(frozen=True)
class LayerNodes:
    """One layer: its name (the user's module path), what it is, and its fx nodes in order."""

    name: str
    kind: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class TracedModel:
    """A model as a graph of layers.

    Attributes:
        module: the fx GraphModule; it shares its parameters with the user's model.
        layers: in topological order.
        front_end: how the graph was found (profile.FRONT_ENDS).
        granularity: what makes a layer (layers.py).
        only_size: the only number of samples that the graph takes; None: any.
        refusals: why the front ends that were tried before couldn't take the model.

    Nodes that no layer has build the result's container (a dataclass) and belong to the result.
    """

    module: fx.GraphModule
    layers: tuple[LayerNodes, ...]
    front_end: str = "fx"
    granularity: str = "layer"
    only_size: int | None = None
    refusals: tuple[str, ...] = ()

    def owner(self) -> dict[fx.Node, int]:
        """The position of the layer that each node belongs to."""
        return {node: k for k, layer in enumerate(self.layers) for node in layer.nodes}

    def packing(self) -> list[fx.Node]:
        """The nodes, in order, that build the result's container."""
        owned = self.owner()
        others = ("placeholder", "get_attr", "output")
        nodes = self.module.graph.nodes
        return [node for node in nodes if node not in owned and node.op not in others]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders, in the order of the model's arguments."""
        return tuple(node for node in self.module.graph.nodes if node.op == "placeholder")

    @property
    def result(self) -> fx.Node:
        """The graph's output node."""
        return output_node(self.module.graph)


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns the graph's result."""
    found: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return found


def operation_name(node: fx.Node) -> str:
    """What a call_function or call_method node calls, in one word."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", type(node.target).__name__)


@dataclass(frozen=True)
class Value:
    """A value that crosses from one layer (or the model's inputs) to others."""

    node: fx.Node
    producer: int | None
    """Position of the producing layer; None for an input of the model."""
    consumers: tuple[int, ...]
    """Positions of the consuming layers, rising; len(layers) stands for the model's result."""


def values(traced: TracedModel) -> tuple[Value, ...]:
    """All values that some layer, or the model's result, takes from elsewhere; in order.

    Parameters and buffers fetched by name (get_attr) aren't among them: they stay with the
    layers that use them.
    """
    owner = traced.owner()
    end = len(traced.layers)
    found = []
    for node in traced.module.graph.nodes:
        if node.op != "placeholder" and node not in owner:
            continue
        producer = owner.get(node)
        consumers = {owner.get(user, end) for user in node.users}
        consumers.discard(producer if producer is not None else -1)
        if consumers:
            found.append(Value(node, producer, tuple(sorted(consumers))))
    return tuple(found)


def state_of_layer(traced: TracedModel, layer: LayerNodes) -> dict[str, Tensor]:
    """Parameters and buffers that a layer uses, by their names in the model."""
    state: dict[str, Tensor] = {}
    for node in layer.nodes:
        if node.op == "call_module":
            module = traced.module.get_submodule(str(node.target))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                state[f"{node.target}.{name}"] = tensor
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                found = fetch_attribute(traced.module, str(source.target))
                if isinstance(found, Tensor):
                    state[str(source.target)] = found
    return state


def fetch_attribute(module: nn.Module, path: str) -> Any:
    """The parameter, buffer or constant at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def tied_layers(
    traced: TracedModel, rewritten: Collection[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Groups of layers (positions, rising) that share a trained parameter or a buffer.

    Args:
        rewritten: storages of frozen parameters that forwards change, as they do buffers.
    """
    shared = _shared_state(traced)
    return tuple(
        sorted({group for group, tensors in shared if not _one_frozen(tensors, rewritten)})
    )


def shared_parameters(
    traced: TracedModel, rewritten: Collection[int] = ()
) -> dict[tuple[int, ...], int]:
    """Those groups of `tied_layers` that share whole trained parameters alone, and how many bytes.

    Each layer of such a group could as well have a copy, with gradients summed over the copies.
    """
    found: dict[tuple[int, ...], int] = {}
    others: set[tuple[int, ...]] = set()
    for group, tensors in _shared_state(traced):
        if _one_frozen(tensors, rewritten):
            continue
        if _one_parameter(tensors) and not is_frozen(tensors[0]):
            found[group] = found.get(group, 0) + tensors[0].nbytes
        else:
            others.add(group)
    return {group: nbytes for group, nbytes in found.items() if group not in others}


def shared_frozen(
    traced: TracedModel, rewritten: Collection[int] = ()
) -> dict[tuple[int, ...], int]:
    """Groups of layers (positions, rising) that share whole parameters which aren't trained, and
    how many bytes: each layer could as well have a copy, with nothing to sum.

    `rewritten`: left out (`tied_layers`).
    """
    found: dict[tuple[int, ...], int] = {}
    for group, tensors in _shared_state(traced):
        if _one_frozen(tensors, rewritten):
            found[group] = found.get(group, 0) + tensors[0].nbytes
    return found


def _one_parameter(tensors: Sequence[Tensor]) -> bool:
    whole = all(isinstance(t, nn.Parameter) for t in tensors)
    return whole and len({id(t) for t in tensors}) == 1


def _one_frozen(tensors: Sequence[Tensor], rewritten: Collection[int] = ()) -> bool:
    one = _one_parameter(tensors) and is_frozen(tensors[0])
    return one and storage_key(tensors[0]) not in rewritten


def is_frozen(tensor: Tensor) -> bool:
    """Whether this is a parameter that isn't trained (`requires_grad` off)."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _shared_state(traced: TracedModel) -> list[tuple[tuple[int, ...], list[Tensor]]]:
    """For each memory that several layers use, their positions, and the tensors that lie in it."""
    users: dict[int, dict[int, list[Tensor]]] = {}
    for k, layer in enumerate(traced.layers):
        for tensor in state_of_layer(traced, layer).values():
            if tensor.numel():
                users.setdefault(storage_key(tensor), {}).setdefault(k, []).append(tensor)
    return [
        (tuple(sorted(by_layer)), [t for tensors in by_layer.values() for t in tensors])
        for by_layer in users.values()
        if len(by_layer) > 1
    ]


# A digest of a traced model's graph -------------------------------------------------------------


def fingerprint(traced: TracedModel) -> str:
    """A digest of the graph: operations with their settings, parameter shapes and which of them are
    trained, connections.

    The same in every process, on every device and for every set of weights; another graph has
    another one.
    """
    parts: list[Any] = []
    for layer in traced.layers:
        state = state_of_layer(traced, layer)
        parts.append(
            [
                layer.name,
                [_describe(traced.module, node) for node in layer.nodes],
                [
                    [name, list(t.shape), str(t.dtype), *(["frozen"] if is_frozen(t) else [])]
                    for name, t in state.items()
                ],
            ]
        )
    packing = [_describe(traced.module, node) for node in traced.packing()]
    parts += [packing, _argument(traced.result.args)]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(module: fx.GraphModule, node: fx.Node) -> list[Any]:
    args = node.args
    if node.op == "call_module":
        whole = module.get_submodule(str(node.target))
        what = f"{type(whole).__qualname__}({whole.extra_repr()})"
    elif isinstance(node.target, (str, torch._ops.OpOverload)):
        what = str(node.target)
    else:
        what = f"{getattr(node.target, '__module__', '')}.{operation_name(node)}"
    # An operator with a body (torch.no_grad inside a model) has that body as an attribute.
    bodies = [
        [_describe(body, inner) for inner in body.graph.nodes]
        for source in node.all_input_nodes
        if source.op == "get_attr"
        and isinstance(body := fetch_attribute(module, str(source.target)), fx.GraphModule)
    ]
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        args = args[1:]  # the kind of device
    return [node.name, what, _argument(args), _argument(node.kwargs), *bodies]


def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Mapping):
        return {str(k): _argument(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_argument(v) for v in value]
    if isinstance(value, slice):
        return ["slice", _argument(value.start), _argument(value.stop), _argument(value.step)]
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype)):
        return str(value)
    return type(value).__name__
