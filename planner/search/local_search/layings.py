"""Which devices stages have in plans to begin with.

Index letters: S stages; D devices; n groups of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from math import inf
from typing import Any, TypeAlias

import numpy as np

from ...cluster.cluster import Cluster
from ...cluster.contention import AllReduceTimes
from ...partition.placings import pattern
from ..choices import Branch, PlacedBranch
from ..device_sequences import cluster_in_sequence, sums_copies
from .first_cuts import even, even_replicas, even_within
from .neighbours import Neighbours, speeds_of

Lying: TypeAlias = tuple[tuple[int, ...], ...]
"""Per stage, the positions of its devices."""

_MOST_COUNTED = 16
"""Stages at the most, where each may have its own number of replicas."""

_MOST_EVEN = 8
"""Of numbers of stages, those whose busiest replica has least to do."""


def layings_of(near: Neighbours, branch: Branch | PlacedBranch) -> Iterator[Lying]:
    """Devices of stages to begin with."""
    if isinstance(branch, PlacedBranch):
        yield branch.lying
        return
    cluster = near.question.cluster
    sequences = _sequences(near) if near.moves_devices else [range(len(cluster.devices))]
    for stages in _stage_counts(near, branch):
        every = list(_as_many_each(near, stages, branch.micro_batches))
        for sequence, lying in product(sequences, every):
            yield tuple(tuple(sequence[d] for d in mine) for mine in lying)
    # Of some of the devices that are linked well, or fast, replicas may be worth more than of all.
    counts = near.relaxation.replica_counts(branch.micro_batches)
    for some, stages in product(_parts(near), _stage_counts(near, branch)):
        each = len(some) // stages
        if each > 1 and each in counts:
            yield tuple(some[s * each : (s + 1) * each] for s in range(stages))


def mixed_layings(near: Neighbours, branch: Branch | PlacedBranch) -> Iterator[Lying]:
    """The same where each stage has as many replicas as it has work for: of few numbers of stages,
    which leave the busiest replica least to do, with sums of gradients."""
    counts = near.relaxation.replica_counts(branch.micro_batches)
    if isinstance(branch, PlacedBranch) or counts == [1]:
        return
    cluster, work_s = near.question.cluster, near.layers.work_s(branch.micro_batches)
    most = min(len(cluster.devices), len(work_s), _MOST_COUNTED)
    parameters = near.relaxation.graph.parameter_bytes
    each = branch.micro_batches * near.question.update_every
    summed: list[float] = (np.bincount(near.layers.number_of, parameters) / each).tolist()
    # Within machines, gradients are summed over links that are faster.
    alone = (False,) if cluster.flat else (False, True)
    sequences = _sequences(near) if near.moves_devices else [range(len(cluster.devices))]
    for sequence, inside in product(sequences, alone):
        listed = cluster_in_sequence(cluster, sequence)
        devices, sums = listed.devices, AllReduceTimes(listed)
        homes = [device.machine if inside else None for device in devices]
        speeds = [device.speed for device in devices]
        found = even_replicas(work_s, speeds, homes, counts, most, summed, sums.of)
        asked = [x for x in found if branch.stages in (None, len(x[1]))]
        for _, places in sorted(asked)[:_MOST_EVEN]:
            yield tuple(tuple(sequence[d] for d in mine) for mine in places)


def even_cut(near: Neighbours, micro_batches: int, lying: Lying) -> tuple[int, ...] | None:
    """Downsets of the cut whose busiest stage has the least to do; None: too many stages."""
    work_s, speeds = near.layers.work_s(micro_batches), speeds_of(near.question.cluster, lying)
    nothing, room = np.zeros((len(speeds), len(work_s))), [inf] * len(speeds)
    ends = even_within(work_s, speeds, nothing, room)
    return None if ends is None else near.layers.downsets(ends)


def even_cuts(near: Neighbours, micro_batches: int, lying: Lying) -> list[tuple[int, ...]]:
    """The first of `first_cuts`, even by time and by layers, which take no time to find."""
    work_s, speeds = near.layers.work_s(micro_batches), speeds_of(near.question.cluster, lying)
    if len(speeds) > len(work_s):
        return []
    ends = (even(weights, speeds) for weights in (work_s, [1.0] * len(work_s)))
    return [near.layers.downsets(each) for each in ends]


def _stage_counts(near: Neighbours, branch: Branch) -> list[int]:
    if branch.stages is not None:
        return [branch.stages]
    most = min(near.search.most_stages, len(near.layers.groups))
    halves = {most >> k for k in range(most.bit_length())} | {most}
    return sorted(halves - {0}, reverse=True)


def _as_many_each(near: Neighbours, stages: int, micro_batches: int) -> Iterator[Lying]:
    """As many devices for each stage, in the sequence in which they are listed."""
    cluster = near.question.cluster
    devices = len(cluster.devices)
    for each in reversed(near.relaxation.replica_counts(micro_batches)):
        if each == 1 or stages * each <= devices < stages * (each + 1):
            yield in_a_row([each] * stages, cluster, near.moves_devices)


def _parts(near: Neighbours) -> list[tuple[int, ...]]:
    """Devices of one machine, and those of one kind, but for all; of machines that are alike, the
    first one's. Of a list that may be taken in no other sequence, those that are neighbours there:
    as stages' replicas are."""
    homes, kinds = near.search.device_kinds
    found = dict[Hashable, tuple[int, ...]]()
    for names in (homes, kinds):
        for name in dict.fromkeys(names):
            mine = tuple(d for d, other in enumerate(names) if other == name)
            if near.moves_devices or mine[-1] - mine[0] < len(mine):
                found.setdefault(pattern(mine, homes, kinds), mine)
    return [mine for mine in found.values() if len(mine) < len(homes)]


