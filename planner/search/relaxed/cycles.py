"""The critical cycles of a branch: what `critical_cycles` needs to know of its systems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from math import lcm, prod
from typing import Literal

import msgspec
import numpy as np

from ...cluster.cluster import Cluster, Device
from ...cluster.contention import AllReduceTimes
from ...costs.memory import holdings
from ...costs.stage_costs import sized
from ...partition.dp.cycle_devices import (
    CycleDevices,
    CycleStage,
    Flight,
    Machines,
    in_any_sequence,
    in_groups,
    in_machines,
    in_sequence,
)
from ...partition.dp.cycle_stages import CycleMessage, CycleProblem, CycleRule
from ...partition.problem import Mode, Option, Place, StageProblem, Vector
from ...schedules.schedules import PATTERNS
from ...systems.operations import BACKWARD, B, F, numbered
from ...systems.variants import ScheduleRule, Variant
from ...systems.versions import entry_versions
from ..choices import Branch
from .places import Assumptions, PlaceMaker
from .relaxation import Relaxation

_RULES: dict[ScheduleRule, CycleRule] = {
    "1f1b": "turns",
    "1f1b-micro": "turns",
    "1f1b-deep": "turns",
    "nf1b": "room",
    "1f1b-flush": "flush",
    "1f1b-split": "flush",
    "gpipe": "forwards-first",
}
"""Which cycles count in a schedule, where each stage has a device of its own."""

_REPLICATED: tuple[ScheduleRule, ...] = (
    "1f1b-flush",
    "1f1b-split",
    "gpipe",
    "1f1b-micro",
    "1f1b-deep",
    "nf1b",
    "1f1b",
)
"""Of them, those where they count with replicas, too."""

_REPEATS = 2
"""Mini-batches, after the pipeline has filled up, until a stage has held what it holds at most."""


_MOST_NEAR = 64
"""Devices × those of a machine: with more, tables don't tell in which they are."""

_MOST_STATES = 2_000
"""Of how many devices of each kind there may be of those behind a stage: with more, tables take too
long."""


def has_cycles(relaxation: Relaxation, branch: Branch) -> bool:
    """Whether the schedule of so many stages, each with a device of its own, says which cycles it
    has."""
    question, stages = relaxation.question, branch.stages
    if relaxation.variant.schedule not in _RULES or stages is None:
        return False
    runs = relaxation.allows(stages, branch.micro_batches) and question.update_every == 1
    if prod(len(mine) + 1 for mine in kinds_of(question.cluster)) > _MOST_STATES:
        return False
    return runs and question.cluster.overlap


def has_replicated_cycles(relaxation: Relaxation, branch: Branch) -> bool:
    """The same where stages have replicas, of however many there are."""
    cluster, n = relaxation.question.cluster, branch.micro_batches
    if relaxation.variant.schedule not in _REPLICATED or branch.pins:
        return False
    if branch.stages is not None and branch.stages >= len(cluster.devices):
        return False
    alike = cluster.uniform and cluster.overlap and relaxation.question.update_every == 1
    return alike and len(cluster.devices) > 1 and relaxation.replica_counts(n) != [1]


def same_anywhere(cluster: Cluster, stages: int, *, any_sequence: bool) -> bool:
    """Whether a cut into so many stages on devices of given kinds, or of given positions where the
    list says the sequence, is one plan: no other devices are meant by that."""
    return cluster.flat or (len(cluster.devices) == stages and not any_sequence)


def kinds_of(cluster: Cluster) -> list[list[int]]:
    """Positions of devices by kind, by memory and speed; the fastest kind first."""
    kinds = dict[Hashable, list[int]]()
    for position, device in enumerate(cluster.devices):
        kinds.setdefault(device.alike, []).append(position)
    return sorted(kinds.values(), key=lambda mine: -cluster.devices[mine[0]].speed)


