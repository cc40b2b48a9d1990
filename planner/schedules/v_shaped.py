"""Schedules of a V with split backwards: `zb-v` (2401.10241, 2405.15362) and `v-half` (2405.15362).

Each device has two stages, one on the way down and one on the way back up, and keeps a stage's
micro-batch from its forward to its weight part: at most 2·D of them in `zb-v`, what 1F1B's fullest
device keeps; D + 1 in `v-half`, D + 2 for an even D. Forwards and backwards repeat a building block
(2405.15362): the times of one micro-batch in a steady pipeline of equal stages, a micro-batch every
six units; in `v-half` what fills and drains the pipeline begins ahead of them (`_ahead`). Weight
parts run when a device would be idle, or when a forward needs their room.

The papers' times are equal. Where they aren't, several blocks and list schedules are tried under
the same limit, for `zb-v` also the first paper's own sequence, which asks for no times, and the one
with the shortest period is taken (our reading). With equal times `zb-v` is never idle.

Index letters: D devices; S = 2·D stages; N micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, WEIGHTS, Row, Rows, row_of
from .list_schedule import MicroBatchScheduler
from .zero_bubble import WeightsWhenIdle, period_of_s, shortest

_UNITS = 6
"""Between two micro-batches: a forward, a backward and a weight part of each of two stages."""


class _Block(NamedTuple):
    """Units from one stage to the next: on the way down, at the turn and on the way back up; to the
    last one's backward; and of backwards likewise."""

    down: int
    turn: int
    up: int
    last: int
    back_down: int
    back_turn: int
    back_up: int


_BLOCKS = tuple(_Block(1, 1, up, 1, 1, 1, up) for up in (5, 3, 2, 1))

_HALF = _Block(2, 1, 1, 4, 2, 2, 1), _Block(1, 1, 2, 1, 1, 1, 2)
"""Those of `v-half` for an even and for an odd number of devices: its authors' sequences. (For an
odd one they have other units, which put operations in the same sequence.)"""

_MOST_TRIED = 20_000
"""Operations of a mini-batch, on all devices, for which all ways are tried."""


def v_shaped(pipeline: Pipeline) -> Rows:
    """Per device, kinds and stages of a mini-batch's operations, updates left out."""
    found = [rows for way in _ways(pipeline) if (rows := way()) is not None]
    if not found:
        # Where stages have nothing to do with each other, one may take all the room.
        scheduler = MicroBatchScheduler(pipeline, 1, _anything(pipeline))
        scheduler.run(1)
        found.append(scheduler.rows())
    return shortest(pipeline, found)


def period_by_one_way_s(pipeline: Pipeline, like: Pipeline) -> float:
    """The period in the way that is the shortest for another pipeline of as many stages and
    micro-batches on the same devices: the pipeline's own schedule, which is the shortest of
    several, has no longer one."""
    rows = _ways(pipeline)[_shortest_way(like)]()
    return inf if rows is None else period_of_s(pipeline, rows)


@lru_cache(maxsize=16)
def _shortest_way(pipeline: Pipeline) -> int:
    known = [(way, rows) for way, make in enumerate(_ways(pipeline)) if (rows := make())]
    if not known:
        return 0
    best = shortest(pipeline, [rows for _, rows in known])
    return next(way for way, rows in known if rows is best)


def _ways(pipeline: Pipeline) -> list[Callable[[], Rows | None]]:
    """What the schedule is the shortest of; a way may have none."""
    devices = len(pipeline.stages_of)
    # Micro-batches that each device's stages may keep at once, all its replicas together.
    most = [pipeline.replicas(0) * pipeline.variant.places(devices)] * devices
    blocks = _BLOCKS
    if pipeline.variant.half_memory:
        blocks = tuple(dict.fromkeys((_HALF[devices % 2], *_BLOCKS)))
    if 3 * pipeline.stages * pipeline.micro_batches > _MOST_TRIED:
        blocks = blocks[:1]

    def in_blocks(block: _Block) -> Rows | None:
        placed = WeightsWhenIdle(pipeline, _in_sequence(pipeline, block), most)
        rows = placed.place()
        return rows if placed.complete else None

    def by_list(*, forwards_first: bool) -> Rows | None:
        keep = _anything(pipeline)
        scheduler = MicroBatchScheduler(pipeline, 1, keep, most, forwards_first=forwards_first)
        return scheduler.rows() if scheduler.run(1) else None

    ways: list[Callable[[], Rows | None]] = [partial(in_blocks, block) for block in blocks]
    ways += [partial(by_list, forwards_first=first) for first in (True, False)]
    if not pipeline.variant.half_memory and all(len(mine) == 2 for mine in pipeline.stages_of):
        ways.append(partial(_by_count, pipeline))
    return ways


def _anything(pipeline: Pipeline) -> list[int]:
    """Micro-batches that stages may keep where nothing but their device's room says so."""
    return [pipeline.micro_batches] * pipeline.stages


