"""Published planners' cost models, as `StageProblem`s: what a stage's load and memory are made of.

PipeDream: Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training (2018), and
msr-fiddle/pipedream. Placement: Tarnawski et al., Efficient Algorithms for Device Placement of
DNN Graph Operators (NeurIPS'20), and msr-fiddle/dnn-partitioning. Piper: Tarnawski et al., Piper:
Multidimensional Planner for DNN Parallelization (NeurIPS'21), and msr-fiddle/piper.

Symbols: r replicas of a stage; k devices from its first one to the end of the list; B bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from timeprest.planner.partition.dp.identical_devices import IdenticalPlaces
from timeprest.planner.partition.problem import (
    CutTensor,
    Mode,
    Option,
    Place,
    StageProblem,
    Vector,
    needs_of,
)
from timeprest.profiles.errors import UserError
from timeprest.tests.benchmarks.published.workload import Node, Workload

# Parts of a `StageProblem`, made of a workload --------------------------------------------------

MAX_MODES = 64
"""Problems with more take longer than that is worth."""


def tensors_of(workload: Workload, wire_s: Iterable[tuple[float, float]]) -> tuple[CutTensor, ...]:
    """Tensors with the same ends as one; their times at a lower and an upper cut added up."""
    total: dict[int, tuple[float, float]] = {}
    for tensor, (lower, upper) in zip(workload.tensors, wire_s, strict=True):
        ends = sum(1 << k for k in {tensor.producer, *tensor.consumers})
        before = total.get(ends, (0.0, 0.0))
        if ends.bit_count() > 1 and (lower or upper):
            total[ends] = (before[0] + lower, before[1] + upper)
    return tuple(
        CutTensor(ends, lower_s=lower, upper_s=upper) for ends, (lower, upper) in total.items()
    )


def recompute_modes(nodes: Sequence[Node]) -> list[Mode]:
    """Modes that compute more and more layers again, the cheapest per byte in flight first.

    Of any stage's layers each mode then has the best first ones; one of them has as many as the
    stage needs. With many layers not every length of the list is a mode.
    """
    gains = []
    for k, node in enumerate(nodes):
        if node.recomputed is not None:
            freed = node.flight_bytes - node.recomputed.flight_bytes
            lost = node.recomputed.compute_s - node.compute_s
            if freed > 0:
                gains.append((lost / freed, k))
    order = [k for _, k in sorted(gains)]
    lengths = {round(len(order) * j / MAX_MODES) for j in range(MAX_MODES + 1)}
    return [mode_of(nodes, set(order[:length])) for length in sorted(lengths)]


def mode_of(nodes: Sequence[Node], recomputed: Set[int] = frozenset()) -> Mode:
    """Some nodes compute their activations again, where they can; the others don't."""
    ways = [
        node.recomputed if k in recomputed and node.recomputed is not None else node
        for k, node in enumerate(nodes)
    ]
    return Mode(
        name="recompute" if recomputed else "plain",
        compute_s=vector(way.compute_s for way in ways),
        fixed_bytes=vector(way.held_bytes for way in ways),
        flight_bytes=vector(way.flight_bytes for way in ways),
    )


def vector(values: Iterable[float]) -> Vector:
    """Numbers as an array."""
    return np.fromiter(values, dtype=np.float64)


# The cost models --------------------------------------------------------------------------------

MAX_DEVICES = 4096
"""Larger problems take more memory than they are worth."""

MAX_SECONDS = 1e12
"""What all layers and tensors together may take: with more, sums get out of a number's reach."""


@dataclass(frozen=True)
class Machines:
    """What a workload is to be cut for.

    Attributes:
        devices: how many there are; some may be left out.
        memory_bytes: of each; infinite without a limit.
        bandwidth_bytes_per_s: of the links between them; None where the file says what a tensor
            costs.
        micro_batches: in a mini-batch; None where the cost model doesn't ask.
        replicas: a stage may take several devices.
        recompute: layers may compute their activations again.
        transfer_scale: what times of tensors on their way between stages are multiplied with.
    """

    devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float | None
    micro_batches: int | None
    replicas: bool
    recompute: bool
    transfer_scale: float