def cycle_problem(
    relaxation: Relaxation,
    branch: Branch,
    *,
    any_sequence: bool = False,
    every_mode: bool = False,
    share: float = 1.0,
    replicated: bool = False,
) -> CycleProblem | None:
    """The cycles of plans with so many micro-batches and stages, each with a device of its own.

    Args:
        replicated: of those instead where some stages have replicas; of any number of stages, where
            the branch has any.
        any_sequence: devices are taken in any, else as they are listed.
        every_mode: as of `CycleProblem`.
        share: of each device's memory, that a guess may use.

    None where there are none (`has_cycles`).
    """
    variant, stages, n = relaxation.variant, branch.stages, branch.micro_batches
    known = has_replicated_cycles if replicated else has_cycles
    if not known(relaxation, branch):
        return None
    found = stage_problem(relaxation, branch, replicated=replicated)
    links = relaxation.question.cluster.networks
    if replicated:
        devices = _groups(relaxation, branch, share)
    else:
        assert stages is not None
        loads = found.loads
        devices = _devices(relaxation, loads, n, stages, share, any_sequence=any_sequence)
    return replace(
        found,
        rule=_RULES[variant.schedule],
        devices=devices,
        exchanges=tuple(exchanges(relaxation)),
        every_mode=every_mode,
        latency_s=min((link.latency_s for link in links), default=0.0),
        split=variant.split_backward,
        entered="" if replicated else _entered(variant),
    )


def exchanges(relaxation: Relaxation) -> Iterator[tuple[int, float]]:
    """Layers that share parameters and may be on several stages, as a bit mask, and what summing
    the gradients of their copies takes in a period at the least."""
    question, position = relaxation.question, relaxation.graph.position
    devices = len(question.cluster.devices)
    if question.tied != "split" or devices < 2:
        return
    sums = AllReduceTimes(question.cluster)
    # Of numbers of devices that weren't measured the smallest takes least.
    measured = [each.processes for each in question.cluster.sums]
    known = {*range(2, 3 + len(measured)), *measured}
    for shared in question.profile.shared:
        most = devices if relaxation.freedom.replicas else min(len(shared.layers), devices)
        counts = [count for count in known if count <= max(most, 2)]
        fixed_s, per_byte_s = map(min, zip(*map(sums.least, counts), strict=True))
        # Those that the same stages have copies of are summed in one.
        seconds = fixed_s / len(question.profile.shared) + per_byte_s * shared.parameter_bytes
        yield sum(1 << position[name] for name in shared.layers), seconds / question.update_every


def _entered(variant: Variant) -> Literal["", "used", "stashed"]:
    """How long the first stage's versions are held, where its limit says how many there are."""
    if not variant.synchronises or variant.schedule != "1f1b":
        return ""
    return "stashed" if variant.stashes else "used"


