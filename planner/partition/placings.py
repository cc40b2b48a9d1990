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


Load = Callable[[int, int, int, int], float]
"""Load in s of a stage by the downset below it, its layers, its option and k."""


def load_of(problem: StageProblem) -> Load:
    """Of stages, each reckoned once; infinite where it doesn't fit its devices."""

    @cache
    def load(*stage: int) -> float:
        return stage_load(problem, *stage) if fits(problem, *stage) else float("inf")

    return load


class Placings:
    """The ways to lay the stages of a cut over the devices in their order.

    Args:
        load: `load_of` the problem, which cuts with some stages in common may share.
    """

    def __init__(self, problem: StageProblem, cut: Cut, load: Load) -> None:
        self._problem, self._cut, self._load_of = problem, cut, load
        self._replicas = [problem.options[stage.option].replicas for stage in cut.stages]
        # Devices that stages take from each one on.
        self._needed = [*accumulate(reversed(self._replicas))][::-1]
        self._below = [*accumulate((s.layers for s in cut.stages), int.__or__, initial=0)]

    def _load(self, s: int, first: int) -> float:
        stage = self._cut.stages[s]
        k = self._problem.devices - first
        return self._load_of(self._below[s], stage.layers, stage.option, k)

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

        def state_of(used: tuple[int, ...], s: int) -> Hashable:
            mine = pattern(used, homes, kinds)
            if s == len(self._replicas):
                return mine
            # What may follow depends on where it ends, and on machines that go on there.
            numbers = {home: k for k, home in enumerate(dict.fromkeys(homes[d] for d in used))}
            open_ = frozenset(item for item in numbers.items() if last[item[0]] > used[-1])
            return mine, used[-1], open_

        def extend(starts: tuple[int, ...], used: tuple[int, ...], worst: float) -> Iterator[Cut]:
            s = len(starts)
            if s == len(self._replicas):
                yield self._cut_at(starts, worst)
                return
            for start in self._starts(s, used[-1] + 1 if used else 0):
                own = self._load(s, start)
                if own >= target():
                    continue
                mine = (*used, *range(start, start + self._replicas[s]))
                # Where no device is left over there is one way alone.
                if self._needed[0] < self._problem.devices:
                    state = state_of(mine, s + 1)
                    if state in seen:
                        continue
                    seen.add(state)
                yield from extend((*starts, start), mine, max(worst, own))

        yield from extend((), (), 0.0)

    def _cut_at(self, starts: Sequence[int], worst: float) -> Cut:
        stages = (
            replace(stage, k=self._problem.devices - start)
            for stage, start in zip(self._cut.stages, starts, strict=True)
        )
        return Cut(tuple(stages), worst)
