"""Improving a plan by local search: one move at a time, each evaluated by its real schedule.

A descent from a plan tries moves of borders (one, or several with the stages between them), of
in-flight limits, of what stages compute again, of replicas and of devices, and other micro-batch
counts, and takes every move that makes the plan better: first what is too much for the devices'
memory, then the period, then how many stages are as busy as the busiest, so that it doesn't stop
where several set the period. Descents begin at even cuts, and at what was found before; at
a plan that no move betters, some borders are moved at random and it descends again, as long as that
pays (iterated local search).

A move is simulated only where what its busiest device, its wires, and a flush need at the least is
below the period that there is.

Index letters: S stages; D devices; N micro-batches; n layers.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from typing import NamedTuple

from ...profiles.errors import PlanError, ScheduleError
from ..costs.recomputation import Selection, of_stage, selection_of
from ..costs.tied_parameters import misplaced
from ..evaluate import Evaluation, LaidOut, lay_out
from ..partition.dp.lattice import joined
from ..partition.problem import SAME, members
from ..schedules.together import periods_s, simulates_together
from ..simulator.pipeline import Pipeline
from ..simulator.timeline import busy_s, filled_and_drained_s, loads_s, round_trip_s
from ..systems.placement import numbered_devices
from .choices import Branch, Choice, capped, caps
from .relaxation import Relaxation
from .state import SearchState

_LAID_OUT = 60
"""Simulated operations that take as long as laying out a plan, about."""

_TOGETHER = 10
"""The same of simulating one of many at once."""

_TOGETHER_AT_ALL = 200
"""And of that, however few they are."""

_ABOUT = 1.005
"""Those with other limits may be so much shorter than expected."""

_STEPS = (1, 2, 4, 8, 16, 32, 3, 6, 12, 24)
"""Groups of layers that borders are moved by, in the sequence in which they are tried."""

_FEW_STAGES = 8
"""With more, rows of borders are moved towards and away from the busiest stages alone."""

_SPREAD = 0.02
"""Of starts, those are descended from whose period is within so much of the best one's."""

_SHARP, _CROWDED = 64, 1e-3
"""A stage that is busy for 95 % of the time of the busiest counts as 0.04 of one; and so much must
be gained where the period stays."""

_KICKED = 3
"""Borders that are moved at random at a plan that no move betters, at the most."""


@dataclass(frozen=True)
class Point:
    """A plan as the local search sees it.

    Attributes:
        downsets: bit masks of the layers before each border: S + 1, the empty one first.
        devices: per stage.
        again: per stage, what it computes again.
        limits: per stage, mini-batches in flight.
    """

    downsets: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    again: tuple[Selection, ...]
    micro_batches: int
    limits: tuple[int, ...]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.devices)


@dataclass(frozen=True)
class Standing:
    """A point that was evaluated.

    Attributes:
        over: what stages need beyond their devices' memory, as a share of it, summed; 0: it fits.
        crowding: how many devices and wires are busy for about all of the period.
    """

    point: Point
    found: Evaluation
    over: float
    crowding: float

    @property
    def period_s(self) -> float:
        """Of the plan, whether it fits or not."""
        return self.found.prediction.period_s

    def better(self, other: Standing) -> bool:
        """Whether it is worth moving here from the other one."""
        if (self.over or other.over) and abs(self.over - other.over) > 1e-9:
            return self.over < other.over
        if self.period_s * SAME < other.period_s or other.period_s * SAME < self.period_s:
            return self.period_s < other.period_s
        return self.crowding < other.crowding - _CROWDED


class Foreseen(NamedTuple):
    """What is known of a point before it is simulated.

    Attributes:
        expected_s: its period, about: simulated with others at once where that can be.
        least_s: no schedule is faster.
        loads_s: what keeps devices and wires busy.
    """

    expected_s: float
    least_s: float
    loads_s: list[float]
    pipeline: Pipeline


