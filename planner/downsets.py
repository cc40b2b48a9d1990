"""Downsets of the layer graph: the places where a pipeline may be cut.

A downset is a set of layers that holds, with a layer, everything that layer needs. Stages are
the differences of a rising chain of downsets, and so contiguous (convex) in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profiles.profile import Profile

MAX_DOWNSETS = 1200
"""With more, only the prefixes of the profile's own order of layers are considered."""


@dataclass(frozen=True)
class Lattice:
    """Places to cut.

    Attributes:
        member: bool, [downsets, layers], rows by rising size: the first is empty, the last full.
        complete: all downsets are there, so that no cut is left out.
        ordered: every layer needs the one before it, directly: the downsets are the prefixes.
    """

    member: NDArray[np.bool_]
    complete: bool
    ordered: bool


def lattice_of(profile: Profile, limit: int = MAX_DOWNSETS) -> Lattice:
    """Downsets of the profile's graph that keep tied layers together."""
    count = len(profile.layers)
    position = {layer.name: k for k, layer in enumerate(profile.layers)}
    needs = [0] * count
    for edge in profile.edges:
        if edge.consumer in position:
            needs[position[edge.consumer]] |= 1 << position[edge.producer]
    ordered = all(needs[k] >> (k - 1) & 1 for k in range(1, count))
    found = None if ordered else _all_downsets(needs, limit)
    complete = ordered or found is not None
    if found is None:
        found = [(1 << k) - 1 for k in range(count + 1)]
    tied = [sum(1 << position[name] for name in group) for group in profile.tied]
    found = [d for d in found if all(d & group in (0, group) for group in tied)]
    found.sort(key=lambda d: (d.bit_count(), d))
    member = np.array([[d >> k & 1 for k in range(count)] for d in found], dtype=np.bool_)
    return Lattice(member, complete, ordered)


def _all_downsets(needs: list[int], limit: int) -> list[int] | None:
    """All downsets as bit masks; None when there are more than `limit`."""
    seen = {0}
    frontier = [0]
    while frontier:
        fresh = []
        for downset in frontier:
            for k, need in enumerate(needs):
                larger = downset | 1 << k
                if larger != downset and need & ~downset == 0 and larger not in seen:
                    seen.add(larger)
                    fresh.append(larger)
                    if len(seen) > limit:
                        return None
        frontier = fresh
    return sorted(seen)
