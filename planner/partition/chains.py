"""Cuts into a given row of stages, each with its device: a bound on all, and those below a period.

What a period or a device's memory is at the least is mostly a sum over stages (`Term`): a device's
work is that of its stages, which lie apart; what fills a pipeline is a little work of each stage
before, and messages. For any weights of such terms that add up to 1, no plan's period is below the
least weighted sum of any cut; and that is found by a dynamic program over stages and places to cut,
since it takes each stage by itself (Lagrangian relaxation). The weights are raised where the best
cut breaks most (multiplicative weights of a zero-sum game).

Places need an order in which none comes before one that it holds; for the bound, any later place
may follow an earlier one, so that a step of the program is one running minimum.

Index letters: P places; S stages; K terms; F measures of layers; B of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dp.lattice import Positions
from .problem import Vector

_ROUNDS = 150
"""In which weights are raised."""

_RATE = 5.0
"""At which, in the first one."""

_GAIN, _IDLE = 1.002, 40
"""When the bound hasn't risen so much in so many, no more follow."""

_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class Term:
    """What some period or memory is at the least: a sum over stages.

    Attributes:
        within: what the measures of a stage's layers count, [S, F].
        entering: what those of messages count that come to a stage, [S, B]; none to the first.
        lost: of stages without a layer of the path, what the whole term is then at the most less,
            [S].
        in_memory: a share of a device's memory, at most 1; else seconds.
    """

    within: Vector
    entering: Vector
    lost: Vector
    in_memory: bool = False


class Found(NamedTuple):
    """What is known of all chains.

    Attributes:
        bound_s: no period is shorter; infinite: no chain is within the memory.
        cuts: that came up, as bit masks of the layers before each of the S + 1 borders, those with
            the smallest of largest terms first.
        rounds: that it took.
    """

    bound_s: float
    cuts: list[tuple[int, ...]]
    rounds: int


