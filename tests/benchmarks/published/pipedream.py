"""PipeDream's graph.txt: a model profiled by msr-fiddle/pipedream, layer by layer.

A line for each node, ``nodeID -- description -- forward_compute_time=ms, backward_compute_time=ms,
activation_size=bytes, parameter_size=bytes``, and a tab-indented ``nodeA -- nodeB`` for each edge.
Times and activations are for one mini-batch, whose size the file doesn't say. An activation may
be a list, ``[a; b]``: the node makes a tuple.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from timeprest.profiles.errors import FileError, TargetError
from timeprest.profiles.files import MAX_SECONDS
from timeprest.profiles.imported.cost_graph import (
    MAX_BYTES,
    Cost,
    Sizes,
    Tensor,
    choose_sizes,
    costs_of,
    make_profile,
    numbered,
    readable,
    topological_order,
)
from timeprest.profiles.profile import ModelInput, Profile
from timeprest.tests.benchmarks.published.file_graph import unique
from timeprest.tests.benchmarks.published.workload import Node, Workload, WorkloadTensor

if TYPE_CHECKING:
    import networkx as nx

# The file as it is written, read into nodes in topological order --------------------------------

_NODE_LINE = (
    "nodeID -- description -- forward_compute_time=ms, backward_compute_time=ms, "
    "activation_size=bytes, parameter_size=bytes"
)
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_TAKES_ELEMENT = re.compile(r"__getitem__\((-?\d{1,9})\)", re.ASCII)


@dataclass(frozen=True)
class PipeDreamNode:
    """A line of the file.

    Attributes:
        name: the node's id and the first word of its description, for plans to show.
        outputs: bytes of what it makes; several for a tuple.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    outputs: tuple[float, ...]
    parameter_bytes: int

    @property
    def is_size(self) -> bool:
        """Makes an integer: it has no gradient, and doesn't grow with the samples."""
        return self.description.startswith("Size(")

    @property
    def element(self) -> int | None:
        """Which element of a tuple it takes out; None where it does something else."""
        match = _TAKES_ELEMENT.fullmatch(self.description)
        return int(match.group(1)) if match else None


@dataclass(frozen=True)
class PipeDreamFile:
    """A file that was read and found to be in order.

    Attributes:
        nodes: in topological order.
        graph: of the nodes' positions in that order.
        inputs: positions of nodes that only load data.
        unwanted: how many lines were left out: they take an element that nobody uses.
    """

    nodes: tuple[PipeDreamNode, ...]
    graph: nx.DiGraph
    inputs: frozenset[int]
    unwanted: int


def read_graph(where: str, text: str) -> PipeDreamFile:
    """Read the file's text. Raises FileError naming the line and what is expected there."""
    nodes: list[PipeDreamNode] = []
    position: dict[str, int] = {}
    edge_lines: list[tuple[str, str, str]] = []
    taken: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        at = f"{where}:{number}"
        if not line.strip():
            continue
        if line[0] in "\t ":
            source, separator, target = line.strip().partition(" -- ")
            if not separator or not source.strip() or not target.strip():
                raise FileError(f"{at}: expected an edge, nodeA -- nodeB")
            edge_lines.append((at, source.strip(), target.strip()))
            continue
        name, node = _read_node(at, line.strip(), taken)
        if name in position:
            raise FileError(f"{at}: {readable(name)} has a line already; names must be unique")
        position[name] = len(nodes)
        nodes.append(node)
    if not nodes:
        raise FileError(f"{where}: has no node; expected lines like {_NODE_LINE}")
    edges = []
    for at, source, target in edge_lines:
        for name in (source, target):
            if name not in position:
                raise FileError(f"{at}: no node is named {readable(name)}")
        edges.append((position[source], position[target]))
    return _sorted(where, nodes, list(position), edges)


def _read_node(at: str, line: str, taken: dict[str, int]) -> tuple[str, PipeDreamNode]:
    body, _, costs = line.rpartition(" -- ")
    if costs.startswith("stage_id="):
        # Their optimizer adds its own cut to the file.
        body, _, costs = body.rpartition(" -- ")
    name, separator, description = body.partition(" -- ")
    parts = [part.partition("=") for part in costs.split(", ")]
    if not separator or not name.strip() or tuple(key for key, _, _ in parts) != _FIELDS:
        raise FileError(f"{at}: expected {_NODE_LINE}")
    values = {key: value.strip() for key, _, value in parts}
    times = [
        _number(at, key, values[key], "milliseconds", MAX_SECONDS * 1e3) / 1e3
        for key in _FIELDS[:2]
    ]
    outputs = values["activation_size"]
    is_list = outputs.startswith("[") and outputs.endswith("]")
    sizes = outputs[1:-1].split(";") if is_list else [outputs]
    description = " ".join(description.split())
    shown = re.sub(r"[^\w.]", "", description.partition("(")[0])[:24]
    return name.strip(), PipeDreamNode(
        name=unique(readable(f"{name.strip()}:{shown}" if shown else name.strip()), taken),
        description=description,
        forward_s=times[0],
        backward_s=times[1],
        outputs=tuple(_number(at, "activation_size", size, "bytes", MAX_BYTES) for size in sizes),
        parameter_bytes=round(
            _number(at, "parameter_size", values["parameter_size"], "bytes", MAX_BYTES)
        ),
    )


