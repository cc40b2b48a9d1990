"""Cuts into a given row of stages, each with its device: a bound on all, and those below a period.

What a period or a device's memory is at the least is mostly a sum over stages (`Term`): a device's
work is that of its stages, which lie apart; what fills a pipeline is a little of each stage before,
and messages. For any weights of such terms that add up to 1, no plan's period is below the least
weighted sum of any cut; and that is found by a dynamic program over stages and places to cut, since
it takes each stage, with what it sends to the next one, by itself (Lagrangian relaxation). The next
weights are between the best ones so far and those that are best against all cuts that came up
(cutting planes, "in-out"): the solution of a zero-sum game, by regret matching.

Of cuts below a period T, no stage alone, and no message, makes any term longer than T; and by the
tables of the program none is in cuts alone whose weighted sums are above T (reduced costs). So for
each T few stages are left, and the bound is the T below which it isn't: found by bisection.

Index letters: L links, a stage each with the kind of stage that it sends to; M measures of those; S
stages; K terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from .dp.cost_tables import Flags
from .dp.lattice import Positions
from .problem import Vector

_ROUNDS, _FEWER = 40, 20
"""In which weights are found, for the first period and for each further one, at the most."""

_INWARDS = 0.4
"""How near to the best weights so far the next ones are."""

_TURNS = 150
"""Of a game's players."""

_CLOSE, _IDLE = 1.001, 8
"""When the bound hasn't risen so much in so many rounds, or can't, no more follow."""

_REDUCED = 10
"""Rounds between which stages are left out."""

PERIODS, _NEAR = 6, 1.01
"""Periods that are asked about, down to so near to the bound."""

_ABOUT = 2.0
"""Of what is known of the bound, where no plan's period is, what is asked about next."""

