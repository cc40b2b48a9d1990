"""Improving a plan by local search: one move at a time, each evaluated by its real schedule.

A descent from a plan tries moves of borders (one, or several with the stages between them), of
in-flight limits, of what stages compute again, of replicas and of devices, and other micro-batch
counts, and takes every move that makes the plan better: first what is too much for the devices'
memory, then the period, then how many stages are as busy as the busiest, so that it doesn't stop
where several set the period. Descents begin at even cuts, and at what was found before; at
a plan that no move betters, some borders are moved at random and it descends again, as long as that
pays (iterated local search). In the end climbs from anywhere take whatever move is better, in
random sequence: what decides may be nothing that busy devices tell.

A move is simulated only where what its busiest device, its wires, and a flush need at the least is
below the period that there is; and of many at once those alone that are expected to be shorter
(`schedules.together`).

Index letters: S stages; D devices; N micro-batches; n layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice, pairwise, product, takewhile
from math import inf
from typing import NamedTuple

from ....profiles.errors import PlanError, ScheduleError
from ...evaluate import Evaluation, LaidOut, lay_out
from ...partition.problem import SAME, members
from ...schedules.schedules import has_row, is_patterned
from ...schedules.together import (
    period_in_one_way_s,
    periods_like_s,
    periods_s,
    simulates_like,
    simulates_together,
)
from ...simulator.pipeline import Pipeline
from ...simulator.timeline import busy_s, filled_and_drained_s, loads_s, round_trip_s
from ..choices import Branch, Choice, PlacedBranch
from ..effort import operations_of, placed_operations
from ..relaxed.relaxation import Relaxation
from ..state import EFFORT, SearchState
from .layings import Lying, even_cut, even_cuts, layings_of, mixed_layings
from .memory_about import cut_that_fits, fitted, over_about, share_about
from .neighbours import STEPS, WORTH_IT, Neighbours, Point, Standing, Under
from .stage_moves import replica_moves, stage_moves

_LAID_OUT = 200
"""Simulated operations that take as long as laying out a plan, about."""

_TOGETHER = 30
"""The same of simulating one of many at once."""

_TOGETHER_AT_ALL = 3000
"""And of that, however few they are."""

_LISTED_SHARE, _LISTED_AT_ALL = 14, 5
"""Where a list schedule makes what stages run, one of many takes so much less than by itself, and
all of them at least as long as so many."""

_MOST_LISTED, _VAGUE = 12, 1.003
"""Of moves that are simulated at once there, those that are simulated by themselves; and how much
longer their periods may seem than that of the plan that they are to better: few settle in time."""

_LIKE, _LIKE_AT_ALL, _FEW_LIKE = 5, 3, 4
"""Of plans that are simulated as one that is known runs, what one of many takes, and each operation
of that one; and of fewer each is simulated by itself."""

_DEAR = 1_500
"""Operations of such plans that take long by themselves."""

_ONE_WAY = 3
"""Of plans with split backwards, operations of a stage for each micro-batch."""

_ABOUT = 1.005
"""Those with other limits may be so much shorter than expected."""

_MOST_STARTS, _NEAR = 4, 0.1
"""Of the cuts to begin with, so many are simulated that are expected to be so near the best one."""

_SPREAD = 0.1
"""Those of them are descended from whose period is within so much of the best plan's."""

_SPREAD_WITH_REPLICAS = 0.25
"""The same where stages may have replicas: there is seldom more than one plan of each kind, and
what a plan that is even gains is more."""

_MOST_OTHERS = 4
"""Plans of other kinds that are improved besides the best one."""

_STANDS_IN = 1.03
"""How much longer periods may be as another plan runs, where times make the schedule."""

_EVEN = 2
"""First cuts that are even, by time and by layers."""

_MOST_MIXED = 8
"""Of devices to begin with where stages have their own numbers of replicas, the most promising."""

_FEW = 20
"""Where fewer plans can be simulated, of each kind of start one is."""

_MAY_FIT = 0.01
"""Those are simulated that are estimated to need so much more than there is, or less."""

_MUCH_OVER = 1.3
"""Of memory, what first cuts may be estimated to need at the most."""

_NEARLY = 0.2
"""First cuts are looked at under limits that are estimated to need so much more."""

_ROOM = (1.0, 0.9)
"""Shares of memory that first cuts fit by what their layers hold: messages come on top."""

_MOST_FITTING = 20
"""Of moves to less memory, those that are simulated at a plan that doesn't fit."""

_BUSY, _CHUNK, _CHUNK_LIKE = 0.8, 16, 48
"""Of the period, what the busiest device has to do where that sets the period; and moves that are
laid out at once, where they aren't simulated together, and where they may run alike."""

_SHARP = 64
"""A stage that is busy for 95 % of the time of the busiest counts as 0.04 of one."""

_MOST_ELSEWHERE = 12
"""Other places of devices that are looked at, at a plan that no other move betters."""

_PROMISING = 1.3
"""Where stages may have replicas, there are many: borders are moved of those that are so near."""