def _number(at: str, field: str, text: str, unit: str, most: float) -> float:
    text = text.strip()
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= most:
        raise FileError(
            f"{at}: {field}={readable(text, 24)}: expected {unit}, a number from 0 to {most:.4g}"
        )
    return value


def _sorted(
    where: str, nodes: Sequence[PipeDreamNode], ids: Sequence[str], edges: Sequence[tuple[int, int]]
) -> PipeDreamFile:
    import networkx as nx

    def number(k: int) -> tuple[int, int]:
        digits = re.search(r"\d{1,18}$", ids[k], re.ASCII)
        return (int(digits.group()) if digits else 0, k)

    graph = nx.DiGraph()
    for k, name in enumerate(ids):
        graph.add_node(k, name=name)
    graph.add_edges_from(edges)
    order = topological_order(where, graph, number)
    unwanted = _unwanted(nodes, graph)
    order = [k for k in order if k not in unwanted]
    graph = numbered(graph, order)
    found = tuple(nodes[k] for k in order)
    inputs = frozenset(
        k
        for k, node in enumerate(found)
        if not graph.pred[k] and re.fullmatch(r"Input\d*", node.description, re.ASCII)
    )
    if len(inputs) == len(found):
        raise FileError(f"{where}: has input nodes only; there is no layer to plan")
    return PipeDreamFile(found, graph, inputs, len(unwanted))


def _unwanted(nodes: Sequence[PipeDreamNode], graph: nx.DiGraph) -> set[int]:
    """Nodes that take out an element which nobody uses, at no cost.

    Each of them would double the places to cut. Where the model ends in nothing else, they are
    its result, and stay.
    """
    ends = {k for k in graph if not graph.succ[k]}
    idle = {
        k
        for k in ends
        if graph.pred[k]
        and nodes[k].element is not None
        and not (nodes[k].forward_s or nodes[k].backward_s or nodes[k].parameter_bytes)
    }
    return idle if idle != ends else set()


# As a profile -----------------------------------------------------------------------------------

_FLOAT32_BYTES = 4


