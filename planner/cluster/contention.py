"""Devices that share a machine, and slow each other down: what a profile measured of it."""

from __future__ import annotations

from collections import Counter

import msgspec

from ...profiles.profile import Together
from .cluster import Cluster


def slowdown(together: Together | None, devices: int) -> float:
    """Time over time alone where so many devices of a machine compute at once.

    On a line between one and as many as were measured; with more, as with those.
    """
    if together is None:
        return 1.0
    share = (min(devices, together.processes) - 1) / (together.processes - 1)
    return 1 + (together.slowdown - 1) * share


def crowded(cluster: Cluster, together: Together | None) -> Cluster:
    """The cluster with devices as fast as they are when as many of a machine's compute as can."""
    if together is None:
        return cluster
    count = Counter(device.machine for device in cluster.devices)
    slower = {home: slowdown(together, cluster.at_once(n)) for home, n in count.items()}
    devices = tuple(
        msgspec.structs.replace(device, speed=round(device.speed / slower[device.machine], 4))
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)