_KICKS, _MOVED = 0.5, 0.4
"""How often a few borders alone are moved at random, where any may be; and the share of these."""

_CLIMBS = 100
"""Climbs from anywhere without gain, in the end."""

_CLIMBED, _DEAREST = 300, 8.0
"""Plans that there is effort for there, of a search's own `EFFORT`, and times that at the most."""

_SURE, _FURTHER = 1.02, 5
"""Where the best plan is further above the bound, there is so many times the effort."""

_HOPELESS = 1.0
"""Of each device's memory, what they may lack in the mean where a plan fits: of what lacks more
seldom a better one comes, and late."""

_FIRST_CUTS, _MOST_LAYINGS = 6, 12
"""First cuts that climbs begin at, of so many numbers of micro-batches, stages and replicas."""

_BORDERS = 1
"""Of the kinds of moves, those that are tried there."""


class Foreseen(NamedTuple):
    """What is known of a point before it is simulated.

    Attributes:
        expected_s: its period, about: simulated with others at once where that can be.
        least_s: no schedule is faster.
        loads_s: what keeps devices and wires busy.
        laid: its stages, with what they cost.
    """

    expected_s: float
    least_s: float
    loads_s: list[float]
    laid: LaidOut

    @property
    def pipeline(self) -> Pipeline:
        """As it is simulated."""
        return self.laid.pipeline


_Ranked = tuple[Foreseen, Point]


