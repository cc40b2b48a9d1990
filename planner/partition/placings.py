"""The ways to lay a cut's stages over the devices: which differ, and which is the best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from .problem import Cut, StageProblem, fits, stage_load


def pattern(
    devices: Sequence[int], homes: Sequence[Hashable], kinds: Sequence[Hashable]
) -> tuple[tuple[int, Hashable], ...]:
    """Devices without their names: equal where kinds and shared homes are.

    Args:
        homes: of each device there is, what it shares with others: its machine.
        kinds: of each device there is, what it is like.
    """
    numbers = {home: k for k, home in enumerate(dict.fromkeys(homes[d] for d in devices))}
    return tuple((numbers[homes[d]], kinds[d]) for d in devices)


class Placings:
    """The ways to lay the stages of a cut over the devices in their order."""

    def __init__(self, problem: StageProblem, cut: Cut) -> None:
        self._problem, self._cut = problem, cut
        self._replicas = [problem.options[stage.option].replicas for stage in cut.stages]
        # Devices that stages take from each one on.
        self._needed = [*accumulate(reversed(self._replicas))][::-1]
        self._below = [*accumulate((s.layers for s in cut.stages), int.__or__, initial=0)]
        self._load = cache(self._load_at)

    def _load_at(self, s: int, first: int) -> float:
        """Load in s of a stage with this first device; infinite where it doesn't fit."""
        problem, stage = self._problem, self._cut.stages[s]
        where = self._below[s], stage.layers, stage.option, problem.devices - first
        return stage_load(problem, *where) if fits(problem, *where) else float("inf")

    def _starts(self, s: int, first: int) -> range:
        return range(first, self._problem.devices - self._needed[s] + 1)

    def best(self) -> Cut:
        """The one whose largest load is smallest; that is infinite where none fits."""

        @cache
        def found(s: int, first: int) -> tuple[float, tuple[int, ...]]:
            if s == len(self._replicas):
                return 0.0, ()
            least: tuple[float, tuple[int, ...]] = (float("inf"), ())
            for start in self._starts(s, first):
                own = self._load(s, start)
                if own < least[0]:
                    rest, starts = found(s + 1, start + self._replicas[s])
                    if max(own, rest) < least[0]:
                        least = max(own, rest), (start, *starts)
            return least

        worst, starts = found(0, 0)
        return self._cut_at(starts, worst) if starts else replace(self._cut, objective_s=worst)

    def below(
        self, target: Callable[[], float], homes: Sequence[Hashable], kinds: Sequence[Hashable]
    ) -> Iterator[Cut]:
        """Every one with loads below a target; of those with the same `pattern` one.

        Args:
            target: in s; may fall meanwhile.
            homes, kinds: as for `pattern`.
        """
        last = {home: d for d, home in enumerate(homes)}
        seen: set[Hashable] = set()

        def extend(starts: tuple[int, ...], used: tuple[int, ...], worst: float) -> Iterator[Cut]:
            s = len(starts)
            if s == len(self._replicas):
                yield self._cut_at(starts, worst)
                return
            for start in self._starts(s, used[-1] + 1 if used else 0):
                own, end = self._load(s, start), start + self._replicas[s]
                if own >= target():
                    continue
                mine = (*used, *range(start, end))
                state: Hashable = pattern(mine, homes, kinds)
                if s + 1 < len(self._replicas):
                    # What may follow depends on where it ends, and on machines that go on there.
                    numbers = {
                        home: k for k, home in enumerate(dict.fromkeys(homes[d] for d in mine))
                    }
                    open_ = frozenset(item for item in numbers.items() if last[item[0]] >= end)
                    state = state, end, open_
                if state not in seen:
                    seen.add(state)
                    yield from extend((*starts, start), mine, max(worst, own))

        yield from extend((), (), 0.0)

    def _cut_at(self, starts: Sequence[int], worst: float) -> Cut:
        stages = (
            replace(stage, k=self._problem.devices - start)
            for stage, start in zip(self._cut.stages, starts, strict=True)
        )
        return Cut(tuple(stages), worst)
