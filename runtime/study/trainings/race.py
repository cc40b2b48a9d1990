"""The rungs of a study with a budget, trained one after another (`figures.rungs`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..figures.rungs import RATES, Rung, rung_lengths
from ..figures.study import Curve, StudiedPlan, StudyQuestion
from ..figures.tuning import TuningGrid, next_trials
from .work import Asked


class Wanted:
    """Trainings that were asked for.

    Attributes:
        met: all of them.
        due: those that aren't done.
    """

    def __init__(self, curve_of: Callable[[Asked], Curve | None]) -> None:
        self._curve_of = curve_of
        self.met: set[Asked] = set()
        self.due: dict[Asked, None] = {}

    def curves(self, wanted: Sequence[Asked]) -> list[Curve] | None:
        """Trainings that are done; None: some are due."""
        self.met.update(wanted)
        found = [self._curve_of(asked) for asked in wanted]
        done = [curve for curve in found if curve is not None]
        if len(done) == len(found):
            return done
        self.due |= {asked: None for asked, c in zip(wanted, found, strict=True) if c is None}
        return None


class _Entrant(NamedTuple):
    arm: int
    rate: float


class Race:
    """Arms at a few rates, of which each rung leaves half.

    Attributes:
        curves: by arm, of all rungs.
        rates: by arm, the best in its last rung.
        first: the best arm of the last rung, plain training left out.
    """

    def __init__(
        self,
        question: StudyQuestion,
        arms: Sequence[str],
        plans: Sequence[StudiedPlan],
        wanted: Wanted,
    ) -> None:
        self._question, self._arms, self._wanted = question, arms, wanted
        self._periods = dict.fromkeys(arms, math.inf)
        for plan in plans:
            self._periods[plan.arm] = min(self._periods[plan.arm], plan.period_s)
        self._lengths = rung_lengths(question.length)
        grid = TuningGrid(question.rate, question.factor, min(RATES, question.tune), (0,))
        rates = [rate for rate, _ in next_trials(grid, [])]
        self._entrants = [_Entrant(k, rate) for k in range(len(arms)) for rate in rates]
        plain, others, self.mini_batches = len(rates), (len(arms) - 1) * len(rates), 0
        for length in self._lengths:
            self.mini_batches += (plain + others) * length
            plain, others = _half(plain), _half(others)
        self.curves: dict[int, list[Curve]] = {}
        self.rates: dict[int, float] = {}
        self.first = 1

    @property
    def over(self) -> bool:
        """Whether all rungs are done."""
        return not self._lengths

    @property
    def length(self) -> int:
        """Mini-batches of the trainings of the next rung."""
        return self._lengths[0]

    def go_on(self) -> str | None:
        """Do a rung, and say how it ended; None: some of its trainings are due."""
        wanted = [self._short(entrant) for entrant in self._entrants]
        done = self._wanted.curves(wanted)
        if done is None:
            return None
        found = {
            entrant: msgspec.structs.replace(curve, phase="rung")
            for entrant, curve in zip(self._entrants, done, strict=True)
        }
        for entrant, curve in found.items():
            self.curves.setdefault(entrant.arm, []).append(curve)
        plain, others = self._ranked(found)
        self.rates |= {entrant.arm: entrant.rate for entrant in reversed(plain + others)}
        self.first = others[0].arm
        self._entrants = plain[: _half(len(plain))] + others[: _half(len(others))]
        gone = sorted({e.arm for e in others} - {e.arm for e in self._entrants})
        names = ", ".join(self._arms[k] for k in gone) or "none"
        length = self._lengths.pop(0)
        return f"{len(wanted)} trainings of {length} mini-batches; dropped for now: {names}"

    def _short(self, entrant: _Entrant) -> Asked:
        asked, length = self._question, self._lengths[0]
        warmup = asked.warmups[0] * length // asked.length
        return Asked(arm=entrant.arm, rate=entrant.rate, warmup=warmup, seed=0, length=length)

    def _ranked(self, curves: Mapping[_Entrant, Curve]) -> tuple[list[_Entrant], list[_Entrant]]:
        """Plain training's pairs, and the others, the best first."""
        rung = Rung(self._question, [curve for e, curve in curves.items() if not e.arm])

        def price(entrant: _Entrant) -> tuple[float, float]:
            if not entrant.arm:
                return rung.badness(curves[entrant])
            return rung.overhead(curves[entrant]) * self._periods[self._arms[entrant.arm]], 0.0

        ranked = sorted(curves, key=lambda entrant: (price(entrant), entrant))
        return [e for e in ranked if not e.arm], [e for e in ranked if e.arm]


def _half(count: int) -> int:
    return (count + 1) // 2
