"""The critical cycles of a branch: what `critical_cycles` needs to know of its systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

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

    None where these aren't all plans of the branch, or nothing is known of its schedule.
    """
    variant, question, stages = relaxation.variant, relaxation.question, branch.stages
    rule, cluster = _RULES.get(variant.schedule), question.cluster
    n = branch.micro_batches
    if rule is None or stages is None or branch.pins or question.update_every > 1:
        return None
    listed = len(cluster.devices) == stages or (cluster.uniform and cluster.flat)
    if relaxation.replica_counts(n) != [1] or not listed or not cluster.overlap:
        return None
    if not relaxation.allows(stages, n):
        return None
    loads = relaxation.problem(branch, Assumptions(view="cycle", unreplicated=True))
    size = relaxation.size(n, 1)
    costs = relaxation.graph.costs(size)
    once = costs.input_s if variant.split_backward else costs.backward_s
    modes = [loads.modes[option.mode] for option in loads.options]
    forward = np.array([costs.forward_s for _ in modes])
    backward = np.array(
        [once + _recomputed_s(mode, costs.again_s, costs.forward_s, relaxation) for mode in modes]
    )
    ranges = relaxation.limit_ranges(stages)
    places = [loads.place(0, stages - s) for s in range(stages)]
    latency_s = min((link.latency_s for link in cluster.links), default=0.0)
    return CycleProblem(
        loads=replace(loads, modes=tuple(modes)),
        rule=rule,
        micro_batches=n,
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
        forward_s=forward,
        backward_s=backward,
        messages=(messages := _messages(relaxation, n, size)),
        every_user=every_user,
        every_mode=every_mode,
        path=(path := tuple(relaxation.graph.heaviest_path(costs.forward_s + costs.backward_s))),
        path_s=_along(path, messages),
        latency_s=latency_s,
    )


def _along(path: Sequence[int], messages: Sequence[CycleMessage]) -> tuple[float, ...]:
    """What a path's layers send to the next one, both ways."""
    found = dict.fromkeys(pairwise(path), 0.0)
    for message in messages:
        for a, b in pairwise(path):
            if message.maker == a and message.users >> b & 1 and message.returns:
                found[a, b] = max(found[a, b], message.wire_s + message.back_s)
    return tuple(found.values())


def _recomputed_s(
    mode: Mode, recompute_s: Vector, forward_s: Vector, relaxation: Relaxation
) -> Vector:
    """What a mode computes again, per layer."""
    if isinstance(mode.again, bool):
        return forward_s if mode.again else np.zeros_like(forward_s)
    inside = np.array([float(name in mode.again) for name in relaxation.graph.names])
    found: Vector = recompute_s * inside
    return found


def _messages(relaxation: Relaxation, n: int, size: int) -> tuple[CycleMessage, ...]:
    fastest, graph = relaxation.question.cluster.fastest_bytes_per_s, relaxation.graph
    whole = relaxation.variant.backward_unit == "mini"
    found = []
    for tensor in graph.tensors:
        edge, maker = tensor.edge, tensor.ends & -tensor.ends
        seconds = sized(edge.fixed_bytes, edge.bytes_per_sample, size) / fastest
        users = tensor.ends & ~maker & ((1 << len(graph.names)) - 1)
        back_s = seconds * (n if whole else 1) if edge.needs_grad else 0.0
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
