"""The critical cycles of a branch: what `critical_cycles` needs to know of its systems."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...costs.memory import holdings
from ...costs.stage_costs import sized
from ...partition.dp.cycle_stages import (
    CycleMessage,
    CycleProblem,
    CycleRule,
    CycleStage,
    Flight,
)
from ...partition.problem import Mode, Vector
from ...schedules.schedules import PATTERNS
from ...systems.operations import BACKWARD, B, F
from ...systems.variants import ScheduleRule, Variant
from ..choices import Branch
from .places import Assumptions
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

_REPEATS = 2
"""Mini-batches, after the pipeline has filled up, until a stage has held what it holds at most."""


def has_cycles(relaxation: Relaxation, branch: Branch) -> bool:
    """Whether plans of so many stages, each with a device of its own, are all plans of a branch,
    and their schedule says which cycles it has."""
    question, n, stages = relaxation.question, branch.micro_batches, branch.stages
    cluster = question.cluster
    if relaxation.variant.schedule not in _RULES or stages is None or branch.pins:
        return False
    listed = len(cluster.devices) == stages or (cluster.uniform and cluster.flat)
    alone = relaxation.replica_counts(n) == [1] and relaxation.allows(stages, n)
    return alone and listed and cluster.overlap and question.update_every == 1


def cycle_problem(
    relaxation: Relaxation,
    branch: Branch,
    *,
    every_user: bool = False,
    every_mode: bool = False,
    share: float = 1.0,
) -> CycleProblem | None:
    """The cycles of plans with so many micro-batches and stages, each with a device of its own.

    Args:
        every_user: a guess, not a bound: all messages go to the next stage, which needn't be.
        every_mode: as of `CycleProblem`.
        share: of each device's memory, that a guess may use.

    None where there are none (`has_cycles`).
    """
    variant, stages = relaxation.variant, branch.stages
    if stages is None or not has_cycles(relaxation, branch):
        return None
    n, found = branch.micro_batches, stage_problem(relaxation, branch)
    cluster, ranges = relaxation.question.cluster, relaxation.limit_ranges(stages)
    places = [found.loads.place(0, stages - s) for s in range(stages)]
    latency_s = min((link.latency_s for link in cluster.links), default=0.0)
    return replace(
        found,
        rule=_RULES[variant.schedule],
        stages=tuple(
            CycleStage(
                speed=place.speed,
                memory_bytes=place.memory_bytes * share,
                copies=place.copies - 1.0,
                per_byte_s=place.sync_s_per_byte,
                flights=_flights(variant, stages, s, n, ranges[s]),
            )
            for s, place in enumerate(places)
        ),
        every_user=every_user,
        every_mode=every_mode,
        latency_s=latency_s,
    )


def stage_problem(relaxation: Relaxation, branch: Branch) -> CycleProblem:
    """What stages cost alone, in no sequence yet, with messages over the fastest link and without
    latencies."""
    variant, n, graph = relaxation.variant, branch.micro_batches, relaxation.graph
    loads = relaxation.problem(branch, Assumptions(view="cycle", unreplicated=True))
    size = relaxation.size(n, 1)
    costs = graph.costs(size)
    once = costs.input_s if variant.split_backward else costs.backward_s
    modes = [loads.modes[option.mode] for option in loads.options]
    backward = [
        once + _recomputed_s(mode, costs.recompute_s, costs.forward_s, relaxation) for mode in modes
    ]
    path = graph.heaviest_path(costs.forward_s + costs.backward_s)
    # Of a whole mini-batch, where a backward takes it.
    gradients = n if variant.backward_unit == "mini" else 1
    fastest = relaxation.question.cluster.fastest_bytes_per_s
    return CycleProblem(
        loads=replace(loads, modes=tuple(modes)),
        rule="room" if variant.backward_unit == "mini" else "turns",
        micro_batches=n,
        stages=(),
        forward_s=np.array([costs.forward_s for _ in modes]),
        backward_s=np.array(backward),
        messages=_messages(relaxation, gradients, size),
        path=tuple(path),
        path_s=tuple((1 + gradients) * nbytes / fastest for nbytes in graph.sent_along(path, size)),
        latency_s=0.0,
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
    stages = []
    for s, stage in enumerate(problem.stages):
        limit = min(cap, stage.flights[-1].limit)
        versions = 1
        if variant.synchronises:
            # Versions that stage 0 still enters with; where they are kept, of all in flight.
            latest = variant.backward_weights == "latest"
            versions = most - limit + 1 if latest else most
        flight = Flight(limit, limit, float(versions), float(limit * n))
        last = s == len(problem.stages) - 1
        speed = stage.speed if last else stage.speed / pace
        stages.append(replace(stage, flights=(flight,), speed=speed))
    return replace(problem, stages=tuple(stages))


def _recomputed_s(
    mode: Mode, recompute_s: Vector, forward_s: Vector, relaxation: Relaxation
) -> Vector:
    """What a mode computes again, per layer."""
    if isinstance(mode.again, bool):
        return forward_s if mode.again else np.zeros_like(forward_s)
    inside = np.array([float(name in mode.again) for name in relaxation.graph.names])
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
        units, versions, kept = _held(variant, n, ahead, limit)
        found.setdefault(units, Flight(limit, units, versions, kept))
    return tuple(found[units] for units in sorted(found))


@lru_cache(maxsize=4096)
def _held(variant: Variant, n: int, ahead: int, limit: int) -> tuple[int, float, float]:
    """Units in flight, and versions and micro-batches kept when a backward runs."""
    first, further = PATTERNS[variant.schedule](n, ahead, limit)
    at = first.find(B)
    if at < 0:
        # Where as many run ahead as a mini-batch has, the first backward is in the next row.
        at = len(first) + further.find(B)
    units = (first + further)[:at].count(F)
    if variant.synchronises and not variant.stashes:
        counted = replace(variant, forward_weights="latest", backward_weights="latest")
    else:
        counted = replace(variant, forward_weights="latest")
    kinds = first + further * (_REPEATS + -(-units // n))
    moments = [m for m in holdings(counted, n, 1, kinds).moments if m.kind == BACKWARD]
    fullest = max(moments, key=lambda m: (m.kept, m.versions))
    return max(units, 1), float(fullest.versions), float(fullest.kept)
