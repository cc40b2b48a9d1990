"""What messages and all-reduces take over a link: latency and bandwidth, or a table by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ...profiles.files import MAX_BYTES, Bandwidth, Seconds

MAX_DEVICES = 65536

Times = tuple[tuple[Annotated[float, Meta(gt=0, le=MAX_BYTES)], Seconds], ...]
"""Bytes of messages, rising, and the seconds that they take, latency included."""


class _Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What takes a latency, and time by its bytes: by bandwidth, or by a table, outside of which
    times are in proportion to those of its first and last size."""

    if TYPE_CHECKING:
        # Each has them at their place in files.
        bandwidth_bytes_per_s: Bandwidth
        latency_s: Seconds
        times: Times

    def __post_init__(self) -> None:
        _check_times(self.times, self.latency_s)

    def wire_s(self, count: float) -> float:
        """Seconds that `count` bytes take, latency left out."""
        times, latency_s = self.times, self.latency_s
        if not times:
            return count / self.bandwidth_bytes_per_s
        k = bisect_left(times, count, key=lambda point: point[0])
        if k in (0, len(times)):
            nbytes, seconds = times[min(k, len(times) - 1)]
            return (seconds - latency_s) * count / nbytes
        (low, low_s), (high, high_s) = times[k - 1 : k + 1]
        return low_s - latency_s + (high_s - low_s) * (count - low) / (high - low)

    @property
    def top_bytes_per_s(self) -> float:
        """The most bytes in a second, latency left out, whatever their number."""
        # On a line between two sizes the rate rises or falls all the way.
        rates = [nbytes / (seconds - self.latency_s) for nbytes, seconds in self.times]
        return max(rates, default=self.bandwidth_bytes_per_s)

    def with_costs(self: T, bandwidth_bytes_per_s: float, latency_s: float) -> T:
        """With this bandwidth, of a table at its largest size and others as much more or less."""
        faster = bandwidth_bytes_per_s / self.bandwidth_bytes_per_s
        return msgspec.structs.replace(
            self,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            latency_s=latency_s,
            times=tuple(
                (nbytes, latency_s + (seconds - self.latency_s) / faster)
                for nbytes, seconds in self.times
            ),
        )


T = TypeVar("T", bound=_Timed)


class Network(_Timed, frozen=True, kw_only=True):
    """The link between two devices: a message of n bytes takes latency + n / bandwidth; or what a
    table says, between whose sizes times lie on straight lines."""

    bandwidth_bytes_per_s: Bandwidth
    """In each direction; in both together when half duplex. With a table, of its largest size."""
    latency_s: Seconds
    half_duplex: bool = False
    """Messages of both directions take turns on one wire."""
    overlap: bool = True
    """Transfers overlap computing; else a device that sends or receives computes nothing."""
    times: Times = ()


class AllReduce(_Timed, frozen=True, kw_only=True):
    """A sum over processes as measured: latency + bytes of the tensor / bandwidth, or by a table as
    of `Network`."""

    processes: Annotated[int, Meta(ge=2, le=MAX_DEVICES)]
    """How many took part; other numbers of processes take other times."""
    latency_s: Seconds
    bandwidth_bytes_per_s: Bandwidth
    times: Times = ()

    def seconds(self, nbytes: float) -> float:
        """Seconds that summing a tensor of `nbytes` takes."""
        return self.latency_s + self.wire_s(nbytes)


def _check_times(times: Times, latency_s: float) -> None:
    """Raises ValueError, of which msgspec makes its own, for a table that can't be one."""
    for (low, low_s), (high, high_s) in pairwise(times):
        if not low < high:
            raise ValueError("times: give rising sizes")
        if high_s < low_s:
            raise ValueError(f"times: {high:g} bytes take less than {low:g}")
    if times and times[0][1] <= latency_s:
        raise ValueError("times: the smallest size takes no longer than the latency")


def costs_by_size(
    times: Sequence[tuple[float, float]], latency_s: float | None, most: float = 0.9
) -> dict[str, Any]:
    """Fields of a `Network` or an `AllReduce`.

    Args:
        latency_s: None: what is left of the first two sizes' times at no bytes.
        most: of the smallest size's time, that may be latency; without one given, 0.9.

    Raises ValueError for a table that can't be one.
    """
    low, low_s = times[0]
    if latency_s is None:
        high, high_s = times[1] if len(times) > 1 else (2 * low, 2 * low_s)
        latency_s, most = max(low_s - (high_s - low_s) * low / max(high - low, 1), 0.0), 0.9
    if most < 1:
        latency_s = min(latency_s, low_s * most)
    _check_times(tuple(times), latency_s)
    nbytes, seconds = times[-1]
    bandwidth = nbytes / (seconds - latency_s)
    return {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s, "times": tuple(times)}
