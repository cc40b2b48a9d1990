"""Cuts into a given row of stages, each with its device: a bound on all, and those below a period.

What a period or a device's memory is at the least is mostly a sum over stages (`Term`): a device's
work is that of its stages, which lie apart; what fills a pipeline is a little of each stage before,
and messages. For any weights of such terms that add up to 1, no plan's period is below the least
weighted sum of any cut; and that is found by a dynamic program over stages and places to cut, since
it takes each stage, with what it sends to the next one, by itself (Lagrangian relaxation). The next
weights are between the best ones so far and those that are best against all cuts that came up
(cutting planes, "in-out"): the solution of a zero-sum game, by regret matching.

Of operations in a fixed sequence further terms come up with the cuts: the longest path through them
by what the mean of some cuts costs is a sum over stages, too (`Paths`). Where a stage may not wait
for the one before it, paths end; so cuts that have no such place, and those that have one behind a
given stage, are bounded apart.

Of cuts below a period T, no stage alone, and no message, makes any term longer than T; and by the
tables of the program none is in cuts alone whose weighted sums are above T (reduced costs). So for
each T few stages are left, and the bound is the T below which it isn't: found by bisection.

Index letters: L links, a stage each with the kind of stage that it sends to; M measures of those; S
stages; K terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from time import monotonic
from typing import NamedTuple

import numpy as np

from .dp.lattice import Flags, Positions
from .problem import Vector

_ROUNDS, _FEWER = 40, 20
"""In which weights are found, for the first period and for each further one, at the most."""

_WITH_PATHS = 80
"""Rounds in which paths come up, at the most."""

_GAINED = 1.0005
"""With them, a further period is asked about where the last one raised the bound so much."""

_LONGER = 1.0005
"""Than all other terms of some cuts, by so much, a path is that counts as a further term."""

_INWARDS = 0.4
"""How near to the best weights so far the next ones are."""

_TURNS, _LOOKED = 150, 10
"""Of a game's players at the most, and between looks at how far apart they are."""

_SETTLED = 1e-4
"""Of a game's value: a game ends when its players' bounds are that near to each other."""

_CLOSE, _IDLE = 1.001, 8
"""When the bound hasn't risen so much in so many rounds, or can't, no more follow."""

_REDUCED = 10
"""Rounds between which stages are left out."""

PERIODS, _NEAR = 6, 1.01
"""Periods that are asked about, down to so near to the bound."""

_ABOUT = 2.0
"""Of what is known of the bound, where no plan's period is, what is asked about next."""

_AT_ONCE, _MOST_CUTS = 512, 200_000
"""Beginnings of chains that are gone on from at once; and cuts, more than which aren't listed."""

_ROUNDING = 1 + 1e-12

_SURE = 1 - 1e-10
"""Of a path that counts: a period is a difference of times, which are rounded."""


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


@dataclass(frozen=True)
class Paths:
    """Finds terms that are long for what stages cost.

    Attributes:
        longest: given measures of each stage, [S, M], and a period T, how often each of them counts
            on the longest path, [S, M], with -T for each time that it goes on from a stage to one
            that doesn't wait for it, or back: of cuts with a period up to T none is shorter.
        apart: the measure that is 1 where the next stage may not wait for this one; else 0.
        spent: links that may be gone through in the time that this takes.
    """

    longest: Callable[[Vector, float], Vector]
    apart: int
    spent: int


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


@dataclass(frozen=True)
class _Row:
    """Links that one stage may be.

    Attributes:
        which: positions in all of them.
        starts: where those of each `begin` begin.
        every: measures of all links, [M, all].
        own: of these, [M, L]; None: not taken from `every` yet. Of many links that are soon left
            out they would take gigabytes.
    """

    which: Positions
    begin: Positions
    end: Positions
    starts: Positions
    every: Vector
    own: Vector | None = None

    @property
    def values(self) -> Vector:
        """Their measures, [M, L]."""
        return self.every[:, self.which] if self.own is None else self.own

    def held(self) -> _Row:
        """The same, for use many times."""
        return replace(self, own=self.values)

    def those(self, some: Flags) -> _Row:
        which = np.flatnonzero(some)
        if len(which) == len(some):
            return self
        begin, own = self.begin[which], None if self.own is None else self.own[:, which]
        starts = np.flatnonzero(np.diff(begin, prepend=-1))
        return _Row(self.which[which], begin, self.end[which], starts, self.every, own)


