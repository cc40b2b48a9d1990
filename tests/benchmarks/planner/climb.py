"""A hill climb over plans, that the planner's search is held against: it shares nothing with it but
the exact judgement of a plan (`evaluate`).

From cuts that are even by layers and by time, under several in-flight limits, it moves borders
(one, or all from one on), limits, and which stages compute their activations again, and takes
whatever is better, until nothing is or the time is over. Time that is left goes into beginnings
near the best. Where stages may have replicas, it moves devices from stage to stage, too, splits
stages and joins them, with borders as they are or cut anew.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from timeprest.planner.costs.tied_parameters import bound_groups, misplaced, on_one_stage
from timeprest.planner.evaluate import Evaluation, evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import Ranges, StalenessBounds, limit_ranges
from timeprest.profiles.errors import TimeprestError

NEVER = (float("inf"), float("inf"))
PAPER = StalenessBounds()


class TimeOver(Exception):  # noqa: N818 - nothing went wrong
    """The climb has had its time."""


@dataclass(frozen=True)
class Point:
    """A plan.

    Attributes:
        borders: numbers of the places where the layers are cut, ascending.
        limits: per stage, in flight.
        recompute: per stage, whether it recomputes its activations.
        replicas: per stage, on neighbouring devices; empty: devices are given.
    """

    micro_batches: int
    borders: tuple[int, ...]
    limits: tuple[int, ...]
    recompute: tuple[bool, ...]
    replicas: tuple[int, ...] = ()


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
                    for recompute in ways:
                        yield Point(n, borders, limits, (recompute,) * self.stages)

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
                recompute = tuple(a != (k == s) for k, a in enumerate(point.recompute))
                yield replace(point, recompute=recompute)

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
        placement = self.placement
        if point.replicas:
            firsts = accumulate(point.replicas, initial=0)
            placement = tuple(tuple(range(a, b)) for a, b in pairwise(firsts))
        if misplaced(self.question.profile, nodes, placement, self.question.tied):
            return None
        parts = zip(nodes, placement, point.limits, point.recompute, strict=True)
        stages = [PlanStage(nodes=x, devices=d, in_flight=f, recompute=a) for x, d, f, a in parts]
        try:
            return evaluate(self.question, stages, point.micro_batches)
        except TimeprestError:
            return None


class ReplicaClimb(Climb):
    """The same where stages may have replicas, any number of stages: on devices as listed.

    Args:
        counts, recompute: as of `Climb`.
        within: how far ahead stages may run.
    """

    def __init__(
        self,
        question: Question,
        counts: Sequence[int],
        *,
        recompute: str = "off",
        within: StalenessBounds = PAPER,
    ) -> None:
        super().__init__(question, [(0,)], counts, recompute=recompute)
        self._within, self._devices = within, len(question.cluster.devices)
        times = [layer.measurements[-1] for layer in question.profile.layers]
        self._work = [0.0, *accumulate(m.forward_s + m.backward_s for m in times)]

    def _starts(self) -> Iterator[Point]:
        """Cuts that are even by time, with as many replicas of each stage, for every N."""
        most = min(self._devices, len(self.places) + 1)
        for n in reversed(self.counts):
            for r in range(1, self._devices + 1):
                for stages in sorted({self._devices // r, self._devices // r // 2, 2}):
                    if 0 < stages <= most and stages * r <= self._devices:
                        yield from self._ways(n, (r,) * stages)

    def _ways(self, n: int, replicas: tuple[int, ...]) -> Iterator[Point]:
        ways = {"off": [False], "on": [True], "auto": [False, True]}[self.recompute]
        cut = self._even(replicas)
        yield from (
            self._point(n, cut, replicas, (recompute,) * len(replicas)) for recompute in ways
        )

    def _point(
        self, n: int, cut: Sequence[int], replicas: Sequence[int], recompute: Sequence[bool]
    ) -> Point:
        """Under limits S − s."""
        stages = len(replicas)
        ranges = limit_ranges(self.question.system, stages, within=self._within)
        limits = tuple(min(top, max(low, stages - s)) for s, (low, top) in enumerate(ranges))
        return Point(n, self._mended(sorted(cut)), limits, tuple(recompute), tuple(replicas))

    def _even(self, replicas: Sequence[int]) -> list[int]:
        shares = [done / sum(replicas) for done in accumulate(replicas)][:-1]
        layers = [bisect_left(self._work, share * self._work[-1]) for share in shares]
        return [bisect_left(self.places, layer) for layer in layers]

    def _near(self, point: Point, rng: random.Random) -> Point:
        replicas, far = [*point.replicas], max(len(self.places) // len(point.replicas), 2)
        for _ in range(rng.randint(1, 3)):
            gains, loses = rng.randrange(len(replicas)), rng.randrange(len(replicas))
            if replicas[loses] > 1:
                replicas[gains], replicas[loses] = replicas[gains] + 1, replicas[loses] - 1
        moved = [b + rng.randint(-far, far) * (rng.random() < 0.4) for b in point.borders]
        return self._point(rng.choice(self.counts), moved, replicas, point.recompute)

    def _neighbours(self, point: Point) -> Iterator[Point]:
        self.stages = len(point.replicas)
        self.ranges = limit_ranges(self.question.system, self.stages, within=self._within)
        yield from super()._neighbours(point)
        n, cut, each, recompute = (
            point.micro_batches,
            point.borders,
            point.replicas,
            point.recompute,
        )
        for replicas in self._moved(each):
            yield self._point(n, cut, replicas, recompute)
            yield self._point(n, self._even(replicas), replicas, recompute)
        for s, r in enumerate(each):
            low, high = ([0, *cut][s], [*cut, len(self.places)][s])
            for first in sorted({1, r // 2, r - 1} - {0, r}):
                parts, twice = (*each[:s], first, r - first, *each[s + 1 :]), recompute[: s + 1]
                within = [*cut, low + (high - low) * first // r]
                for borders in (within, self._even(parts)):
                    if len(borders) <= len(self.places):
                        yield self._point(n, borders, parts, (*twice, *recompute[s:]))
            if s < self.stages - 1:
                joined = (*each[:s], r + each[s + 1], *each[s + 2 :])
                left = (*recompute[:s], *recompute[s + 1 :])
                yield self._point(n, (*cut[:s], *cut[s + 1 :]), joined, left)
        yield from (self._point(m, cut, each, recompute) for m in self.counts if m != n)

    def _moved(self, each: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """A device more for a stage, a device less, or one moved from stage to stage."""
        for s, t in product(range(-1, len(each)), repeat=2):
            found = [r + (k == s) - (k == t) for k, r in enumerate(each)]
            if s != t and min(found) > 0 and sum(found) <= self._devices:
                yield tuple(found)
