"""Discrete-event simulation of lanes (stages, devices or replicas), under a rule of what runs next.

Each lane, which is a stage, a device or a replica, offers what it would run next as soon as it is
known when that can start. The offer that starts first runs, once all messages that are sent until
then have been; ties go by an offer's other numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from .clock import SimulatedClock

Offer = tuple[Any, ...]
"""When it can start; what ties go by; the lane, as the last number."""


class EventLoop:
    """Runs, of all lanes' next operations, the one that starts earliest; a rule is a subclass with
    the four methods at the end.

    Attributes:
        updates: per stage, mini-batches that it has updated after.
        now_s: all that starts before has been run.
    """

    def __init__(self, clock: SimulatedClock, lanes: int) -> None:
        self.clock = clock
        self.updates = [0 for _ in clock.replicas]
        self.now_s = 0.0
        self._heap: list[Offer] = []
        # A lane's offers in the heap are stale but for its current one.
        self._current: list[Offer | None] = [None] * lanes

    def run(self, mini_batches: int) -> bool:
        """Go on until every stage has updated after so many; False when nothing is left first."""
        heap, current, sending, take = self._heap, self._current, self.clock.sending, self._take
        behind = sum(1 for done in self.updates if done < mini_batches)
        while behind:
            if not heap:
                if not sending:
                    return False
                self._deliver()
                continue
            offer = heapq.heappop(heap)
            if current[offer[-1]] is not offer:
                continue
            if sending and sending[0][0] <= offer[0]:
                heapq.heappush(heap, offer)
                self._deliver()
                continue
            self.now_s = offer[0]
            if take(offer) == mini_batches:
                behind -= 1
        return True

    def _deliver(self) -> None:
        kind, s, complete = self.clock.deliver()
        self._arrived(kind, complete)
        if self.clock.blocking:
            # Where transfers don't overlap computing, they have moved what both stages do next.
            ends = (s, *(port.stage for port in self.clock.ports[kind][s]))
            for lane in sorted({lane for t in ends for lane in self._lanes(t)}):
                self._offer(lane)

    def _offer(self, lane: int) -> None:
        """Make what the lane would run next its current offer, and put it into the heap."""
        raise NotImplementedError

    def _take(self, offer: Offer) -> int:
        """Run it. Returns the mini-batches that a stage has now updated after, if one just did."""
        raise NotImplementedError

    def _arrived(self, kind: int, complete: Sequence[tuple[int, int]]) -> None:
        """Have lanes offer anew what waited for these; (stage, slot) as `SimulatedClock.run`."""
        raise NotImplementedError

    def _lanes(self, s: int) -> Iterable[int]:
        """Those of a stage's device."""
        raise NotImplementedError
