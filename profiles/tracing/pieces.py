"""Cutting a traced model into pieces that run one after the other.

The profiler makes a piece of every layer, the runtime one of every stage. Results in containers
are taken apart into tensors, and put together again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ..errors import TraceError
from .graph import GraphBody, TracedModel, graph_of, values

LAYER = "timeprest_layer"
"""Key of a piece's nodes' `meta`: the name of the layer that they are of."""


@dataclass(frozen=True)
class Piece:
    """A part of the model as a module of its own, under the model's own parameter names.

    It is called with the values of these names (`inputs`), other pieces' or the model's own, in
    order; it returns a tuple of those that other pieces, or the result, take from it (`outputs`),
    and behind them the model's result where `has_result`.
    """

    module: GraphBody
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    has_result: bool


def cut(traced: TracedModel, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Cut the model into pieces; the last one also makes the model's result.

    Args:
        groups: for each piece the positions of its layers, rising.

    Raises ValueError: not every layer is in exactly one group, or one needs a later group's value.
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

    layer_of = {node: traced.layers[k].name for k in group for node in traced.layers[k].nodes}
    inside = set(layer_of)
    if has_result:
        inside.update(traced.packing())
    for node in graph_of(traced.module).nodes:
        if node in inside:
            copies[node] = graph.node_copy(node, copy_of)
            copies[node].meta[LAYER] = layer_of.get(node)
    result: tuple[Any, ...] = tuple(copies[node] for node in gives)
    if has_result:
        result = (*result, fx.map_arg(traced.result.args[0], copy_of))
    graph.output(result)
    module = GraphBody(traced.module, graph)
    return Piece(module, tuple(n.name for n in takes), tuple(n.name for n in gives), has_result)


_TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Types that go from layer to layer by their position here."""


_KINDS = {Tensor: "tensor", torch.Size: "size", torch.dtype: "type", torch.device: "device"}


def encode(value: Any, name: str) -> torch.Tensor:
    """A value between pieces as a tensor: sizes become int64 tensors, and so do types of tensors
    (``x.to(h.dtype)``). Of a device nothing is sent: it is that of whoever gets it. Raises
    TraceError for none of those."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, int)):
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Size):
        return torch.tensor(tuple(value), dtype=torch.int64)
    if isinstance(value, torch.dtype) and value in _TYPES:
        return torch.tensor(_TYPES.index(value), dtype=torch.int64)
    if isinstance(value, torch.device):
        return torch.tensor(0, dtype=torch.int64)
    raise TraceError(
        f"value {name!r} is a {type(value).__name__}: only tensors, numbers, sizes, types and "
        "devices can go from layer to layer; compute it inside the module that uses it, or take a "
        "tuple apart before it goes on (h, c = …)"
    )


def decode(tensor: torch.Tensor, kind: str) -> Any:
    """The value that `encode` was given, by its kind (`kind_of`)."""
    if kind == "number":
        return tensor.item()
    if kind == "size":
        return torch.Size(tensor.tolist())
    if kind == "type":
        return _TYPES[int(tensor)]
    return tensor.device if kind == "device" else tensor


def kind_of(value: Any) -> str:
    """What `decode` needs to know of a value: "tensor", "size", "type", "device" or "number"."""
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), "number")


# Nests of containers ----------------------------------------------------------------------------


def is_container(value: Any) -> bool:
    """Whether `map_items` goes into it: a dataclass, mapping, list or tuple of any class."""
    return _is_record(value) or isinstance(value, (Mapping, list, tuple))


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def items_in(container: Any) -> list[Any]:
    """What is in a container."""
    if _is_record(container):
        return [getattr(container, field.name) for field in dataclasses.fields(container)]
    return list(container.values() if isinstance(container, Mapping) else container)


def map_items(
    change: Callable[[Any], Any], value: Any, make: Callable[..., Any] | None = None
) -> Any:
    """The same container with other items; what is no container as it is.

    Args:
        make: of class, arguments and arguments by name, makes containers of classes of their own;
            by default it calls the class.

    Raises TraceError for a class that can't be made of its items.
    """
    make = make or _made
    if _is_record(value):
        given: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            # What isn't given is None in outputs of transformers.
            if field.init and (item is not None or field.default is not None):
                given[field.name] = change(item)
        return make(type(value), (), given)
    if isinstance(value, Mapping):
        inside = {key: change(item) for key, item in value.items()}
        return inside if type(value) is dict else make(type(value), (inside,), {})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return make(type(value), tuple(change(item) for item in value), {})
    if isinstance(value, (list, tuple)):
        return type(value)(change(item) for item in value)
    return value


def _made(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return kind(*args, **kwargs)
    except Exception as error:  # a class of the user or of some library that is made otherwise
        if args and issubclass(kind, Mapping):
            return args[0]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TraceError(
            f"a {kind.__name__} can't be made of its items: {reason}; use a plain tuple or dict"
        ) from error


def tensors_in(value: Any) -> list[Tensor]:
    """Those in a nest of containers that torch knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# Results in containers: taken apart into tensors for torch.export, and put together again -------


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for the k-th tensor in a structure."""

    index: int


@dataclasses.dataclass(frozen=True)
class Built:
    """Stands for `make(*args, **kwargs)`: a dataclass, a named tuple, a mapping of some class."""

    make: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def take_apart(value: Any) -> tuple[tuple[Any, ...], Any]:
    """The tensors in a nest of containers, and the structure with a `Slot` for each.

    Raises TraceError for an object that is neither a container nor a constant.
    """
    found: list[Any] = []

    def walk(item: Any) -> Any:
        if isinstance(item, (Tensor, torch.SymInt)):
            found.append(item)
            return Slot(len(found) - 1)
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if is_container(item):
            return map_items(walk, item, Built)
        raise TraceError(
            f"the model's result holds a {type(item).__name__}: return tensors, in tuples, lists, "
            "dicts or dataclasses (for Hugging Face models set use_cache=False)"
        )

    structure = walk(value)
    return tuple(found), structure


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest of containers with other tensors. Raises TraceError as `take_apart`."""
    leaves, structure = take_apart(value)
    return fill(structure, [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def fill(structure: Any, leaves: Sequence[Any], call: Callable[..., Any] | None = None) -> Any:
    """A structure with these in place of its slots.

    Args:
        call: is given what makes a container, its arguments and those by name, and has it made;
            `fx.Graph.call_function`, where leaves are nodes. None: it is made here.
    """

    def filled(item: Any) -> Any:
        if isinstance(item, Slot):
            return leaves[item.index]
        if not isinstance(item, Built):
            return map_items(filled, item)
        args = tuple(filled(field) for field in item.args)
        kwargs = {name: filled(field) for name, field in item.kwargs.items()}
        return item.make(*args, **kwargs) if call is None else call(item.make, args, kwargs)

    return filled(structure)