def _by_count(pipeline: Pipeline) -> Rows:
    """The sequence of ZB-V with equal times (2401.10241, section 6), as others write it out:
    forwards on the way down and up, then one of each stage in turn with its backward and weight
    part; while the pipeline drains, weight parts wait. Replicas of a device do alike."""
    devices, r = len(pipeline.stages_of), pipeline.replicas(0)
    n = max(2 * devices - 1, -(-pipeline.micro_batches // r))
    rows = list[Row]()
    for d, mine in enumerate(pipeline.stages_of):
        (f, b, w), (up_f, up_b, up_w) = (
            [(kind, s) for kind in (FORWARDS, BACKWARDS, WEIGHTS)] for s in mine
        )
        left, turn = devices - d, [b, w, up_f, up_b, up_w]
        ops = [f] * (2 * left - 1) + [up_f, f] * d + [up_f, up_b, up_w] * left
        ops += [f, *turn] * (n - devices - left + 1) + turn * (left - 1)
        ops += [b, up_b] * d + [b, w] * left + [up_w] * d + [w] * d
        done = Counter[tuple[int, int]]()
        row: list[tuple[int, int]] = []
        for op in ops:
            # It is for as many micro-batches as there should be at least.
            count = min(r, pipeline.micro_batches - done[op])
            row += [op] * count
            done[op] += count
        rows.append(row_of(row))
    return tuple(rows)


def _in_sequence(pipeline: Pipeline, block: _Block) -> Rows:
    """Forwards and backwards in the sequence of a repeated block."""
    ahead = None
    if pipeline.variant.half_memory and block == _HALF[0]:
        ahead = _ahead(pipeline.stages, pipeline.micro_batches, block)
    return ahead or _in_blocks(pipeline, block)


def _in_blocks(pipeline: Pipeline, block: _Block) -> Rows:
    starts = _starts(pipeline.stages, block)
    found = list[Row]()
    for mine in pipeline.stages_of:
        row = sorted(
            (at[s] + _UNITS * i, kind, s)
            for kind, at in starts
            for s in mine
            for i in range(pipeline.micro_batches)
        )
        found.append(row_of((kind, s) for _, kind, s in row))
    return tuple(found)


def _starts(stages: int, block: _Block) -> tuple[tuple[int, list[int]], tuple[int, list[int]]]:
    """When a micro-batch's forwards and backwards begin, by stage."""
    half = stages // 2
    there = [*[block.down] * (half - 1), block.turn, *[block.up] * (half - 1)]
    back = [*[block.back_down] * (half - 1), block.back_turn, *[block.back_up] * (half - 1)]
    forward_at = [*accumulate(there, initial=0)]
    first = forward_at[-1] + block.last
    return (FORWARDS, forward_at), (BACKWARDS, [*accumulate(back, initial=first)][::-1])


# Ahead of the block's times ----------------------------------------------------------------------

_Op = tuple[int, int, int]
"""Kind, stage, micro-batch."""


@lru_cache(maxsize=256)
def _ahead(stages: int, n: int, block: _Block) -> Rows | None:
    """The sequence of a repeated block whose operations begin in the first free unit that they may,
    until the first micro-batch is back and once the last one has begun; no device keeps more at
    once than before. With equal times as short as the authors' own (their program to 2405.15362).

    None where the block has two operations in one unit.
    """
    rows = [dict[int, _Op]() for _ in range(stages // 2)]
    for kind, begins in _starts(stages, block):
        for s, i in product(range(stages), range(n)):
            rows[min(s, stages - 1 - s)][begins[s] + _UNITS * i] = kind, s, i
    if sum(map(len, rows)) < 2 * stages * n:
        return None
    for row in rows:
        _fill_with_weights(row)
    at = {op: (t, d) for d, row in enumerate(rows) for t, op in row.items()}
    most, steady, ends = max(map(_kept, rows)), False, False
    for op in sorted(at, key=at.__getitem__):
        steady |= op == (BACKWARDS, 0, 0)
        if ends or not steady:
            before, row = at[op][0], rows[at[op][1]]
            least = 1 + max((at[other][0] for other in _behind(op, stages)), default=-1)
            for t in range(least, before):
                if t not in row and _kept({**row, before: _NOTHING, t: op}) <= most:
                    del row[before]
                    row[t], at[op] = op, (t, at[op][1])
                    break
        ends |= op == (FORWARDS, 0, n - 1)
    ordered = ([row[t] for t in sorted(row)] for row in rows)
    return tuple(row_of((kind, s) for kind, s, _ in row if kind != WEIGHTS) for row in ordered)


_NOTHING: _Op = (BACKWARDS, 0, 0)
"""What keeps no more and no less."""


def _fill_with_weights(row: dict[int, _Op]) -> None:
    """Put the weight parts of a device's backwards into its units without an operation."""
    waiting, t, last = deque[_Op](), 0, max(row)
    while waiting or t <= last:
        if t not in row and waiting:
            row[t] = waiting.popleft()
        elif t in row and row[t][0] == BACKWARDS:
            waiting.append((WEIGHTS, *row[t][1:]))
        t += 1


def _kept(row: Mapping[int, _Op]) -> int:
    """Micro-batches of its stages that a device keeps at once, at the most."""
    kinds = (row[t][0] for t in sorted(row))
    return max(accumulate((kind == FORWARDS) - (kind == WEIGHTS) for kind in kinds))


def _behind(op: _Op, stages: int) -> Iterator[_Op]:
    """What an operation waits for."""
    kind, s, i = op
    if i:
        yield kind, s, i - 1
    if kind == WEIGHTS:
        yield BACKWARDS, s, i
    elif kind == BACKWARDS:
        yield (kind, s + 1, i) if s + 1 < stages else (FORWARDS, s, i)
    elif s:
        yield kind, s - 1, i
