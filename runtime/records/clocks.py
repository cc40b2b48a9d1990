"""Clocks of several hosts, brought together by the messages between them.

Processes on one host share a clock that only goes forward. Between hosts, what is known is that no
message arrived before it was sent: the least delay seen in one direction and the least in the other
differ by twice the clocks' difference, where the way takes as long there as back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple


class Delay(NamedTuple):
    """A message between two hosts: by how much its arrival there is later than its sending here,
    each by its own host's clock."""

    source: Hashable
    target: Hashable
    seconds: float


def offsets(hosts: Iterable[Hashable], delays: Iterable[Delay]) -> Mapping[Hashable, float]:
    """Seconds to add to each host's clock, so that it goes with the first one's.

    Hosts that no messages lead to keep their own.
    """
    least: dict[tuple[Hashable, Hashable], float] = {}
    for source, target, seconds in delays:
        if source != target:
            known = least.get((source, target), seconds)
            least[source, target] = min(known, seconds)
    every = list(dict.fromkeys(hosts))
    found: dict[Hashable, float] = {}
    for start in every:
        if start in found:
            continue
        found[start] = 0.0
        reached = [start]
        for here in reached:
            for there in every:
                ahead = _ahead(least.get((here, there)), least.get((there, here)))
                if there not in found and ahead is not None:
                    found[there] = found[here] - ahead
                    reached.append(there)
    return found


def _ahead(there: float | None, back: float | None) -> float | None:
    """By how much the other clock is ahead, from the least delays in both directions."""
    if there is not None and back is not None:
        return (there - back) / 2
    if there is not None:
        return there
    return None if back is None else -back
