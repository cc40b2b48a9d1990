"""Profiles from `networkx` graphs: of one's own, or of a profile's that were changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import FileError, TargetError
from ..files import MAX_SECONDS
from ..profile import Edge, Layer, Profile, SharedParameters, check_profile
from .cost_graph import MAX_BYTES, choose_sizes, fingerprint_of, topological_order, totals
from .table import TableEdge, TableRow, profile_of

if TYPE_CHECKING:
    import networkx as nx

WHERE = "graph"
"""What messages call it."""

_SECONDS = ("forward_s", "backward_s")
_BYTES = ("parameter_bytes", "activation_bytes", "saved_bytes")


def import_graph(
    graph: nx.DiGraph, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """As `Profile.from_networkx` says."""
    import networkx as nx

    if not isinstance(graph, nx.DiGraph) or graph.is_multigraph():
        raise FileError(f"{WHERE}: must be a networkx.DiGraph, not a {type(graph).__name__}")
    for node in graph:
        if not isinstance(node, str) or not node.strip():
            raise FileError(f"{WHERE}: node {node!r}: a layer's name must be a text")
    known = graph.graph.get("profile")
    if isinstance(known, Profile):
        if batch_size is not None or micro_batch_sizes is not None:
            raise TargetError(f"{WHERE}: its profile says the sizes; leave batch_size out")
        return _changed(known, graph)
    return _own(graph, batch_size, micro_batch_sizes)


def _changed(known: Profile, graph: nx.DiGraph) -> Profile:
    """Another profile than the known one where layers or edges went or came: it can't be run, for
    it is no model's any more."""
    import networkx as nx

    by_name = {name: _layer(name, graph.nodes[name]) for name in graph if name != "output"}
    nodes = list(graph)
    positions = nx.convert_node_labels_to_integers(graph, label_attribute="name")
    ordered = [nodes[k] for k in topological_order(WHERE, positions)]
    names = [name for name in ordered if name != "output"]
    layers = [by_name[name] for name in names]
    edges = [edge for ends in graph.edges for edge in _tensors(graph, *ends)]
    listed = {edge: k for k, edge in enumerate(known.edges)}
    edges.sort(key=lambda edge: listed.get(edge, len(listed)))
    same = [layer.name for layer in known.layers] == names and list(known.edges) == edges
    left = set(names)
    more: dict[str, Any] = {}
    if not same:
        more = {
            "front_end": "networkx",
            "fingerprint": fingerprint_of("networkx", layers, edges),
            "whole_model": totals(layers, known.micro_batch_sizes),
            "assumptions": (
                *known.assumptions,
                f"Its graph was changed: {len(names)} layers, where {known.target} has "
                f"{len(known.layers)}, or other edges.",
            ),
            "inputs": tuple(
                msgspec.structs.replace(
                    source,
                    consumers=tuple(c for c in source.consumers if c in left or c == "output"),
                )
                for source in known.inputs
            ),
            "tied": tuple(g for g in (_left(g, left) for g in known.tied) if len(g) > 1),
            "shared": _shared_by(known.shared, left),
            "shared_frozen": _shared_by(known.shared_frozen or (), left) or msgspec.UNSET,
        }
    found = msgspec.structs.replace(known, layers=tuple(layers), edges=tuple(edges), **more)
    return check_profile(found, WHERE)


def _shared_by(shared: Iterable[SharedParameters], left: set[str]) -> tuple[SharedParameters, ...]:
    """Those that several layers share of the ones that are left."""
    found = (msgspec.structs.replace(s, layers=_left(s.layers, left)) for s in shared)
    return tuple(shared for shared in found if len(shared.layers) > 1)


def _left(group: Sequence[str], left: set[str]) -> tuple[str, ...]:
    return tuple(name for name in group if name in left)


def _layer(name: str, attributes: Mapping[str, Any]) -> Layer:
    fields = {field.name for field in msgspec.structs.fields(Layer)} - {"name"}
    given = {
        key: value
        for key, value in attributes.items()
        if key in fields and value is not msgspec.UNSET
    }
    try:
        return msgspec.convert({"name": name, **msgspec.to_builtins(given)}, Layer)
    except (msgspec.ValidationError, TypeError) as error:
        raise FileError(f"{WHERE}: layer {name!r}: {error}") from None


def _tensors(graph: nx.DiGraph, source: str, target: str) -> list[Edge]:
    found = graph.edges[source, target].get("tensors")
    if not found or not all(isinstance(each, Edge) for each in found):
        raise FileError(
            f"{WHERE}: edge {source!r} → {target!r}: tensors must be one or more of "
            "profiles.profile.Edge"
        )
    return [msgspec.structs.replace(each, producer=source, consumer=target) for each in found]


# A graph of one's own -----------------------------------------------------------------------------


def _own(
    graph: nx.DiGraph, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    if batch_size is None:
        raise TargetError(f"{WHERE}: say the batch_size that its numbers are for")
    if not graph:
        raise FileError(f"{WHERE}: has no layer")
    sizes = choose_sizes(WHERE, batch_size, batch_size, micro_batch_sizes)
    position = {name: k for k, name in enumerate(graph)}
    rows = [_row(name, graph.nodes[name]) for name in graph]
    edges = []
    for source, target, attributes in graph.edges(data=True):
        nbytes = attributes.get("bytes")
        if nbytes is not None:
            nbytes = int(_number(f"edge {source!r} → {target!r}", "bytes", nbytes, MAX_BYTES))
        edges.append(TableEdge(position[source], position[target], nbytes))
    return profile_of(WHERE, "networkx", rows, edges, sizes)


def _row(name: str, attributes: Mapping[str, Any]) -> TableRow:
    if name == "output":
        raise FileError(f"{WHERE}: node \"output\": can't be a layer's name")
    found: dict[str, Any] = {"saved_bytes": None}
    for most, fields in ((MAX_SECONDS, _SECONDS), (MAX_BYTES, _BYTES)):
        for field in fields:
            value = attributes.get(field)
            if value is None and field in found:
                continue
            number = _number(f"layer {name!r}", field, value, most)
            found[field] = number if field in _SECONDS else int(number)
    return TableRow(name=name, **found)


def _number(whose: str, field: str, value: Any, most: float) -> float:
    if value is None:
        raise FileError(f"{WHERE}: {whose}: has no {field}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not 0 <= number <= most:
        raise FileError(f"{WHERE}: {whose}: {field} must be a number from 0 to {most:.0e}")
    return number
