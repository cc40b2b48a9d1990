"""What importers share: a graph of costs, made a profile.

Tables and files give each node's cost at one size. `Sizes` says what samples that size stands for.

Their graphs are `networkx.DiGraph`s of positions, in the file or in topological order, with edges
from what makes a tensor to what uses it. Nodes that the file names have that as attribute `name`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import FileError, TargetError
from ..files import MAX_SECONDS, MIN_SECONDS
from ..profile import (
    ELSEWHERE,
    Edge,
    Layer,
    Measurement,
    ModelInput,
    OptimizerCost,
    Profile,
    Storage,
    Totals,
    check_profile,
)

if TYPE_CHECKING:
    import networkx as nx

MAX_BYTES = 2**44
"""What one layer may hold: more isn't a model, and its sums may not fit a file's numbers."""

MAX_SAMPLES = 2**31 - 1


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    given: samples in the micro-batch that the file's numbers are for.
    batch_size: samples in the mini-batch.
    micro_batches: the profile's micro-batch sizes, rising; `given` is among them.
    """

    given: int
    batch_size: int
    micro_batches: tuple[int, ...]

    @property
    def assumption(self) -> tuple[str, ...]:
        """What is assumed for the sizes that the file says nothing of."""
        if len(self.micro_batches) == 1:
            return ()
        return (
            f"The file's numbers are for {self.given} samples; at other micro-batch sizes times "
            "and bytes were taken to be proportional.",
        )


def choose_sizes(
    where: str, given: int, batch_size: int | None, asked: Sequence[int] | None
) -> Sizes:
    """The profile's sizes: those asked for, and the one that the file's numbers are for.

    Raises TargetError for sizes that aren't whole, below 1, or above the mini-batch.
    """
    for name, size in [
        ("batch_size", given if batch_size is None else batch_size),
        *(("micro_batch_sizes", size) for size in asked or ()),
    ]:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TargetError(f"{where}: {name} {size!r}: give a whole number from 1")
    micro_batches = tuple(sorted({given, *(asked or ())}))
    batch_size = micro_batches[-1] if batch_size is None else batch_size
    if micro_batches[0] < 1 or batch_size < 1:
        raise TargetError(f"{where}: sizes of batches must be 1 or more")
    if batch_size > MAX_SAMPLES:
        raise TargetError(f"{where}: a mini-batch of {batch_size} samples is too large")
    if micro_batches[-1] > batch_size:
        raise TargetError(
            f"{where}: micro-batches of {micro_batches[-1]} samples are more than the mini-batch "
            f"of {batch_size}; give a larger --batch-size or smaller --micro-batch-sizes"
        )
    return Sizes(given, batch_size, micro_batches)


@dataclass(frozen=True)
class Cost:
    """A layer at the size that the file's numbers are for.

    Attributes:
        saves: storages among its saved bytes that other layers may keep too.
        grows: saved bytes grow with the samples.
    """

    name: str
    kind: str
    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    saves: tuple[str, ...] = ()
    grows: bool = True


@dataclass(frozen=True)
class Tensor:
    """A tensor, in bytes at the size that the file's numbers are for.

    Attributes:
        storage: its memory, which several tensors may share.
        grows: it grows with the samples.
    """

    name: str
    storage: str
    nbytes: float
    needs_grad: bool
    grows: bool = True


def make_profile(
    where: str,
    front_end: str,
    sizes: Sizes,
    costs: Sequence[Cost],
    uses: Iterable[tuple[str, str, Tensor]],
    *,
    dtype: str = "unknown",
    inputs: tuple[ModelInput, ...] = (),
    storage_bytes: dict[str, float] | None = None,
    assumptions: Iterable[str],
) -> Profile:
    """Put a profile together.

    Args:
        where: the file, for messages, and the profile's target.
        costs: the layers in topological order.
        uses: (producer, consumer, tensor).
        storage_bytes: of storages that are larger than the tensors in them.

    Raises:
        FileError: layers whose bytes get out of bounds at the sizes asked for.
    """
    edges, storages = _edges(where, sizes, uses, storage_bytes or {})
    layers = tuple(_layer(where, cost, sizes) for cost in costs)
    return check_profile(
        Profile(
            target=where,
            fingerprint=fingerprint_of(front_end, layers, edges),
            front_end=front_end,
            device=ELSEWHERE,
            threads=1,
            dtype=dtype,
            torch_version="",
            batch_size=sizes.batch_size,
            micro_batch_sizes=sizes.micro_batches,
            inputs=inputs,
            layers=layers,
            edges=edges,
            storages=storages,
            tied=(),
            loss=(),
            optimizer=OptimizerCost(
                name="none",
                state_bytes_per_parameter_byte=0.0,
                update_fixed_s=0.0,
                update_s_per_byte=0.0,
            ),
            whole_model=totals(layers, sizes.micro_batches),
            assumptions=(
                *sizes.assumption,
                *assumptions,
                "The whole model's figures are the sums of its layers'; working memory besides "
                "what is kept was left out.",
                "Optimizer steps were taken to cost no time and to hold no state; "
                "--optimizer-state sets the state.",
            ),
        ),
        where,
    )