class LocalSearch:
    """Improves plans of one search, straight or with several stages on each device.

    Args:
        relaxation: whose graph says which layers must share a stage.
        pins: (layer, stage); the search's by default.
        moves_devices: stages may have others than the cluster lists at their place.

    Attributes:
        list_scheduled: a list schedule makes what stages run, whatever their limits are.
        begun: first cuts that were climbed from.
    """

    def __init__(
        self,
        search: SearchState,
        relaxation: Relaxation | None = None,
        pins: Sequence[tuple[int, int]] | None = None,
        *,
        moves_devices: bool = False,
    ) -> None:
        self.search = search
        self.relaxation = relaxation or search.relaxation
        self.question = search.question
        if pins is None:
            pins = search.branches[0].pins if search.branches else ()
        self.near = Neighbours(search, self.relaxation, pins, moves_devices=moves_devices)
        self.list_scheduled = self.relaxation.list_scheduled
        self._standings: dict[Point, Standing | None] = {}
        self._seen: dict[Point, Foreseen | None] = {}
        # Periods that points are known to be longer than.
        self._longer_s: dict[Point, float] = {}
        self._layers_s: dict[tuple[int, int], float] = {}
        self.begun = set[Point]()

    def look(self, point: Point, than: Standing | None = None) -> Standing | None:
        """Evaluate a point; None where it can't be, or can't be better than another.

        Raises OutOfBudget when the budget is used up.
        """
        if point in self._standings:
            return self._standings[point]
        seen = self.foreseen(point)
        if seen is None or (than is not None and self._useless(seen, than)):
            return None
        most_s = inf if than is None or than.over else than.period_s * SAME
        if self._longer_s.get(point, 0.0) >= most_s:
            return None
        if than is not None and self._seems_longer(seen, point, than):
            self._longer_s[point] = most_s
            return None
        choice = self.near.choice(point)
        found = self.search.look(choice, point.micro_batches, point.limits, most_s)
        if found is None and most_s < inf:
            self._longer_s[point] = most_s
            return None
        standing = None if found is None else self._standing(point, found)
        self._standings[point] = standing
        return standing

    def _useless(self, seen: Foreseen, than: Standing) -> bool:
        """Whether what a point may be at best is no better."""
        if than.over or seen.least_s * SAME < than.period_s:
            return False
        bottlenecks = _bottlenecks(seen.loads_s, than.period_s)
        return seen.least_s > than.period_s * SAME or bottlenecks > than.bottlenecks - WORTH_IT

    def _seems_longer(self, seen: Foreseen, point: Point, than: Standing) -> bool:
        """Whether its period is longer than a plan's in the one schedule that was the shortest for
        the plan, where the system takes the shortest of several (`period_in_one_way_s`)."""
        one = than.found.pipeline
        if than.over or not _runs_like(point, than):
            return False
        found_s = period_in_one_way_s(seen.pipeline, one)
        self.search.budget.take(_ONE_WAY * one.stages * one.micro_batches if found_s else 0)
        return found_s > than.period_s * _VAGUE

    def foreseen(self, point: Point) -> Foreseen | None:
        """What is known before it is simulated; None where it can't be."""
        if point not in self._seen:
            choice, seen = self.near.choice(point), None
            if all(choice.nodes) and self.near.valid(point, choice):
                laid = self._laid_out(choice, point)
                if laid is not None:
                    loads = loads_s(laid.pipeline)
                    least_s = self._least_s(laid.pipeline, max(loads))
                    seen = Foreseen(least_s, least_s, loads, laid)
            self._seen[point] = seen
        return self._seen[point]

    def work_s(self, point: Point) -> float:
        """What its layers keep the busiest device busy at the least, per mini-batch."""
        devices, n = self.question.cluster.devices, point.micro_batches
        work = dict[tuple[int, ...], float]()
        for (a, b), mine in zip(pairwise(point.downsets), point.devices, strict=True):
            key = n, b & ~a
            if key not in self._layers_s:
                seconds = self.near.layers.seconds(n)
                self._layers_s[key] = sum(seconds[j] for j in members(b & ~a))
            work[mine] = work.get(mine, 0.0) + self._layers_s[key]
        if self.relaxation.variant.whole_mini_batches and max(map(len, point.devices)) > 1:
            return 0.0
        return max(
            n * seconds / len(mine) / max(devices[d].speed for d in mine)
            for mine, seconds in work.items()
        )

    def _laid_out(self, choice: Choice, point: Point) -> LaidOut | None:
        self.search.budget.take(_LAID_OUT)
        try:
            stages = choice.with_limits(point.limits)
            return lay_out(self.question, stages, point.micro_batches)
        except (PlanError, ScheduleError):
            return None

    def _least_s(self, pipeline: Pipeline, least_s: float) -> float:
        """No schedule is faster. `least_s`: than its busiest device or wire."""
        flushes = self.relaxation.variant.flushes
        if flushes and pipeline.update_every == 1:
            least_s = max(least_s, filled_and_drained_s(pipeline))
        if flushes or (is_patterned(pipeline) and simulates_together(pipeline)):
            return least_s
        return max(least_s, round_trip_s(pipeline))

    def _standing(self, point: Point, found: Evaluation) -> Standing:
        shares = found.memory_shares(self.question.cluster)
        over = sum(max(share - 1.0, 0.0) for share in shares)
        most = self.relaxation.most_late
        over += 0.0 if most is None else float(max(found.delay - most, 0))
        bottlenecks = _bottlenecks(loads_s(found.pipeline), found.prediction.period_s)
        return Standing(point, found, over, bottlenecks)

    # Starts ------------------------------------------------------------------------------------

    def hoped_s(self, micro_batches: int, lying: Lying) -> float:
        """What the even cut needs at the least with so many micro-batches, stages having these
        devices; times the share of the devices' memory that it needs, about, if they lack some."""
        cut, stages = even_cut(self.near, micro_batches, lying), len(lying)
        if cut is None:
            return inf
        limits, recompute = (
            next(self.near.usual_limits(stages, lying)),
            self.relaxation.recompute[0],
        )
        point = Point(cut, lying, (recompute,) * stages, micro_batches, limits)
        seen = self.foreseen(point)
        if seen is None:
            return inf
        return seen.least_s * max(share_about(seen.laid, point, self.question), 1.0)

    def starts_on(self, lying: Lying, micro_batches: int) -> list[Standing]:
        """The best of first cuts with so many micro-batches, stages having these devices, under the
        widest limits; where none fits, under less."""
        stages, cuts = len(lying), self.near.first_cuts(micro_batches, lying)
        under = limits_and_ways(self, lying, micro_batches)
        limits, recompute = under[0]
        points = dict.fromkeys(
            _that_may_fit(
                self, Point(cut, lying, (recompute,) * stages, micro_batches, limits), under
            )
            for cut in cuts
        )
        found = [x for p in self._expected(list(points)) if (x := self.look(p))]
        if self.relaxation.limited and len({*lying}) == len(lying):
            found += _that_fit(self, lying, micro_batches, under, found)
        if all(standing.over for standing in found):
            # What is slower may need less: even stages.
            found += [x for p in [*points][:_EVEN] if (x := self.look(p))]
            for begun in {standing.point: standing for standing in found}.values():
                found += _with_less(self, begun, under[1:])
        return found

    def _expected(self, points: Sequence[Point]) -> list[Point]:
        """The few that are expected to be fastest."""
        seen = [(found, p) for p in points if (found := self.foreseen(p)) is not None]
        if not seen:
            return []
        expected, pipelines = [found.least_s for found, _ in seen], [x.pipeline for x, _ in seen]
        if simulates_together(pipelines[0]) and not self.list_scheduled:
            expected = _at_once_s(self, pipelines)
        elif simulates_like(pipelines[0]) and len(seen) >= _FEW_LIKE:
            expected = _like_s(self, pipelines[0], pipelines)
        best_s, most = self.search.period_s, _MOST_STARTS
        operations = operations_of(
            self.relaxation.variant, points[0].stages, points[0].micro_batches
        )
        few = operations * _MOST_STARTS * _FEW > self.search.budget.effort
        if few or self.relaxation.freedom.replicas:
            # With replicas there are several ways to have so many stages, each with its own.
            most = 1
        ranked = sorted(zip(expected, range(len(seen)), strict=True))
        near = ranked[0][0] * (1 + _NEAR)
        return [seen[k][1] for s, k in ranked[:most] if s <= near and s < best_s * 1.2]

    # Descents ----------------------------------------------------------------------------------

    def descend(self, here: Standing, worth: float = 0.0) -> Standing:
        """Take moves until none makes it better. Raises OutOfBudget when the budget is used up.

        Args:
            worth: share of the period that a move must gain.
        """
        while not self._done(here):
            found = self._bettered(here, worth=worth) or self._elsewhere(here)
            if found is None:
                break
            here = found
        return here

    def _elsewhere(self, here: Standing) -> Standing | None:
        """What is better with devices in each other's places or a stage more or fewer, and borders
        that suit them."""
        near = self.near
        points = dict.fromkeys(
            replace(point, downsets=cut)
            for point in chain(near.device_moves(here.point), stage_moves(near, here.point))
            for cut in (point.downsets, *even_cuts(near, point.micro_batches, point.devices))
        )
        expected = [(seen.expected_s, p) for p in points if (seen := self.foreseen(p)) is not None]
        expected.sort(key=lambda item: item[0])
        near_s = inf if here.over else here.period_s * _PROMISING
        replicas = self.relaxation.freedom.replicas
        for _, point in expected[:_MOST_ELSEWHERE]:
            found = self.look(point)
            if replicas and found is not None and found.period_s > near_s:
                continue
            while found is not None and not found.better(here):
                found = self._bettered(found, _BORDERS)
            if found is not None:
                return found
        return None

    def _done(self, here: Standing) -> bool:
        """Whether no plan can be faster."""
        return not here.over and here.period_s <= self.search.bound_s * SAME

    def _bettered(
        self, here: Standing, most: int | None = None, worth: float = 0.0
    ) -> Standing | None:
        """What the first move that makes it better leads to; None where none does.

        Those that leave the busiest device least to do are tried first: where nothing else holds
        stages up, these are the best ones.

        Args:
            most: kinds of moves that are tried, borders first; None: all.
            worth: as of `descend`.
        """
        near, busiest = self.near, self._busiest(here)
        borders = (near.border_moves,)
        others = (near.limit_moves, near.recompute_moves, partial(replica_moves, near))
        kinds = [borders, (near.row_moves,), others, (near.count_moves,)]
        if here.over:
            kinds = [others, *kinds[:2], kinds[-1]]
        for together in kinds[:most]:
            points = dict.fromkeys(
                point for kind in together for point in kind(here.point, busiest)
            )
            ranked: Callable[..., Iterable[Point]] = self._fitting if here.over else self._ranked
            some: Iterable[list[Point]] = [[*points]]
            if here.found.pipeline.placement and not here.over:
                some = _chunks(self, [*points], here)
            for point in chain.from_iterable(ranked(each, here) for each in some):
                found = self.look(point, here)
                if found is None or not found.better(here):
                    continue
                if here.over or not worth or found.period_s < here.period_s * (1 - worth):
                    return found
        return None

    def _fitting(self, points: Sequence[Point], here: Standing) -> list[Point]:
        """Those that are likely to need less beyond the devices' memory, the least first."""
        found = list[tuple[float, float, Point]]()
        for point in points:
            seen = self.foreseen(point)
            if seen is not None:
                over = over_about(seen.laid, point, here, self.question)
                if over < here.over:
                    found.append((over, seen.least_s, point))
        return [point for _, _, point in sorted(found, key=lambda item: item[:2])[:_MOST_FITTING]]

    def _ranked(self, points: Sequence[Point], here: Standing) -> list[Point]:
        """Those that may be better, by what they are expected to be."""
        found, alike = list[_Ranked](), dict[Hashable, list[_Ranked]]()
        like, has_likes = list[_Ranked](), _has_likes(here.found.pipeline)
        for point in points:
            if point in self._standings or self.work_s(point) > here.period_s * SAME:
                continue
            seen = self.foreseen(point)
            if seen is None or self._useless(seen, here):
                continue
            if over_about(seen.laid, point, here, self.question) > _MAY_FIT:
                narrower = _narrower(self, seen, point, here)
                if narrower is None:
                    continue
                seen, point = narrower
            if has_likes and _runs_like(point, here):
                like.append((seen, point))
            elif simulates_together(seen.pipeline):
                alike.setdefault(_alike(self, point), []).append((seen, point))
            else:
                found.append((seen, point))
        found += _run_alike(self, like, here)
        for key, some in alike.items():
            # With one micro-batch, one by itself is about as short as one of many.
            one = some[0][1].micro_batches == 1
            if self.list_scheduled and (one or len(some) <= _LISTED_AT_ALL):
                found += some
            elif key == _alike(self, here.point) or len(some) > 1:
                found += self._together(some, here)
            elif any(a > b for a, b in zip(some[0][1].limits, here.point.limits, strict=False)):
                # Where a pattern says what stages run, fewer in flight make nothing faster.
                found += some
        found.sort(key=lambda item: item[0].expected_s)
        return [point for _, point in found]

    def _together(self, some: Sequence[_Ranked], here: Standing) -> list[_Ranked]:
        """Those of one schedule that may be better, with what is expected of them."""
        pipelines, found = [seen.pipeline for seen, _ in some], list[_Ranked]()
        alike = _alike(self, here.point) == _alike(self, some[0][1])
        # What doesn't settle in time is as far off for both.
        mine = here.found.pipeline if alike else pipelines[0]
        *periods, mine_s = _at_once_s(self, [*pipelines, mine])
        limit_s = mine_s if alike else here.period_s * _ABOUT
        limit_s *= _VAGUE if self.list_scheduled else 1.0
        for (seen, point), period_s in zip(some, periods, strict=True):
            bottlenecks = _bottlenecks(seen.loads_s, here.period_s)
            shorter = period_s * SAME < limit_s
            if shorter or (
                period_s <= limit_s * SAME and bottlenecks < here.bottlenecks - WORTH_IT
            ):
                found.append((seen._replace(expected_s=max(period_s, seen.least_s)), point))
        if self.list_scheduled:
            found.sort(key=lambda item: item[0].expected_s)
            del found[_MOST_LISTED:]
        return found

    def _busiest(self, here: Standing) -> list[int]:
        """Stages, the busiest first; before them those that need too much memory."""
        pipeline, cluster = here.found.pipeline, self.question.cluster
        over = {s for s, _ in here.found.over_limit(cluster)} if here.over else set[int]()
        busy = busy_s(pipeline)
        return sorted(range(here.point.stages), key=lambda s: (s not in over, -busy[s], s))


