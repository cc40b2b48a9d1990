"""Plans that nothing beats in everything: period, memory per device and version difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..evaluate import Evaluation


@dataclass(frozen=True)
class ParetoPoint:
    """A plan's three prices.

    Attributes:
        memory_bytes: of the device that holds most.
        version_difference: largest of any stage, in the steady state.
    """

    variant: str
    evaluation: Evaluation
    period_s: float
    memory_bytes: int
    version_difference: int


def pareto_point(variant: str, found: Evaluation) -> ParetoPoint:
    """What a plan costs."""
    predicted = found.prediction
    return ParetoPoint(
        variant=variant,
        evaluation=found,
        period_s=predicted.period_s,
        memory_bytes=max(each.memory_bytes for each in predicted.devices or predicted.stages),
        version_difference=found.difference,
    )


class ParetoFront:
    """The plans seen so far that none beats or equals in all three, by ascending period."""

    def __init__(self) -> None:
        self._points: list[ParetoPoint] = []

    def add(self, point: ParetoPoint) -> None:
        """Keep the plan unless one that is kept is as good; drop those that it is as good as."""
        if any(_as_good(kept, point) for kept in self._points):
            return
        self._points = [kept for kept in self._points if not _as_good(point, kept)] + [point]

    @property
    def points(self) -> tuple[ParetoPoint, ...]:
        """Without any plan that another is as good as in everything."""
        return tuple(sorted(self._points, key=_prices))


def beaten(prices: tuple[float, int, int], points: Iterable[ParetoPoint]) -> bool:
    """Whether some point is as good in period, memory and version difference, and better in one."""
    return any(
        _no_more(_prices(point), prices) and not _no_more(prices, _prices(point))
        for point in points
    )


def _prices(point: ParetoPoint) -> tuple[float, int, int]:
    return point.period_s, point.memory_bytes, point.version_difference


def _as_good(point: ParetoPoint, other: ParetoPoint) -> bool:
    return _no_more(_prices(point), _prices(other))


def _no_more(prices: tuple[float, int, int], others: tuple[float, int, int]) -> bool:
    # Periods that differ by rounding are the same.
    return all(a <= b + 1e-9 * abs(b) for a, b in zip(prices, others, strict=True))