def _layer(where: str, cost: Cost, sizes: Sizes) -> Layer:
    measurements = []
    for m in sizes.micro_batches:
        share = m / sizes.given
        saved = cost.saved_bytes * (share if cost.grows else 1)
        if saved > MAX_BYTES or share * max(cost.forward_s, cost.backward_s) > MAX_SECONDS:
            raise FileError(f"{where}: {cost.name}: costs too much with {m} samples; give fewer")
        measurements.append(
            Measurement(
                micro_batch=m,
                forward_s=_seconds(cost.forward_s * share),
                backward_s=_seconds(cost.backward_s * share),
                saved_bytes=round(saved),
                workspace_bytes=0,
            )
        )
    return Layer(
        name=cost.name,
        kind=cost.kind,
        parameter_bytes=cost.parameter_bytes,
        buffer_bytes=cost.buffer_bytes,
        saves=cost.saves,
        measurements=tuple(measurements),
    )


def _seconds(seconds: float) -> float:
    return seconds if seconds >= MIN_SECONDS else 0.0


def _edges(
    where: str,
    sizes: Sizes,
    uses: Iterable[tuple[str, str, Tensor]],
    storage_bytes: dict[str, float],
) -> tuple[tuple[Edge, ...], tuple[Storage, ...]]:
    edges: dict[tuple[str, str], Edge] = {}
    storages: dict[str, Storage] = {}

    def affine(nbytes: float, grows: bool) -> dict[str, Any]:
        if grows:
            return {"bytes_per_sample": nbytes / sizes.given, "fixed_bytes": 0}
        return {"bytes_per_sample": 0.0, "fixed_bytes": round(nbytes)}

    most = sizes.micro_batches[-1]
    for producer, consumer, tensor in uses:
        if tensor.grows and tensor.nbytes * most / sizes.given > MAX_BYTES:
            raise FileError(f"{where}: {tensor.name}: is too large with {most} samples; give fewer")
        edges.setdefault(
            (tensor.name, consumer),
            Edge(
                producer=producer,
                consumer=consumer,
                tensor=tensor.name,
                storage=tensor.storage,
                needs_grad=tensor.needs_grad,
                **affine(tensor.nbytes, tensor.grows),
            ),
        )
        whole = storage_bytes.get(tensor.storage, tensor.nbytes)
        storages.setdefault(
            tensor.storage, Storage(name=tensor.storage, **affine(whole, tensor.grows))
        )
    return tuple(edges.values()), tuple(storages.values())


def totals(layers: Sequence[Layer], sizes: Sequence[int]) -> tuple[Totals, ...]:
    """Of a model that isn't there: the sums of its layers, for each micro-batch size."""
    found = []
    for size in sizes:
        measured = [m for la in layers for m in la.measurements if m.micro_batch == size]
        found.append(
            Totals(
                micro_batch=size,
                forward_s=math.fsum(m.forward_s for m in measured),
                backward_s=math.fsum(m.backward_s for m in measured),
                saved_bytes=sum(m.saved_bytes for m in measured),
            )
        )
    return tuple(found)


def fingerprint_of(front_end: str, layers: Sequence[Layer], edges: Sequence[Edge]) -> str:
    """Of a graph that was imported: another wherever it is another."""
    parts = (
        front_end,
        [(la.name, la.kind, la.parameter_bytes, la.buffer_bytes) for la in layers],
        [(e.producer, e.consumer, e.tensor, e.needs_grad) for e in edges],
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


# A graph of positions ---------------------------------------------------------------------------


def topological_order(
    where: str, graph: nx.DiGraph, rank: Callable[[int], Any] | None = None
) -> list[int]:
    """A graph's nodes in an order that its edges allow, the lowest rank first.

    Args:
        graph: of positions, with names.
        rank: what decides among nodes that could come next, different for all; by default their
            position.

    Raises FileError naming the nodes of a cycle.
    """
    import networkx as nx

    order: list[int] = []
    try:
        order.extend(nx.lexicographical_topological_sort(graph, rank))
    except nx.NetworkXUnfeasible:
        # Upwards in what no order reaches, from the first such node: each has one before it.
        left = numbered(graph, range(len(graph))).subgraph(set(graph).difference(order))
        back = [a for a, *_ in nx.find_cycle(left, min(left), orientation="reverse")]
        cycle = [*reversed(back), back[-1]]
        cycle = cycle if len(cycle) <= 8 else [*cycle[:7], cycle[-1]]
        shown = [graph.nodes[k]["name"] for k in cycle]
        raise FileError(
            f"{where}: edges: {' → '.join(shown)} is a cycle; a model's graph must have none"
        ) from None
    return order


def numbered(graph: nx.DiGraph, order: Sequence[int]) -> nx.DiGraph:
    """Nodes of a graph, counted from 0 in a given order, with the edges between them.

    Neighbours are listed in that order, too.
    """
    import networkx as nx

    place = {k: position for position, k in enumerate(order)}
    made = nx.DiGraph()
    made.add_nodes_from(range(len(place)))
    made.add_edges_from(
        sorted((place[a], place[b]) for a, b in graph.edges if a in place and b in place)
    )
    return made


def readable(text: str, most: int = 48) -> str:
    """Text from a file for people: on one line, not long, and nothing that a table would act on."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = " ".join(clean.replace("[", "(").replace("]", ")").split())
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"