def _alike(local: LocalSearch, point: Point) -> Hashable:
    """Points with the same are simulated together."""
    return point.stages, point.micro_batches, () if local.list_scheduled else point.limits


def _run_alike(local: LocalSearch, some: Sequence[_Ranked], here: Standing) -> list[_Ranked]:
    """Those that may be better if they ran as a plan does, with what is expected of them. Raises
    OutOfBudget when the budget is used up."""
    one = here.found.pipeline
    if len(some) < _FEW_LIKE:
        return [*some]
    mine_s, *periods = _like_s(local, one, [one, *(seen.pipeline for seen, _ in some)])
    given = has_row(one.variant)
    limit_s, found = mine_s * (_VAGUE if given else _STANDS_IN), list[_Ranked]()
    for (seen, point), period_s in zip(some, periods, strict=True):
        if period_s <= limit_s:
            expected = max(period_s, seen.least_s)
            found.append((seen._replace(expected_s=expected), point))
    found.sort(key=lambda item: item[0].expected_s)
    return found[: _MOST_LISTED if given else None]


def _like_s(local: LocalSearch, one: Pipeline, pipelines: Sequence[Pipeline]) -> list[float]:
    """Periods as one of them runs. Raises OutOfBudget when the budget is used up."""
    operations = 2 * one.stages * (3 if one.weight_s else 2) * one.micro_batches
    local.search.budget.take(_LIKE_AT_ALL * operations + _LIKE * len(pipelines))
    found: list[float] = periods_like_s(one, pipelines).tolist()
    return found


