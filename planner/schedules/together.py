"""Periods of many pipelines that run one schedule, simulated at once.

Where a pattern alone says what stages run, and no two stages' messages share a wire, operations
come in the same sequence whatever they take. So one pass over it, with a vector of times for each
stage, does for all pipelines what `steady_state` does for one; `nf1b_together` does it where times
make the sequence. It ends after some mini-batches, settled or not: a local search ranks its moves
by it, and simulates what it takes exactly. Else pipelines that differ little run much alike: all
are taken through what one of them runs and sends, in its sequence (`periods_like_s`).

Index letters: K pipelines; S stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..simulator.clock import NOT_YET
from ..simulator.executor import execute
from ..simulator.pipeline import Pipeline, in_a_row
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS
from .nf1b_together import SETTLING, Seconds, messages_of, nf1b_periods_s
from .schedules import PATTERNS, make_schedule
from .steady_state import steady_state
from .v_shaped import period_by_one_way_s

_MOST_OPERATIONS = 30_000
"""Of a simulation, about: of deep pipelines fewer mini-batches are."""


def simulates_together(pipeline: Pipeline) -> bool:
    variant = pipeline.variant
    return (
        variant.order is None
        and (variant.schedule in PATTERNS or variant.schedule == "nf1b")
        and not variant.split_backward
        and not pipeline.placement
        and not pipeline.paces
        and not any(link.routes for link in pipeline.links)
    )


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
    count = (0 if first.variant.flushes else 2 * deep) + span + SETTLING * every
    affordable = _MOST_OPERATIONS // (stages * (2 * n + 1))
    if count > affordable:
        span = every * max(affordable // (2 * every), 1)
        count = 2 * span
    # The sequence is the same whatever operations take.
    alone = replace(in_a_row(first.variant, n, first.limits), update_every=every)
    updated = _updates_s(pipelines, _sequence(alone, count), count)
    found: Seconds = (updated[-1] - updated[-1 - span]).max(axis=0) / span
    return found


def simulates_like(pipeline: Pipeline) -> bool:
    """Whether others can be simulated at once that run what this one does.

    Where nothing flushes, what little is run otherwise adds up from one mini-batch to the next.
    """
    if not pipeline.variant.flushes:
        return False
    routes = [route for link in pipeline.links for route in link.routes]
    overlaps = all(route.overlaps for route in routes)
    alone = all(pipeline.replicas(s) == 1 for s in range(pipeline.stages))
    placed, split = bool(pipeline.placement), pipeline.variant.split_backward
    # Where devices have several stages, weight parts change places from cut to cut.
    return placed != split and alone and overlaps and not pipeline.late


def periods_like_s(one: Pipeline, pipelines: Sequence[Pipeline]) -> Seconds:
    """Period of each, about, [K], where devices run and send what one does, in its sequence.

    Args:
        one: that `simulates_like`.
        pipelines: with as many stages and micro-batches, on the same devices.
    """
    events, count, span = _as_run(one)
    updated = _updates_s(pipelines, events, count)
    found: Seconds = (updated[-1] - updated[-1 - span]).max(axis=0) / span
    return found


def period_in_one_way_s(pipeline: Pipeline, like: Pipeline) -> float:
    """Where a system's schedule is the shortest of several, the period in the one that is for
    another pipeline of as many stages and micro-batches; else 0: nothing is known that soon."""
    if pipeline.variant.schedule != "v-shaped":
        return 0.0
    return period_by_one_way_s(pipeline, like)


_RUNS, _SENDS, _BOTH = range(3)

_Event = tuple[int, int, int, int]
"""Kind, slot and stage of an operation, and whether it runs, sends what it made, or both."""


def _updates_s(
    pipelines: Sequence[Pipeline], events: Sequence[_Event], mini_batches: int
) -> Seconds:
    """When stages update after each of so many mini-batches, [mini-batches, S, K]."""
    first, count = pipelines[0], len(pipelines)
    stages, device_of = range(first.stages), first.placement or range(first.stages)
    taken = {
        FORWARDS: np.array([p.forward_s for p in pipelines]).T,
        BACKWARDS: np.array([[p.backward_op_s(s) for s in stages] for p in pipelines]).T,
        WEIGHTS: np.array([[p.weight_op_s(s) for s in stages] for p in pipelines]).T,
        UPDATES: np.array([[p.update_op_s(s) for s in stages] for p in pipelines]).T,
    }
    messages = defaultdict(list)
    for (kind, s, t, wire), times in messages_of(pipelines).items():
        messages[kind, s].append((t, wire, *times))
    free = np.zeros((max(device_of) + 1, count))
    wires: dict[Hashable, Seconds] = defaultdict(lambda: np.zeros(count))
    ready: dict[tuple[int, int, int], Seconds] = {}
    ends: dict[tuple[int, int, int], Seconds] = {}
    updated = np.zeros((mini_batches, first.stages, count))
    for kind, slot, s, does in events:
        if does == _SENDS:
            at = ends.pop((kind, s, slot))
        else:
            at = free[device_of[s]]
            if kind == UPDATES:
                if slot < mini_batches:
                    updated[slot, s] = at
                if first.updates_after(slot):
                    at += taken[UPDATES][s]
                continue
            arrived = ready.pop((kind, s, slot), None)
            if arrived is not None:
                np.maximum(at, arrived, out=at)
            at += taken[kind][s]
            if does == _RUNS:
                ends[kind, s, slot] = at.copy()
                continue
        for t, wire, wire_s, latency_s in messages[kind, s]:
            gone = wires[wire]
            np.maximum(gone, at, out=gone)
            gone += wire_s
            there = gone + latency_s
            before = ready.get((kind, t, slot))
            ready[kind, t, slot] = there if before is None else np.maximum(before, there)
    return updated


@lru_cache(maxsize=64)
def _sequence(pipeline: Pipeline, mini_batches: int) -> list[_Event]:
    """All operations, each behind those whose messages it waits for."""
    executed = execute(pipeline, make_schedule(pipeline, mini_batches))
    return [(*executed.tasks[d][position], _BOTH) for d, position in executed.sequence]


@lru_cache(maxsize=16)
def _as_run(pipeline: Pipeline) -> tuple[list[_Event], int, int]:
    """What runs and is sent until all repeats, as time goes by; the mini-batches that are updated
    after, and how many of them the period is a mean over."""
    steady = steady_state(pipeline)
    clock, timed = steady.clock, list[tuple[float, bool, _Event]]()
    for kind, by_stage in enumerate(clock.starts_s):
        for s, starts in enumerate(by_stage):
            seconds = clock.durations.seconds[kind][s][0]
            for slot, start in enumerate(starts):
                if start != NOT_YET:
                    end = start + seconds
                    timed.append((start, True, (kind, slot, s, _RUNS)))
                    # Messages go before what begins then, but for those of what takes no time.
                    timed.append((end, end == start, (kind, slot, s, _SENDS)))
    events = [
        event
        for _, _, event in sorted(timed)
        if event[-1] == _RUNS or event[0] in (FORWARDS, BACKWARDS)
    ]
    done = steady.mini_batches
    return events, done, steady.cycle or max(done // 2, 1)
