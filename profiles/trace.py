"""Tracing a model with torch.fx into layers under the user's module names.

A layer is a leaf module (anything of torch.nn but containers) together with the function
and method calls that follow it up to the next leaf module (the first one also takes those
before it). Layers are therefore intervals
of one topological order, so that the graph of layers has no cycle, whatever the model.
"""

from __future__ import annotations

import hashlib
import json
import operator
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .errors import TraceError

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
        inputs: the placeholders, in the order of the model's arguments.
    """

    module: fx.GraphModule
    layers: tuple[LayerNodes, ...]
    inputs: tuple[fx.Node, ...]

    def owner(self) -> dict[fx.Node, int]:
        """The position of the layer that each node belongs to."""
        return {node: k for k, layer in enumerate(self.layers) for node in layer.nodes}

    @property
    def result(self) -> fx.Node:
        """The graph's output node."""
        found: fx.Node = next(n for n in self.module.graph.nodes if n.op == "output")
        return found


@dataclass(frozen=True)
class Value:
    """A value that crosses from one layer (or the model's inputs) to others."""

    node: fx.Node
    producer: int | None
    """Position of the producing layer; None for an input of the model."""
    consumers: tuple[int, ...]
    """Positions of the consuming layers, rising; len(layers) stands for the model's result."""


def trace(model: nn.Module, target: str = "the model") -> TracedModel:
    """Trace `model` symbolically.

    Raises:
        TraceError: control flow that depends on a tensor's values, and the like. The message
            names the line of the user's code.
    """
    try:
        graph_module = fx.symbolic_trace(model)
    except Exception as error:  # fx runs the user's forward: anything may come out
        raise TraceError(_explain(model, target, error)) from error
    layers = _group(graph_module)
    if not layers:
        raise TraceError(f"{target}: the traced model has no operation; there is nothing to cut")
    inputs = tuple(node for node in graph_module.graph.nodes if node.op == "placeholder")
    return TracedModel(graph_module, layers, inputs)


def _explain(model: nn.Module, target: str, error: Exception) -> str:
    torch_folder = str(Path(torch.__file__).parent)
    here = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((torch_folder, here, "<"))
    ]
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`"
    else:
        where = f"{target} ({type(model).__name__}.forward)"
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"{where}: torch.fx can't trace this: {reason.rstrip('.')}. Make the forward independent "
        "of tensor values (no `if`, loop or Python conversion on them), or move that part into "
        "a module of its own that is called as a whole (torch.fx.wrap, or a torch.nn leaf)"
    )


def _group(graph_module: fx.GraphModule) -> tuple[LayerNodes, ...]:
    groups: list[list[fx.Node]] = []
    owner: dict[fx.Node, int] = {}
    modules = 0
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.op == "call_module":
            # What comes before the first module belongs to that module's layer.
            if modules or not groups:
                groups.append([])
            modules += 1
        # Unpacking a tuple and reading a size belong to whoever made the thing: so no
        # tuple crosses from one layer to another.
        made_by = owner.get(node.args[0]) if _is_unpacking(node) else None
        if made_by is None:
            if not groups:
                groups.append([])
            made_by = len(groups) - 1
        groups[made_by].append(node)
        owner[node] = made_by
    names: set[str] = set()
    return tuple(
        LayerNodes(_unique(_layer_name(nodes), names), _kind(graph_module, nodes), tuple(nodes))
        for nodes in groups
    )


def _is_unpacking(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_function" and node.target is operator.getitem:
        return not any(isinstance(a, fx.Node) for a in node.args[1:]) and isinstance(
            node.args[1], int
        )
    if node.op == "call_function" and node.target is getattr:
        return True
    return node.op == "call_method" and node.target == "size"


def _layer_name(nodes: Sequence[fx.Node]) -> str:
    for node in nodes:
        if node.op == "call_module":
            return str(node.target)
    return nodes[0].name


def _unique(name: str, taken: set[str]) -> str:
    candidate, k = name, 1
    while candidate in taken or candidate == OUTPUT:
        k += 1
        candidate = f"{name}@{k}"
    taken.add(candidate)
    return candidate


def _kind(graph_module: fx.GraphModule, nodes: Sequence[fx.Node]) -> str:
    words = []
    for node in nodes:
        if node.op == "call_module":
            words.append(type(graph_module.get_submodule(str(node.target))).__name__)
        else:
            words.append(_operation_name(node))
    if len(words) > 4:
        words = [*words[:3], f"{len(words) - 3} more"]
    return " + ".join(words)


def _operation_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", type(node.target).__name__)


def values(traced: TracedModel) -> tuple[Value, ...]:
    """All values that some layer, or the model's result, takes from elsewhere; in order.

    Parameters and buffers fetched by name (get_attr) aren't among them: they stay with the
    layers that use them.
    """
    owner = traced.owner()
    end = len(traced.layers)
    found = []
    for node in traced.module.graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        producer = owner.get(node)
        consumers = {end if user.op == "output" else owner[user] for user in node.users}
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
                state[str(source.target)] = fetch_attribute(traced.module, str(source.target))
    return state


def fetch_attribute(module: nn.Module, path: str) -> Any:
    """The parameter, buffer or constant at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def tied_layers(traced: TracedModel) -> tuple[tuple[int, ...], ...]:
    """Groups of layers (positions, rising) that share a parameter or a buffer."""
    users: dict[int, set[int]] = {}
    for k, layer in enumerate(traced.layers):
        for tensor in state_of_layer(traced, layer).values():
            if isinstance(tensor, Tensor) and tensor.numel():
                users.setdefault(tensor.untyped_storage().data_ptr(), set()).add(k)
    return tuple(sorted({tuple(sorted(group)) for group in users.values() if len(group) > 1}))


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
    parts.append(_argument(traced.result.args))
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(traced: TracedModel, node: fx.Node) -> list[Any]:
    if node.op == "call_module":
        module = traced.module.get_submodule(str(node.target))
        what = f"{type(module).__qualname__}({module.extra_repr()})"
    elif isinstance(node.target, str):
        what = node.target
    else:
        what = f"{getattr(node.target, '__module__', '')}.{_operation_name(node)}"
    return [node.name, what, _argument(node.args), _argument(node.kwargs)]


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


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """The fx nodes inside a nest of tuples, lists, dicts and slices."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from nodes_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))