class _Terms:
    """Those of chains, given ones first; and then those that came up.

    Attributes:
        within: how often measures count, [K, S, M].
        in_memory: whether they are shares of a device's memory, [K].
        given: how many were given.
        below_s: those that came up hold for periods up to this.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.within: Vector = np.array([term.within for term in terms])
        self.in_memory: Flags = np.array([term.in_memory for term in terms])
        self.given, self.below_s = len(terms), inf

    def add(self, more: Sequence[Vector] | Vector) -> None:
        self.within = np.concatenate([self.within, more])
        self.in_memory = np.append(self.in_memory, np.zeros(len(more), dtype=np.bool_))

    def forget(self) -> None:
        self.within, self.in_memory = self.within[: self.given], self.in_memory[: self.given]

    def begin_as(self, other: _Terms) -> None:
        """Take those that came up among others, of fewer or more measures."""
        measures = self.within.shape[2]
        more = other.within[other.given :, :, :measures]
        self.forget()
        self.add(np.pad(more, ((0, 0), (0, 0), (0, measures - more.shape[2]))))
        self.below_s = other.below_s

    def of(self, values: Vector) -> Vector:
        """Each one by measures of stages, [S, M]."""
        found: Vector = (self.within * values).sum(axis=(1, 2))
        return found

    def scale(self, target: float) -> Vector:
        """What makes seconds of each, below a period: shares of memory are at most 1."""
        return np.where(self.in_memory, target, 1.0)

    def most(self, target: float) -> Vector:
        """The most that each term may be below a period, [K]: that, or a whole memory."""
        return np.where(self.in_memory, 1.0, target) * _ROUNDING

    def at_least(self, weights: Vector, least: float, target: float) -> float:
        """What the period is at the least where the weighted sum is: shares of memory are at most
        1, so that T · (1 - their weight) + target · their weight ≥ the sum."""
        of_memory = float(weights[self.in_memory].sum())
        if of_memory >= 1.0 - 1e-9:
            return inf if least > target * _ROUNDING * _ROUNDING else 0.0
        return (least - of_memory * target) / (1.0 - of_memory)

    def most_common(self) -> tuple[Vector, list[Vector]]:
        """Weights of the term that the most others contain: 1 of one, where these are more than
        stages; and per stage, what they have besides, [others, M]. No chain has any of them
        shorter than the shortest one by that term and what is besides."""
        within, containing = self.within, np.zeros(0, dtype=np.intp)
        weights = np.zeros(len(within))
        for number in np.flatnonzero(~self.in_memory):
            more = np.flatnonzero((within >= within[number]).all(axis=(1, 2)) & ~self.in_memory)
            if len(more) > max(len(containing), within.shape[1]):
                containing, weights = more, np.eye(len(within))[number]
        besides = within[containing] - np.tensordot(weights, within, 1)
        return weights, [np.unique(x, axis=0) for x in besides.swapaxes(0, 1)]


class Chains:
    """Chains of S stages from the first place to the last one.

    Args:
        allowed: per stage, the links that it may be, [L].
        paths: where terms come up.
    """

    def __init__(
        self,
        links: Links,
        terms: Sequence[Term],
        allowed: Sequence[Flags],
        paths: Paths | None = None,
    ) -> None:
        self.links, self._paths, self._terms = links, paths, _Terms(terms)
        self.stages = self._terms.within.shape[1]
        self._allowed = allowed
        # Those with terms that came up, too.
        self._weights = self._by_paths = np.full(len(terms), 1.0 / len(terms))
        self._base, self._besides = self._terms.most_common()
        self._spent, self._most_spent, self._until = 0, inf, inf
        # The shortest period that is asked about so far, and what is left below it.
        self._left: tuple[float, list[_Row]] = inf, self._all_rows

    def begin_as(self, other: Chains) -> None:
        """Look for weights from those of others on, with the same terms and those that came up."""
        if other._terms.given == self._terms.given:
            self._terms.begin_as(other._terms)
            self._weights, self._by_paths = other._weights, other._by_paths

    @cached_property
    def _all_rows(self) -> list[_Row]:
        links, last, found = self.links, int(self.links.end.max(initial=0)), []
        which = np.arange(len(links.begin))
        whole = _Row(which, links.begin, links.end, links.begin, links.values)
        for s in range(self.stages):
            some = self._allowed[s] & ((links.begin < links.kinds) == (s == 0))
            found.append(whole.those(some & ((links.end == last) == (s == self.stages - 1))))
        # Those that others lead to and that lead to the end.
        return self._reduced(found, np.zeros(self._terms.given), inf)

    # The bound -----------------------------------------------------------------------------------

    def bound(
        self,
        low_s: float,
        below_s: float,
        most: float = inf,
        periods: int = PERIODS,
        until: float = inf,
    ) -> Found:
        """No chain's period is shorter than this.

        Args:
            low_s: none is shorter than that.
            below_s: longer ones don't matter.
            most: links that are gone through, about.
            periods: that are asked about.
            until: no longer than that, by `time.monotonic`.
        """
        self._spent, self._most_spent, self._until = 0, most, until
        seen = dict[tuple[int, ...], float]()
        low, high = low_s, inf
        if below_s > self._terms.below_s:
            self._terms.forget()
            weights = self._weights[: self._terms.given]
            self._by_paths = self._weights = weights + (1.0 - weights.sum()) / len(weights)
        self._terms.below_s = below_s
        by_paths = self._paths is not None and below_s < inf
        for turn in range(periods):
            if low * _ROUNDING >= below_s or high <= low * _NEAR or self._is_over:
                break
            target = min(below_s, low * _ABOUT) if high == inf else sqrt(low * high)
            if turn == 0 and below_s < inf:
                # What is left below the best plan is what proofs begin with.
                target = below_s
            least, rows = self._least_below(target, _FEWER if turn else _ROUNDS, seen)
            if target == below_s:
                self._left = target, rows
            before = low
            if least >= target:
                low = target
            else:
                low, high = max(low, least), min(high, target)
                if turn > 1 and by_paths and low <= before * _GAINED:
                    break
        cuts = {cut: worst for chain, worst in seen.items() for cut in [self.links.cut(chain)]}
        return Found(low / _ROUNDING, sorted(cuts, key=lambda cut: (cuts[cut], cut)), self._spent)

    @property
    def _is_over(self) -> bool:
        return self._spent > self._most_spent or monotonic() > self._until

    def _least_below(
        self, target: float, rounds: int, seen: dict[tuple[int, ...], float]
    ) -> tuple[float, list[_Row]]:
        """Of chains below a period, what none is below, and what is left for each stage.

        Args:
            seen: where chains are noted, with their largest term.
        """
        known_s, rows = self._left
        rows = self._alone(rows if target <= known_s else self._all_rows, target)
        paths = self._paths if self._terms.below_s < inf else None
        if paths is None or not self._apart(rows):
            rounds = rounds if paths is None else _WITH_PATHS
            least, rows, first = self._raised(rows, self._by_paths, target, rounds, seen, paths)
            self._by_paths = first
            self._weights = first if paths is None else self._weights
            return least, rows
        least, rows, self._weights = self._raised(rows, self._weights, target, rounds, seen)
        if least >= target:
            return least, rows
        known, left = inf, list[list[_Row]]()
        for case in self._cases(rows, paths):
            if known <= least or self._is_over:
                return least, rows
            first, enough = self._weights if left else self._by_paths, min(known, target)
            found, rest, weights = self._raised(
                case, first, target, _WITH_PATHS, seen, paths, enough
            )
            if not left:
                self._by_paths = weights
            known = min(known, found)
            left.append(rest)
        if known <= least:
            return least, rows
        return known, [
            row.those(np.isin(row.which, np.concatenate([rest[s].which for rest in left])))
            for s, row in enumerate(rows)
        ]

    def _cases(self, rows: Sequence[_Row], paths: Paths) -> Iterator[list[_Row]]:
        """All chains: those whose stages all wait for the one before them; and for each stage those
        where it is the first one that the next may not wait for."""
        which = self.links.values[paths.apart] > 0
        apart: list[Flags] = [which[row.which] for row in rows]
        yield [row.those(~some) for row, some in zip(rows, apart, strict=True)]
        for s in range(self.stages):
            if apart[s].any():
                before = [row.those(~some) for row, some in zip(rows[:s], apart, strict=False)]
                yield [*before, rows[s].those(apart[s]), *rows[s + 1 :]]

    def _raised(
        self,
        rows: list[_Row],
        first: Vector,
        target: float,
        rounds: int,
        seen: dict[tuple[int, ...], float],
        paths: Paths | None = None,
        enough: float = inf,
    ) -> tuple[float, list[_Row], Vector]:
        """Of some of these chains, as `_least_below`, with the weights that show it.

        Args:
            first: weights to begin with, of the first terms.
            paths: further terms that come up.
            enough: the least needn't be known to be more.
        """
        rows, scale = [row.held() for row in rows], self._terms.scale(target)
        weights = kept = np.append(first, np.zeros(len(scale) - len(first)))
        best, risen, met, sums = 0.0, 0, list[list[int]](), list[Vector]()
        for turn in range(1, rounds + 1):
            chain = self._cheapest(rows, self._costs(rows, weights * scale))
            if chain is None:
                return inf, rows, kept
            terms = self._by_terms(chain) * scale
            met.append(chain)
            sums.append(terms)
            least = self._terms.at_least(weights, float(weights @ terms), target)
            if least > best:
                risen = turn if least > best * _CLOSE else risen
                best, kept = least, weights
            known = best >= min(target, enough) or not terms.any()
            if known or (paths is None and best >= float(terms.max())):
                break
            against, most_s, shares = _best_weights(np.array(sums).T, kept)
            if paths is not None and self._longer(paths, met, shares, most_s):
                risen = turn
                scale = self._terms.scale(target)
                sums = [self._by_terms(each) * scale for each in met]
                kept = np.append(kept, np.zeros(len(scale) - len(kept)))
                against, most_s, shares = _best_weights(np.array(sums).T, kept)
            late = turn - risen > _IDLE or self._is_over
            if most_s <= best * _CLOSE or late or turn == rounds:
                middle = self._between(rows, np.array(met), shares)
                if middle is not None:
                    seen[tuple(middle)] = float((self._by_terms(middle) * scale).max())
                break
            if turn % _REDUCED == 0:
                rows = self._reduced(rows, kept * scale, target)
            weights = _INWARDS * kept + (1 - _INWARDS) * against
        seen.update({tuple(c): float(t.max()) for c, t in zip(met, sums, strict=True)})
        return best, self._reduced(rows, kept * scale, target), kept

    def _longer(
        self, paths: Paths, met: Sequence[Sequence[int]], shares: Vector, most_s: float
    ) -> bool:
        """Add paths that are longer than all terms of the mean of some chains, or of the last one.
        Returns whether there are any."""
        values = self.links.values[:, np.array(met)]
        last, more = values[:, -1].T, list[Vector]()
        mean = np.tensordot(shares, values, axes=(0, 1)).T
        for measures, longest_s in ((mean, most_s), (last, float(self._by_terms(met[-1]).max()))):
            within = paths.longest(measures, self._terms.below_s) * _SURE
            self._spent += paths.spent
            if float((within * measures).sum()) > longest_s * _LONGER:
                more.append(within)
        if more:
            self._terms.add(more)
        return bool(more)

    def _growing(self, rows: Sequence[_Row]) -> int:
        """How many terms, from the first one on, have no negative part at any stage."""
        return self._terms.given if self._apart(rows) else len(self._terms.within)

    def _apart(self, rows: Sequence[_Row]) -> bool:
        """Whether some stage may not wait for the one before it."""
        if self._paths is None:
            return False
        which = self.links.values[self._paths.apart] > 0
        return any(which[row.which].any() for row in rows)

    def _alone(self, rows: Sequence[_Row], target: float) -> list[_Row]:
        """Rows without the links that by themselves make a term longer than the target."""
        growing, found = self._growing(rows), []
        most = self._terms.most(target)[:growing, None]
        for s, row in enumerate(rows):
            # Of many terms a stage's part is the same.
            own = np.concatenate([self._terms.within[:growing, s], most], axis=1)
            own = np.unique(own, axis=0)
            some: Flags = np.logical_and.reduce(own[:, :-1] @ row.values <= own[:, -1:], axis=0)
            found.append(row if some.all() else row.those(some))
        return self._reduced(found, self._base, target, self._besides)

    def _costs(self, rows: Sequence[_Row], weights: Vector) -> list[Vector]:
        """Per stage, its part of the weighted sum."""
        coefficients = np.tensordot(weights, self._terms.within[: len(weights)], 1)
        self._spent += sum(len(row.which) for row in rows)
        if not weights.any():
            return [np.zeros(len(row.which)) for row in rows]
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

    def _by_terms(self, chain: Sequence[int]) -> Vector:
        """Each term of a chain, [K]."""
        return self._terms.of(self.links.values[:, chain].T)

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
            sums_on = sums + beyond[row.end]
            some = sums_on <= room
            if besides is not None and len(besides[s]):
                values = row.values
                for more in besides[s]:
                    some &= sums_on + more @ values <= room
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
            go_on: told how many beginnings of chains are looked at next: whether there may be more.
        """
        known_s, rows = self._left
        most, rows = self._terms.most(most_s), rows if most_s <= known_s else self._all_rows
        rows = [row.held() for row in self._alone(rows, most_s)]
        weights = self._weights if self._apart(rows) else self._by_paths
        scale = self._terms.scale(most_s)[: len(weights)]
        weights = weights * scale if most_s < inf else np.zeros(len(weights))
        costs = self._costs(rows, weights)
        behind = self._behind(rows, costs)
        room = most_s * _ROUNDING * _ROUNDING
        growing, last = self._growing(rows), self.stages - 1
        found: list[tuple[float, tuple[int, ...]]] = []

        def extend(s: int, ahead: _Beginnings) -> bool:
            if not go_on(len(ahead.at)):
                return False
            row = rows[s]
            low, high = np.searchsorted(row.begin, [ahead.at, ahead.at + 1])
            numbers = high - low
            parent = np.arange(len(numbers)).repeat(numbers)
            link = np.arange(len(parent)) - (numbers.cumsum() - numbers - low).repeat(numbers)
            sums = ahead.spent[parent] + costs[s][link]
            fine = sums + behind[s + 1][row.end[link]] <= room
            parent, link, sums = parent[fine], link[fine], sums[fine]
            after = ahead.terms[:, parent] + self._terms.within[:, s] @ row.values[:, link]
            those = len(most) if s == last else growing
            fine = (after[:those] <= most[:those, None]).all(axis=0)
            parent, link = parent[fine], link[fine]
            chains = np.column_stack([ahead.chains[parent], row.which[link]])
            on = _Beginnings(row.end[link], chains, after[:, fine], sums[fine])
            if s == last:
                loads_s = on.terms[~self._terms.in_memory].max(axis=0)
                cuts = map(self.links.cut, chains.tolist())
                found.extend(zip(loads_s.tolist(), cuts, strict=True))
                return len(found) <= _MOST_CUTS
            return all(extend(s + 1, some) for some in on.parts())

        for first in range(self.links.kinds):
            none = np.zeros((len(most), 1)), np.zeros(1)
            begun = _Beginnings(np.array([first]), np.zeros((1, 0), dtype=np.intp), *none)
            if not extend(0, begun):
                return None
        return sorted(found)


