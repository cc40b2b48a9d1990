"""Where the weight parts of split backwards go: the schedule of ZB-H1 (2401.10241), for any stages.

Forwards and backwards stay in the sequence of 1F1B. A weight part W may run at any time after its
backward B, but until then the stage keeps the micro-batch's activations. No replica keeps more
micro-batches at once than 1F1B makes its fullest one keep: S of them where stages have one device
each. Index letters: s stage, N micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from ..simulator.clock import SimulatedClock
from ..simulator.executor import ContendedExecutor, ListExecutor, coded
from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS, B, F, U, W

_GAP = 0.5
"""A weight part isn't begun when what comes next is there before so much of its time is over."""


_MOST_TRIED = 50_000
"""Operations of a mini-batch, on all stages, for which several ways are tried."""


def postponed(pipeline: Pipeline, rows: Sequence[bytes]) -> tuple[bytes, ...]:
    """Per stage, the kinds of a mini-batch's operations, its update left out.

    Three ways to place the weight parts are tried, and the one with the shortest period is taken:
    as late as memory allows (the paper's, best where stages are equal), whenever the stage would
    be idle, and right after their backwards: so no system that doesn't split is faster. Of
    mini-batches with very many operations, where the bubble is small, the first way is taken.

    Args:
        rows: the same without weight parts.
    """
    most = _most_kept(pipeline, rows)
    late = tuple(_late(row, keep) for row, keep in zip(rows, most, strict=True))
    if sum(map(len, late)) > _MOST_TRIED:
        return late
    at_once = tuple(row.replace(B, B + W) for row in rows)
    found = [late, _Idle(pipeline, rows, most).place(), at_once]
    periods = [_period_s(pipeline, kinds) for kinds in found]
    # Rounding is no reason to take a later one.
    best = min(periods) * (1 + 1e-9)
    return next(kinds for kinds, seconds in zip(found, periods, strict=True) if seconds <= best)


def _most_kept(pipeline: Pipeline, rows: Sequence[bytes]) -> list[int]:
    """Per stage, how many micro-batches it may keep at once, all its replicas together."""
    replicas = [pipeline.replicas(s) for s in range(pipeline.stages)]
    ahead = [row.find(B) for row in rows]
    each = max(-(-count // r) for count, r in zip(ahead, replicas, strict=True))
    return [each * r for r in replicas]


def _late(row: bytes, most: int) -> bytes:
    """Weight parts when a forward needs their room; while the pipeline drains, one after each
    backward; and the rest."""
    forwards, kept, waiting = row.count(F), 0, 0
    kinds = []
    for kind in row:
        if kind == FORWARDS:
            if kept == most:
                kinds.append(WEIGHTS)
                kept, waiting = kept - 1, waiting - 1
            kept, forwards = kept + 1, forwards - 1
        kinds.append(kind)
        if kind == BACKWARDS:
            waiting += 1
            if not forwards:
                kinds.append(WEIGHTS)
                waiting -= 1
    return bytes(kinds) + W * waiting


def _period_s(pipeline: Pipeline, rows: Sequence[bytes]) -> float:
    """From update to update, on the slowest stage; the first mini-batches are like all others."""
    clock = SimulatedClock(pipeline)
    clock.grow(2)
    lists = [coded(clock, s, (row + U) * 2) for s, row in enumerate(rows)]
    if clock.contended:
        done = ContendedExecutor(clock, lists).run(2)
    else:
        run = ListExecutor(clock)
        run.lists = lists
        done = run.run()
    return max(b - a for a, b in clock.starts_s[UPDATES]) if done else inf


class _Idle:
    """Weight parts whenever the stage would be idle: a list schedule of one mini-batch.

    Times are those of one micro-batch over the stage's replicas, and messages never wait for a
    wire: what comes of it is a schedule, which the clock then times exactly.
    """

    def __init__(self, pipeline: Pipeline, rows: Sequence[bytes], most: Sequence[int]) -> None:
        stages = range(pipeline.stages)
        self._rows, self._most = rows, most
        self._seconds = [
            [
                seconds / pipeline.replicas(s)
                for seconds in (
                    pipeline.forward_s[s],
                    pipeline.backward_op_s(s),
                    0.0,
                    pipeline.weight_op_s(s),
                )
            ]
            for s in stages
        ]
        # Per kind and stage: (stage that gets a message, seconds on the way).
        self._ways: list[list[list[tuple[int, float]]]] = [[[] for _ in stages] for _ in range(4)]
        due = [[0 for _ in stages] for _ in range(2)]
        for link in pipeline.links:
            there, back = link.source, link.target
            self._ways[FORWARDS][there].append((back, link.forward_s + link.latency_s))
            due[FORWARDS][back] += 1
            if link.has_gradient:
                self._ways[BACKWARDS][back].append((there, link.backward_s + link.latency_s))
                due[BACKWARDS][there] += 1
        n = pipeline.micro_batches
        # Per kind, stage and micro-batch: messages still to come, and when the last one is there.
        self._due = [[[count] * n for count in counts] for counts in due]
        self._ready_s = [[[0.0] * n for _ in stages] for _ in range(2)]
        self._kinds: list[list[int]] = [[] for _ in stages]
        self._position = [0 for _ in stages]
        self._done = [[0, 0, 0, 0] for _ in stages]
        self._free_s = [0.0 for _ in stages]
        self._heap = [(0.0, s) for s in stages]

    def place(self) -> tuple[bytes, ...]:
        """Per stage, the kinds of its operations."""
        while self._heap:
            now, s = heapq.heappop(self._heap)
            if now >= self._free_s[s]:
                self._decide(now, s)
        return tuple(bytes(kinds) for kinds in self._kinds)

    def _decide(self, now: float, s: int) -> None:
        done, row = self._done[s], self._rows[s]
        waiting = done[BACKWARDS] - done[WEIGHTS]
        kind, start = WEIGHTS, inf
        if self._position[s] < len(row):
            kind = row[self._position[s]]
            if not self._due[kind][s][done[kind]]:
                start = self._ready_s[kind][s][done[kind]]
            full = done[FORWARDS] - done[WEIGHTS] == self._most[s]
            if kind == FORWARDS and full and start <= now:
                kind = WEIGHTS
        if start <= now and kind != WEIGHTS:
            self._position[s] += 1
            self._run(now, s, kind)
        elif (waiting and start - now >= _GAP * self._seconds[s][WEIGHTS]) or start <= now:
            self._run(now, s, WEIGHTS)
        elif start < inf:
            heapq.heappush(self._heap, (start, s))

    def _run(self, now: float, s: int, kind: int) -> None:
        number = self._done[s][kind]
        self._done[s][kind] += 1
        self._kinds[s].append(kind)
        self._free_s[s] = end = now + self._seconds[s][kind]
        heapq.heappush(self._heap, (end, s))
        for t, seconds in self._ways[kind][s]:
            self._due[kind][t][number] -= 1
            ready_s = self._ready_s[kind][t]
            ready_s[number] = max(ready_s[number], end + seconds)
            if not self._due[kind][t][number]:
                heapq.heappush(self._heap, (max(ready_s[number], self._free_s[t]), t))
