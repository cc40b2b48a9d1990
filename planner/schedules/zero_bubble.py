"""Where the weight parts of split backwards go: the schedule of ZB-H1 (2401.10241), for any stages.

Forwards and backwards stay in the sequence that they have, in ZB-H1 that of 1F1B. A weight part W
may run at any time after its backward B, but until then the stage keeps the micro-batch's
activations. In ZB-H1 no replica keeps more micro-batches at once than 1F1B makes its fullest one
keep: S of them where stages have one device each. Index letters: s stage, N micro-batches.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from math import inf

from ..simulator.clock import SimulatedClock
from ..simulator.executor import ContendedExecutor, ListExecutor, coded
from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS, B, F, Rows, U, W, row_of

ROUNDING = 1 + 1e-9

GAP = 0.5
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

    def of_stages(found: Sequence[bytes]) -> Rows:
        return tuple((kinds, (s,) * len(kinds)) for s, kinds in enumerate(found))

    idle = WeightsWhenIdle(pipeline, of_stages(rows), most).place()
    found = [of_stages(late), idle, of_stages(at_once)]
    return tuple(kinds for kinds, _ in shortest(pipeline, found))


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


def shortest(pipeline: Pipeline, found: Sequence[Rows]) -> Rows:
    """Those rows with the shortest period: from update to update, on the slowest stage; the first
    mini-batches are like all others."""
    periods: list[float] = []
    for rows in found:
        periods.append(period_of_s(pipeline, rows, min(periods, default=inf)))
    # Rounding is no reason to take a later one.
    best = min(periods) * ROUNDING
    return next(rows for rows, seconds in zip(found, periods, strict=True) if seconds <= best)


def period_of_s(pipeline: Pipeline, rows: Rows, best_s: float = inf) -> float:
    """The period of rows; infinite where the first mini-batch takes longer than a best one: the
    second one begins behind it, on devices of which none is there for it sooner."""
    clock = SimulatedClock(pipeline)
    clock.grow(2)
    both = [
        coded(clock, ((row + U * len(mine)) * 2, (of + mine) * 2), {})
        for (row, of), mine in zip(rows, pipeline.stages_of, strict=True)
    ]
    updates = clock.starts_s[UPDATES]
    if clock.contended:
        contended = ContendedExecutor(clock, both)
        if not contended.run(1) or updates[0][0] > best_s * ROUNDING or not contended.run(2):
            return inf
    else:
        run = ListExecutor(clock)
        run.lists = [tasks[: len(tasks) // 2] for tasks in both]
        if not run.run() or updates[0][0] > best_s * ROUNDING:
            return inf
        run.lists = both
        if not run.run():
            return inf
    return max(b - a for a, b in updates)


class WeightsWhenIdle:
    """Weight parts whenever the device would be idle: a list schedule of one mini-batch.

    Times are those of one micro-batch over the stage's replicas, and messages never wait for a
    wire: what comes of it is a schedule, which the clock then times exactly.
    """

    def __init__(self, pipeline: Pipeline, rows: Rows, most: Sequence[int]) -> None:
        """
        Args:
            rows: of forwards and backwards.
            most: per device, micro-batches that its stages may keep at once, all together.
        """
        stages = range(pipeline.stages)
        self._rows = [list(zip(*row, strict=True)) for row in rows]
        self._most = most
        self._device_of = {s: d for d, (_, turns) in enumerate(rows) for s in turns}
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
        self._found: list[list[tuple[int, int]]] = [[] for _ in rows]
        self._position = [0 for _ in rows]
        self._done = [[0, 0, 0, 0] for _ in stages]
        # Per device, stages whose weight parts wait, in the sequence of their backwards.
        self._waiting: list[deque[int]] = [deque() for _ in rows]
        self._kept = [0 for _ in rows]
        self._free_s = [0.0 for _ in rows]
        self._heap = [(0.0, d) for d in range(len(rows))]

    def place(self) -> Rows:
        """Per device, the kinds of its operations, and their stages."""
        while self._heap:
            now, d = heapq.heappop(self._heap)
            if now >= self._free_s[d]:
                self._decide(now, d)
        return tuple(map(row_of, self._found))

    @property
    def complete(self) -> bool:
        """Whether all has been placed: not so where a forward waits for room for ever."""
        return all(p == len(row) for p, row in zip(self._position, self._rows, strict=True))

    def _decide(self, now: float, d: int) -> None:
        row, waiting = self._rows[d], self._waiting[d]
        kind, start, s = WEIGHTS, inf, 0
        if self._position[d] < len(row):
            kind, s = row[self._position[d]]
            number = self._done[s][kind]
            if not self._due[kind][s][number]:
                start = self._ready_s[kind][s][number]
            if kind == FORWARDS and self._kept[d] == self._most[d]:
                if not waiting:
                    return
                if start <= now:
                    kind = WEIGHTS
        if start <= now and kind != WEIGHTS:
            self._position[d] += 1
            self._run(now, d, kind, s)
        elif waiting and (start <= now or start - now >= GAP * self._seconds[waiting[0]][WEIGHTS]):
            self._run(now, d, WEIGHTS, waiting.popleft())
        elif start < inf:
            heapq.heappush(self._heap, (start, d))

    def _run(self, now: float, d: int, kind: int, s: int) -> None:
        number = self._done[s][kind]
        self._done[s][kind] += 1
        self._found[d].append((kind, s))
        if kind == BACKWARDS:
            self._waiting[d].append(s)
        else:
            self._kept[d] += 1 if kind == FORWARDS else -1
        self._free_s[d] = end = now + self._seconds[s][kind]
        heapq.heappush(self._heap, (end, d))
        for t, seconds in self._ways[kind][s]:
            self._due[kind][t][number] -= 1
            ready_s = self._ready_s[kind][t]
            ready_s[number] = max(ready_s[number], end + seconds)
            if not self._due[kind][t][number]:
                other = self._device_of[t]
                heapq.heappush(self._heap, (max(ready_s[number], self._free_s[other]), other))