def stage_problem(
    relaxation: Relaxation, branch: Branch, *, replicated: bool = False
) -> CycleProblem:
    """What stages cost alone, in no sequence yet, with messages over the fastest link and without
    latencies.

    Args:
        replicated: stages may have replicas: no more than with any number of them.
    """
    variant, n, graph = relaxation.variant, branch.micro_batches, relaxation.graph
    wires = _most_wires(relaxation, n) if replicated else 1
    loads = relaxation.problem(branch, Assumptions(view="cycle", unreplicated=not replicated))
    whole = replicated and variant.whole_mini_batches
    if not whole:
        # Of more replicas each computes less again at once.
        most = max(option.replicas for option in loads.options)
        loads = replace(loads, options=tuple(x for x in loads.options if x.replicas == most))
    shares = [option.replicas if whole else 1 for option in loads.options]
    sized_costs = [graph.costs(relaxation.size(n, share)) for share in shares]
    modes = [
        replace(mode, compute_s=mode.compute_s / share)
        for share, mode in zip(shares, (loads.modes[x.mode] for x in loads.options), strict=True)
    ]
    backward = [
        (costs.input_s if variant.split_backward else costs.backward_s)
        + _recomputed_s(mode, costs.recompute_s, costs.forward_s, relaxation)
        for mode, costs in zip(modes, sized_costs, strict=True)
    ]
    size = relaxation.size(n, 1)
    costs = graph.costs(size)
    path = graph.heaviest_path(costs.forward_s + costs.backward_s)
    # Of a whole mini-batch, where a backward takes it.
    gradients = max(n // wires, 1) if variant.backward_unit == "mini" else 1
    fastest, operation = (
        relaxation.question.cluster.fastest_bytes_per_s,
        relaxation.question.profile.operation,
    )
    sent = [nbytes / (wires if whole else 1) for nbytes in graph.sent_along(path, size)]
    return CycleProblem(
        loads=replace(loads, modes=tuple(modes)),
        rule="room" if variant.backward_unit == "mini" else "turns",
        micro_batches=n,
        devices=CycleDevices((), (), ()),
        forward_s=np.array([costs.forward_s for costs in sized_costs]),
        backward_s=np.array(backward),
        messages=_messages(relaxation, gradients, size),
        path=tuple(path),
        path_s=tuple((1 + gradients) * nbytes / fastest for nbytes in sent),
        latency_s=0.0,
        operation_s=0.0 if operation is None else operation.forward_s,
        shares=tuple(shares) if whole else (),
    )


def filled_up(problem: CycleProblem, variant: Variant, cap: int, pace: float) -> CycleProblem:
    """A guess, not a bound, at how list schedules run: each stage has as much in flight as limits
    of at most `cap` allow, and all of that is there when a backward begins.

    Args:
        pace: of all stages but the last, as if they took so many times as long. Where it is the
            last that sets the period, gradients leave it evenly, and all others keep up; where it
            is another one, they come there sooner each time, until forwards are put off.
    """
    most, n = min(cap, problem.stages[0].flights[-1].limit), problem.micro_batches

    def filled(s: int, stage: CycleStage) -> CycleStage:
        limit = min(cap, stage.flights[-1].limit)
        versions = 1
        if variant.synchronises:
            # Versions that stage 0 still enters with; where they are kept, of all in flight.
            latest = variant.backward_weights == "latest"
            versions = most - limit + 1 if latest else most
        flight = Flight(limit, limit, float(versions), float(limit * n))
        last = s == len(problem.stages) - 1
        return replace(stage, flights=(flight,), speed=stage.speed / (1 if last else pace))

    return replace(problem, devices=problem.devices.changed(filled))


def _devices(
    relaxation: Relaxation,
    loads: StageProblem,
    n: int,
    stages: int,
    share: float,
    *,
    any_sequence: bool,
) -> CycleDevices:
    """What stages may have of the cluster's devices."""
    cluster, ranges = relaxation.question.cluster, relaxation.limit_ranges(stages)
    flights = [_flights(relaxation.variant, stages, s, n, ranges[s]) for s in range(stages)]

    @cache
    def places(device: Device) -> list[Place]:
        alike = msgspec.structs.replace(cluster, devices=(device,) * stages, links=())
        place = PlaceMaker(
            replace(relaxation.question, cluster=alike),
            relaxation.freedom,
            n,
            Assumptions(view="cycle", unreplicated=True),
            loads.options,
            syncs=True,
            every_device=True,
        ).places()
        return [place(0, stages - s) for s in range(stages)]

    def stage_of(s: int, device: Device) -> CycleStage:
        place = places(device)[s]
        return CycleStage(
            speed=place.speed,
            memory_bytes=place.memory_bytes * share,
            copies=place.copies - 1.0,
            per_byte_s=place.sync_s_per_byte,
            flights=flights[s],
            first=not s,
        )

    machines, count = _machines(cluster), len(cluster.devices)
    # Where each stage has the device at its place, cuts are listed.
    if cluster.uniform and machines and (any_sequence or stages < count):
        first = cluster.devices[0]
        return in_machines(count, machines, stages, lambda s: stage_of(s, first))
    if any_sequence or cluster.uniform:
        kinds = kinds_of(cluster)
        firsts = [cluster.devices[mine[0]] for mine in kinds]
        counts, speeds = [len(mine) for mine in kinds], [device.speed for device in firsts]
        return in_any_sequence(counts, speeds, stages, lambda s, g: stage_of(s, firsts[g]))
    speeds = [device.speed for device in cluster.devices]
    return in_sequence(speeds, stages, lambda s, d: stage_of(s, cluster.devices[d]))


def _most_wires(relaxation: Relaxation, n: int) -> int:
    """The most wires between the replicas of two stages: lcm(r, r'), of all r and r' that fit."""
    counts, devices = relaxation.replica_counts(n), len(relaxation.question.cluster.devices)
    return max(lcm(a, b) for a, b in product(counts, counts) if a + b <= max(devices, 2))


def _groups(relaxation: Relaxation, branch: Branch, share: float) -> CycleDevices:
    """What stages with replicas may have of a cluster's equal devices."""
    n = branch.micro_batches
    replicas, devices = relaxation.replica_counts(n), len(relaxation.question.cluster.devices)
    place = PlaceMaker(
        relaxation.question,
        relaxation.freedom,
        n,
        Assumptions(view="cycle", identical=True),
        [Option(r) for r in replicas],
        syncs=True,
        every_device=False,
    ).places()

    in_turns = relaxation.variant.schedule == "1f1b-micro"

    def stage_of(k: int, r: int, behind: int, apart: bool) -> CycleStage:
        found = place(replicas.index(r), k)
        return CycleStage(
            speed=found.speed,
            memory_bytes=found.memory_bytes * share,
            copies=found.copies - 1.0,
            per_byte_s=max(found.sync_s_per_byte, apart_s[r] if apart else 0.0),
            flights=tuple(_group_flights(relaxation, n, k, r, behind)),
            replicas=r,
            whole=relaxation.variant.whole_mini_batches,
            after_update=max(n - (-(-k // r) - 1) * r, 1) if in_turns else 0,
        )

    rule = relaxation.variant.schedule
    machines = _machines(relaxation.question.cluster)
    apart_s = {r: _apart_s(relaxation.question.cluster, r) for r in replicas if machines}
    return in_groups(
        devices,
        replicas,
        stage_of,
        branch.stages,
        counted=rule in ("nf1b", "1f1b"),
        machines=machines,
    )


def _machines(cluster: Cluster) -> Machines | None:
    """Those of equal devices; None where they make no difference, or tables would take too long."""
    homes = Counter(device.machine for device in cluster.devices)
    most, far = max(homes.values()), cluster.between_machines or cluster.network
    share = far.top_bytes_per_s / cluster.fastest_bytes_per_s
    if cluster.flat or cluster.links or share >= 1 or len(cluster.devices) * most > _MOST_NEAR:
        return None
    return Machines(len(homes), most, share)


def _apart_s(cluster: Cluster, replicas: int) -> float:
    """What a byte takes to be summed over so many devices in several machines, at the least."""
    sums, last = AllReduceTimes(cluster), len(cluster.devices) - replicas
    ranges = [range(first, first + replicas) for first in range(last + 1)]
    several = [r for r in ranges if len({cluster.devices[d].machine for d in r}) > 1]
    return min((sums.of(r)[1] for r in several), default=0.0)


def _group_flights(relaxation: Relaxation, n: int, k: int, r: int, behind: int) -> Iterator[Flight]:
    """What r replicas may have in flight of N micro-batches, k devices being from the first of them
    on, and so many stages behind them: of a pipeline that flushes each of them, else all
    together."""
    variant, mine = relaxation.variant, n // r
    # As the schedule says (`schedules`).
    each = min(-(-k // r), mine)
    if variant.schedule in ("1f1b", "nf1b"):
        limits = relaxation.limit_ranges(1 + behind)[0]
        own = n if variant.schedule == "1f1b" else mine
        yield from _flights(variant, 1 + behind, 0, own, limits)
    elif variant.schedule == "1f1b-deep":
        limits, found = relaxation.limit_ranges(1 + behind)[0], dict[int, Flight]()
        for limit in range(limits[0], limits[1] + 1):
            ahead = min((-(-k // r) - 1) * r, (limit - 1) * n)
            found.setdefault(ahead, Flight(limit, ahead + r, 1.0, float(-(-ahead // r) + 1)))
        yield from found.values()
    elif variant.forwards_first:
        # Of its forwards some may run while those behind it have begun their backwards.
        yield Flight(1, mine + max(-(-(k - r) // r) - 1, 0), 1.0, float(mine))
    elif variant.flushes:
        yield Flight(1, each, 1.0, float(each))
    else:
        yield Flight(2 if k > r else 1, each * r, 1.0, float(each))


def _recomputed_s(
    mode: Mode, recompute_s: Vector, forward_s: Vector, relaxation: Relaxation
) -> Vector:
    """What a mode computes again, per layer."""
    if isinstance(mode.recompute, bool):
        return forward_s if mode.recompute else np.zeros_like(forward_s)
    inside = np.array([float(name in mode.recompute) for name in relaxation.graph.names])
    found: Vector = recompute_s * inside
    return found


def _messages(relaxation: Relaxation, gradients: int, size: int) -> tuple[CycleMessage, ...]:
    fastest, graph = relaxation.question.cluster.fastest_bytes_per_s, relaxation.graph
    found = []
    for tensor in graph.tensors:
        edge, maker = tensor.edge, tensor.ends & -tensor.ends
        seconds = sized(edge.fixed_bytes, edge.bytes_per_sample, size) / fastest
        users = tensor.ends & ~maker & ((1 << len(graph.names)) - 1)
        back_s = seconds * gradients if edge.needs_grad else 0.0
        found.append(CycleMessage(maker.bit_length() - 1, users, seconds, back_s, edge.needs_grad))
    return tuple(found)


def _flights(
    variant: Variant, stages: int, s: int, n: int, limits: tuple[int, int]
) -> tuple[Flight, ...]:
    """What a stage may have in flight, by rising units; of limits for the same, the lowest."""
    ahead = stages - 1 - s
    if variant.schedule not in PATTERNS:
        return tuple(
            Flight(limit, limit, 1.0, float(n)) for limit in range(limits[0], limits[1] + 1)
        )
    found = dict[int, Flight]()
    for limit in range(limits[0], limits[1] + 1):
        units, versions, kept = _held(variant, n, ahead, limit, stages)
        found.setdefault(units, Flight(limit, units, versions, kept))
    return tuple(found[units] for units in sorted(found))


@lru_cache(maxsize=4096)
def _held(
    variant: Variant, n: int, ahead: int, limit: int, stages: int
) -> tuple[int, float, float]:
    """Units in flight, and versions and micro-batches kept when a backward runs; where the first
    stage's limit isn't known, of versions those alone that its own limit leads to."""
    pattern = PATTERNS[variant.schedule]
    first, further = pattern(n, ahead, limit)
    at = first.find(B)
    if at < 0:
        # Where as many run ahead as a mini-batch has, the first backward is in the next row.
        at = len(first) + further.find(B)
    units = (first + further)[:at].count(F)
    repeats, entries = _REPEATS + -(-units // n), tuple[int, ...]()
    counted = replace(variant, forward_weights="latest")
    if variant.synchronises and variant.schedule == "1f1b-micro":
        # What enters is the same under any limit.
        counted, micro = variant, variant.backward_unit == "micro"
        entering, then = pattern(n, stages - 1, limit)
        ops = numbered(entering + then * (2 * repeats + stages), n, micro=micro)
        entries = entry_versions(variant, n, ops)
    elif variant.synchronises and not variant.stashes:
        counted = replace(counted, backward_weights="latest")
    moments = holdings(counted, n, 1, first + further * repeats, entries).moments
    fullest = max((m for m in moments if m.kind == BACKWARD), key=lambda m: (m.kept, m.versions))
    return max(units, 1), float(fullest.versions), float(fullest.kept)