def problem_of(
    workload: Workload,
    model: str | None = None,
    *,
    devices: int | None = None,
    bandwidth_bytes_per_s: float | None = None,
    memory_bytes: float | None = None,
    micro_batches: int | None = None,
    replicas: bool = True,
    recompute: bool = True,
    transfer_scale: float = 1.0,
) -> StageProblem:
    """A published workload under its planner's cost model. What isn't given is the file's own.

    Args:
        model: name of the cost model, of `COST_MODELS`; by default the one the file is for.
        devices: how many machines or accelerators.
        bandwidth_bytes_per_s: between any two of them. For a placement workload it takes the
            place of the file's costs of tensors.
        memory_bytes: of each device; infinite where neither this nor the file limits it.
        micro_batches: in a mini-batch (Piper).
        replicas: whether a stage may take several devices, where the cost model has that.
        recompute: whether layers may compute their activations again, likewise.
        transfer_scale: multiplies times of tensors on their way between stages: 0.001 for
            a layer graph of the placement paper as its planner takes it, the inverse of
            PipeDream's --activation_compression_ratio.

    Raises:
        UserError: no such cost model, or not this file's; something that it needs is missing, or
            out of bounds.
    """
    model = workload.cost_model if model is None else model
    if model not in COST_MODELS:
        raise UserError(f"no cost model is named {model!r}; there are {', '.join(COST_MODELS)}")
    if model != workload.cost_model:
        raise UserError(
            f"{workload.where}: its numbers are for the cost model {workload.cost_model}, not "
            f"{model}"
        )
    if memory_bytes is None:
        memory_bytes = workload.memory_bytes
    machines = Machines(
        devices=_count(workload, "devices", devices, workload.devices),
        memory_bytes=math.inf if memory_bytes is None else memory_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        micro_batches=workload.micro_batches if micro_batches is None else micro_batches,
        replicas=replicas,
        recompute=recompute,
        transfer_scale=transfer_scale,
    )
    _check(workload, machines)
    problem = COST_MODELS[model](workload, machines)
    total_s = sum(mode.compute_s.sum() for mode in problem.modes)
    total_s += sum(tensor.lower_s + tensor.upper_s for tensor in problem.tensors)
    if not total_s < MAX_SECONDS:
        raise UserError(f"{workload.where}: its layers and tensors take too long to be added up")
    return problem


def pipedream(workload: Workload, machines: Machines) -> StageProblem:
    """PipeDream's: load = max(Σ compute / r + 4·(r − 1)·P / (B·r) / r, 2·bytes / (B·r)).

    P is the stage's parameters, and bytes are of the tensors that it gets, each once, however many
    of its layers use it. Both directions of them share a link and run beside computing. What it
    sends on is its successor's load. With a memory limit, a stage holds parameters and activations
    for ⌈k / r⌉ mini-batches, its own among them: their check counts ⌈(k − r) / r⌉.
    """
    bandwidth = _bandwidth(workload, machines)
    options = tuple(
        Option(r) for r in (range(1, machines.devices + 1) if machines.replicas else (1,))
    )

    def place(r: int) -> Place:
        return Place(
            memory_bytes=machines.memory_bytes,
            sync_s_per_byte=4 * (r - 1) / (bandwidth * r * r),
            lower_scale=1 / r,
            upper_scale=0.0,
        )

    per_byte = 2 * machines.transfer_scale / bandwidth
    return _problem(
        workload,
        [(tensor.nbytes * per_byte, 0.0) for tensor in workload.tensors],
        machines.devices,
        options,
        IdenticalPlaces(options, place, copies_per_unit=1.0),
        overlap=True,
    )


def placement(workload: Workload, machines: Machines) -> StageProblem:
    """The placement paper's: load = Σ latency + Σ cost of tensors that cross the device's border.

    In or out, forward or backward; each once. Computing waits for transfers. Memory is what the
    nodes hold. No replicas.
    """
    bandwidth = machines.bandwidth_bytes_per_s
    cost_s = []
    for tensor in workload.tensors:
        seconds = tensor.cost_s if bandwidth is None else tensor.nbytes / bandwidth
        if seconds is None:
            raise UserError(f"{workload.where}: doesn't say what tensors cost; give a bandwidth")
        cost_s.append(seconds * machines.transfer_scale)
    here = Place(memory_bytes=machines.memory_bytes)
    wire_s = [(seconds, seconds) for seconds in cost_s]
    return _problem(workload, wire_s, machines.devices, (Option(1),), lambda option, k: here)


