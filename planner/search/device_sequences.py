"""Whether the sequence makes a difference in which stages take a cluster's devices.

Where it does, the search looks at devices as they are listed first, then in any sequence
(`SearchState.any_sequence`): bounds, first plans and proofs by critical cycles have a kind of
device for each stage then (`partition.dp.cycle_devices`), and local search moves devices, too.
Where no cycles tell, and sequences are few, each is then searched by itself (`few_sequences`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby, pairwise, permutations

import msgspec

from ..cluster.cluster import Cluster
from ..partition.placings import pattern
from ..question import Question

SEQUENCES = ("best", "listed")
"""In which sequence devices are used: whichever is best, or as the cluster lists them."""

_MOST_DEVICES, _MOST_SEQUENCES = 6, 24
"""Of clusters that each sequence is searched of by itself."""


def few_sequences(homes: Sequence[Hashable], kinds: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """The sequences of all devices that differ in anything; none where they are many.

    Args:
        homes, kinds: each device's machine, and what it is like.
    """
    if len(kinds) > _MOST_DEVICES:
        return []
    found = {pattern(each, homes, kinds): each for each in permutations(range(len(kinds)))}
    return list(found.values()) if len(found) <= _MOST_SEQUENCES else []


def cluster_in_sequence(cluster: Cluster, sequence: Sequence[int]) -> Cluster:
    """The same cluster, its devices listed in this sequence of their positions."""
    return msgspec.structs.replace(cluster, devices=tuple(cluster.devices[d] for d in sequence))


def on_first_devices(
    cluster: Cluster, lying: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The devices of stages, exchanged for the first in their machines that are like them and free;
    machines for the first with the same devices, where no pair has a link of its own."""
    used = dict.fromkeys(d for mine in lying for d in mine)
    homes, free = dict[str | None, str | None](), _by_machine(cluster)
    machines = {home: Counter(map(cluster.like, mine)) for home, mine in free.items()}
    number = dict[int, int]()
    for d in used:
        home = cluster.devices[d].machine
        if home not in homes:
            alike = [
                h for h in machines if machines[h] == machines[home] and h not in homes.values()
            ]
            homes[home] = home if cluster.links else alike[0]
        place = next(e for e in free[homes[home]] if cluster.like(e) == cluster.like(d))
        free[homes[home]].remove(place)
        number[d] = place
    found = tuple(tuple(sorted(number[d] for d in mine)) for mine in lying)
    # As they are listed is how they stay.
    return found if follows_list(found) or not follows_list(lying) else tuple(lying)


def _by_machine(cluster: Cluster) -> dict[str | None, list[int]]:
    found = dict[str | None, list[int]]()
    for d, device in enumerate(cluster.devices):
        found.setdefault(device.machine, []).append(d)
    return found


def follows_list(lying: Sequence[tuple[int, ...]]) -> bool:
    """Whether stages take devices one behind the other, as the cluster lists them."""
    devices = [d for mine in lying for d in mine]
    return all(a < b for a, b in pairwise(devices))


def sums_copies(question: Question) -> bool:
    """Whether stages may have to sum gradients of parameters that they share: those with copies
    are better off in one machine."""
    return question.tied == "split" and bool(question.profile.shared)


def sequence_matters(question: Question, replicas: bool) -> bool:
    """Whether the sequence of a cluster's devices makes a difference: they are of several kinds, by
    memory and speed, or in machines with more and fewer of them, or listed in turns, or some have
    links of their own; or they are in machines, and stages sum copies or may have replicas in
    several of them, or what links machines is faster than some link inside one."""
    cluster = question.cluster
    if cluster.links or len({d.alike for d in cluster.devices}) > 1:
        return True
    homes = [d.machine for d in cluster.devices]
    sizes, rows = Counter(homes), sum(1 for _ in groupby(homes))
    if cluster.flat or len(set(sizes.values())) > 1 or rows > len(sizes):
        return not cluster.flat
    beside = [(d, homes[d] == homes[d + 1]) for d in range(len(homes) - 1)]
    inside, between = (
        {cluster.link(d, d + 1).bandwidth_bytes_per_s for d, together in beside if together is mine}
        for mine in (True, False)
    )
    slow = bool(inside) and min(inside) < max(between)
    return slow or replicas or sums_copies(question)
