"""Moves of a plan that change its stages' devices: replicas from stage to stage, a stage in two,
two stages in one.

What moves has its work with it: borders are as they are, or such that each replica has as much to
do as before.

Index letters: S stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

from ...costs.recomputation import Selection
from ...partition.problem import members
from ...systems.placement import numbered_devices
from .first_cuts import even
from .layings import in_a_row
from .neighbours import Neighbours, Point


def replica_moves(near: Neighbours, point: Point, busiest: Sequence[int]) -> Iterator[Point]:
    """More replicas for one stage, from another one or none; on devices as listed, unless these
    may move. With borders as they are, and with as much for each replica as before."""
    devices = len(near.question.cluster.devices)
    counts = near.relaxation.replica_counts(point.micro_batches)
    if counts == [1] or numbered_devices(point.devices):
        return
    before = [len(mine) for mine in point.devices]
    work_s = _work_s(near, point)
    for gains, loses in product(busiest, [None, *reversed(busiest)]):
        each = list(before)
        more = next((r for r in counts if r > each[gains]), None)
        if more is None or gains == loses:
            continue
        by, each[gains] = more - each[gains], more
        if loses is not None:
            each[loses] -= by
        if sum(each) > devices or not all(r in counts for r in each):
            continue
        wanted_s = [s * r / was for s, r, was in zip(work_s, each, before, strict=True)]
        cuts = dict.fromkeys((point.downsets, _in_proportion(near, point, wanted_s)))
        for cut, lying in product(cuts, _with_replicas(near, point, each, gains, loses)):
            yield replace(point, downsets=cut, devices=lying)


def _with_replicas(
    near: Neighbours, point: Point, each: Sequence[int], gains: int, loses: int | None
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Devices of stages, where one has more of them, from another one or none."""
    if not near.moves_devices:
        yield in_a_row(each, near.question.cluster)
        return
    for spare in _spare(near, point, loses, each[gains] - len(point.devices[gains])):
        mine = list(point.devices)
        mine[gains] += spare
        if loses is not None:
            mine[loses] = mine[loses][: each[loses]]
        yield tuple(mine)


def _work_s(near: Neighbours, point: Point) -> list[float]:
    """Per stage, the forwards and backwards of its layers for a micro-batch."""
    seconds = near.layers.seconds(point.micro_batches)
    return [sum(seconds[j] for j in members(b & ~a)) for a, b in pairwise(point.downsets)]


def _in_proportion(near: Neighbours, point: Point, wanted_s: Sequence[float]) -> tuple[int, ...]:
    """Downsets of stages whose work is about in this proportion, layers in the sequence in
    which the point's stages have them."""
    sequence = [g for a, b in pairwise(point.downsets) for g in near.layers.inside(b & ~a)]
    groups = [near.layers.groups[g] for g in sequence]
    seconds = near.layers.seconds(point.micro_batches)
    work_s = [sum(seconds[j] for j in members(mask)) for mask in groups]
    masks = [0, *accumulate(groups, int.__or__)]
    # Where nothing takes any time, any would do.
    shares = wanted_s if any(wanted_s) else [1.0] * len(wanted_s)
    return (0, *(masks[end] for end in even(work_s, shares)))


def stage_moves(near: Neighbours, point: Point) -> Iterator[Point]:
    """A stage in two, the other one with a device that does nothing, or as many of them as are
    alike in a machine, or with some of its replicas; or two stages in one, on the devices of one of
    them or of both."""
    most, counts = near.search.most_stages, near.relaxation.replica_counts(point.micro_batches)
    open_count = any(b.stages is None for b in near.search.branches)
    if not open_count or numbered_devices(point.devices):
        return
    spare = {
        mine[:r]: None
        for r in counts
        for mine in _idle(near, point)
        if r == 1 or r <= len(mine) < 2 * r
    }
    groups, sets = near.layers.groups, point.downsets
    for s in range(point.stages if point.stages < most else 0):
        inside = sets[s + 1] & ~sets[s]
        within = near.layers.inside(inside)
        if len(within) < 2:
            continue
        ways = (*point.recompute[: s + 1], *point.recompute[s:])
        for mine, at in product(spare, (s, s + 1)):
            devices = (*point.devices[:at], mine, *point.devices[at:])
            for part in _parts(near, point.devices[s], mine, len(within)):
                middle = sets[s] | sum(groups[g] for g in within[:part])
                cut = (*sets[: s + 1], middle, *sets[s + 1 :])
                yield _with_stages(near, point, cut, devices, ways)
        yield from _parted(near, point, s, ways, counts)
    for s in range(point.stages - 1):
        cut, (one, other) = (*sets[: s + 1], *sets[s + 2 :]), point.devices[s : s + 2]
        for mine, like in ((other, s + 1), (one, s), (one + other, s)):
            if len(mine) in counts:
                devices = (*point.devices[:s], mine, *point.devices[s + 2 :])
                ways = (*point.recompute[:s], point.recompute[like], *point.recompute[s + 2 :])
                yield _with_stages(near, point, cut, devices, ways)


def _parts(
    near: Neighbours, devices: Sequence[int], spare: Sequence[int], count: int
) -> tuple[int, ...]:
    """Of so many groups of layers, those before the border between a stage's devices and others:
    half; slower ones may be of use for the first, or the last, alone."""
    mine, others = (
        min(near.question.cluster.devices[d].speed for d in x) for x in (devices, spare)
    )
    return (count // 2, 1, count - 1) if others < mine and count > 2 else (count // 2,)


def _parted(
    near: Neighbours, point: Point, s: int, ways: tuple[Selection, ...], counts: Sequence[int]
) -> Iterator[Point]:
    """A stage in two that have its replicas, and each of them as much to do as before."""
    mine, work_s = point.devices[s], _work_s(near, point)
    for first in sorted({1, len(mine) // 2, len(mine) - 1}):
        if first in counts and len(mine) - first in counts:
            devices = (*point.devices[:s], mine[:first], mine[first:], *point.devices[s + 1 :])
            part_s = work_s[s] * first / len(mine)
            wanted_s = (*work_s[:s], part_s, work_s[s] - part_s, *work_s[s + 1 :])
            yield _with_stages(near, point, _in_proportion(near, point, wanted_s), devices, ways)


def _with_stages(
    near: Neighbours,
    point: Point,
    downsets: tuple[int, ...],
    devices: tuple[tuple[int, ...], ...],
    ways: tuple[Selection, ...],
) -> Point:
    """The point with another number of stages; on devices as listed, unless these may move."""
    if not near.moves_devices:
        devices = in_a_row([len(mine) for mine in devices], near.question.cluster)
    limits = next(near.usual_limits(len(devices), devices))
    return Point(downsets, devices, ways, point.micro_batches, limits)


def _spare(
    near: Neighbours, point: Point, loses: int | None, count: int
) -> Iterator[tuple[int, ...]]:
    """So many devices that a stage gives, its last ones, or that have no stage."""
    if loses is not None:
        yield point.devices[loses][-count:]
        return
    yield from (mine[:count] for mine in _idle(near, point) if len(mine) >= count)


def _idle(near: Neighbours, point: Point) -> list[tuple[int, ...]]:
    """Devices that have no stage, those together that are of one kind in one machine."""
    alike, used = dict[Hashable, list[int]](), {d for mine in point.devices for d in mine}
    for d, like in enumerate(zip(*near.search.device_kinds, strict=True)):
        if d not in used:
            alike.setdefault(like, []).append(d)
    return [tuple(mine) for mine in alike.values()]
