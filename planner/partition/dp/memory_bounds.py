"""What memory rules out before any stage is looked at.

A stage's bytes are at least fixed + copies · parameters + units · flight, each a sum over its
layers. Counted with some copies c and units u instead, the sum is at most max(1, c / copies,
u / units) times that, and so at most as many times its device's memory. Sums counted so add up
over the stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import Vector
from .cost_tables import FITS, PairCosts
from .places import Places


@dataclass(frozen=True)
class MemoryBound:
    """One way to count.

    Attributes:
        held: bytes of each downset's layers, [D].
        ahead, behind: bytes that can be held on the last k devices, and on all but those, [K + 1].
        single: bytes that one stage can hold where so many devices are needed beyond it, [K + 1].
    """

    held: Vector
    ahead: Vector
    behind: Vector
    single: Vector


def memory_bounds(costs: PairCosts, places: Places) -> list[MemoryBound]:
    """Bounds counted as at the list's last device, its middle and its first one."""
    if not (places.limited and places.whole and len(places.usable)):
        return []
    fewest = int(places.usable[places.replicas[places.usable].argmin()])
    r, devices = int(places.replicas[fewest]), places.devices
    ways: dict[tuple[float, float], MemoryBound] = {}
    for k in (r, (r + devices + 1) // 2, devices):
        copies = float(places.field("copies", fewest)[k - r])
        units = float(places.field("units", fewest)[k - r])
        if (copies, units) not in ways:
            ways[copies, units] = _bound(costs, places, copies, units)
    return list(ways.values())


def _bound(costs: PairCosts, places: Places, copies: float, units: float) -> MemoryBound:
    problem = costs.problem
    held = problem.parameter_bytes * copies
    least = np.min([m.fixed_bytes + units * m.flight_bytes for m in problem.modes], axis=0)
    most = places.memory(copies, units) * FITS
    ahead, behind = places.added(most)
    # From each k on, the most that an option can hold.
    later = np.maximum.accumulate(most[:, ::-1], axis=1)[:, ::-1]
    single = np.zeros(places.devices + 1)
    for option in places.usable.tolist():
        r = int(places.replicas[option])
        np.maximum(single[: len(single) - r], later[option, r:], out=single[: len(single) - r])
    return MemoryBound(costs.summed(least + held), ahead, behind, single)
