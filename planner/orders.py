"""Orders: which operations each stage runs, in which sequence. Decided before the run.

An order is a pure function of the pipeline; timing jitter never changes it, so runs repeat.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .events import Clock
from .operations import BACKWARD, FORWARD, UPDATE, Op, Order
from .pipeline import Pipeline


def make_order(pipeline: Pipeline, mini_batches: int) -> Order:
    """The order of all stages for a run of `mini_batches`, from first forward to last update."""
    return ORDER_RULES[pipeline.variant.order](pipeline, mini_batches)


def _gpipe(pipeline: Pipeline, mini_batches: int) -> Order:
    micro_batches = range(pipeline.micro_batches)
    ops: list[Op] = []
    for b in range(mini_batches):
        ops += [Op(FORWARD, b, i) for i in micro_batches]
        ops += [Op(BACKWARD, b, i) for i in micro_batches]
        ops.append(Op(UPDATE, b))
    return tuple(tuple(ops) for _ in range(pipeline.stages))


def _one_forward_one_backward(pipeline: Pipeline, mini_batches: int) -> Order:
    """Each stage fills up to its in-flight limit, then takes turns (PipeDream, section 3.2)."""

    def stage_ops(limit: int) -> Iterator[Op]:
        done = 0
        for b in range(mini_batches):
            yield Op(FORWARD, b, 0)
            if b - done + 1 == limit:
                yield from (Op(BACKWARD, done), Op(UPDATE, done))
                done += 1
        for b in range(done, mini_batches):
            yield from (Op(BACKWARD, b), Op(UPDATE, b))

    return tuple(tuple(stage_ops(limit)) for limit in pipeline.limits)


def _n_forwards_one_backward(pipeline: Pipeline, mini_batches: int) -> Order:
    """List schedule of nF1B (TiMePReSt; the rule that orders it is our reading).

    At every step the operation that can start earliest runs; ties go to backwards, then to
    the lower stage. A forward of a new mini-batch needs room under the stage's limit.
    """
    clock = Clock(pipeline)
    stages = range(pipeline.stages)
    last_micro = pipeline.micro_batches - 1
    orders: list[list[Op]] = [[] for _ in stages]
    next_forward = [Op(FORWARD, 0, 0) for _ in stages]
    next_backward = [0 for _ in stages]
    # A stage's entry in the heap is stale when its number isn't the stage's current one.
    heap: list[tuple[float, int, int, int, Op]] = []
    current = [0 for _ in stages]

    def candidate(s: int) -> tuple[float, int, Op] | None:
        forward, b = next_forward[s], next_backward[s]
        options = []
        if forward.mini_batch < mini_batches and (
            forward.micro_batch or forward.mini_batch - b < pipeline.limits[s]
        ):
            options.append((1, forward))
        if b < forward.mini_batch:
            options.append((0, Op(BACKWARD, b)))
        starts = [
            (max(clock.free_s[s], ready), rank, op)
            for rank, op in options
            if (ready := clock.ready_s(s, op)) is not None
        ]
        return min(starts, key=lambda start: start[:2]) if starts else None

    def offer(s: int) -> None:
        current[s] += 1
        found = candidate(s)
        if found:
            start, rank, op = found
            heapq.heappush(heap, (start, rank, s, current[s], op))

    for s in stages:
        offer(s)
    while heap:
        _, _, s, number, op = heapq.heappop(heap)
        if number != current[s]:
            continue
        clock.run(s, op)
        orders[s].append(op)
        if op.kind == FORWARD:
            _, b, i = op
            last = i == last_micro
            next_forward[s] = Op(FORWARD, b + 1, 0) if last else Op(FORWARD, b, (i or 0) + 1)
            touched = [link.target for link in clock.successors[s]]
        else:
            update = Op(UPDATE, op.mini_batch)
            clock.run(s, update)
            orders[s].append(update)
            next_backward[s] += 1
            touched = [link.source for link in clock.predecessors[s]]
        for t in (s, *touched):
            offer(t)
    return tuple(tuple(ops) for ops in orders)


ORDER_RULES: dict[str, Callable[[Pipeline, int], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "nf1b": _n_forwards_one_backward,
}
