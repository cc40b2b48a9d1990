"""A hill climb over plans, that the planner's search is held against: it shares nothing with it but
the exact judgement of a plan (`evaluate`).

From cuts that are even by layers and by time, under several in-flight limits, it moves borders
(one, or all from one on), limits, and which stages compute their activations again, and takes
whatever is better, until nothing is or the time is over. Time that is left goes into beginnings
near the best.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from timeprest.planner.costs.tied_parameters import bound_groups, misplaced, on_one_stage
from timeprest.planner.evaluate import Evaluation, Question, evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.schedules.schedules import Ranges, limit_ranges
from timeprest.profiles.errors import TimeprestError

NEVER = (float("inf"), float("inf"))


class TimeOver(Exception):  # noqa: N818 - nothing went wrong
    """The climb has had its time."""


@dataclass(frozen=True)
class Point:
    """A plan.

    Attributes:
        borders: numbers of the places where the layers are cut, ascending.
        limits: per stage, in flight.
        again: per stage, whether it computes its activations again.
    """

    micro_batches: int
    borders: tuple[int, ...]
    limits: tuple[int, ...]
    again: tuple[bool, ...]


class Climb:
    """One question's climb.

    Args:
        placement: per stage, the positions of its devices, the same for all stages of these.
        counts: numbers of micro-batches to choose from.
        recompute: "off", "on" for all stages, or "auto" for any.
        ranges: the limits that it may give; None: all that `limit_ranges` has.
    """

    def __init__(
        self,
        question: Question,
        placement: Sequence[tuple[int, ...]],
        counts: Sequence[int],
        *,
        recompute: str = "off",
        ranges: Ranges | None = None,
    ) -> None:
        self.question, self.placement, self.recompute = question, tuple(placement), recompute
        several = len(set(placement)) < len(placement)
        self.stages = len(placement)
        self.ranges = ranges or limit_ranges(question.system, self.stages, several=several)
        least = question.system.least_micro_batches(self.stages)
        self.counts = [n for n in counts if n >= least]
        profile = question.profile
        self.names = [layer.name for layer in profile.layers]
        groups = on_one_stage(profile) if several else bound_groups(profile, question.tied)
        ends = [sorted(map(self.names.index, group)) for group in groups]
        inner = range(1, len(self.names))
        self.places = [p for p in inner if not any(e[0] < p <= e[-1] for e in ends)]
        self.best: Evaluation | None = None
        self.tried = 0
        self._ranks: dict[Point, tuple[float, float]] = {}
        self._deadline = float("inf")

    def run(self, seconds: float, seed: int = 0) -> Evaluation | None:
        """The best plan that fits; None where none was found."""
        rng, self._deadline = random.Random(seed), time.monotonic() + seconds
        if len(self.places) < self.stages - 1 or not self.counts:
            return None
        try:
            starts = sorted(self._starts(), key=self._rank)
            tops = [self._climbed(start, rng) for start in starts]
            top = min(tops, key=self._rank)
            while time.monotonic() < self._deadline:
                other = self._climbed(self._near(top, rng), rng)
                top = min(top, other, key=self._rank)
        except TimeOver:
            pass
        return self.best

    def usual(self) -> Evaluation | None:
        """The plan that is even in time, under limits S − s; None where there can't be one."""
        if len(self.places) < self.stages - 1 or not self.counts:
            return None
        start = next(self._starts())
        return self._evaluated(start)

    def _starts(self) -> Iterator[Point]:
        """Even cuts by time and by layers, under limits S − s, the least and the most, for every N;
        the largest first."""
        times = [layer.measurements[-1] for layer in self.question.profile.layers]
        work = [0.0, *accumulate(m.forward_s + m.backward_s for m in times)]
        shares = [k / self.stages for k in range(1, self.stages)]
        by_time = [bisect_left(work, share * work[-1]) for share in shares]
        by_layers = [share * len(self.names) for share in shares]
        least, most = zip(*self.ranges, strict=True)
        usual = [min(top, max(low, self.stages - s)) for s, (low, top) in enumerate(self.ranges)]
        ways = {"off": [False], "on": [True], "auto": [False, True]}[self.recompute]
        for n in reversed(self.counts):
            for cut in (by_time, by_layers):
                borders = self._mended([bisect_left(self.places, p) for p in cut])
                for limits in dict.fromkeys((tuple(usual), least, most)):
                    for again in ways:
                        yield Point(n, borders, limits, (again,) * self.stages)

    def _mended(self, borders: Sequence[int]) -> tuple[int, ...]:
        """The nearest that leave no stage empty."""
        found: list[int] = []
        for k, border in enumerate(borders):
            room = len(self.places) - (len(borders) - k)
            found.append(max(min(border, room), found[-1] + 1 if found else 0))
        return tuple(found)

    def _near(self, point: Point, rng: random.Random) -> Point:
        far = max(len(self.places) // self.stages, 2)
        moved = [b + rng.randint(-far, far) * (rng.random() < 0.4) for b in point.borders]
        return replace(point, borders=self._mended(sorted(moved)))

    def _climbed(self, point: Point, rng: random.Random) -> Point:
        """The top of the hill: each neighbour that is better is gone on from."""
        while True:
            others = list(self._neighbours(point))
            rng.shuffle(others)
            better = next((p for p in others if self._rank(p) < self._rank(point)), None)
            if better is None:
                return point
            point = better

    def _neighbours(self, point: Point) -> Iterator[Point]:
        step, borders, limits = 1, point.borders, point.limits
        while step <= max(len(self.places) // self.stages, 1):
            for k in range(len(borders)):
                for by in (-step, step):
                    one = (*borders[:k], borders[k] + by, *borders[k + 1 :])
                    behind = (*borders[:k], *(b + by for b in borders[k:]))
                    yield from (replace(point, borders=self._mended(b)) for b in (one, behind))
            step *= 2
        for s, (low, top) in enumerate(self.ranges):
            if limits[s] < top:
                raised = (max(limit, limits[s] + 1) for limit in limits[: s + 1])
                yield replace(point, limits=(*raised, *limits[s + 1 :]))
            if limits[s] > low:
                lowered = (min(limit, limits[s] - 1) for limit in limits[s:])
                yield replace(point, limits=(*limits[:s], *lowered))
            if self.recompute == "auto":
                again = tuple(a != (k == s) for k, a in enumerate(point.again))
                yield replace(point, again=again)

    def _rank(self, point: Point) -> tuple[float, float]:
        """What it lacks of memory, as shares of the devices', then the period. Raises TimeOver."""
        if point not in self._ranks:
            if time.monotonic() > self._deadline:
                raise TimeOver
            self.tried += 1
            self._ranks[point] = self._judged(point)
        return self._ranks[point]

    def _judged(self, point: Point) -> tuple[float, float]:
        found = self._evaluated(point)
        if found is None:
            return NEVER
        shares = found.memory_shares(self.question.cluster)
        lacks, period_s = sum(max(share - 1, 0.0) for share in shares), found.prediction.period_s
        if not lacks and (self.best is None or period_s < self.best.prediction.period_s):
            self.best = found
        return lacks, period_s

    def _evaluated(self, point: Point) -> Evaluation | None:
        """None where layers are apart that must be together, or the system has no such stages."""
        ends = [0, *(self.places[b] for b in point.borders), len(self.names)]
        nodes = [tuple(self.names[a:b]) for a, b in pairwise(ends)]
        if misplaced(self.question.profile, nodes, self.placement, self.question.tied):
            return None
        parts = zip(nodes, self.placement, point.limits, point.again, strict=True)
        stages = [PlanStage(nodes=x, devices=d, in_flight=f, recompute=a) for x, d, f, a in parts]
        try:
            return evaluate(self.question, stages, point.micro_batches)
        except TimeprestError:
            return None