def import_pipedream(
    where: str, text: str, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """A profile from the file's text; arguments and errors as of `reader.import_profile`."""
    file = read_graph(where, text)
    if batch_size is None:
        raise TargetError(
            f"{where}: PipeDream's files don't say the batch size their times are for; give it "
            "with --batch-size (their image models: 128)"
        )
    sizes = choose_sizes(where, batch_size, batch_size, micro_batch_sizes)
    tensors, storage_bytes = _tensors(file)
    results = _results(file)
    uses = [
        (file.nodes[a].name, file.nodes[b].name, tensor)
        for b in file.graph
        for a in file.graph.pred[b]
        if a not in file.inputs
        for tensor in _used(where, file, tensors, a, b)
    ]
    for k in results:
        uses += [(file.nodes[k].name, "output", tensor) for tensor in tensors[k]]
    used = {tensor.storage for _, _, tensor in uses}
    profile = make_profile(
        where,
        "pipedream",
        sizes,
        [
            _cost(node, sizes.given, tensors[k], used)
            for k, node in enumerate(file.nodes)
            if k not in file.inputs
        ],
        uses,
        storage_bytes=storage_bytes,
        assumptions=_assumptions(file, sizes, results),
    )
    inputs = tuple(_model_inputs(file, sizes))
    return msgspec.structs.replace(profile, dtype="float32", inputs=inputs)


# Tensors ---------------------------------------------------------------------------------------


def _tensors(file: PipeDreamFile) -> tuple[list[tuple[Tensor, ...]], dict[str, float]]:
    """What each node makes, and the bytes of each storage.

    An element taken from a tuple lies in the tuple's memory.
    """
    made: list[tuple[Tensor, ...]] = []
    storage_bytes: dict[str, float] = {}
    for k, node in enumerate(file.nodes):
        element = _element(file, made, k)
        several = len(node.outputs) > 1
        tensors = []
        for n, nbytes in enumerate(node.outputs):
            name = f"{node.name}[{n}]" if several else node.name
            storage = element.storage if element and not several else name
            storage_bytes.setdefault(storage, nbytes)
            fixed = nbytes if node.is_size else 0.0
            tensors.append(Tensor(name, storage, nbytes, not node.is_size, fixed))
        made.append(tuple(tensors))
    return made, storage_bytes


def _element(file: PipeDreamFile, made: Sequence[tuple[Tensor, ...]], k: int) -> Tensor | None:
    """The tensor that node k takes out of a tuple; None where it does something else."""
    index = file.nodes[k].element
    tuples = [a for a in file.graph.pred[k] if a not in file.inputs and len(made[a]) > 1]
    if index is None or len(tuples) != 1:
        return None
    elements = made[tuples[0]]
    return elements[index] if -len(elements) <= index < len(elements) else None


def _used(
    where: str, file: PipeDreamFile, made: Sequence[tuple[Tensor, ...]], a: int, b: int
) -> tuple[Tensor, ...]:
    """What node b uses of node a's results: one element where it takes that, else all."""
    if file.nodes[b].element is None or len(made[a]) == 1:
        return made[a]
    element = _element(file, made, b)
    if element is None:
        raise FileError(
            f"{where}: {file.nodes[b].name} takes element {file.nodes[b].element} of "
            f"{file.nodes[a].name}, whose activation_size lists {len(made[a])}"
        )
    return (element,)


def _results(file: PipeDreamFile) -> list[int]:
    """Nodes whose results nobody uses: the model's."""
    return [k for k in file.graph if not file.graph.succ[k] and k not in file.inputs]


# The profile's parts ---------------------------------------------------------------------------


def _cost(node: PipeDreamNode, given: int, tensors: Sequence[Tensor], used: set[str]) -> Cost:
    return Cost(
        name=node.name,
        kind=readable(node.description),
        measured=(costs_of(given, node.forward_s, node.backward_s, sum(node.outputs)),),
        parameter_bytes=node.parameter_bytes,
        saves=tuple(tensor.storage for tensor in tensors if tensor.storage in used),
        grows=not node.is_size,
    )


def _model_inputs(file: PipeDreamFile, sizes: Sizes) -> Iterator[ModelInput]:
    for k in sorted(file.inputs):
        elements = math.ceil(sum(file.nodes[k].outputs) / _FLOAT32_BYTES / sizes.given)
        yield ModelInput(
            name=file.nodes[k].name,
            shape=(elements,) if elements else (),
            dtype="float32",
            consumers=tuple(file.nodes[b].name for b in file.graph.succ[k]),
        )


def _assumptions(file: PipeDreamFile, sizes: Sizes, results: Sequence[int]) -> list[str]:
    loading_s = sum(file.nodes[k].forward_s + file.nodes[k].backward_s for k in file.inputs)
    sentences = [
        f"The file's times and activations were taken to be for {sizes.given} samples.",
        "Each layer keeps its own output for the backward, and nothing else; a tuple's elements "
        "are kept once.",
        "Gradients are as large as the tensors they belong to; Size nodes have none.",
        f"The model's result was taken to be that of {_some_names(file, results)}.",
    ]
    if file.unwanted:
        sentences.append(
            f"Left out: {file.unwanted} nodes that take an element out of a tuple that nobody "
            "uses, at no cost."
        )
    if file.inputs:
        sentences.append(
            f"Inputs ({_some_names(file, sorted(file.inputs))}) cost nothing: "
            f"{loading_s * 1e3:.6g} ms of loading were left out; their shapes count float32 "
            "elements, none where the file gives 0 bytes."
        )
    return sentences


def _some_names(file: PipeDreamFile, positions: Sequence[int]) -> str:
    shown = ", ".join(file.nodes[k].name for k in positions[:4])
    return shown if len(positions) <= 4 else f"{shown} and {len(positions) - 4} more"


# As its own planner sees it ---------------------------------------------------------------------


def pipedream_workload(where: str, text: str) -> Workload:
    """Read the file's text. Raises FileError naming the line that is wrong.

    Inputs are left out, with their loading times; so are nodes that take an element of a tuple
    that nobody uses. What a node sends is all that it makes, also where an element is used alone.
    """
    file = read_graph(where, text)
    kept = [k for k in file.graph if k not in file.inputs]
    graph = numbered(file.graph, kept)
    return Workload(
        where=where,
        cost_model="pipedream",
        unit="mini-batch",
        listed=len(file.nodes) + file.unwanted,
        nodes=tuple(
            Node(
                name=file.nodes[k].name,
                compute_s=file.nodes[k].forward_s + file.nodes[k].backward_s,
                parameter_bytes=float(file.nodes[k].parameter_bytes),
                flight_bytes=sum(file.nodes[k].outputs),
            )
            for k in kept
        ),
        graph=graph,
        tensors=tuple(
            WorkloadTensor(a, tuple(graph.succ[a]), sum(file.nodes[k].outputs))
            for a, k in enumerate(kept)
            if graph.succ[a]
        ),
        notes=(
            f"Left out: {len(file.inputs)} inputs, and {file.unwanted} nodes that take an "
            "element of a tuple that nobody uses.",
        ),
    )