class LocalSearch:
    """Improves plans of one search, straight or with several stages on each device.

    Args:
        relaxation: whose graph says which layers must share a stage.
        pins: (layer, stage).
        moves_devices: stages may have others than the cluster lists at their place.
    """

    def __init__(
        self,
        search: SearchState,
        relaxation: Relaxation | None = None,
        pins: Sequence[tuple[int, int]] = (),
        *,
        moves_devices: bool = False,
    ) -> None:
        self.search = search
        self.relaxation = relaxation or search.relaxation
        self.question = search.question
        self._pins, self._moves_devices = tuple(pins), moves_devices
        self._random = random.Random(0)
        self._standings: dict[Point, Standing | None] = {}
        self._seen: dict[Point, Foreseen | None] = {}
        self._nodes: dict[int, tuple[str, ...]] = {}
        self._ways: dict[int, list[float]] = {}
        self._layers_s: dict[tuple[int, int], float] = {}

    @cached_property
    def _groups(self) -> list[int]:
        """Layers that share a stage, as bit masks, in topological order."""
        counts = self.search.branches[0].micro_batches if self.search.branches else 1
        return joined(self.relaxation.problem(Branch(counts)))

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {layer: g for g, mask in enumerate(self._groups) for layer in members(mask)}

    # Points ------------------------------------------------------------------------------------

    def point_of(self, found: Evaluation) -> Point:
        """A plan as a point."""
        position, ways = self.relaxation.graph.position, self.relaxation.recompute
        masks = (sum(1 << position[name] for name in stage.nodes) for stage in found.stages)
        return Point(
            (0, *accumulate(masks, int.__or__)),
            tuple(stage.devices for stage in found.stages),
            tuple(selection_of(stage.recompute, ways) for stage in found.stages),
            found.micro_batches,
            found.limits,
        )

    def _choice(self, point: Point) -> Choice:
        nodes = tuple(self._nodes_of(b & ~a) for a, b in pairwise(point.downsets))
        return Choice(nodes, point.devices, tuple(map(of_stage, point.again, nodes)))

    def _nodes_of(self, mask: int) -> tuple[str, ...]:
        if mask not in self._nodes:
            names = self.relaxation.graph.names
            self._nodes[mask] = tuple(names[j] for j in members(mask))
        return self._nodes[mask]

    def _valid(self, point: Point, choice: Choice) -> bool:
        question, sets = self.question, point.downsets
        if not self.relaxation.allows(point.stages, point.micro_batches):
            return False
        for layer, stage in self._pins:
            if stage >= point.stages or not sets[stage + 1] & ~sets[stage] & 1 << layer:
                return False
        for group in self.relaxation.graph.together:
            if any(group & mask and group & ~mask for mask in sets[1:-1]):
                return False
        return misplaced(question.profile, choice.nodes, choice.devices, question.tied) is None

    def look(self, point: Point, than: Standing | None = None) -> Standing | None:
        """Evaluate a point; None where it can't be, or can't be better than another.

        Raises OutOfBudget when the budget is used up.
        """
        if point in self._standings:
            return self._standings[point]
        seen = self._foreseen(point)
        if seen is None or (than is not None and self._useless(seen, than)):
            return None
        found = self.search.look(self._choice(point), point.micro_batches, point.limits)
        standing = None if found is None else self._standing(point, found)
        self._standings[point] = standing
        return standing

    def _useless(self, seen: Foreseen, than: Standing) -> bool:
        """Whether what a point may be at best is no better."""
        if than.over or seen.least_s * SAME < than.period_s:
            return False
        crowding = _crowding(seen.loads_s, than.period_s)
        return seen.least_s > than.period_s * SAME or crowding > than.crowding - _CROWDED

    def _foreseen(self, point: Point) -> Foreseen | None:
        """What is known before it is simulated; None where it can't be."""
        if point not in self._seen:
            choice, seen = self._choice(point), None
            if all(choice.nodes) and self._valid(point, choice):
                laid = self._laid_out(choice, point)
                if laid is not None:
                    loads = loads_s(laid.pipeline)
                    least_s = self._least_s(laid.pipeline, max(loads))
                    seen = Foreseen(least_s, least_s, loads, laid.pipeline)
            self._seen[point] = seen
        return self._seen[point]

    def _work_s(self, point: Point) -> float:
        """What its layers keep the busiest device busy at the least, per mini-batch."""
        devices, n = self.question.cluster.devices, point.micro_batches
        work = dict[tuple[int, ...], float]()
        for (a, b), mine in zip(pairwise(point.downsets), point.devices, strict=True):
            key = n, b & ~a
            if key not in self._layers_s:
                if n not in self._ways:
                    self._ways[n] = self.relaxation.way_s(n).tolist()
                self._layers_s[key] = sum(self._ways[n][j] for j in members(b & ~a))
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
        if flushes and pipeline.update_every == 1 and not pipeline.paces:
            least_s = max(least_s, filled_and_drained_s(pipeline))
        if flushes or simulates_together(pipeline):
            return least_s
        return max(least_s, round_trip_s(pipeline))

    def _standing(self, point: Point, found: Evaluation) -> Standing:
        shares = found.memory_shares(self.question.cluster)
        over = sum(max(share - 1.0, 0.0) for share in shares)
        crowding = _crowding(loads_s(found.pipeline), found.prediction.period_s)
        return Standing(point, found, over, crowding)

    # Starts ------------------------------------------------------------------------------------

    def even_cuts(self, micro_batches: int, stages: int) -> Iterator[tuple[int, ...]]:
        """Downsets of cuts with as much time, and with as many layers, on each stage."""
        groups = self._groups
        if stages > len(groups):
            return
        seconds = self.relaxation.way_s(micro_batches)
        by_time = [float(sum(seconds[j] for j in members(mask))) for mask in groups]
        masks = [0, *accumulate(groups, int.__or__)]
        seen = set[tuple[int, ...]]()
        for weights in (by_time, [1.0] * len(groups)):
            done = [0.0, *accumulate(weights)]
            ends, at = [0], 0
            for s in range(1, stages):
                wanted = done[-1] * s / stages
                rest = len(groups) - (stages - s)
                at = min(range(at + 1, rest + 1), key=lambda g: (abs(done[g] - wanted), g))
                ends.append(at)
            cut = tuple(masks[g] for g in (*ends, len(groups)))
            if cut not in seen:
                seen.add(cut)
                yield cut

    def start(self, branch: Branch) -> Standing | None:
        """The best of even cuts, under the usual limits, the least and the widest."""
        best: Standing | None = None
        devices = len(self.question.cluster.devices)
        for stages in self._stage_counts(branch):
            for lying in self._layings(stages, branch.micro_batches, devices):
                for cut in self.even_cuts(branch.micro_batches, stages):
                    for again in self.relaxation.recompute:
                        for limits in self._usual_limits(stages, lying):
                            point = Point(
                                cut, lying, (again,) * stages, branch.micro_batches, limits
                            )
                            found = self.look(point, best)
                            if found is not None and (best is None or found.better(best)):
                                best = found
                            if found is not None and not found.over:
                                # With fewer in flight it is no faster.
                                break
                        if best is not None and not best.over:
                            break
        return best

    def _stage_counts(self, branch: Branch) -> list[int]:
        if branch.stages is not None:
            return [branch.stages]
        most = min(self.search.most_stages, len(self._groups))
        halves = {most >> k for k in range(most.bit_length())} | {most}
        return sorted(halves - {0}, reverse=True)

    def _layings(
        self, stages: int, micro_batches: int, devices: int
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Devices of stages: as many for each; the last ones of those listed."""
        for each in reversed(self.relaxation.replica_counts(micro_batches)):
            if each == 1 or stages * each <= devices < stages * (each + 1):
                first = devices - stages * each
                yield tuple(
                    tuple(range(first + s * each, first + (s + 1) * each)) for s in range(stages)
                )

    def _usual_limits(
        self, stages: int, devices: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int, ...]]:
        """The widest; a mini-batch for each stage behind; fewer and fewer down to the least."""
        ranges = self._ranges(devices)
        behind = range(stages - 1, -1, -1)
        usual = [
            (low, max(low, min(high, 1 + d))) for (low, high), d in zip(ranges, behind, strict=True)
        ]
        seen = {tuple(high for _, high in ranges)}
        yield tuple(high for _, high in ranges)
        for cap in caps(usual):
            limits = capped(usual, cap)
            if limits not in seen:
                seen.add(limits)
                yield limits

    def _ranges(self, devices: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
        several = bool(numbered_devices(devices))
        return self.relaxation.limit_ranges(len(devices), several=several)

    # Descents ----------------------------------------------------------------------------------

    def descend(self, here: Standing) -> Standing:
        """Take moves until none makes it better. Raises OutOfBudget when the budget is used up."""
        while not self._done(here):
            found = self._bettered(here)
            if found is None:
                break
            here = found
        return here

    def _done(self, here: Standing) -> bool:
        """Whether no plan can be faster."""
        return not here.over and here.period_s <= self.search.bound_s * SAME

    def _bettered(self, here: Standing) -> Standing | None:
        """What the first move that makes it better leads to; None where none does.

        Those that leave the busiest device least to do are tried first: where nothing else holds
        stages up, these are the best ones.
        """
        borders = (self._border_moves, self._row_moves)
        others = (self._limit_moves, self._recompute_moves, self._replica_moves)
        rare = (self._device_moves, self._count_moves)
        kinds = (others, borders, rare) if here.over else (borders, others, rare)
        for together in kinds:
            points = dict.fromkeys(point for kind in together for point in kind(here))
            for point in list(points) if here.over else self._ranked(list(points), here):
                found = self.look(point, here)
                if found is not None and found.better(here):
                    return found
        return None

    def _ranked(self, points: Sequence[Point], here: Standing) -> list[Point]:
        """Those that may be better, by what they are expected to be."""
        found, alike = list[tuple[Foreseen, Point]](), dict[Hashable, list[Point]]()
        for point in points:
            if point in self._standings or self._work_s(point) > here.period_s * SAME:
                continue
            seen = self._foreseen(point)
            if seen is None or self._useless(seen, here):
                continue
            if simulates_together(seen.pipeline):
                alike.setdefault(_alike(point), []).append(point)
            else:
                found.append((seen, point))
        for some in alike.values():
            found += self._together(some, here)
        found.sort(key=lambda item: item[0].expected_s)
        return [point for _, point in found]

    def _together(
        self, points: Sequence[Point], here: Standing
    ) -> Iterator[tuple[Foreseen, Point]]:
        """Those of one schedule that may be better, with what is expected of them."""
        seen = [found for point in points if (found := self._seen[point]) is not None]
        self.search.budget.take(_TOGETHER * len(points) + _TOGETHER_AT_ALL)
        pipelines = [found.pipeline for found in seen]
        alike = _alike(here.point) == _alike(points[0])
        # What doesn't settle in time is as far off for both.
        *periods, mine_s = periods_s([*pipelines, here.found.pipeline if alike else pipelines[0]])
        limit_s = float(mine_s) if alike else here.period_s * _ABOUT
        for point, found, period_s in zip(points, seen, map(float, periods), strict=True):
            crowding = _crowding(found.loads_s, here.period_s)
            shorter = period_s * SAME < limit_s
            if shorter or (period_s <= limit_s * SAME and crowding < here.crowding - _CROWDED):
                yield found._replace(expected_s=max(period_s, found.least_s)), point

    def _busiest(self, here: Standing) -> list[int]:
        """Stages, the busiest first; before them those that need too much memory."""
        pipeline, cluster = here.found.pipeline, self.question.cluster
        over = {s for s, _ in here.found.over_limit(cluster)} if here.over else set[int]()
        busy = [busy_s(pipeline, s) for s in range(here.point.stages)]
        return sorted(range(here.point.stages), key=lambda s: (s not in over, -busy[s], s))

    def _border_moves(self, here: Standing) -> Iterator[Point]:
        """One border, from the busiest stages on."""
        seen = set[tuple[int, int]]()
        for s in self._busiest(here):
            for border, by in ((s, 1), (s + 1, -1), (s, -1), (s + 1, 1)):
                if 0 < border < here.point.stages and (border, by) not in seen:
                    seen.add((border, by))
                    for step in _STEPS:
                        yield from self._shifted(here.point, border, border, by * step)

    def _row_moves(self, here: Standing) -> Iterator[Point]:
        """Several borders in a row: stages between them keep the size that they have."""
        stages, busiest = here.point.stages, self._busiest(here)
        for a, b in combinations(range(1, stages), 2):
            if stages <= _FEW_STAGES or {a - 1, b} & set(busiest[:2]):
                for step in (-1, 1, -2, 2):
                    yield from self._shifted(here.point, a, b, step)

    def _limit_moves(self, here: Standing) -> Iterator[Point]:
        """One stage more or fewer in flight; before it there are no fewer, behind it no more."""
        point = here.point
        ranges = self._ranges(point.devices)
        for s, by in product(range(point.stages), (1, -1)):
            mine = point.limits[s] + by
            limits = tuple(
                max(limit, mine) if t < s else min(limit, mine) if t > s else mine
                for t, limit in enumerate(point.limits)
            )
            if all(a <= limit <= b for limit, (a, b) in zip(limits, ranges, strict=True)):
                yield replace(point, limits=limits)

    def _recompute_moves(self, here: Standing) -> Iterator[Point]:
        """Other layers that one stage computes again, or all."""
        point, ways = here.point, self.relaxation.recompute
        for way in ways if len(ways) > 1 else ():
            yield replace(point, again=(way,) * point.stages)
            for s in self._busiest(here):
                yield replace(point, again=(*point.again[:s], way, *point.again[s + 1 :]))

    def _replica_moves(self, here: Standing) -> Iterator[Point]:
        """More replicas for one stage, from another one or none; in the listed sequence."""
        point, devices = here.point, len(self.question.cluster.devices)
        counts = self.relaxation.replica_counts(point.micro_batches)
        if counts == [1] or numbered_devices(point.devices):
            return
        busiest = self._busiest(here)
        for gains, loses in product(busiest, [None, *reversed(busiest)]):
            each = [len(mine) for mine in point.devices]
            more = next((r for r in counts if r > each[gains]), None)
            if more is None or gains == loses:
                continue
            by, each[gains] = more - each[gains], more
            if loses is not None:
                each[loses] -= by
            if sum(each) <= devices and all(r in counts for r in each):
                yield replace(point, devices=_in_a_row(each, devices))

    def _device_moves(self, here: Standing) -> Iterator[Point]:
        """Two devices in each other's place, or one in the place of another that does nothing."""
        homes, kinds = self.search.device_kinds
        count = len(self.question.cluster.devices)
        for a, b in combinations(range(count if self._moves_devices else 0), 2):
            if (homes[a], kinds[a]) != (homes[b], kinds[b]):
                swap = {a: b, b: a}
                devices = tuple(tuple(swap.get(d, d) for d in mine) for mine in here.point.devices)
                yield replace(here.point, devices=devices)

    def _count_moves(self, here: Standing) -> Iterator[Point]:
        """The same cut with other micro-batches."""
        point = here.point
        counts = {b.micro_batches for b in self.search.branches if b.stages in (None, point.stages)}
        for n in sorted(counts, key=lambda n: abs(n - point.micro_batches)):
            yield replace(point, micro_batches=n)

    def _shifted(self, point: Point, first: int, last: int, by: int) -> Iterator[Point]:
        found = self.shifted(point, first, last, by)
        if found is not None:
            yield found

    def shifted(self, point: Point, first: int, last: int, by: int) -> Point | None:
        """Borders from `first` to `last` moved by so many groups of layers, the later ones if it is
        positive; None where a stage would have no layers left.

        Each takes the next layers in topological order of the stage that it moves into.
        """
        sets = list(point.downsets)
        order = range(last, first - 1, -1) if by > 0 else range(first, last + 1)
        for border in order:
            low, mine, high = sets[border - 1], sets[border], sets[border + 1]
            inside = high & ~mine if by > 0 else mine & ~low
            groups = sorted({self._group_of[layer] for layer in members(inside)})
            if len(groups) <= abs(by):
                return None
            for g in groups[:by] if by > 0 else groups[by:]:
                mine = mine | self._groups[g] if by > 0 else mine & ~self._groups[g]
            sets[border] = mine
        return replace(point, downsets=tuple(sets))

    # Starting anew -----------------------------------------------------------------------------

    def kicked(self, point: Point) -> Point:
        """The point with some borders elsewhere."""
        for _ in range(self._random.randint(1, _KICKED)):
            if point.stages < 2:
                break
            first = self._random.randrange(1, point.stages)
            last = self._random.randrange(first, point.stages)
            by = self._random.choice((-1, 1)) * self._random.choice(_STEPS)
            point = self.shifted(point, first, last, by) or point
        return point


def _alike(point: Point) -> Hashable:
    """Points with the same are simulated together."""
    return point.stages, point.micro_batches, point.limits


def _crowding(loads: Sequence[float], period_s: float) -> float:
    """How many devices and wires are busy for about all of the period."""
    return sum((each / period_s) ** _SHARP for each in loads) if period_s else 0.0


def _in_a_row(each: Sequence[int], devices: int) -> tuple[tuple[int, ...], ...]:
    """So many devices for each stage, the last ones of those listed."""
    at = [*accumulate(each, initial=devices - sum(each))]
    return tuple(tuple(range(a, b)) for a, b in pairwise(at))


def start_even(search: SearchState, local: LocalSearch) -> None:
    """First plans from even cuts, improved. Raises OutOfBudget when the budget is used up."""
    found = []
    for done, branch in enumerate(search.branches):
        search.say(f"{search.standing}; even cuts", done, len(search.branches))
        standing = local.start(branch)
        if standing is not None:
            found.append(standing)
    found.sort(key=lambda s: (s.over, s.period_s))
    for standing in found:
        best_s = search.period_s
        if not standing.over and standing.period_s > best_s * (1 + _SPREAD):
            continue
        local.descend(standing)


def improve(search: SearchState, local: LocalSearch, tries: int) -> None:
    """Improve the best plan; kick it and descend again, so often without gain.

    Raises OutOfBudget when the budget is used up.
    """
    if search.best is None:
        return
    here = local.look(local.point_of(search.best))
    if here is None:
        return
    here = local.descend(here)
    failed = 0
    while failed < tries and not here.over and here.period_s > search.bound_s * SAME:
        search.say(search.standing)
        begun = local.look(local.kicked(here.point))
        there = None if begun is None else local.descend(begun)
        if there is not None and there.better(here):
            failed = 0 if there.period_s * SAME < here.period_s else failed + 1
            here = there
        else:
            failed += 1