def _has_likes(pipeline: Pipeline) -> bool:
    """Whether it pays to simulate others as this one runs: where times make the schedule, which
    then differs from cut to cut, only if that takes long."""
    variant = pipeline.variant
    if not simulates_like(pipeline) or has_row(variant):
        return simulates_like(pipeline)
    return placed_operations(variant, pipeline.stages, pipeline.micro_batches) >= _DEAR


def _runs_like(point: Point, here: Standing) -> bool:
    """Whether devices may run the same operations for both, where the pipeline flushes."""
    mine = here.point
    return (point.devices, point.micro_batches) == (mine.devices, mine.micro_batches)


def _narrower(local: LocalSearch, seen: Foreseen, point: Point, here: Standing) -> _Ranked | None:
    """A point that doesn't fit with fewer in flight, where times make what stages run; None
    where that is known, can't fit, or can't be better."""
    if not local.list_scheduled or seen.pipeline.placement:
        return None
    least = [low for low, _ in local.relaxation.limit_ranges(point.stages)]
    other = fitted(seen.laid, point, here, local.question, least)
    if other is None or other in local._standings:
        return None
    pipeline = replace(seen.pipeline, limits=other.limits)
    least_s = local._least_s(pipeline, max(seen.loads_s))
    laid = seen.laid._replace(pipeline=pipeline)
    narrower = local._seen[other] = Foreseen(least_s, least_s, seen.loads_s, laid)
    return None if local._useless(narrower, here) else (narrower, other)


def _at_once_s(local: LocalSearch, pipelines: Sequence[Pipeline]) -> list[float]:
    """Simulated at once. Raises OutOfBudget when the budget is used up."""
    first, each, at_all = pipelines[0], _TOGETHER, _TOGETHER_AT_ALL
    if local.list_scheduled:
        operations = operations_of(first.variant, first.stages, first.micro_batches)
        each, at_all = operations // _LISTED_SHARE, operations * _LISTED_AT_ALL
    takes = each * len(pipelines) + at_all
    local.search.budget.take(takes)
    local.search.budget.check_time_for(takes)
    found: list[float] = periods_s(pipelines).tolist()
    return found


