"""The places of a relaxed problem, each changed by a function of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..partition.dp.identical_devices import RisingPlaces
from ..partition.problem import Option, Place

Change = Callable[[Place, int], Place]
"""Of a place, by its replicas; never of its units and copies."""


def changed(
    place: Callable[[int, int], Place], options: Sequence[Option], change: Change
) -> Callable[[int, int], Place]:
    """Places that are each changed by a function of theirs and of their replicas."""
    if isinstance(place, RisingPlaces):
        return place.changed(options, change)
    return lambda option, k: change(place(option, k), options[option].replicas)


def smaller(share: float) -> Change:
    """So much of each device's memory may be used."""
    return lambda place, _: replace(place, memory_bytes=place.memory_bytes * share)
