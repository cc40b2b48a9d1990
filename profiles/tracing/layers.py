"""What makes a layer: from a graph of operations to layers under the user's module names.

Granularity "layer": a layer is a leaf module (anything of torch.nn but containers and Transformers,
and any module without children) together with the function and method calls that follow it up to
the next one; the first layer also takes those before it. "op": every operation is a layer. Name
patterns (``h.*``, or several with commas, as in `fnmatch`): a module whose path matches is one
layer with all that is inside; the rest as for "layer".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import TraceError
from .graph import OUTPUT, LayerNodes, operation_name

LAYER, OP = "layer", "op"


@dataclass(frozen=True)
class Home:
    """The module call that an operation belongs to, of a class (`kind`), at a path in the user's
    model, "" for the model itself; `call` tells two calls of one module apart."""

    path: str
    kind: str
    call: str


ModuleStack = Callable[[fx.Node], Sequence[Home]]
"""The module calls around an operation, from the model itself to the innermost."""


NETWORKS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch.nn that are made of layers."""


def is_leaf(module: nn.Module) -> bool:
    """Whether a module counts as one operation: torch.nn's own, or one without children."""
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict, *NETWORKS)):
        return False
    ours = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    return ours or not any(True for _ in module.children())


def matches(path: str, granularity: str) -> bool:
    """Whether a module's path matches the granularity's name patterns."""
    return any(fnmatchcase(path, pattern) for pattern in _patterns(granularity))


def _patterns(granularity: str) -> list[str]:
    return [] if granularity in (LAYER, OP) else [*map(str.strip, granularity.split(","))]


def check_granularity(model: nn.Module, granularity: str) -> None:
    """Raise TraceError when name patterns match no module of the model."""
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in _patterns(granularity):
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise TraceError(
                f"--granularity {granularity!r}: no module's name matches {pattern!r}; "
                f"give layer, op, or patterns of names such as {', '.join(paths[:4])}"
            )


def without_effect(layers: Sequence[LayerNodes], granularity: str) -> list[str]:
    """Name patterns that make no layer: what they match is inside another, or isn't called."""
    names = [layer.name.partition("@")[0] for layer in layers]
    return [p for p in _patterns(granularity) if not any(fnmatchcase(n, p) for n in names)]


def group(
    graph: fx.Graph, granularity: str, homes: ModuleStack, model: nn.Module
) -> tuple[LayerNodes, ...]:
    """Group the operations of a graph into layers, by the module calls (`homes`) around each, and
    by which modules of the user's model are leaves."""
    groups: list[list[fx.Node]] = []
    owner: dict[fx.Node, int] = {}
    current: Home | None = None
    named = False
    inner: dict[fx.Node, Home | None] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or packs_the_result(node):
            continue
        made_by = owner.get(node.args[0]) if _is_unpacking(node) else None
        if made_by is None:
            home = inner[node] = _layer_home(node, granularity, homes, model)
            # What comes before the first module belongs to that module's layer.
            enters = home is not None and home != current
            if granularity == OP or not groups or (enters and named):
                groups.append([])
            if enters:
                named, current = True, home
            made_by = len(groups) - 1
        groups[made_by].append(node)
        owner[node] = made_by
    taken = {OUTPUT}
    layers = []
    for nodes in groups:
        name = _op_name(nodes[0], homes) if granularity == OP else _name(nodes, inner)
        layers.append(LayerNodes(_unique(name, taken, "@"), _kind(nodes, inner), tuple(nodes)))
    _name_values(graph, layers)
    return tuple(layers)


def _layer_home(
    node: fx.Node, granularity: str, homes: ModuleStack, model: nn.Module
) -> Home | None:
    """The outermost module call around a node that is a layer; None for loose functions."""
    stack = homes(node)
    for home in stack:
        if matches(home.path, granularity):
            return home
    if node.op == "call_module" and stack:
        return stack[-1]
    return next((home for home in stack if _is_whole(model, home.path)), None)


def _is_whole(model: nn.Module, path: str) -> bool:
    try:
        return is_leaf(model.get_submodule(path))
    except AttributeError:  # an operator of an imported graph, or a module made inside forward
        return True


def packs_the_result(node: fx.Node) -> bool:
    """Whether a node only builds the container (a dataclass, say) that the model returns."""
    if node.op != "call_function" or not isinstance(node.target, type):
        return False
    return all(user.op == "output" or packs_the_result(user) for user in node.users)


def without_gradient(value: Any) -> Any:
    """What an operation under torch.no_grad made: a graph has no such context, so it is cut off
    behind each of them."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(without_gradient(item) for item in value)
    return value


def _is_unpacking(node: fx.Node) -> bool:
    """Unpacking a tuple, reading a size and cutting gradients off belong to whoever made the thing:
    so no tuple crosses from one layer to another, and both modes have the same layers."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_function" and node.target is operator.getitem:
        return isinstance(node.args[1], (int, str))
    if node.op == "call_function":
        return node.target in (getattr, torch.ops.aten.sym_size.int, without_gradient)
    return node.op == "call_method" and node.target == "size"


def _name(nodes: Sequence[fx.Node], inner: dict[fx.Node, Home | None]) -> str:
    found = (home for node in nodes if (home := inner.get(node)) is not None)
    home = next(found, None)
    return nodes[0].name if home is None else home.path or "model"


def _op_name(node: fx.Node, homes: ModuleStack) -> str:
    stack = homes(node)
    path = stack[-1].path if stack else ""
    if node.op == "call_module":
        return path or node.name
    return f"{path}.{operation_name(node)}" if path else operation_name(node)


def _unique(name: str, taken: set[str], before_number: str) -> str:
    candidate, k = name, 1
    while candidate in taken:
        k += 1
        candidate = f"{name}{before_number}{k}"
    taken.add(candidate)
    return candidate


def _kind(nodes: Sequence[fx.Node], inner: dict[fx.Node, Home | None]) -> str:
    # The module first: what else a layer does is around it.
    modules = {home: home.kind for node in nodes if (home := inner.get(node)) is not None}
    loose = [operation_name(node) for node in nodes if inner.get(node) is None]
    words = [*modules.values(), *loose]
    if len(words) > 4:
        words = [*words[:3], f"{len(words) - 3} more"]
    return " + ".join(words)


def _name_values(graph: fx.Graph, layers: Sequence[LayerNodes]) -> None:
    """Name what goes between layers after its layer: the same in training and evaluation mode."""
    owner = {node: k for k, layer in enumerate(layers) for node in layer.nodes}
    taken = {node.name for node in graph.nodes}
    for k, layer in enumerate(layers):
        stem = re.sub(r"\W", "_", layer.name)
        stem = f"_{stem}" if stem[0].isdigit() else stem
        count = 0
        for node in layer.nodes:
            if all(owner.get(user) == k for user in node.users):
                continue
            count += 1
            taken.discard(node.name)
            node.name = _unique(stem if count == 1 else f"{stem}_{count}", taken, "_v")