class _Beginnings(NamedTuple):
    """Of chains, their first links.

    Attributes:
        at: number of the place that each leads to, [B].
        chains: positions of its links, [B, stages].
        terms: so far, [K, B].
        spent: what they cost by weights, [B].
    """

    at: Positions
    chains: Positions
    terms: Vector
    spent: Vector

    def parts(self) -> Iterator[_Beginnings]:
        for k in range(0, len(self.at), _AT_ONCE):
            some = slice(k, k + _AT_ONCE)
            yield _Beginnings(
                self.at[some], self.chains[some], self.terms[:, some], self.spent[some]
            )


def _best_weights(terms: Vector, first: Vector) -> tuple[Vector, float, Vector]:
    """Weights of terms whose least sum over some chains is about the largest there is; what none
    have more than; and the shares of the chains, for which that holds.

    Args:
        terms: of each chain, [K, chains].
        first: to begin with.
    """
    # Small matrices: what takes time is how many calls there are.
    (rows, columns), largest, add = terms.shape, float(terms.max()), np.add.reduce
    terms, turns = terms / largest, np.arange(1.0, _TURNS + 1)
    mine, others = np.maximum(first, 1e-12), np.ones(columns)
    weights, shares = mine / mine.sum(), others / columns
    weighed, mixed = np.empty((_TURNS, rows)), np.empty((_TURNS, columns))
    for turn in range(_TURNS):
        paid = weights.dot(terms)
        others += shares.dot(paid) - paid
        np.maximum(others, 0.0, out=others)
        total = add(others)
        shares = mixed[turn] = others / total if total else np.full(columns, 1 / columns)
        gained = terms.dot(shares)
        mine += gained - weights.dot(gained)
        np.maximum(mine, 0.0, out=mine)
        total = add(mine)
        weights = weighed[turn] = mine / total if total else np.full(rows, 1 / rows)
        if turn % _LOOKED == _LOOKED - 1:
            # Later turns count for more; both are means of as many.
            each = turns[: turn + 1] / turns[: turn + 1].sum()
            mean, of_chains = each @ weighed[: turn + 1], each @ mixed[: turn + 1]
            most, least = (terms @ of_chains).max(), (mean @ terms).min()
            if most - least <= _SETTLED * most:
                break
    return mean, float(most) * largest, of_chains