class Chains:
    """Chains of S stages from the first place to the last one.

    Args:
        masks: bit masks of the layers before each place, those first that others hold, [P].
        measures: of the layers before each place, [F, P].
        messages: of what crosses there, [B, P].
        gaps: layers of the path before each place, [P]; never falling.
    """

    def __init__(
        self,
        masks: Sequence[int],
        measures: Vector,
        messages: Vector,
        gaps: NDArray[np.intp],
        terms: Sequence[Term],
    ) -> None:
        self.masks, self.gaps = masks, gaps
        self._measures, self._messages = measures, messages
        self._within = np.array([term.within for term in terms])
        self._entering = np.array([term.entering for term in terms])
        self._lost = np.array([term.lost for term in terms])
        self._memory = np.array([term.in_memory for term in terms])
        self.stages = self._within.shape[1]

    # The bound -----------------------------------------------------------------------------------

    def bound(self, about_s: float, rounds: int = _ROUNDS) -> Found:
        """No chain's period is shorter than this.

        Args:
            about_s: what periods are about: what shares of memory are held against.
        """
        scale = np.where(self._memory, about_s, 1.0)
        weights = np.full(len(scale), 1.0 / len(scale))
        mean, middle, best = np.zeros(len(scale)), np.zeros(self.stages + 1), 0.0
        seen, risen = dict[tuple[int, ...], None](), 0
        for turn in range(1, rounds + 1):
            least, chain, terms = self._least(weights * scale)
            now = self._at_least(weights, least, about_s)
            if now > best * _GAIN:
                risen = turn
            best = max(best, now)
            if chain is None or best == np.inf:
                return Found(np.inf, [], turn)
            terms = terms * scale
            worst = float(terms.max())
            seen[chain] = None
            if not worst > 0 or best >= worst or turn - risen > _IDLE:
                break
            # Those of early rounds count for less and less.
            mean, middle = mean * (1 - 2 / (turn + 1)), middle * (1 - 2 / (turn + 1))
            mean, middle = (
                mean + weights * 2 / (turn + 1),
                middle + np.array(chain) * 2 / (turn + 1),
            )
            weights = weights * np.exp(_RATE / turn**0.5 * (terms / worst - 1.0))
            weights /= weights.sum()
            if turn % 10 == 0:
                least, chain, _ = self._least(mean * scale)
                best = max(best, self._at_least(mean, least, about_s))
        seen[self._between(middle)] = None
        cuts = {cut: self._worst(cut, scale) for cut in map(self._cut, seen) if cut}
        return Found(best / _ROUNDING, sorted(cuts, key=lambda cut: (cuts[cut], cut)), turn)

    def _worst(self, cut: Sequence[int], scale: Vector) -> float:
        """The largest of a cut's terms."""
        chain = [self._position[mask] for mask in cut]
        return float((self._terms(chain, np.diff(self.gaps[chain]) == 0) * scale).max())

    @cached_property
    def _position(self) -> dict[int, int]:
        return {mask: p for p, mask in enumerate(self.masks)}

    def _between(self, middle: Vector) -> tuple[int, ...]:
        """The chain nearest to a mean of several."""
        ends = np.rint(middle).astype(int).tolist()
        for s in range(1, self.stages):
            ends[s] = max(ends[s], ends[s - 1] + 1)
        for s in range(self.stages - 1, 0, -1):
            ends[s] = min(ends[s], ends[s + 1] - 1)
        return tuple(ends)

    def _cut(self, chain: Sequence[int]) -> tuple[int, ...] | None:
        """A chain whose places hold each other; None where a stage would be empty."""
        masks = tuple(accumulate((self.masks[p] for p in chain), int.__or__))
        return None if any(a == b for a, b in pairwise(masks)) else masks

    def _at_least(self, weights: Vector, least: float, about_s: float) -> float:
        """What the period is at the least where the weighted sum is: shares of memory are at most
        1, so that T · (1 − their weight) + about · their weight ≥ the sum."""
        of_memory = float(weights[self._memory].sum())
        if of_memory >= 1.0 - 1e-9:
            return float("inf") if least > about_s * _ROUNDING * _ROUNDING else 0.0
        return (least - of_memory * about_s) / (1.0 - of_memory)

    def _least(self, weights: Vector) -> tuple[float, tuple[int, ...] | None, Vector]:
        """The least weighted sum; a chain that has it, with each of its terms."""
        values, entering, lost = self._weighted(weights)
        cost, begun = self._first, list[Vector]()
        for s in range(self.stages):
            begin = cost - values[s] + entering[s]
            begun.append(cost)
            cost = np.full(len(cost), np.inf)
            cost[1:] = np.minimum.accumulate(begin)[:-1] + values[s, 1:]
            inside = begun[-1] - values[s]
            for ends, begins in self._shared:
                without = inside[begins] + values[s, ends] - lost[s] - entering[s + 1, ends]
                cost[ends] = np.minimum(cost[ends], without)
            if s < self.stages - 1:
                cost[-1] = np.inf
        least = float(cost[-1])
        if not np.isfinite(least):
            return least, None, np.zeros(len(weights))
        chain, off = [len(cost) - 1], np.zeros(self.stages, dtype=bool)
        for s in reversed(range(self.stages)):
            end, before = chain[-1], begun[s]
            from_s = (before - values[s] + entering[s])[:end]
            begin = int(from_s.argmin())
            first = int(np.searchsorted(self.gaps, self.gaps[end]))
            if first < end:
                inside = (before - values[s])[first:end] - lost[s] - entering[s + 1, end]
                if inside.min() < from_s[begin]:
                    begin, off[s] = first + int(inside.argmin()), True
            chain.append(begin)
        return least, tuple(chain[::-1]), self._terms(chain[::-1], off)

    def _terms(self, chain: Sequence[int], off: NDArray[np.bool_]) -> Vector:
        """Each term of a chain. `off`: stages without a layer of the path."""
        inside = np.diff(self._measures[:, chain], axis=1).T
        crossing = self._messages[:, chain[:-1]].T.copy()
        crossing[off] = 0.0
        crossing[1:][off[:-1]] = 0.0
        found: Vector = (
            np.einsum("ksf,sf->k", self._within, inside)
            + np.einsum("ksb,sb->k", self._entering, crossing)
            - self._lost @ off
        )
        return found

    def _weighted(self, weights: Vector) -> tuple[Vector, Vector, Vector]:
        """Sums of terms: of stages' layers up to each place, [S, P]; of what comes to them there,
        [S + 1, P]; and what is lost, [S]."""
        values = np.tensordot(weights, self._within, 1) @ self._measures
        entering = np.zeros((self.stages + 1, values.shape[1]))
        entering[1:-1] = np.tensordot(weights, self._entering, 1)[1:] @ self._messages
        return values, entering, weights @ self._lost

    @cached_property
    def _first(self) -> Vector:
        first = np.full(len(self.gaps), np.inf)
        first[0] = 0.0
        return first

    @cached_property
    def _shared(self) -> list[tuple[Positions, Positions]]:
        """Pairs of places with the same layers of the path before them: the later and the earlier
        one, those first that are next to each other."""
        found = list[tuple[Positions, Positions]]()
        for apart in range(1, len(self.gaps)):
            begins = np.flatnonzero(self.gaps[apart:] == self.gaps[:-apart])
            if not len(begins):
                break
            found.append((begins + apart, begins))
        return found

    # Those below a period ------------------------------------------------------------------------

    def below(
        self, most_s: float, go_on: Callable[[int], bool], allowed: Sequence[NDArray[np.bool_]]
    ) -> list[tuple[float, tuple[int, ...]]] | None:
        """Chains none of whose terms is above a period, the lowest first; None: there are too many.

        Args:
            go_on: told how many places were looked at: whether there may be more.
            allowed: per stage, where it may end, [P].
        """
        most = np.where(self._memory, 1.0, most_s) * _ROUNDING
        found: list[tuple[float, tuple[int, ...]]] = []

        def extend(s: int, chain: tuple[int, ...], terms: Vector) -> bool:
            below = chain[-1]
            ends = np.flatnonzero(self._holding(below) & allowed[s])
            if not go_on(len(ends) + 1):
                return False
            inside = self._measures[:, ends] - self._measures[:, [below]]
            off = self.gaps[ends] == self.gaps[below]
            entering = np.zeros(len(most))
            if s and self.gaps[below] > self.gaps[chain[-2]]:
                entering = self._entering[:, s] @ self._messages[:, below]
            after = terms[:, None] + self._within[:, s] @ inside
            after += np.where(off, 0.0, entering[:, None]) - np.outer(self._lost[:, s], off)
            keep = (after <= most[:, None]).all(axis=0)
            for end, mine in zip(ends[keep].tolist(), after[:, keep].T, strict=True):
                if s == self.stages - 1:
                    found.append((float(mine[~self._memory].max()), (*chain, end)))
                elif not extend(s + 1, (*chain, end), mine):
                    return False
            return True

        complete = extend(0, (0,), np.zeros(len(most)))
        return sorted(found) if complete else None

    def _holding(self, below: int) -> NDArray[np.bool_]:
        """Which places hold another one and more, [P]."""
        mask = self.masks[below]
        found = np.array([other & mask == mask for other in self.masks])
        found[below] = False
        return found
