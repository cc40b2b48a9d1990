"""A traced model: torch.fx nodes in layers under the user's module names, and queries over them.

Layers are intervals of one topological order, so that the graph of layers has no cycle,
whatever the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _forward_from_src

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
        module: the graph as a module; it shares its parameters with the user's model.
        layers: in topological order.
        front_end: how the graph was found (profile.FRONT_ENDS).
        granularity: what makes a layer (layers.py).
        only_size: the only number of samples that the graph takes; None: any.
        refusals: why the front ends that were tried before couldn't take the model.

    Nodes that no layer has build the result's container (a dataclass) and belong to the result.
    """

    module: GraphBody
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
        nodes = graph_of(self.module).nodes
        return [node for node in nodes if node not in owned and node.op not in others]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders, in the order of the model's arguments."""
        return tuple(node for node in graph_of(self.module).nodes if node.op == "placeholder")

    @property
    def result(self) -> fx.Node:
        """The graph's output node."""
        return output_node(graph_of(self.module))


# A graph that runs ------------------------------------------------------------------------------

_GRAPH = "fx.graph"
"""Where a body has its graph: no attribute of a model has a name with a dot."""

_KINDS = ("_modules", "_parameters", "_buffers")


class GraphBody(nn.Module):
    """A torch.fx graph as a module, over a model's parameters, buffers and modules under their own
    names.

    As fx.GraphModule, but without attributes that the model's could be called like: those have
    `graph`, `code`, `meta` and more. So `graph_of` and `recompile` are functions.
    """

    def __new__(cls, *arguments: Any) -> GraphBody:
        # Each has a forward of its own.
        return super().__new__(type(cls.__name__, (cls,), {}))

    def __init__(self, root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> None:
        """`root`: what the graph's nodes name is taken from; a mapping has it by those names."""
        super().__init__()
        targets = [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]
        if isinstance(root, nn.Module):
            self.training = root.training
            found = {target: fetch_attribute(root, target) for target in targets}
        else:
            # Modules before what lies in them.
            targets.sort(key=lambda target: target.count("."))
            found = {target: root[target] for target in targets}
        for target, value in found.items():
            _put(self, target, value)
        vars(self)[_GRAPH] = graph
        recompile(self)


def graph_of(module: nn.Module) -> fx.Graph:
    """A body's graph."""
    found: fx.Graph = vars(module)[_GRAPH]
    return found


def _put(holder: nn.Module, target: str, value: Any) -> None:
    """Have a value at a dotted path; modules on the way that aren't there are empty ones."""
    *path, field = target.split(".")
    for name in path:
        inner = holder._modules.get(name)
        if inner is None:
            inner = holder._modules[name] = nn.Module()
        elif type(inner) is not nn.Module:
            return  # the model's own, which has it
        holder = inner
    if isinstance(value, nn.Module):
        holder._modules[field] = value
    elif isinstance(value, nn.Parameter):
        holder._parameters[field] = value
    elif isinstance(value, Tensor):
        holder._buffers[field] = value
    else:
        vars(holder)[field] = value


def recompile(module: GraphBody) -> None:
    """Have a body do what its graph says by now."""
    graph = graph_of(module)
    placed = ("placeholder", "call_module", "get_attr")
    targets = {node: str(node.target) for node in graph.nodes if node.op in placed}
    selves = [node for node in graph.nodes if node.name == "self"]
    texts: dict[str, str] = {}
    try:
        for node in selves:
            node.name = "value"
        # Arguments and modules may be called as what the code itself uses (torch, operator).
        for k, (node, target) in enumerate(targets.items()):
            node.target = f"given_{k}"
            if node.op != "placeholder":
                texts[node.target] = _lookup(module, target)
        code = graph.python_code("self")
    finally:
        for node, target in targets.items():
            node.target = target
        for node in selves:
            node.name = "self"
    source = re.sub(r"\bself\.(given_\d+)\b", lambda match: texts[match[1]], code.src)
    type(module).forward = _forward_from_src(source, code.globals)


def _lookup(module: nn.Module, target: str) -> str:
    text, owner = "self", module
    for name in target.split("."):
        kinds = [kind for kind in _KINDS if name in vars(owner).get(kind, ())]
        if name.isidentifier() and not iskeyword(name) and not hasattr(nn.Module, name):
            text += f".{name}"
        elif kinds:
            text += f".{kinds[0]}[{name!r}]"
        else:
            text = f"getattr({text}, {name!r})"
        owner = _inside(owner, name)
    return text


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
    for node in graph_of(traced.module).nodes:
        if node.op != "placeholder" and node not in owner:
            continue
        producer = owner.get(node)
        consumers = {owner.get(user, end) for user in node.users}
        consumers.discard(producer if producer is not None else -1)
        if consumers:
            found.append(Value(node, producer, tuple(sorted(consumers))))
    return tuple(found)


def layers_and_values(traced: TracedModel) -> tuple[list[str], list[str]]:
    """Names of the layers, and of what goes between them: graphs that are cut alike have the
    same."""
    return [layer.name for layer in traced.layers], [v.node.name for v in values(traced)]


def why_not_evaluated(trained: TracedModel, evaluated: TracedModel) -> str:
    """Why a model can't be evaluated with the stages that it is trained with, in one sentence;
    empty: it can. `evaluated`: its graph in evaluation mode."""
    if layers_and_values(trained) == layers_and_values(evaluated):
        return ""
    names = [{layer.name for layer in traced.layers} for traced in (trained, evaluated)]
    odd = shorten(", ".join(map(repr, sorted(names[0] ^ names[1]))), 120, placeholder=" …")
    return (
        "the model's forward has other layers in evaluation mode than in training mode"
        f"{odd and f' ({odd})'}, and can't be evaluated "
        "with the pipeline it is trained with: have it do the same in both (return all outputs in "
        "both, drop out by torch's dropouts), keep modules whole that don't (tp-profile "
        "--granularity NAME-PATTERN), or train with --no-evaluate"
    )


def state_of(traced: TracedModel, nodes: Iterable[fx.Node]) -> dict[str, Tensor]:
    """Parameters and buffers that operations use, by their names in the model."""
    state: dict[str, Tensor] = {}
    for node in nodes:
        if node.op == "call_module":
            module = fetch_attribute(traced.module, str(node.target))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                state[f"{node.target}.{name}"] = tensor
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                found = fetch_attribute(traced.module, str(source.target))
                if isinstance(found, Tensor):
                    state[str(source.target)] = found
    return state


def fetch_attribute(module: nn.Module, path: str) -> Any:
    """The module, parameter, buffer or constant at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = _inside(value, part)
    return value


def _inside(owner: Any, name: str) -> Any:
    # A model may call what it has as nn.Module calls a method.
    for kind in _KINDS if isinstance(owner, nn.Module) else ():
        found = vars(owner)[kind].get(name)
        if found is not None:
            return found
    return getattr(owner, name)


def unused_parameters(model: nn.Module, body: GraphBody) -> dict[str, nn.Parameter]:
    """Those of a model that are to be trained and that its graph has no use for, by name."""
    used = {id(p) for p in body.parameters()}
    named = {name for name, _ in body.named_parameters(remove_duplicate=False)}
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in used and name not in named
    }


class SharedState(NamedTuple):
    """Groups of layers (positions, rising) that share state.

    Attributes:
        tied: share a trained parameter or a buffer.
        copyable: those of them that share whole trained parameters alone, and how many bytes: each
            layer could as well have a copy, with gradients summed over the copies.
        frozen: share whole parameters that aren't trained, and how many bytes: each layer could as
            well have a copy, with nothing to sum.
    """

    tied: tuple[tuple[int, ...], ...]
    copyable: dict[tuple[int, ...], int]
    frozen: dict[tuple[int, ...], int]


def shared_state(traced: TracedModel, rewritten: Collection[int] = ()) -> SharedState:
    """What layers share; `rewritten`: storages of frozen parameters that forwards change, as they
    do buffers."""
    users: dict[int, dict[int, list[Tensor]]] = {}
    for k, layer in enumerate(traced.layers):
        for tensor in state_of(traced, layer.nodes).values():
            if tensor.numel():
                users.setdefault(storage_key(tensor), {}).setdefault(k, []).append(tensor)
    tied, in_part = set[tuple[int, ...]](), set[tuple[int, ...]]()
    copyable: dict[tuple[int, ...], int] = {}
    frozen: dict[tuple[int, ...], int] = {}
    for key, by_layer in users.items():
        group = tuple(sorted(by_layer))
        if len(group) == 1:
            continue
        first, *others = (tensor for tensors in by_layer.values() for tensor in tensors)
        whole = isinstance(first, nn.Parameter) and all(tensor is first for tensor in others)
        if whole and is_frozen(first) and key not in rewritten:
            frozen[group] = frozen.get(group, 0) + first.nbytes
            continue
        tied.add(group)
        if whole and not is_frozen(first):
            copyable[group] = copyable.get(group, 0) + first.nbytes
        else:
            in_part.add(group)
    copyable = {group: nbytes for group, nbytes in copyable.items() if group not in in_part}
    return SharedState(tuple(sorted(tied)), copyable, frozen)


def is_frozen(tensor: Tensor) -> bool:
    """Whether this is a parameter that isn't trained (`requires_grad` off)."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


_LOOKUPS = ("embedding", "embedding_bag", "gather", "index_select")
"""Operations whose matrices are tables."""


def hidden_matrices(traced: TracedModel, model: nn.Module) -> tuple[nn.Parameter, ...]:
    """The model's parameters of two dimensions that its hidden layers multiply by, each once: those
    that Muon is for.

    By Muon's documentation that leaves out embeddings, and by its author's also the output layer.
    Our reading of these: the tables of nn.Embedding and nn.EmbeddingBag, and whatever else an
    operation looks rows up in; and the matrices of the last operation that has any.

    Args:
        model: that was traced; both share their parameters.
    """
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters(recurse=False)
    }
    used: dict[int, nn.Parameter] = {}
    last: set[int] = set()
    for node in graph_of(traced.module).nodes:
        state = state_of(traced, [node]).values()
        mine = [p for p in state if isinstance(p, nn.Parameter) and p.dim() == 2]
        if node.op != "call_module" and operation_name(node) in _LOOKUPS:
            tables |= {id(p) for p in mine}
        used |= {id(p): p for p in mine}
        last = {id(p) for p in mine if id(p) not in tables} or last
    return tuple(p for key, p in used.items() if key not in tables | last)


# A digest of a traced model's graph -------------------------------------------------------------


def fingerprint(traced: TracedModel) -> str:
    """A digest of the graph: operations with their settings, parameter shapes and which of them are
    trained, connections.

    The same in every process, on every device and for every set of weights; another graph has
    another one.
    """
    parts: list[Any] = []
    for layer in traced.layers:
        state = state_of(traced, layer.nodes)
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


def _describe(module: nn.Module, node: fx.Node) -> list[Any]:
    args = node.args
    if node.op == "call_module":
        whole = fetch_attribute(module, str(node.target))
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
