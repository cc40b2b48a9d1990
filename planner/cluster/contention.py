"""What devices share: a machine, in which they slow each other down, and sums of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate, chain, pairwise

import msgspec
import numpy as np

from ...profiles.profile import Together
from .cluster import Cluster
from .links import Network


def slowdown(together: Together | None, devices: int) -> float:
    """Time over time alone where so many devices of a machine compute at once.

    On a line between one and as many as were measured; with more, as with those.
    """
    if together is None:
        return 1.0
    share = (min(devices, together.processes) - 1) / (together.processes - 1)
    return 1 + (together.slowdown - 1) * share


def contention_on(cluster: Cluster, together: Together | None) -> Together | None:
    """What was measured, for a cluster whose devices are all as fast as the one that was profiled;
    None: it says itself how fast they are."""
    return together if all(device.speed == 1 for device in cluster.devices) else None


def with_contention(cluster: Cluster, together: Together | None) -> Cluster:
    """The cluster with devices as fast as they are when all of a machine's compute at once."""
    if together is None:
        return cluster
    count = Counter(device.machine for device in cluster.devices)
    slower = {home: slowdown(together, n) for home, n in count.items()}
    devices = tuple(
        msgspec.structs.replace(device, speed=_rounded(device.speed / slower[device.machine]))
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def _rounded(speed: float) -> float:
    return round(speed, 4) if speed >= 0.1 else float(f"{speed:.4g}")


# What summing gradients over neighbouring devices takes, as an affine time ----------------------


class AllReduceTimes:
    """What summing gradients over neighbouring devices takes; at the least, where times aren't
    affine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        homes = [device.machine for device in cluster.devices]
        self._moves = [0, *accumulate(int(a != b) for a, b in pairwise(homes))]
        # Machines' devices may be listed in turn.
        self._in_rows = self._moves[-1] + 1 == len(set(homes))
        self._known: dict[Hashable, tuple[float, float]] = {}

    def least(self, count: int) -> tuple[float, float]:
        """Of an all-reduce over so many devices, wherever they lie, at the least: as `of`."""
        if self.cluster.links:
            return self._of_any(count)
        moves = np.array(self._moves)
        moved = moves[count - 1 :] - moves[: len(moves) - count + 1]
        first = np.unique(moved, return_index=True)[1] if self._in_rows else np.arange(len(moved))
        times = [self.of(range(at, at + count)) for at in first.tolist()]
        times.append(self._time(self._closest(count)))
        return min(fixed for fixed, _ in times), min(per_byte for _, per_byte in times)

    def of(self, devices: range) -> tuple[float, float]:
        """Of an all-reduce: seconds in any case, and for each byte."""
        if len(devices) == 1:
            return 0.0, 0.0
        # As many devices in as many machines take the same time.
        machines = self._moves[devices[-1]] - self._moves[devices[0]] + 1
        if not self._in_rows:
            machines = len({self.cluster.devices[d].machine for d in devices})
        # Of links that differ from pair to pair, only the same devices do.
        key: Hashable = devices if self.cluster.links else (len(devices), machines)
        if key not in self._known:
            self._known[key] = self._time(devices)
        return self._known[key]

    def _time(self, devices: Sequence[int]) -> tuple[float, float]:
        count = len(devices)
        measured = self.cluster.measured_sum(count)
        if count < 2:
            return 0.0, 0.0
        if measured is not None:
            return measured.latency_s, 1 / measured.top_bytes_per_s
        return _of_ring(self.cluster.ring(devices), count)

    def _of_any(self, count: int) -> tuple[float, float]:
        """Of so many devices anywhere, as if the best of all links were between them."""
        if count < 2 or self.cluster.measured_sum(count) is not None:
            return self._time(range(count))
        each = [_of_ring([link], count) for link in self.cluster.networks]
        return min(fixed_s for fixed_s, _ in each), min(per_byte for _, per_byte in each)

    def _closest(self, count: int) -> list[int]:
        """So many devices on the fewest machines, neighbours in the list or not."""
        homes: dict[str | None, list[int]] = {}
        for d, device in enumerate(self.cluster.devices):
            homes.setdefault(device.machine, []).append(d)
        fullest = sorted(homes.values(), key=lambda mine: -len(mine))
        return [*chain.from_iterable(fullest)][:count]


def _of_ring(links: Sequence[Network], count: int) -> tuple[float, float]:
    """As `AllReduceTimes.of`, of a ring of so many devices."""
    latency_s = max(link.latency_s for link in links)
    per_byte = max((2 if link.half_duplex else 1) / link.top_bytes_per_s for link in links)
    return 2 * (count - 1) * latency_s, 2 * (count - 1) * per_byte / count