def piper(workload: Workload, machines: Machines) -> StageProblem:
    """Piper's: load = (Σ compute + 2·Σ bytes of crossing edges / B) / r + 4·(r − 1)·P / (r·B·M).

    M is the micro-batches in a mini-batch, which r divides. A stage holds, for y = ⌈k / r⌉
    micro-batches in flight, Σ(a·y + b). Each layer may compute its activations again, which costs
    time and frees memory: their planner starts without, and takes the layers that lose the least
    time per byte until the stage fits. Here that is a mode for each length of that list.
    """
    bandwidth = _bandwidth(workload, machines)
    if machines.micro_batches is None:
        raise UserError(
            f"{workload.where}: doesn't say how many micro-batches a mini-batch has; give that"
        )
    count = machines.micro_batches
    devices = min(machines.devices, count)
    most = devices if machines.replicas else 1
    recompute = machines.recompute and math.isfinite(machines.memory_bytes)
    modes = recompute_modes(workload.nodes) if recompute else [mode_of(workload.nodes)]
    options = tuple(
        Option(r, mode) for r in range(1, most + 1) if count % r == 0 for mode in range(len(modes))
    )

    def place(r: int) -> Place:
        return Place(
            memory_bytes=machines.memory_bytes,
            sync_s_per_byte=4 * (r - 1) / (r * bandwidth * count),
            lower_scale=1 / r,
            upper_scale=1 / r,
            copies=0.0,
        )

    per_byte = 2 * machines.transfer_scale / bandwidth
    return _problem(
        workload,
        [(tensor.nbytes * per_byte, tensor.nbytes * per_byte) for tensor in workload.tensors],
        devices,
        options,
        IdenticalPlaces(options, place),
        modes=modes,
    )


def _problem(
    workload: Workload,
    wire_s: Sequence[tuple[float, float]],
    devices: int,
    options: tuple[Option, ...],
    place: Callable[[int, int], Place],
    *,
    modes: Sequence[Mode] | None = None,
    overlap: bool = False,
) -> StageProblem:
    """What the cost models share. `modes`: by default one, without recomputation."""
    return StageProblem(
        names=tuple(node.name for node in workload.nodes),
        needs=needs_of(workload.graph),
        tensors=tensors_of(workload, wire_s),
        modes=tuple(modes or [mode_of(workload.nodes)]),
        options=options,
        parameter_bytes=vector(node.parameter_bytes for node in workload.nodes),
        devices=devices,
        place=place,
        overlap=overlap,
    )


COST_MODELS: dict[str, Callable[[Workload, Machines], StageProblem]] = {
    "pipedream": pipedream,
    "placement": placement,
    "piper": piper,
}
"""By the name that `Workload.cost_model` has."""


# What was asked for ----------------------------------------------------------------------------


def _count(workload: Workload, what: str, given: int | None, own: int | None) -> int:
    count = own if given is None else given
    if count is None:
        raise UserError(f"{workload.where}: doesn't say how many {what} there are; give that")
    if not 1 <= count <= MAX_DEVICES:
        raise UserError(f"{workload.where}: {count} {what}; expected 1 to {MAX_DEVICES}")
    return count


def _bandwidth(workload: Workload, machines: Machines) -> float:
    bandwidth = machines.bandwidth_bytes_per_s or workload.bandwidth_bytes_per_s
    if bandwidth is None:
        raise UserError(f"{workload.where}: doesn't say the bandwidth between devices; give that")
    if bandwidth < 1:
        raise UserError(f"{workload.where}: a bandwidth of {bandwidth:g} B/s is no link's")
    return bandwidth


def _check(workload: Workload, machines: Machines) -> None:
    """Raises UserError for numbers that no machine has."""
    bandwidth = machines.bandwidth_bytes_per_s
    for what, value in (
        ("bandwidth", 1.0 if bandwidth is None else bandwidth),
        ("memory", machines.memory_bytes),
        (
            "number of micro-batches",
            1 if machines.micro_batches is None else machines.micro_batches,
        ),
    ):
        if not value > 0:
            raise UserError(f"{workload.where}: the {what} must be more than 0, not {value:g}")
    if not 0 <= machines.transfer_scale < math.inf:
        raise UserError(f"{workload.where}: transfers can't take {machines.transfer_scale:g} times")
