"""Results in containers: taken apart into tensors for torch.export, and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import TraceError


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
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
            kept = {name: walk(field) for name, field in fields.items() if field is not None}
            return Built(type(item), (), kept)
        if isinstance(item, Mapping):
            inside = {key: walk(field) for key, field in item.items()}
            return inside if type(item) is dict else Built(type(item), (inside,), {})
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return Built(type(item), tuple(walk(field) for field in item), {})
        if isinstance(item, (list, tuple)):
            return type(item)(walk(field) for field in item)
        raise TraceError(
            f"the model's result holds a {type(item).__name__}: return tensors, in tuples, lists, "
            "dicts or dataclasses (for Hugging Face models set use_cache=False)"
        )

    structure = walk(value)
    return tuple(found), structure


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest of containers with other tensors. Raises TraceError as `take_apart`."""
    leaves, structure = take_apart(value)
    changed = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def fill(item: Any) -> Any:
        if isinstance(item, Slot):
            return changed[item.index]
        if isinstance(item, Built):
            kwargs = {name: fill(field) for name, field in item.kwargs.items()}
            return item.make(*(fill(field) for field in item.args), **kwargs)
        if isinstance(item, dict):
            return {key: fill(field) for key, field in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(fill(field) for field in item)
        return item

    return fill(structure)


def put_together(graph: fx.Graph, structure: Any, leaves: tuple[fx.Node, ...]) -> Any:
    """The structure as an argument of the graph's output, containers built by nodes."""
    if isinstance(structure, Slot):
        return leaves[structure.index]
    if isinstance(structure, Built):
        args = tuple(put_together(graph, item, leaves) for item in structure.args)
        kwargs = {k: put_together(graph, item, leaves) for k, item in structure.kwargs.items()}
        return graph.call_function(structure.make, args, kwargs)
    if isinstance(structure, dict):
        return {key: put_together(graph, item, leaves) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(put_together(graph, item, leaves) for item in structure)
    return structure
