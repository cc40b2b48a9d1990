"""The cut as its solvers see it: numbers for layers and tensors, and what makes a stage's load.

A cut is an ascending chain of downsets of the layer graph, from the empty one to the full one; the
stage X between downsets a and b holds the layers of b less those of a. The solvers look for the
chain, and an option for each of its stages, whose largest stage load is smallest, where every
stage fits its devices' memory. Which system is trained, and by whose cost model, is all in the
numbers: `planner.search.relaxed.relaxation` makes them for our own systems,
`tests/benchmarks/published/cost_models.py` for published planners.

Index letters: a, b downsets; X a stage; r its replicas; k devices from its first one to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx as nx

Vector = NDArray[np.float64]

SAME = 1 + 1e-9
"""Periods and loads within this factor are the same; rounding is no gain."""

FITS = 1 + 1e-12
"""Rounding is forgiven where bytes are compared with a device's memory."""


@dataclass(frozen=True)
class CutTensor:
    """What layers exchange. A stage that has some of its ends, but not all, takes part.

    The stage's traffic over its lower cut is that of tensors with an end in a and an end in X;
    over its upper cut that of tensors with no end in a, one in X and one beyond b. A tensor that
    passes the stage by costs it nothing; one that several of its layers use counts once.

    Attributes:
        ends: bit mask of the layers that make or use it. Bit n, of n layers, stands for the
            model's result: it lies beyond every downset but the full one.
        lower_s, upper_s: what it adds to the stage's wire time, per period.
        lower_bytes, upper_bytes: what it adds to the stage's memory, whatever is in flight.
        kept_bytes: what the stage above the cut keeps of it per unit in flight, in modes that
            keep their inputs (`Mode.inputs_kept`).
        remade_bytes: likewise in modes where the layer that makes it is computed again, so that
            its own stage doesn't keep it: by what they compute again (`Mode.remade`).
    """

    ends: int
    lower_s: float = 0.0
    upper_s: float = 0.0
    lower_bytes: float = 0.0
    upper_bytes: float = 0.0
    kept_bytes: float = 0.0
    remade_bytes: tuple[float, ...] = ()

    def with_another(self, other: CutTensor) -> CutTensor:
        """Both as one, with the ends of this one."""
        return CutTensor(
            self.ends,
            self.lower_s + other.lower_s,
            self.upper_s + other.upper_s,
            self.lower_bytes + other.lower_bytes,
            self.upper_bytes + other.upper_bytes,
            self.kept_bytes + other.kept_bytes,
            tuple(map(sum, zip_longest(self.remade_bytes, other.remade_bytes, fillvalue=0.0))),
        )


@dataclass(frozen=True)
class Shared:
    """Memory that several layers keep, counted once in a stage that has any of them.

    Attributes:
        ends: bit mask of those layers.
        nbytes: per unit in flight.
    """

    ends: int
    nbytes: float


@dataclass(frozen=True)
class Mode:
    """A way to run a stage: plainly, or with activations of all or some layers computed again.

    Attributes:
        name: "plain", "recompute", "selective".
        compute_s: per layer, [n]: what its replicas share, per period.
        fixed_bytes: per layer, [n]: held whatever is in flight.
        flight_bytes: per layer, [n]: held for each unit in flight.
        shared_in_flight: how many times `Shared` bytes count per unit in flight.
        shared_once: how many times they count besides.
        inputs_kept: how many times tensors' `kept_bytes` count per unit in flight.
        remade: which of their `remade_bytes` do; None: none.
        remade_once: of those, what `fixed_bytes` have as made anew: they aren't, where they are
            kept.
        recompute: whether a stage's layers are recomputed; or the names of those that are.
        recompute_s: per layer, [n]: of a micro-batch, what it takes; None: nothing.
    """

    name: str
    compute_s: Vector
    fixed_bytes: Vector
    flight_bytes: Vector
    shared_in_flight: float = 1.0
    shared_once: float = 0.0
    inputs_kept: float = 0.0
    remade: int | None = None
    remade_once: float = 0.0
    recompute: bool | frozenset[str] = False
    recompute_s: Vector | None = None


@dataclass(frozen=True)
class Option:
    """How many devices a stage takes, and in which mode it runs."""

    replicas: int
    mode: int = 0
    """Position in the problem's modes."""


@dataclass(frozen=True)
class Place:
    """What an option means at a place in the list of devices.

    Attributes:
        speed: of its slowest device.
        memory_bytes: of its smallest device; infinite without a limit.
        sync_s, sync_s_per_byte: of summing gradients over its replicas, per period: a constant if
            it has parameters, and for each byte of them.
        lower_scale, upper_scale: what the wire times of the stage's cuts are multiplied with.
        units: in flight at the stage's peak, each with its `flight_bytes`.
        copies: of the parameters, with gradients, optimizer state and older versions.
    """

    speed: float = 1.0
    memory_bytes: float = float("inf")
    sync_s: float = 0.0
    sync_s_per_byte: float = 0.0
    lower_scale: float = 1.0
    upper_scale: float = 1.0
    units: float = 1.0
    copies: float = 1.0


