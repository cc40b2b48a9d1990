"""By which links messages may come to neighbouring devices from those listed before them."""

from __future__ import annotations

from collections.abc import Callable

from ..cluster.cluster import Cluster, Network


def links_from_before(cluster: Cluster) -> Callable[[range], list[Network]]:
    """The links by which some neighbouring devices may get messages from any device before them."""
    seen: dict[str | None, int] = {}
    kinds = [0]
    for d, device in enumerate(cluster.devices):
        seen.setdefault(device.machine, d)
        kinds.append(len(seen))

    def links(mine: range) -> list[Network]:
        first = mine[0]
        homes = {cluster.devices[d].machine for d in mine}
        before = [home for home in homes if seen[home] < first]
        found = [cluster.network] if before else []
        if first and kinds[first] + len(homes) - len(before) > 1:
            found.append(cluster.between_machines or cluster.network)
        return found

    return links
