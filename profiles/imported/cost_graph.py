"""What importers share: a graph of costs, made a profile.

Tables and files give each node's cost at one size or several. `Sizes` says which these are.

Their graphs are `networkx.DiGraph`s of positions, in the file or in topological order, with edges
from what makes a tensor to what uses it. Nodes that the file names have that as attribute `name`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    OptimizerCost,
    Profile,
    Storage,
    Totals,
    check_profile,
)
from ..sizes import measured_at

if TYPE_CHECKING:
    import networkx as nx

MAX_BYTES = 2**44
"""What one layer may hold: more isn't a model, and its sums may not fit a file's numbers."""

MAX_SAMPLES = 2**31 - 1


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    measured: samples in the micro-batches that the file has numbers for, rising.
    batch_size: samples in the mini-batch.
    micro_batches: the profile's micro-batch sizes, rising.
    """

    measured: tuple[int, ...]
    batch_size: int
    micro_batches: tuple[int, ...]

    @property
    def given(self) -> int:
        """The size that tensors' bytes are for: the largest that the file has numbers for."""
        return self.measured[-1]

    @property
    def assumption(self) -> tuple[str, ...]:
        """What is assumed for the sizes that the file says nothing of."""
        others = [m for m in self.micro_batches if m not in self.measured]
        if not others:
            return ()
        if len(self.measured) == 1:
            return (
                f"The file's numbers are for {self.given} samples; at other micro-batch sizes "
                "times and bytes were taken to be proportional.",
            )
        known = ", ".join(map(str, self.measured))
        shown = ", ".join(map(str, others))
        beyond = [m for m in others if not self.measured[0] <= m <= self.measured[-1]]
        return (
            f"The file's numbers are for micro-batches of {known} samples; those for {shown} lie "
            "on the line through the two nearest"
            + (
                f", of which {', '.join(map(str, beyond))} beyond what was measured: more samples "
                "were taken to cost no less than fewer."
                if beyond
                else "."
            ),
        )


def choose_sizes(
    where: str, given: int | Sequence[int], batch_size: int | None, asked: Sequence[int] | None
) -> Sizes:
    """The profile's sizes: those asked for, and those that the file's numbers are for, but for
    what is more than a mini-batch.

    Args:
        given: one size that the file has numbers for, or several.
        batch_size: by default the largest of all.

    Raises TargetError for sizes that aren't whole, below 1, or above the mini-batch.
    """
    measured = tuple(sorted(set(given))) if isinstance(given, Sequence) else (given,)
    for name, size in [
        ("batch_size", measured[-1] if batch_size is None else batch_size),
        *(("micro_batch_sizes", size) for size in asked or ()),
    ]:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TargetError(f"{where}: {name} {size!r}: give a whole number from 1")
    batch_size = max((*measured, *(asked or ()))) if batch_size is None else batch_size
    if min(batch_size, *measured, *(asked or ())) < 1:
        raise TargetError(f"{where}: sizes of batches must be 1 or more")
    if batch_size > MAX_SAMPLES:
        raise TargetError(f"{where}: a mini-batch of {batch_size} samples is too large")
    if max(asked or (0,)) > batch_size:
        raise TargetError(
            f"{where}: micro-batches of {max(asked or ())} samples are more than the mini-batch "
            f"of {batch_size}; give a larger --batch-size or smaller --micro-batch-sizes"
        )
    own = {min(m, batch_size) for m in measured}
    return Sizes(measured, batch_size, tuple(sorted({*own, *(asked or ())})))


@dataclass(frozen=True)
class Cost:
    """A layer.

    Attributes:
        measured: what the file says of it, at one size or several, rising.
        saves: storages among its saved bytes that other layers may keep too.
        grows: saved bytes grow with the samples.
        update_s: of the optimizer's step on its parameters; None: it isn't known.
    """

    name: str
    kind: str
    measured: Sequence[Measurement]
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    saves: tuple[str, ...] = ()
    grows: bool = True
    update_s: float | None = None


def costs_of(
    size: int, forward_s: float, backward_s: float, saved_bytes: float = 0, workspace_bytes: int = 0
) -> Measurement:
    """What a file says of a layer at one size."""
    return Measurement(
        micro_batch=size,
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=round(saved_bytes),
        workspace_bytes=workspace_bytes,
    )


