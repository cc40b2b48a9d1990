"""Branches whose devices have several stages: which placements there are, on which devices.

Index letters: S stages; v stages on each device.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache

import msgspec

from ...profiles.errors import PlanError
from ..cluster.cluster import Cluster
from ..costs.layer_graph import held_together
from ..partition.placings import pattern
from ..systems.placement import placements
from ..systems.variants import Variant
from .choices import PlacedBranch, StagesAsked
from .relaxed.relaxation import Relaxation

_MOST_SUBSETS = 32
"""Of the ways to leave devices out, so many are looked at."""

_MOST_STATES = 100_000
"""So many times the devices there are may be gone through to find them."""


def placed_branches(
    relaxation: Relaxation,
    asked: StagesAsked,
    per_device: int,
    counts: Sequence[int],
    stages: int | None,
    least: int,
) -> list[PlacedBranch]:
    """All with so many stages on each of so many devices at the least; there may be none."""
    cluster, variant = relaxation.question.cluster, relaxation.variant
    most = relaxation.graph.most_stages
    found = []
    for number in range(len(cluster.devices), least - 1, -1):
        placed = {
            placement: None
            for name in asked.patterns
            for size in sorted(
                {number * per_device, 2 * number - (per_device == 2 and name == "v")}
            )
            if size <= most and stages in (None, size)
            for placement in placements(name, size, number)
            if _has(placement, per_device, variant)
        }
        subsets = device_subsets(cluster, number)[0] if placed else ()
        for placement in placed:
            found += [
                PlacedBranch(n, placement, devices)
                for devices in subsets
                for n in counts
                if relaxation.allows(len(placement), n, placement)
            ]
    return found


def _has(placement: tuple[int, ...], per_device: int, variant: Variant) -> bool:
    """Whether devices have so many stages; the one at a V's bottom may have one."""
    devices = max(placement) + 1
    if variant.placement == "v" and (len(placement) != 2 * devices or devices == 1):
        return False
    return max(Counter(placement).values()) == per_device


@lru_cache(maxsize=4096)
def device_subsets(cluster: Cluster, number: int) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Devices to use, so many, one choice of those that make no difference; the fastest first.

    Of neighbours that are alike the first ones stand for any. What may follow is looked at once for
    all choices so far that make no difference to it.

    Returns:
        `_MOST_SUBSETS` at most, and whether they are all there are.
    """
    homes = [d.machine for d in cluster.devices]
    kinds = [cluster.like(d) for d in range(len(homes))]
    fastest = sorted(range(len(kinds)), key=lambda d: -cluster.devices[d].speed)
    last = {homes[d]: at for at, d in enumerate(fastest)}
    found: dict[Hashable, tuple[int, ...]] = {}
    states, most = set[Hashable](), _MOST_STATES // len(kinds)
    # How many of the fastest were looked at, and which of them are chosen.
    going: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while going and len(found) < _MOST_SUBSETS and len(states) < most:
        at, chosen = going.pop()
        devices = tuple(sorted(chosen))
        key = pattern(devices, homes, kinds)
        if len(devices) == number:
            found.setdefault(key, devices)
            continue
        used, left = dict.fromkeys(homes[d] for d in devices), sorted(fastest[at:])
        # Machines that go on, and where later devices come between those chosen.
        on = tuple(home if last[home] >= at else None for home in used)
        state = at, key, on, tuple(bisect(left, d) for d in devices)
        if state in states:
            continue
        states.add(state)
        end = at + 1
        while end < len(fastest) and _alike(cluster, *fastest[end - 1 : end + 1]):
            end += 1
        missing = number - len(devices)
        for count in range(max(missing - len(fastest) + end, 0), min(end - at, missing) + 1):
            going.append((end, (*chosen, *fastest[at : at + count])))
    return tuple(found.values()), not going and len(found) < _MOST_SUBSETS


def _alike(cluster: Cluster, a: int, b: int) -> bool:
    """Whether device b follows device a in the list, and is like it, in the same machine."""
    first, second = cluster.devices[a], cluster.devices[b]
    same = first == msgspec.structs.replace(second, name=first.name)
    return b == a + 1 and same and cluster.like(a) == cluster.like(b)


def no_branches(relaxation: Relaxation, asked: StagesAsked, stages: int | None) -> PlanError:
    """Why there are none: no placement has so many stages, or the model too few layers."""
    question, most = relaxation.question, relaxation.graph.most_stages
    devices, least = len(question.cluster.devices), min(asked.per_device)
    where = f"--stages-per-device {least}" if stages is None else f"--stages {stages}"
    if most < (least if stages is None else stages):
        tie = None
        if not relaxation.graph.one_device:
            tie = held_together(question.profile, relaxation.variant, question.tied)
        count = "1 stage" if most == 1 else f"{most} stages"
        return PlanError(
            f"{where}: the model can be cut into {count} at most "
            f"({len(question.profile.layers)} layers)" + (f": {tie}" if tie else "")
        )
    several = " or ".join(map(str, asked.per_device))
    names = " or ".join(asked.patterns)
    return PlanError(
        f"{where}: {relaxation.variant.name} can't have that with {several} stages on each of up "
        f"to {devices} {'device' if devices == 1 else 'devices'} (placement {names}), a model of "
        f"{most} stages at most, and the micro-batches asked for"
    )
