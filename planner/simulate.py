"""Simulating an order: when each operation runs, the steady period, the idle share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..profiles.errors import OrderError
from .events import Clock
from .operations import FORWARD, UPDATE, Op, Order, op_text
from .pipeline import Pipeline


class Event(NamedTuple):
    """An operation on the clock, in seconds from the start of the run."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When each stage runs each of its operations.

    Attributes:
        stages: per stage, its events in order.
        sequence: (stage, position in that stage's list) in an order in which one process
            could run them all.
    """

    stages: tuple[tuple[Event, ...], ...]
    sequence: tuple[tuple[int, int], ...]


def simulate(pipeline: Pipeline, order: Order) -> Timeline:
    """Run the order on the clock.

    Raises:
        OrderError: some operation waits for a message that is never sent (a deadlock); the
            message names the operations that every stuck stage waits at.
    """
    clock = Clock(pipeline)
    events: list[list[Event]] = [[] for _ in order]
    sequence: list[tuple[int, int]] = []
    pending = list(range(len(order)))
    while pending:
        s = pending.pop()
        ran = False
        while len(events[s]) < len(order[s]):
            op = order[s][len(events[s])]
            if clock.ready_s(s, op) is None:
                break
            sequence.append((s, len(events[s])))
            events[s].append(Event(op, *clock.run(s, op)))
            ran = True
        if ran:
            neighbours = {link.target for link in clock.successors[s]}
            neighbours |= {link.source for link in clock.predecessors[s]}
            pending += [t for t in sorted(neighbours, reverse=True) if t not in pending]
    stuck = [
        op_text(s, ops[len(events[s])]) for s, ops in enumerate(order) if len(events[s]) < len(ops)
    ]
    if stuck:
        raise OrderError(f"deadlock: these operations wait for each other: {', '.join(stuck)}")
    started = {(s, k): e.start_s for s, found in enumerate(events) for k, e in enumerate(found)}
    # By start time people see the pipeline's own sequence; the stable sort keeps causes first.
    rank = {key: n for n, key in enumerate(sequence)}
    sequence.sort(key=lambda key: (started[key], rank[key]))
    return Timeline(tuple(tuple(found) for found in events), tuple(sequence))


def warm_mini_batches(stages: int) -> int:
    """Mini-batches to simulate so that the middle third runs at the steady rate."""
    return 12 + 6 * stages


def steady_period_s(timeline: Timeline) -> float:
    """Seconds per mini-batch in the middle of the run, filling and draining left out.

    That of the slowest stage: one that gets no gradients back may run ahead of the others.
    Where updates come in a pattern that repeats every c mini-batches, the mean over whole
    patterns; else the mean over the middle third.
    """
    return max(_period_s([e.end_s for e in s if e.op.kind == UPDATE]) for s in timeline.stages)


def predicted_period_s(pipeline: Pipeline, timeline: Timeline) -> float:
    """The steady period, and never less than the busiest stage's or wire's time.

    Where two stages are nearly as slow, a short simulation may still be filling the buffers
    between them, and look faster than it stays.
    """
    n = pipeline.micro_batches
    wires = [max(n * link.forward_s, n * link.backward_s) for link in pipeline.links]
    work = [pipeline.work_s(s) for s in range(pipeline.stages)]
    return max(steady_period_s(timeline), *work, *wires)


def _period_s(ends: Sequence[float]) -> float:
    if len(ends) < 3:
        return ends[-1] / len(ends) if ends else 0.0
    gaps = [b - a for a, b in pairwise(ends)]
    middle = gaps[len(gaps) // 3 : max(2 * len(gaps) // 3, len(gaps) // 3 + 1)]
    scale = max(max(middle), 1e-30)
    for cycle in range(1, len(middle) // 2 + 1):
        pairs = zip(middle, middle[cycle:], strict=False)
        if all(abs(a - b) <= 1e-9 * scale for a, b in pairs):
            return sum(middle[:cycle]) / cycle
    return sum(middle) / len(middle)


def idle_shares(pipeline: Pipeline, period_s: float) -> tuple[float, ...]:
    """Share of the steady period in which each stage computes nothing."""
    if period_s <= 0:
        return tuple(0.0 for _ in range(pipeline.stages))
    return tuple(max(0.0, 1 - pipeline.work_s(s) / period_s) for s in range(pipeline.stages))


def most_waiting(timeline: Timeline, source: int, target: int, posted: int) -> int:
    """Most forward messages at once that are made but for which no buffer is posted yet.

    Args:
        posted: receives that the target has posted ahead of its use of them.
    """
    moments = [(e.end_s, 1) for e in timeline.stages[source] if e.op.kind == FORWARD]
    moments += [(e.start_s, -1) for e in timeline.stages[target] if e.op.kind == FORWARD]
    waiting = most = 0
    # What is taken at the very moment it is made never waits.
    for _, change in sorted(moments):
        waiting += change
        most = max(most, waiting)
    return max(most - posted, 1)
