"""Periods of many pipelines that run one schedule, simulated at once.

Where a pattern alone says what stages run, and no two stages' messages share a wire, operations
come in the same sequence whatever they take. So one pass over it, with a vector of times for each
stage, does for all pipelines what `steady_state` does for one; `nf1b_together` does it where times
make the sequence. It ends after some mini-batches, settled or not: a local search ranks its moves
by it, and simulates what it takes exactly.

Index letters: K pipelines; S stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..simulator.executor import execute
from ..simulator.pipeline import Link, Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES
from .nf1b_together import nf1b_periods_s
from .schedules import PATTERNS, make_schedule

Seconds = NDArray[np.float64]

_SETTLING = 4
"""Mini-batches after those that fill the pipeline, twice over."""

_MOST_OPERATIONS = 30_000
"""Of a simulation, about: of deep pipelines fewer mini-batches are."""


def simulates_together(pipeline: Pipeline) -> bool:
    """Whether it can be simulated at once with others."""
    variant = pipeline.variant
    return (
        variant.order is None
        and (variant.schedule in PATTERNS or variant.schedule == "nf1b")
        and not variant.split_backward
        and not pipeline.placement
        and not pipeline.paces
        and not any(link.routes for link in pipeline.links)
    )


def stand_in(pipeline: Pipeline) -> Pipeline:
    """What a pipeline is ranked by: where backwards are split, the same with whole ones, whose
    schedule doesn't depend on times."""
    if not pipeline.variant.split_backward or pipeline.placement:
        return pipeline
    whole = replace(pipeline.variant, schedule="1f1b-flush", split_backward=False)
    return replace(pipeline, variant=whole, weight_s=())


def periods_s(pipelines: Sequence[Pipeline]) -> Seconds:
    """Period of each, about, [K]: the mean over the second half of a simulation that begins empty.

    Args:
        pipelines: of one system, with the same stages, micro-batches, limits (where the schedule
            has a pattern) and update interval, that `simulates_together`.
    """
    first = pipelines[0]
    if first.variant.schedule not in PATTERNS:
        return nf1b_periods_s(pipelines)
    stages, n, every = first.stages, first.micro_batches, first.update_every
    deep = max(first.limits)
    span = every * (1 if first.variant.flushes else max(-(-deep // every), 2))
    count = (0 if first.variant.flushes else 2 * deep) + span + _SETTLING * every
    affordable = _MOST_OPERATIONS // (stages * (2 * n + 1))
    if count > affordable:
        span = every * max(affordable // (2 * every), 1)
        count = 2 * span
    micro = first.variant.backward_unit == "micro"
    sequence = _sequence(_alone(first), count)
    taken = {
        FORWARDS: np.array([p.forward_s for p in pipelines]).T,
        BACKWARDS: np.array([[p.backward_op_s(s) for s in range(stages)] for p in pipelines]).T,
        UPDATES: np.array([[p.update_op_s(s) for s in range(stages)] for p in pipelines]).T,
    }
    links = _ports(pipelines, 1 if micro else n)
    free = np.zeros((stages, len(pipelines)))
    wires: dict[tuple[int, int], Seconds] = {}
    ready: dict[tuple[int, int, int], Seconds] = {}
    updated = np.zeros((count, stages, len(pipelines)))
    for kind, slot, s in sequence:
        at = free[s]
        if kind == UPDATES:
            updated[slot, s] = at
            if first.updates_after(slot):
                at += taken[UPDATES][s]
            continue
        arrived = ready.pop((kind, s, slot), None)
        if arrived is not None:
            np.maximum(at, arrived, out=at)
        at += taken[kind][s]
        for t, wire_s, latency_s in links[kind][s]:
            begin = np.maximum(at, wires[s, t]) if (s, t) in wires else at
            gone = wires[s, t] = begin + wire_s
            there = gone + latency_s
            before = ready.get((kind, t, slot))
            ready[kind, t, slot] = there if before is None else np.maximum(before, there)
    last = updated[count - 1] - updated[count - 1 - span]
    found: Seconds = last.max(axis=0) / span
    return found


def _alone(pipeline: Pipeline) -> Pipeline:
    """What its sequence depends on: each stage sends to the next, and nothing takes time."""
    zeros = (0.0,) * pipeline.stages
    links = tuple(Link(s, s + 1, 0.0, 0.0, 0.0) for s in range(pipeline.stages - 1))
    return replace(
        pipeline, forward_s=zeros, backward_s=zeros, update_s=zeros, links=links, all_reduce_s=()
    )


@lru_cache(maxsize=64)
def _sequence(pipeline: Pipeline, mini_batches: int) -> list[tuple[int, int, int]]:
    """Kind, slot and stage of all operations, each behind those whose messages it waits for."""
    executed = execute(pipeline, make_schedule(pipeline, mini_batches))
    return [executed.tasks[d][position] for d, position in executed.sequence]


_Ports = list[list[tuple[int, Seconds, Seconds]]]


def _ports(pipelines: Sequence[Pipeline], gradients: int) -> dict[int, _Ports]:
    """Per kind and stage: where messages go, their time on the wire, [K], and their latency, [K],
    minus infinity where a pipeline has no such link.

    Args:
        gradients: micro-batches whose gradients a message has.
    """
    stages, count = pipelines[0].stages, len(pipelines)
    found: dict[int, _Ports] = {kind: [[] for _ in range(stages)] for kind in (FORWARDS, BACKWARDS)}
    rows: dict[tuple[int, int, int], tuple[Seconds, Seconds]] = {}
    for k, pipeline in enumerate(pipelines):
        for link in pipeline.links:
            sent = [(FORWARDS, link.source, link.target, link.forward_s)]
            if link.has_gradient:
                back_s = link.backward_s * gradients
                sent.append((BACKWARDS, link.target, link.source, back_s))
            for kind, s, t, wire_s in sent:
                if (kind, s, t) not in rows:
                    rows[kind, s, t] = np.zeros(count), np.full(count, -np.inf)
                wire, latency = rows[kind, s, t]
                wire[k], latency[k] = wire_s, link.latency_s
    for (kind, s, t), (wire, latency) in rows.items():
        found[kind][s].append((t, wire, latency))
    return found