@dataclass(frozen=True)
class StageProblem:
    """Everything a solver needs. Stage X between a and b, with option o, at place p, has

        busy = (compute[mode](X) / r + serial(X) + serial_fixed if X has parameters) / speed
             + sync if X has parameters + sync_per_byte · parameters(X)
        wire = lower_scale · lower(X) + upper_scale · upper(X)
        load = before(a) + after(layers beyond b) + (max(busy, wire) if overlap else busy + wire)
        bytes = fixed[mode](X) + copies · parameters(X)
              + units · (flight[mode](X) + shared_in_flight · shared(X) + inputs_kept · kept(X)
                         + remade(X)) - remade_once · remade(X)
              + shared_once · shared(X) + lower_bytes(X) + upper_bytes(X)
              + max workspace of a layer of X

    where a layer's number is added up over the layers of a set, and a tensor's as `CutTensor` says.
    An option is allowed where its bytes are within its place's memory.

    Attributes:
        names: of the n layers, in topological order.
        needs: per layer, bit mask of the layers it uses; all come before it.
        together: bit masks of layers that must share a stage.
        tensors, shared, modes, options: as above.
        parameter_bytes, serial_s, workspace_bytes, before_s, after_s: per layer, [n].
        serial_fixed_s: once for a stage with parameters.
        overlap: transfers run beside computing.
        devices: K, how many there are. A stage with r replicas whose first device is the k-th
            from the end takes the devices from there on; devices may be left out.
        place: (option's position, k) → Place; pure. Called with replicas ≤ k ≤ devices.
        stages: how many stages the chain must have; None: any number.
        pins: layer → the stage it must be on, 0 the first; only where `stages` is given.
    """

    names: tuple[str, ...]
    needs: tuple[int, ...]
    tensors: tuple[CutTensor, ...]
    modes: tuple[Mode, ...]
    options: tuple[Option, ...]
    parameter_bytes: Vector
    devices: int
    place: Callable[[int, int], Place]
    together: tuple[int, ...] = ()
    shared: tuple[Shared, ...] = ()
    serial_s: Vector | None = None
    serial_fixed_s: float = 0.0
    workspace_bytes: Vector | None = None
    before_s: Vector | None = None
    after_s: Vector | None = None
    overlap: bool = True
    stages: int | None = None
    pins: tuple[tuple[int, int], ...] = ()

    @property
    def layers(self) -> int:
        """n."""
        return len(self.names)

    @property
    def full(self) -> int:
        """Bit mask of all layers."""
        return (1 << self.layers) - 1


@dataclass(frozen=True)
class ChosenStage:
    """One stage of an answer.

    Attributes:
        layers: bit mask.
        option: position in the problem's options.
        k: devices from its first one to the end of the list, itself included.
    """

    layers: int
    option: int
    k: int


@dataclass(frozen=True)
class Cut:
    """An answer: stages from the input side on, and their largest load in s."""

    stages: tuple[ChosenStage, ...]
    objective_s: float


@dataclass(frozen=True)
class Answer:
    """What a solver found.

    Attributes:
        cut: the best one found; None where there is none.
        bound_s: no cut that was asked for has a smaller objective. Without any cut: infinite, or
            what objectives were to be below.
        optimal: nothing more can be known: the cut is proven best, or it is that there is none.
        interrupted: stopped from outside.
    """

    cut: Cut | None
    bound_s: float
    optimal: bool
    interrupted: bool = False


# The layer graph in bit masks -------------------------------------------------------------------


def needs_of(graph: nx.DiGraph) -> tuple[int, ...]:
    """`StageProblem.needs` of a graph whose nodes are listed in topological order."""
    position = {node: k for k, node in enumerate(graph)}
    return tuple(sum(1 << position[a] for a in graph.pred[node]) for node in graph)


def members(mask: int) -> Iterator[int]:
    """Positions of the layers in a bit mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def closures(needs: Sequence[int], together: Sequence[int] = ()) -> list[int]:
    """Per layer, bit mask of its group and of all that this needs, however far away.

    The groups are the finest that no downset takes apart: `together` joins layers, and joins all
    that lies on a cycle between groups already joined. Layers of one group have the same closure,
    those of different ones don't.

    Args:
        needs: per layer, in topological order, bit mask of the layers that it uses.
        together: bit masks of layers that must share a stage.
    """
    found = [0] * len(needs)
    for group in _joined(needs, together) if together else (1 << k for k in range(len(needs))):
        inside = list(members(group))
        for layer in inside:
            for other in members(needs[layer] & ~group):
                group |= found[other]
        for layer in inside:
            found[layer] = group
    return found


def _joined(needs: Sequence[int], together: Sequence[int]) -> Iterator[int]:
    """The groups, as bit masks, in a topological order."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(needs)))
    graph.add_edges_from((a, k) for k, mask in enumerate(needs) for a in members(mask))
    for group in together:
        nx.add_cycle(graph, members(group))
    joined = nx.condensation(graph)
    for node in nx.topological_sort(joined):
        yield sum(1 << layer for layer in joined.nodes[node]["members"])


# A stage's load and bytes, straight from the definition: slow, for checks and for answers -------


