"""What summing gradients over neighbouring devices takes, as an affine time."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from .cluster import Cluster

_LARGE = 1e9
"""Bytes, to read an affine time off."""


class Sync:
    """What summing gradients over neighbouring devices takes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        pairs = pairwise(device.machine for device in cluster.devices)
        self._moves = [0, *accumulate(int(a != b) for a, b in pairs)]
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def least(self, count: int) -> tuple[float, float]:
        """Of an all-reduce over so many devices, wherever they lie, at the least: as `of`."""
        moves = np.array(self._moves)
        first = np.unique(moves[count - 1 :] - moves[: len(moves) - count + 1], return_index=True)
        times = [self.of(range(at, at + count)) for at in first[1].tolist()]
        return min(fixed for fixed, _ in times), min(per_byte for _, per_byte in times)

    def of(self, devices: range) -> tuple[float, float]:
        """Of an all-reduce: seconds in any case, and for each byte."""
        if len(devices) == 1:
            return 0.0, 0.0
        # As many devices in as many machines take the same time.
        key = len(devices), self._moves[devices[-1]] - self._moves[devices[0]]
        if key not in self._known:
            fixed_s = self.cluster.all_reduce_s(devices, 0.0)
            whole_s = self.cluster.all_reduce_s(devices, _LARGE)
            self._known[key] = fixed_s, (whole_s - fixed_s) / _LARGE
        return self._known[key]
