"""Whether the sequence makes a difference in which stages take a cluster's devices.

Where it does, the search looks at devices as they are listed first, then in any sequence
(`SearchState.any_sequence`): bounds, first plans and proofs by critical cycles have a kind of
device for each stage then (`partition.dp.cycle_devices`), and local search moves devices, too.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from ..cluster.cluster import Cluster

SEQUENCES = ("best", "listed")
"""In which sequence devices are used: whichever is best, or as the cluster lists them."""


def sequence_matters(cluster: Cluster) -> bool:
    """Whether the sequence of a cluster's devices makes a difference: they are of several kinds, by
    memory and speed, or in machines with more and fewer of them, or listed in turns, or some have
    links of their own."""
    if cluster.links or len({d.alike for d in cluster.devices}) > 1:
        return True
    homes = [d.machine for d in cluster.devices]
    sizes, rows = Counter(homes), sum(1 for _ in groupby(homes))
    return not cluster.flat and (len(set(sizes.values())) > 1 or rows > len(sizes))