@dataclass(frozen=True)
class Tensor:
    """A tensor, in bytes at the size that the file's numbers are for, the largest of these.

    Attributes:
        storage: its memory, which several tensors may share.
        fixed_bytes: what of it doesn't grow with the samples.
    """

    name: str
    storage: str
    nbytes: float
    needs_grad: bool
    fixed_bytes: float = 0.0


NO_OPTIMIZER = OptimizerCost(
    name="none", state_bytes_per_parameter_byte=0.0, update_fixed_s=0.0, update_s_per_byte=0.0
)


def make_profile(
    where: str,
    front_end: str,
    sizes: Sizes,
    costs: Sequence[Cost],
    uses: Iterable[tuple[str, str, Tensor]],
    *,
    storage_bytes: dict[str, float] | None = None,
    optimizer: OptimizerCost = NO_OPTIMIZER,
    assumptions: Iterable[str],
) -> Profile:
    """Put a profile together.

    Args:
        where: the file, for messages, and the profile's target.
        costs: the layers in topological order.
        uses: (producer, consumer, tensor).
        storage_bytes: of storages that are larger than the tensors in them.

    Raises FileError: layers whose bytes get out of bounds at the sizes asked for.
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
            dtype="unknown",
            torch_version="",
            batch_size=sizes.batch_size,
            micro_batch_sizes=sizes.micro_batches,
            inputs=(),
            layers=layers,
            edges=edges,
            storages=storages,
            tied=(),
            loss=(),
            optimizer=optimizer,
            whole_model=totals(layers, sizes.micro_batches),
            assumptions=(*sizes.assumption, *assumptions, *_left_out(layers, optimizer)),
        ),
        where,
    )


def _left_out(layers: Sequence[Layer], optimizer: OptimizerCost) -> Iterator[str]:
    """What the file says nothing of."""
    sums = "The whole model's figures are the sums of its layers'"
    if not any(m.workspace_bytes for layer in layers for m in layer.measurements):
        sums += "; working memory besides what is kept was left out"
    yield f"{sums}."
    if optimizer is NO_OPTIMIZER:
        timeless = [layer.name for layer in layers if layer.update_s is msgspec.UNSET]
        of = "" if len(timeless) == len(layers) else f", for {', '.join(timeless[:4])},"
        no_time = f" to cost no time{of} and" if timeless else ""
        yield (
            f"Optimizer steps were taken{no_time} to hold no state; --optimizer-state sets the "
            "state."
        )


def _layer(where: str, cost: Cost, sizes: Sizes) -> Layer:
    measurements = []
    for size in sizes.micro_batches:
        found = measured_at(cost.measured, size)
        saved = found.saved_bytes if cost.grows else cost.measured[-1].saved_bytes
        most = max(saved, found.workspace_bytes, cost.parameter_bytes, cost.buffer_bytes)
        if most > MAX_BYTES or max(found.forward_s, found.backward_s) > MAX_SECONDS:
            raise FileError(f"{where}: {cost.name}: costs too much with {size} samples; give fewer")
        measurements.append(
            msgspec.structs.replace(
                found,
                forward_s=_seconds(found.forward_s),
                backward_s=_seconds(found.backward_s),
                saved_bytes=saved,
            )
        )
    return Layer(
        name=cost.name,
        kind=cost.kind,
        parameter_bytes=cost.parameter_bytes,
        buffer_bytes=cost.buffer_bytes,
        saves=cost.saves,
        update_s=msgspec.UNSET if cost.update_s is None else _seconds(cost.update_s),
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

    def affine(nbytes: float, fixed: float) -> dict[str, Any]:
        per_sample = max(nbytes - fixed, 0.0) / sizes.given
        return {"bytes_per_sample": per_sample, "fixed_bytes": round(fixed)}

    most = sizes.micro_batches[-1]
    for producer, consumer, tensor in uses:
        if (tensor.nbytes - tensor.fixed_bytes) * most / sizes.given > MAX_BYTES:
            raise FileError(f"{where}: {tensor.name}: is too large with {most} samples; give fewer")
        edges.setdefault(
            (tensor.name, consumer),
            Edge(
                producer=producer,
                consumer=consumer,
                tensor=tensor.name,
                storage=tensor.storage,
                needs_grad=tensor.needs_grad,
                **affine(tensor.nbytes, tensor.fixed_bytes),
            ),
        )
        whole = storage_bytes.get(tensor.storage, tensor.nbytes)
        storages.setdefault(
            tensor.storage, Storage(name=tensor.storage, **affine(whole, tensor.fixed_bytes))
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
