"""Whether the sequence makes a difference in which stages take a cluster's devices.

Where it does, the search looks at devices as they are listed first, then in any sequence
(`SearchState.any_sequence`): bounds, first plans and proofs by critical cycles have a kind of
device for each stage then (`partition.dp.cycle_devices`), and local search moves devices, too.
Where no cycles tell, and sequences are few, each is then searched by itself (`few_sequences`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import groupby, permutations

from ..cluster.cluster import Cluster
from ..partition.placings import pattern

SEQUENCES = ("best", "listed")
"""In which sequence devices are used: whichever is best, or as the cluster lists them."""

_MOST_DEVICES, _MOST_SEQUENCES = 6, 24
"""Of clusters that each sequence is searched of by itself."""


def few_sequences(cluster: Cluster) -> list[tuple[int, ...]]:
    """The sequences of all devices that differ in anything; none where they are many."""
    count = len(cluster.devices)
    if count > _MOST_DEVICES:
        return []
    homes: list[Hashable] = [device.machine for device in cluster.devices]
    kinds = [cluster.like(d) for d in range(count)]
    found = {pattern(each, homes, kinds): each for each in permutations(range(count))}
    return list(found.values()) if len(found) <= _MOST_SEQUENCES else []


def sequence_matters(cluster: Cluster) -> bool:
    """Whether the sequence of a cluster's devices makes a difference: they are of several kinds, by
    memory and speed, or in machines with more and fewer of them, or listed in turns, or some have
    links of their own."""
    if cluster.links or len({d.alike for d in cluster.devices}) > 1:
        return True
    homes = [d.machine for d in cluster.devices]
    sizes, rows = Counter(homes), sum(1 for _ in groupby(homes))
    return not cluster.flat and (len(set(sizes.values())) > 1 or rows > len(sizes))
