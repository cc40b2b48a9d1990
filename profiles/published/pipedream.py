"""PipeDream's graph.txt: a model profiled by msr-fiddle/pipedream, layer by layer.

A line for each node, ``nodeID -- description -- forward_compute_time=ms, backward_compute_time=ms,
activation_size=bytes, parameter_size=bytes``, and a tab-indented ``nodeA -- nodeB`` for each edge.
Times and activations are for one mini-batch, whose size the file doesn't say. An activation may
be a list, ``[a; b]``: the node makes a tuple.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..errors import FileError, TargetError
from ..profile import ModelInput, Profile
from .cost_graph import Cost, Sizes, Tensor, choose_sizes, make_profile
from .foreign_nodes import readable
from .pipedream_text import Graph, Node, read_graph

_FLOAT32_BYTES = 4


def import_pipedream(
    where: str, text: str, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """A profile from the file's text.

    Args:
        where: the file's path.
        batch_size: samples that the file's times are for.
        micro_batch_sizes: other sizes to list, with costs in proportion.

    Raises:
        TargetError: no batch size, or micro-batches that are larger.
        FileError: the file is malformed; names the line.
    """
    graph = read_graph(where, text)
    if batch_size is None:
        raise TargetError(
            f"{where}: PipeDream's files don't say the batch size their times are for; give it "
            "with --batch-size (their image models: 128)"
        )
    sizes = choose_sizes(where, batch_size, batch_size, micro_batch_sizes)
    tensors, storage_bytes = _tensors(graph)
    results = _results(graph)
    uses = [
        (graph.nodes[a].name, graph.nodes[b].name, tensor)
        for b, sources in enumerate(graph.sources)
        for a in sources
        if a not in graph.inputs
        for tensor in _used(where, graph, tensors, a, b)
    ]
    for k in results:
        uses += [(graph.nodes[k].name, "output", tensor) for tensor in tensors[k]]
    used = {tensor.storage for _, _, tensor in uses}
    return make_profile(
        where,
        "pipedream",
        sizes,
        [
            _cost(node, tensors[k], used)
            for k, node in enumerate(graph.nodes)
            if k not in graph.inputs
        ],
        uses,
        dtype="float32",
        inputs=tuple(_model_inputs(graph, sizes)),
        storage_bytes=storage_bytes,
        assumptions=_assumptions(graph, sizes, results),
    )


# Tensors ---------------------------------------------------------------------------------------


def _tensors(graph: Graph) -> tuple[list[tuple[Tensor, ...]], dict[str, float]]:
    """What each node makes, and the bytes of each storage.

    An element taken from a tuple lies in the tuple's memory.
    """
    made: list[tuple[Tensor, ...]] = []
    storage_bytes: dict[str, float] = {}
    for k, node in enumerate(graph.nodes):
        element = _element(graph, made, k)
        several = len(node.outputs) > 1
        tensors = []
        for n, nbytes in enumerate(node.outputs):
            name = f"{node.name}[{n}]" if several else node.name
            storage = element.storage if element and not several else name
            storage_bytes.setdefault(storage, nbytes)
            tensors.append(Tensor(name, storage, nbytes, not node.is_size, not node.is_size))
        made.append(tuple(tensors))
    return made, storage_bytes


def _element(graph: Graph, made: Sequence[tuple[Tensor, ...]], k: int) -> Tensor | None:
    """The tensor that node k takes out of a tuple; None where it does something else."""
    index = graph.nodes[k].element
    tuples = [a for a in graph.sources[k] if a not in graph.inputs and len(made[a]) > 1]
    if index is None or len(tuples) != 1:
        return None
    elements = made[tuples[0]]
    return elements[index] if -len(elements) <= index < len(elements) else None


def _used(
    where: str, graph: Graph, made: Sequence[tuple[Tensor, ...]], a: int, b: int
) -> tuple[Tensor, ...]:
    """What node b uses of node a's results: one element where it takes that, else all."""
    if graph.nodes[b].element is None or len(made[a]) == 1:
        return made[a]
    element = _element(graph, made, b)
    if element is None:
        raise FileError(
            f"{where}: {graph.nodes[b].name} takes element {graph.nodes[b].element} of "
            f"{graph.nodes[a].name}, whose activation_size lists {len(made[a])}"
        )
    return (element,)


def _results(graph: Graph) -> list[int]:
    """Nodes whose results nobody uses: the model's."""
    used = {a for sources in graph.sources for a in sources}
    return [k for k in range(len(graph.nodes)) if k not in used and k not in graph.inputs]


# The profile's parts ---------------------------------------------------------------------------


def _cost(node: Node, tensors: Sequence[Tensor], used: set[str]) -> Cost:
    return Cost(
        name=node.name,
        kind=readable(node.description),
        forward_s=node.forward_s,
        backward_s=node.backward_s,
        saved_bytes=round(sum(node.outputs)),
        parameter_bytes=node.parameter_bytes,
        saves=tuple(tensor.storage for tensor in tensors if tensor.storage in used),
        grows=not node.is_size,
    )


def _model_inputs(graph: Graph, sizes: Sizes) -> Iterator[ModelInput]:
    consumers: dict[int, list[str]] = {k: [] for k in sorted(graph.inputs)}
    for node, sources in zip(graph.nodes, graph.sources, strict=True):
        for k in graph.inputs.intersection(sources):
            consumers[k].append(node.name)
    for k, names in consumers.items():
        elements = math.ceil(sum(graph.nodes[k].outputs) / _FLOAT32_BYTES / sizes.given)
        yield ModelInput(
            name=graph.nodes[k].name,
            shape=(elements,) if elements else (),
            dtype="float32",
            consumers=tuple(names),
        )


def _assumptions(graph: Graph, sizes: Sizes, results: Sequence[int]) -> list[str]:
    loading_s = sum(graph.nodes[k].forward_s + graph.nodes[k].backward_s for k in graph.inputs)
    sentences = [
        f"The file's times and activations were taken to be for {sizes.given} samples.",
        "Each layer keeps its own output for the backward, and nothing else; a tuple's elements "
        "are kept once.",
        "Gradients are as large as the tensors they belong to; Size nodes have none.",
        f"The model's result was taken to be that of {_some_names(graph, results)}.",
    ]
    if graph.unwanted:
        sentences.append(
            f"Left out: {graph.unwanted} nodes that take an element out of a tuple that nobody "
            "uses, at no cost."
        )
    if graph.inputs:
        sentences.append(
            f"Inputs ({_some_names(graph, sorted(graph.inputs))}) cost nothing: "
            f"{loading_s * 1e3:.6g} ms of loading were left out; their shapes count float32 "
            "elements, none where the file gives 0 bytes."
        )
    return sentences


def _some_names(graph: Graph, positions: Sequence[int]) -> str:
    shown = ", ".join(graph.nodes[k].name for k in positions[:4])
    return shown if len(positions) <= 4 else f"{shown} and {len(positions) - 4} more"
