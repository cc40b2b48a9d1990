"""Plans that nothing beats in everything: period, memory per device and delay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..evaluate import Evaluation

Prices = tuple[float, ...]


@dataclass(frozen=True)
class ParetoPoint:
    """A plan's three prices.

    Attributes:
        memory_bytes: of the device that holds most.
        delay: largest of any stage, in updates (`StagePrediction.delay`): a system that stashes
            weights has no version difference, and is as late as another.
    """

    variant: str
    evaluation: Evaluation
    period_s: float
    memory_bytes: int
    delay: int

    @property
    def prices(self) -> Prices:
        """All three."""
        return self.period_s, self.memory_bytes, self.delay


class ParetoFront:
    """The plans seen so far that none beats or equals in all three, by ascending period."""

    def __init__(self) -> None:
        self._points: list[ParetoPoint] = []

    def add(self, point: ParetoPoint) -> None:
        """Keep the plan unless one that is kept is as good; drop those that it is as good as."""
        if any(_no_more(kept.prices, point.prices) for kept in self._points):
            return
        kept = [kept for kept in self._points if not _no_more(point.prices, kept.prices)]
        self._points = [*kept, point]

    @property
    def points(self) -> tuple[ParetoPoint, ...]:
        """Without any plan that another is as good as in everything."""
        return tuple(sorted(self._points, key=lambda point: point.prices))


def beaten(prices: Prices, others: Iterable[Prices]) -> bool:
    """Whether some other is as good in every price, and better in one."""
    return any(_no_more(other, prices) and not _no_more(prices, other) for other in others)


def unbeaten(prices: Mapping[str, Prices]) -> set[str]:
    """Names that no other is as good as in every price, and better in one."""
    return {name for name, mine in prices.items() if not beaten(mine, prices.values())}


def _no_more(prices: Prices, others: Prices) -> bool:
    # What differs by rounding is the same.
    return all(a <= b + 1e-9 * abs(b) for a, b in zip(prices, others, strict=True))