_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class Links:
    """Stages between two places, each with the kind of the next one, by rising `begin`.

    Attributes:
        begin, end: numbers of a place with the kind of the stage that begins there, [L]; the first
            place has the lowest ones, behind the last one there is one number, the highest.
        values: measures of a stage and of what it sends to the next, [M, L].
        masks: bit masks of the layers before each place.
        kinds: numbers of each place.
    """

    begin: Positions
    end: Positions
    values: Vector
    masks: Sequence[int]
    kinds: int

    def cut(self, chain: Sequence[int]) -> tuple[int, ...]:
        """Bit masks of the layers before each border of a row of links."""
        return (0, *(self.masks[int(self.end[link]) // self.kinds] for link in chain))


@dataclass(frozen=True)
class Term:
    """What some period or memory is at the least: a sum over stages.

    Attributes:
        within: how often measures count, [S, M].
        in_memory: a share of a device's memory, at most 1; else seconds.
    """

    within: Vector
    in_memory: bool = False


class Found(NamedTuple):
    """What is known of all chains.

    Attributes:
        bound_s: no period is shorter; infinite: no chain is within the memory.
        cuts: that came up, as bit masks of the layers before each of the S + 1 borders, those with
            the smallest of largest terms first.
        spent: links that were gone through.
    """

    bound_s: float
    cuts: list[tuple[int, ...]]
    spent: int


class _Row(NamedTuple):
    """Links that one stage may be.

    Attributes:
        which: positions in all of them.
        values: of those, [M, L].
        starts: where those of each `begin` begin.
    """

    which: Positions
    begin: Positions
    end: Positions
    values: Vector
    starts: Positions

    def those(self, some: Flags) -> _Row:
        begin = self.begin[some]
        starts = np.flatnonzero(np.diff(begin, prepend=-1))
        return _Row(self.which[some], begin, self.end[some], self.values[:, some], starts)


class Chains:
    """Chains of S stages from the first place to the last one.

    Args:
        allowed: per stage, the links that it may be, [L].
    """

    def __init__(self, links: Links, terms: Sequence[Term], allowed: Sequence[Flags]) -> None:
        self.links = links
        self._within = np.array([term.within for term in terms])
        self._memory = np.array([term.in_memory for term in terms])
        self.stages = self._within.shape[1]
        self._allowed = allowed
        self._weights = np.full(len(terms), 1.0 / len(terms))
        self._base, self._besides = self._most_common()
        self._spent, self._most_spent = 0, inf
        # The shortest period that is asked about so far, and what is left below it.
        self._left: tuple[float, list[_Row]] = inf, self._all_rows

    def _most_common(self) -> tuple[Vector, list[Vector]]:
        """Weights of the term that the most others contain: 1 of one, where these are more than
        stages; and per stage, what they have besides, [others, M]. No chain has any of them
        shorter than the shortest one by that term and what is besides."""
        within, containing = self._within, np.zeros(0, dtype=np.intp)
        weights = np.zeros(len(within))
        for number in np.flatnonzero(~self._memory):
            more = np.flatnonzero((within >= within[number]).all(axis=(1, 2)) & ~self._memory)
            if len(more) > max(len(containing), self.stages):
                containing, weights = more, np.eye(len(within))[number]
        besides = within[containing] - np.tensordot(weights, within, 1)
        return weights, [np.unique(x, axis=0) for x in besides.swapaxes(0, 1)]

    def begin_as(self, other: Chains) -> None:
        """Look for weights from those of others on, with the same terms."""
        if len(other._weights) == len(self._weights):
            self._weights = other._weights

    @property
    def size(self) -> int:
        """Links of all stages."""
        return sum(len(row.which) for row in self._left[1])

    @cached_property
    def _all_rows(self) -> list[_Row]:
        links, last, found = self.links, int(self.links.end.max(initial=0)), []
        whole = _Row(np.arange(len(links.begin)), links.begin, links.end, links.values, links.begin)
        for s in range(self.stages):
            some = self._allowed[s] & ((links.begin < links.kinds) == (s == 0))
            found.append(whole.those(some & ((links.end == last) == (s == self.stages - 1))))
        # Those that others lead to and that lead to the end.
        return self._reduced(found, np.zeros(len(self._within)), inf)

    # The bound -----------------------------------------------------------------------------------

    def bound(
        self, low_s: float, below_s: float, most: float = inf, periods: int = PERIODS
    ) -> Found:
        """No chain's period is shorter than this.

        Args:
            low_s: none is shorter than that.
            below_s: longer ones don't matter.
            most: links that are gone through, about.
            periods: that are asked about.
        """
        self._spent, self._most_spent = 0, most
        seen = dict[tuple[int, ...], float]()
        low, high = low_s, inf
        for turn in range(periods):
            if low * _ROUNDING >= below_s or high <= low * _NEAR or self._spent > most:
                break
            target = min(below_s, low * _ABOUT) if high == inf else sqrt(low * high)
            if turn == 0 and below_s < inf:
                # What is left below the best plan is what proofs begin with.
                target = below_s
            least, rows = self._least_below(target, _FEWER if turn else _ROUNDS, seen)
            if target == below_s:
                self._left = target, rows
            if least >= target:
                low = target
            else:
                low, high = max(low, least), min(high, target)
        cuts = {cut: worst for chain, worst in seen.items() for cut in [self.links.cut(chain)]}
        return Found(low / _ROUNDING, sorted(cuts, key=lambda cut: (cuts[cut], cut)), self._spent)

    def _least_below(
        self, target: float, rounds: int, seen: dict[tuple[int, ...], float]
    ) -> tuple[float, list[_Row]]:
        """Of chains below a period, what none is below, and what is left for each stage.

        Args:
            seen: where chains are noted, with their largest term.
        """
        known_s, rows = self._left
        rows = self._alone(rows if target <= known_s else self._all_rows, target)
        scale = np.where(self._memory, target, 1.0)
        weights = kept = self._weights
        best, risen, met, sums = 0.0, 0, list[list[int]](), list[Vector]()
        for turn in range(1, rounds + 1):
            chain = self._cheapest(rows, self._costs(rows, weights * scale))
            if chain is None:
                return inf, rows
            terms = self._terms(chain) * scale
            met.append(chain)
            sums.append(terms)
            least = self._at_least(weights, float(weights @ terms), target)
            if least > best:
                risen = turn if least > best * _CLOSE else risen
                best, kept = least, weights
            if not best < min(target, float(terms.max())) or not terms.any():
                break
            against, most_s, shares = _best_weights(np.array(sums).T, kept)
            late = turn - risen > _IDLE or self._spent > self._most_spent
            if most_s <= best * _CLOSE or late or turn == rounds:
                middle = self._between(rows, np.array(met), shares)
                if middle is not None:
                    seen[tuple(middle)] = float((self._terms(middle) * scale).max())
                break
            if turn % _REDUCED == 0:
                rows = self._reduced(rows, kept * scale, target)
            weights = _INWARDS * kept + (1 - _INWARDS) * against
        seen.update({tuple(c): float(t.max()) for c, t in zip(met, sums, strict=True)})
        self._weights = kept
        return best, self._reduced(rows, kept * scale, target)

    def _at_least(self, weights: Vector, least: float, target: float) -> float:
        """What the period is at the least where the weighted sum is: shares of memory are at most
        1, so that T · (1 - their weight) + target · their weight ≥ the sum."""
        of_memory = float(weights[self._memory].sum())
        if of_memory >= 1.0 - 1e-9:
            return inf if least > target * _ROUNDING * _ROUNDING else 0.0
        return (least - of_memory * target) / (1.0 - of_memory)

    def _most(self, target: float) -> Vector:
        """Of each term, below a period, [K]."""
        return np.where(self._memory, 1.0, target) * _ROUNDING

    def _alone(self, rows: Sequence[_Row], target: float) -> list[_Row]:
        """Stages that alone make no term longer."""
        most, found = self._most(target)[:, None], []
        for s, row in enumerate(rows):
            # Of many terms a stage's part is the same.
            own = np.unique(np.concatenate([self._within[:, s], most], axis=1), axis=0)
            some: Flags = np.logical_and.reduce(own[:, :-1] @ row.values <= own[:, -1:], axis=0)
            found.append(row if some.all() else row.those(some))
        return self._reduced(found, self._base, target, self._besides)

    def _costs(self, rows: Sequence[_Row], weights: Vector) -> list[Vector]:
        """Per stage, its part of the weighted sum."""
        coefficients = np.tensordot(weights, self._within, 1)
        self._spent += sum(len(row.which) for row in rows)
        return [own @ row.values for own, row in zip(coefficients, rows, strict=True)]

    def _behind(self, rows: Sequence[_Row], costs: Sequence[Vector]) -> list[Vector]:
        """Per stage, the least cost of what may come from each begin on; and behind the last
        one."""
        found = [self._nowhere()]
        found[0][-1] = 0.0
        for row, own in zip(reversed(rows), reversed(costs), strict=True):
            least = self._nowhere()
            if len(row.which):
                sums = own + found[-1][row.end]
                least[row.begin[row.starts]] = np.minimum.reduceat(sums, row.starts)
            found.append(least)
        return found[::-1]

    def _nowhere(self) -> Vector:
        return np.full(int(self.links.end.max(initial=0)) + 1, inf)

    def _cheapest(self, rows: Sequence[_Row], costs: Sequence[Vector]) -> list[int] | None:
        """A chain with the least cost; None: there is no chain."""
        behind, chain = self._behind(rows, costs), list[int]()
        at = int(behind[0][: self.links.kinds].argmin())
        if not np.isfinite(behind[0][at]):
            return None
        for row, own, beyond in zip(rows, costs, behind[1:], strict=True):
            low, high = np.searchsorted(row.begin, [at, at + 1]).tolist()
            best = low + int((own[low:high] + beyond[row.end[low:high]]).argmin())
            chain.append(int(row.which[best]))
            at = int(row.end[best])
        return chain

    def _between(self, rows: Sequence[_Row], met: Vector, shares: Vector) -> list[int] | None:
        """The chain whose borders are nearest to the mean ones of some.

        Args:
            met: their links, [chains, S].
            shares: of each chain.
        """
        kinds = self.links.kinds
        middle = shares @ (self.links.end[met] // kinds)
        apart = [np.abs(row.end // kinds - at) for row, at in zip(rows, middle, strict=True)]
        return self._cheapest(rows, apart)

    def _terms(self, chain: Sequence[int]) -> Vector:
        """Each term of a chain, [K]."""
        values = self.links.values[:, chain].T
        found: Vector = (self._within * values).sum(axis=(1, 2))
        return found

    def _reduced(
        self,
        rows: Sequence[_Row],
        weights: Vector,
        target: float,
        besides: Sequence[Vector] | None = None,
    ) -> list[_Row]:
        """What is in some chain whose weighted sum isn't above the target.

        Args:
            besides: per stage, what any of those comes on top, [_, M].
        """
        costs, found = self._costs(rows, weights), list[_Row]()
        behind = self._behind(rows, costs)
        ahead, room = self._nowhere(), target * _ROUNDING * _ROUNDING
        ahead[: self.links.kinds] = 0.0
        for s, (row, own, beyond) in enumerate(zip(rows, costs, behind[1:], strict=True)):
            sums = ahead[row.begin] + own
            some = sums + beyond[row.end] <= room
            for more in besides[s] if besides is not None else ():
                some &= sums + beyond[row.end] + more @ row.values <= room
            # Of what leads nowhere, nothing is below an infinite period, either.
            some &= np.isfinite(sums) & np.isfinite(beyond[row.end])
            ahead = self._nowhere()
            np.minimum.at(ahead, row.end[some], sums[some])
            found.append(row.those(some))
        return found

    # Those below a period ------------------------------------------------------------------------

    def below(
        self, most_s: float, go_on: Callable[[int], bool]
    ) -> list[tuple[float, tuple[int, ...]]] | None:
        """Cuts none of whose terms is above a period, the lowest first, as bit masks; None: there
        are too many.

        Args:
            go_on: told how many links were looked at: whether there may be more.
        """
        known_s, rows = self._left
        most, rows = self._most(most_s), rows if most_s <= known_s else self._all_rows
        rows = self._alone(rows, most_s)
        weights = (
            self._weights * np.where(self._memory, most_s, 1.0)
            if most_s < inf
            else np.zeros(len(most))
        )
        costs = self._costs(rows, weights)
        behind = self._behind(rows, costs)
        room = most_s * _ROUNDING * _ROUNDING
        found: list[tuple[float, tuple[int, ...]]] = []

        def extend(s: int, at: int, chain: tuple[int, ...], terms: Vector, spent: float) -> bool:
            row = rows[s]
            low, high = np.searchsorted(row.begin, [at, at + 1]).tolist()
            if not go_on(high - low + 1):
                return False
            values, ends = row.values[:, low:high], row.end[low:high]
            after = terms[:, None] + self._within[:, s] @ values
            sums = spent + costs[s][low:high]
            fine = (sums + behind[s + 1][ends] <= room) & (after <= most[:, None]).all(axis=0)
            for k in np.flatnonzero(fine).tolist():
                mine = (*chain, int(row.which[low + k]))
                if s == self.stages - 1:
                    load_s = float(after[~self._memory, k].max())
                    found.append((load_s, self.links.cut(mine)))
                elif not extend(s + 1, int(ends[k]), mine, after[:, k], float(sums[k])):
                    return False
            return True

        for first in range(self.links.kinds):
            if not extend(0, first, (), np.zeros(len(most)), 0.0):
                return None
        return sorted(found)


def _best_weights(terms: Vector, first: Vector) -> tuple[Vector, float, Vector]:
    """Weights of terms whose least sum over some chains is about the largest there is; what none
    have more than; and the shares of the chains, for which that holds.

    Args:
        terms: of each chain, [K, chains].
        first: to begin with.
    """
    (rows, columns), largest = terms.shape, float(terms.max())
    mine, others = np.maximum(first, 1e-12), np.ones(columns)
    weights, shares = mine / mine.sum(), others / columns
    mean, mixed = np.zeros(rows), np.zeros(columns)
    for turn in range(1, _TURNS + 1):
        paid = weights @ terms
        others = np.maximum(others + (shares @ paid - paid) / largest, 0.0)
        total = others.sum()
        shares = others / total if total else np.full(columns, 1 / columns)
        gained = terms @ shares
        mine = np.maximum(mine + (gained - weights @ gained) / largest, 0.0)
        total = mine.sum()
        weights = mine / total if total else np.full(rows, 1 / rows)
        mean += turn * weights
        mixed += turn * shares
    mixed /= mixed.sum()
    return mean / mean.sum(), float((terms @ mixed).max()), mixed