def stage_load(problem: StageProblem, below: int, layers: int, option: int, k: int) -> float:
    """Load in s of the stage with these `layers` above the downset `below`."""
    chosen = problem.options[option]
    mode, place = problem.modes[chosen.mode], problem.place(option, k)
    inside = list(members(layers))
    parameters = _total(problem.parameter_bytes, inside)
    busy = _total(mode.compute_s, inside) / chosen.replicas + _total(problem.serial_s, inside)
    busy += problem.serial_fixed_s if parameters else 0.0
    busy = busy / place.speed + (place.sync_s if parameters else 0.0)
    busy += place.sync_s_per_byte * parameters
    lower = upper = 0.0
    for side, tensor in _at_cuts(problem, below, layers):
        if side == "lower":
            lower += tensor.lower_s
        else:
            upper += tensor.upper_s
    wire = place.lower_scale * lower + place.upper_scale * upper
    load = max(busy, wire) if problem.overlap else busy + wire
    load += _total(problem.before_s, members(below))
    return load + _total(problem.after_s, members(problem.full & ~(below | layers)))


def stage_bytes(problem: StageProblem, below: int, layers: int, option: int, k: int) -> float:
    """Bytes that the stage with these `layers` above the downset `below` holds at its peak."""
    chosen = problem.options[option]
    mode, place = problem.modes[chosen.mode], problem.place(option, k)
    inside = list(members(layers))
    shared = sum(item.nbytes for item in problem.shared if item.ends & layers)
    total = _total(mode.fixed_bytes, inside)
    total += place.copies * _total(problem.parameter_bytes, inside)
    flight = _total(mode.flight_bytes, inside) + mode.shared_in_flight * shared
    for side, tensor in _at_cuts(problem, below, layers):
        if side == "lower":
            total += tensor.lower_bytes
            flight += mode.inputs_kept * tensor.kept_bytes
            if mode.remade is not None and tensor.remade_bytes:
                flight += tensor.remade_bytes[mode.remade]
                total -= mode.remade_once * tensor.remade_bytes[mode.remade]
        else:
            total += tensor.upper_bytes
    total += place.units * flight + mode.shared_once * shared
    if problem.workspace_bytes is not None:
        total += max(float(problem.workspace_bytes[j]) for j in inside)
    return total


def fits(problem: StageProblem, below: int, layers: int, option: int, k: int) -> bool:
    """Whether the stage is within its devices' memory; rounding is forgiven."""
    limit = problem.place(option, k).memory_bytes
    return stage_bytes(problem, below, layers, option, k) <= limit * FITS


Step = tuple[int, int, int, int]
"""Positions in a list of downsets of a stage's lower and upper one, its option, and k."""


def cut_of(problem: StageProblem, downsets: Sequence[int], steps: Iterable[Step]) -> Cut:
    """A chain of downsets, bit masks of layers, as an answer; its objective by `stage_load`."""
    chosen, worst = [], 0.0
    for below, above, option, k in steps:
        layers = downsets[above] & ~downsets[below]
        chosen.append(ChosenStage(layers, option, k))
        worst = max(worst, stage_load(problem, downsets[below], layers, option, k))
    return Cut(tuple(chosen), worst)


def cut_on_last_devices(
    problem: StageProblem, downsets: Sequence[int], chain: Sequence[tuple[int, int, int]]
) -> Cut:
    """As `cut_of`, of steps without k: on as many devices as they take, the last ones."""
    replicas = [problem.options[option].replicas for _, _, option in chain]
    needed = [*accumulate(reversed(replicas))][::-1]
    return cut_of(problem, downsets, [(*step, k) for step, k in zip(chain, needed, strict=True)])


def cut_load(problem: StageProblem, cut: Cut) -> float:
    """The largest load of an answer's stages; infinite where one doesn't fit its devices."""
    below, worst = 0, 0.0
    for stage in cut.stages:
        if not fits(problem, below, stage.layers, stage.option, stage.k):
            return float("inf")
        load = stage_load(problem, below, stage.layers, stage.option, stage.k)
        worst = max(worst, load)
        below |= stage.layers
    return worst


def _at_cuts(problem: StageProblem, below: int, layers: int) -> Iterator[tuple[str, CutTensor]]:
    beyond = ~(below | layers)
    if below | layers == problem.full:
        beyond = 0
    for tensor in problem.tensors:
        if tensor.ends & layers:
            if tensor.ends & below:
                yield "lower", tensor
            elif tensor.ends & beyond:
                yield "upper", tensor


def _total(values: Vector | None, inside: Iterable[int]) -> float:
    if values is None:
        return 0.0
    return float(np.sum(values[list(inside)]))


Deadline = float | None
"""When a search ends, by `time.monotonic`: with what it knows, or by OutOfTime. None: never."""


class OutOfTime(Exception):  # noqa: N818 - it ends a search, nothing went wrong
    """The deadline has passed."""


def check_time(deadline: Deadline) -> None:
    """Raises OutOfTime when a deadline has passed."""
    if deadline is not None and monotonic() > deadline:
        raise OutOfTime