def _sequences(near: Neighbours) -> Iterable[Sequence[int]]:
    """Of devices: as listed, machine by machine, one of each machine in turn, and by speed, fast
    ones first and last. Where the first layers and the last ones may want devices of one machine,
    which sums what they share, or of one kind: half of these first, and half last."""
    question, devices = near.question, near.question.cluster.devices
    listed, seats, taken = range(len(devices)), list[int](), Counter[str | None]()
    for device in devices:
        seats.append(taken[device.machine])
        taken[device.machine] += 1
    keys: list[Callable[[int], tuple[Any, ...]]] = [
        lambda d: (d,),
        lambda d: (devices[d].machine or "",),
        # A replica's messages stay in its machine, which has some of each stage's.
        lambda d: (seats[d], devices[d].machine or ""),
        lambda d: (devices[d].machine or "", -devices[d].speed),
        lambda d: (-devices[d].speed, devices[d].machine or ""),
        lambda d: (devices[d].speed, devices[d].machine or ""),
        # The same of each kind's machines alone.
        lambda d: (-devices[d].speed, seats[d], devices[d].machine or ""),
        lambda d: (devices[d].speed, seats[d], devices[d].machine or ""),
    ]
    found = dict.fromkeys(tuple(sorted(listed, key=key)) for key in keys)
    if sums_copies(question) or not question.cluster.uniform:
        for mine in _parts(near):
            half, rest = len(mine) - len(mine) // 2, (d for d in listed if d not in mine)
            found[tuple(chain(mine[:half], rest, mine[half:]))] = None
    return found


def in_a_row(each: Sequence[int], cluster: Cluster, any_sequence: bool = False) -> Lying:
    """So many devices for each stage, as they are listed: the fastest ones, of equal ones the last,
    or where they are in machines, those that leave the fewest stages in several; of a list that may
    be taken in any sequence the last ones."""
    speeds = [0.0 if any_sequence else device.speed for device in cluster.devices]
    spare = len(speeds) - sum(each)
    if spare and len(set(speeds)) == 1 and not (any_sequence or cluster.flat):
        return _inside_machines(each, [device.machine for device in cluster.devices], spare)
    ranked = sorted(range(len(speeds)), key=lambda d: (-speeds[d], -d))
    chosen = sorted(ranked[: sum(each)])
    return tuple(tuple(chosen[a:b]) for a, b in pairwise([*accumulate(each, initial=0)]))


def _inside_machines(each: Sequence[int], homes: Sequence[str | None], spare: int) -> Lying:
    """What is left of a machine is left out where the next stage needs more, as long as there are
    devices to spare.

    Args:
        homes: each device's machine.
    """
    at, found = 0, list[tuple[int, ...]]()
    for replicas in each:
        left = next((d for d in range(at, len(homes)) if homes[d] != homes[at]), len(homes)) - at
        begun = at > 0 and homes[at - 1] == homes[at]
        if begun and left < replicas and left <= spare:
            at, spare = at + left, spare - left
        found.append(tuple(range(at, at + replicas)))
        at += replicas
    return tuple(found)