def limits_and_ways(
    local: LocalSearch, lying: Sequence[tuple[int, ...]], micro_batches: int
) -> list[Under]:
    """Limits and what all stages compute again, those first that are likely to be fastest, and take
    most memory: computing again takes up to a third longer; and with fewer in flight than stages,
    mini-batches or where backwards take these micro-batches, some are idle."""
    ways, stages = local.relaxation.recompute, len(lying)
    each = micro_batches if local.relaxation.variant.backward_unit == "mini" else 1
    longer = {True: 4 / 3, False: 1.0}

    def takes(under: Under) -> float:
        limits, way = under
        waits = max((stages + each - 1) / (each * limits[0]), 1.0)
        return waits * (longer[way] if isinstance(way, bool) else 7 / 6)

    some_ways = dict.fromkeys((ways[0], ways[len(ways) // 2], ways[-1]))
    every = product(local.near.usual_limits(stages, lying), some_ways)
    return sorted(every, key=takes)


def _that_may_fit(local: LocalSearch, point: Point, under: Sequence[Under]) -> Point:
    """The point under the first of these limits and ways to compute again that it doesn't need far
    more memory under than there is; of those that do simulations take long, and nothing comes of
    them."""
    for limits, recompute in under:
        point = replace(point, limits=limits, recompute=(recompute,) * point.stages)
        seen = local.foreseen(point) if local.relaxation.limited else None
        if seen is None or share_about(seen.laid, point, local.question) <= _MUCH_OVER:
            return point
    return point


def _that_fit(
    local: LocalSearch,
    lying: Lying,
    micro_batches: int,
    under: Sequence[Under],
    known: Sequence[Standing],
) -> Iterator[Standing]:
    """Cuts that are as even as memory lets them be, under limits and ways to compute again that are
    likely to be faster than those that known cuts fit with, up to the first that fits."""
    fits = {(s.point.limits, s.point.recompute[0]) for s in known if not s.over}
    for limits, recompute in takewhile(lambda each: each not in fits, under):
        for share in _ROOM:
            cut = cut_that_fits(local.near, micro_batches, lying, limits, recompute, share)
            if cut is None:
                break
            point = Point(cut, lying, (recompute,) * len(lying), micro_batches, limits)
            seen = local.foreseen(point)
            if seen is None or seen.least_s > local.search.period_s:
                break
            standing = local.look(point)
            if standing is not None:
                yield standing
                if not standing.over:
                    return


def _bottlenecks(loads: Sequence[float], period_s: float) -> float:
    """How many devices and wires are busy for about all of the period."""
    return sum((each / period_s) ** _SHARP for each in loads) if period_s else 0.0


def _chunks(local: LocalSearch, points: list[Point], here: Standing) -> Iterator[list[Point]]:
    """A few points at a time: where they aren't simulated together, laying out all of them takes
    longer than the simulations of a few. Those first that leave the busiest device least to do,
    unless it is idle for long."""
    if local.work_s(here.point) > _BUSY * here.period_s:
        points.sort(key=local.work_s)
    else:
        local.near.random.shuffle(points)
    size = _CHUNK_LIKE if _has_likes(here.found.pipeline) else _CHUNK
    for first in range(0, len(points), size):
        yield points[first : first + size]


def starts_with(
    local: LocalSearch, branch: PlacedBranch, cuts: Iterable[tuple[int, ...]]
) -> Iterator[Standing]:
    """These cuts of a branch, each under the widest limits; where it doesn't fit, with more
    computed again and fewer in flight that are likely to, up to the first that does, and the
    last."""
    lying, n = branch.lying, branch.micro_batches
    (most, kept), *less = limits_and_ways(local, lying, n)
    for cut in cuts:
        widest = local.look(Point(cut, lying, (kept,) * len(lying), n, most))
        if widest is None:
            continue
        yield widest
        if widest.over:
            yield from _with_less(local, widest, less)


def _with_less(local: LocalSearch, begun: Standing, less: Sequence[Under]) -> Iterator[Standing]:
    """Those with fewer in flight and more computed again that are likely to fit, up to the first
    that does, and the last."""
    for limits, recompute in less:
        point = replace(begun.point, limits=limits, recompute=(recompute,) * begun.point.stages)
        seen = local.foreseen(point)
        if seen is None:
            continue
        over = over_about(seen.laid, point, begun, local.question)
        last = (limits, recompute) == less[-1]
        standing = local.look(point) if over <= _NEARLY or last else None
        if standing is not None:
            yield standing
            if not standing.over:
                break


def fastest_first(
    local: LocalSearch,
    branch: PlacedBranch,
    cuts: Iterable[tuple[int, ...]],
    *,
    by_memory: bool = False,
) -> list[tuple[int, ...]]:
    """Cuts of a branch, by what they need at the least under the widest limits.

    Args:
        by_memory: times the share of the devices' memory that they need, about, if they lack some.
    """
    lying, n = branch.lying, branch.micro_batches
    recompute, limits = (
        local.relaxation.recompute[:1],
        next(local.near.usual_limits(len(lying), lying)),
    )
    known = list[tuple[float, tuple[int, ...]]]()
    for cut in cuts:
        point = Point(cut, lying, recompute * len(lying), n, limits)
        seen = local.foreseen(point)
        if seen is not None:
            share = share_about(seen.laid, point, local.question) if by_memory else 1.0
            known.append((seen.least_s * max(share, 1.0), cut))
    return [cut for _, cut in sorted(known)]


def start(
    search: SearchState,
    local: LocalSearch,
    branches: Sequence[Branch | PlacedBranch] | None = None,
) -> None:
    """First plans of branches, by default of all, improved. Raises OutOfBudget when the budget is
    used up."""
    found = list[Standing]()
    some = search.branches if branches is None else branches
    every = [(b.micro_batches, lying) for b in some for lying in layings_of(local.near, b)]
    mixed = [(b.micro_batches, lying) for b in some for lying in mixed_layings(local.near, b)]
    # Some are found in several sequences of the devices.
    hoped_s = {each: local.hoped_s(*each) for each in dict.fromkeys((*every, *mixed))}
    promising = sorted(dict.fromkeys(mixed), key=hoped_s.__getitem__)[:_MOST_MIXED]
    # Where simulations are dear there may be time for few: the most promising ones first.
    ranked = sorted(dict.fromkeys((*every, *promising)), key=hoped_s.__getitem__)
    for done, (micro_batches, lying) in enumerate(ranked):
        search.say(f"{search.standing}; first cuts", done, len(ranked))
        found += local.starts_on(lying, micro_batches)
    found.sort(key=lambda s: (s.over, s.period_s))
    for standing in found[:_MOST_STARTS]:
        if standing.over or standing.period_s <= search.period_s * (1 + _spread(search)):
            local.descend(standing)


def improve(
    search: SearchState, local: LocalSearch, tries: int, begun: Standing | None = None
) -> None:
    """Improve the best plan; kick it and descend again, so often without gain.

    Raises OutOfBudget when the budget is used up.

    Args:
        begun: what to improve in its place.
    """
    here = begun
    if begun is None and search.best is not None:
        here = local.look(local.near.point_of(search.best))
    if here is None:
        return
    here = local.descend(here)
    failed = 0
    while failed < tries and here.period_s > search.bound_s * SAME:
        search.say(search.standing)
        begun = local.look(local.near.kicked(here.point))
        there = None if begun is None else local.descend(begun)
        if there is not None and there.better(here):
            failed = 0 if there.period_s * SAME < here.period_s else failed + 1
            here = there
        else:
            failed += 1


def improve_others(search: SearchState, local: LocalSearch, tries: int) -> None:
    """Improve plans with other micro-batches, stages or replicas than the best one has, that come
    near to it: what a search for those alone would have improved. Raises OutOfBudget when the
    budget is used up."""
    near = [
        found
        for found in search.by_kind.values()
        if found is not search.best
        and not found.pipeline.placement
        and found.prediction.period_s <= search.period_s * (1 + _spread(search))
    ]
    for found in sorted(near, key=lambda each: each.prediction.period_s)[:_MOST_OTHERS]:
        if search.period_s <= search.bound_s * SAME:
            return
        begun = local.look(local.near.point_of(found))
        if begun is not None:
            improve(search, local, tries, begun)


def _spread(search: SearchState) -> float:
    return _SPREAD_WITH_REPLICAS if search.relaxation.freedom.replicas else _SPREAD


def climbing_effort(search: SearchState, effort: int) -> int:
    """What climbs from anywhere may take, in a search of so much effort: as much again, where plans
    are dear, enough for some hundreds like the best one, and more where that isn't near a bound."""
    found = search.best or search.closest
    if found is None:
        return effort
    takes = placed_operations if found.pipeline.placement else operations_of
    each = takes(search.relaxation.variant, len(found.stages), found.micro_batches)
    further = 1 if search.period_s <= search.bound_s * _SURE else _FURTHER
    return round(effort * min(max(_CLIMBED * each / EFFORT, 1.0), _DEAREST) * further)


def climb_on(
    search: SearchState, local: LocalSearch, branches: Sequence[Branch | PlacedBranch]
) -> None:
    """Climb until that gains nothing for long: in turns from first cuts of branches, and from the
    best plan with some borders elsewhere. Raises OutOfBudget when the budget is used up."""
    here = None if search.best is None else local.look(local.near.point_of(search.best))
    begins, failed = _begins(local, branches), 0
    # The best plan's own hill is seldom the highest one: a first cut comes before it.
    for turn in count():
        if failed >= _CLIMBS or (here and local._done(here)):
            return
        search.say(search.standing)
        point = None
        if here is None or not turn % 2:
            point = next((p for p in begins if p not in local.begun), None)
        if point is not None:
            local.begun.add(point)
        elif here is None:
            return
        else:
            point = _scattered(local, here.point) if turn > 1 else here.point
        there, failed = local.look(point), failed + 1
        lacks = 0.0 if there is None or here is None or here.over else there.over
        if there is None or lacks > _HOPELESS * len(local.question.cluster.devices):
            continue
        there = _climbed(local, there)
        if here is None or there.better(here):
            failed = 0 if here is None or there.period_s * SAME < here.period_s else failed
            here = there


def _climbed(local: LocalSearch, here: Standing) -> Standing:
    """As `descend`, by whatever move is better, in random sequence. Raises as that."""
    while not local._done(here):
        for point in _hopeful(local, here):
            found = local.look(point, here)
            if found is not None and found.better(here):
                break
        else:
            found = local._elsewhere(here)
        if found is None:
            break
        here = found
    return here


def _hopeful(local: LocalSearch, here: Standing) -> Iterator[Point]:
    """Any moves that may be better; of those that run alike, what is expected to be."""
    points, pipeline = _any_moves(local, here), here.found.pipeline
    alike = _has_likes(pipeline) and not here.over
    for first in range(0, len(points), _CHUNK_LIKE):
        like = list[_Ranked]()
        for point in points[first : first + _CHUNK_LIKE]:
            if not _may_be_better(local, point, here):
                continue
            seen = local.foreseen(point)
            if alike and seen is not None and _runs_like(point, here):
                like.append((seen, point))
            else:
                yield point
        yield from (point for _, point in _run_alike(local, like, here))


def _any_moves(local: LocalSearch, here: Standing) -> list[Point]:
    """All but those of devices and stages, in random sequence; and of borders one, or all from one
    on, any far."""
    near, point, last = local.near, here.point, here.point.stages - 1
    rows = [(k, end) for k in range(1, last + 1) for end in {k, last}]
    shifts = [(*row, by * step) for row in rows for step in STEPS for by in (-1, 1)]
    found = [moved for shift in shifts if (moved := near.shifted(point, *shift)) is not None]
    if here.found.pipeline.placement and here.found.pipeline.weight_s and not here.over:
        # A stage of one group may be best where weight parts of others fill its device; it also
        # takes little memory, but seldom leads to a fast plan that fits.
        far = [(k, by * len(near.layers.groups)) for k in range(1, last + 1) for by in (-1, 1)]
        ends = (near.shifted(point, k, k, by, at_most=True) for k, by in far)
        found += [moved for moved in ends if moved is not None]
    kinds = (near.limit_moves, near.recompute_moves, partial(replica_moves, near), near.count_moves)
    for kind in kinds:
        found += kind(point, local._busiest(here))
    near.random.shuffle(found)
    return found


def _may_be_better(local: LocalSearch, point: Point, here: Standing) -> bool:
    """By what is known before it is simulated."""
    if not here.over and local.work_s(point) > here.period_s * SAME:
        return False
    seen = local.foreseen(point)
    if seen is None or local._useless(seen, here):
        return False
    over = over_about(seen.laid, point, here, local.question)
    return over < here.over if here.over else over <= _MAY_FIT


def _scattered(local: LocalSearch, point: Point) -> Point:
    """Kicked, or with any of its borders elsewhere."""
    near, some = local.near, local.near.random
    if some.random() < _KICKS:
        return near.kicked(point)
    far = max(len(local.question.profile.layers) // point.stages, 2)
    variant = local.relaxation.variant
    several = variant.split_backward and len({*point.devices}) < point.stages
    for border in range(1, point.stages):
        if some.random() < _MOVED:
            by = some.choice((-1, 1)) * some.randint(1, far)
            point = near.shifted(point, border, border, by, at_most=several) or point
    return point


def _begins(local: LocalSearch, branches: Sequence[Branch | PlacedBranch]) -> Iterator[Point]:
    """First cuts of branches under some limits, those first that may be fastest and nearly fit."""
    near, bounds = local.near, local.search.bounds
    ranked = sorted(branches, key=lambda b: (bounds[b], -b.micro_batches))
    every = ((b.micro_batches, lying) for b in ranked for lying in layings_of(near, b))
    some = list(islice(every, _MOST_LAYINGS))
    for at in range(_FIRST_CUTS):
        found = dict[Point, float]()
        for n, lying in some:
            cuts, under = near.first_cuts(n, lying)[at:], limits_and_ways(local, lying, n)
            for limits, recompute in under[:: len(under) // 3 or 1] if cuts else ():
                point = Point(cuts[0], lying, (recompute,) * len(lying), n, limits)
                seen = local.foreseen(point)
                if seen is not None:
                    share = share_about(seen.laid, point, local.question)
                    found[point] = max(share, 1.0) * seen.least_s
        yield from sorted(found, key=lambda point: found[point])
