"""Which plan is signed: of those about as fast as the fastest, the one that an expert would take.

The search minimises the period; bounds and proofs are of that alone. What else there is to mind is
asked at its end, of plans that it met and of their neighbours. (While it searches it couldn't be
asked: "within 1 % of it" is no order, for of three plans each may be within 1 % of the next, and
not the first of the last.)

Of all plans whose period is within the tolerance of the fastest one's, or of what loading a
mini-batch takes, those are kept that take no more devices, and of these in this sequence

1. the smallest version difference, the largest of the stages';
2. the lowest share of memory on the fullest device, in tenths; one that is half full has room;
3. the most even loads: the standard deviation of devices' seconds from their mean, in whole per
   cent of that; the busiest one left out, for often a single layer is what keeps it busy;
4. fewer stages, the shorter period, what is more even or less full by less than that, and fewer
   mini-batches in flight.

In such steps, so that nothing is given away for what nobody would see: no stage gets a single
layer, so that a device is full to 6 % instead of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import ceil
from statistics import fmean, pstdev

import msgspec

from ...cluster.cluster import Cluster
from ...evaluate import Evaluation, evaluate
from ...partition.problem import SAME, members
from ...plan import FastestPlan
from ...question import Question
from ...simulator.pipeline import Pipeline
from ...simulator.timeline import busy_s
from ..choices import Branch, Choice
from ..device_sequences import follows_list, on_first_devices
from ..keep_more import keep_more
from ..local_search.improve import LocalSearch, start
from ..local_search.neighbours import Point
from ..relaxed.relaxation import Relaxation
from ..state import EFFORT, SOON_S, OutOfBudget, SearchState

_EFFORT = EFFORT // 10
"""Simulated operations for looking around at the end."""


_PER_MOVE = 20
"""The same of finding out how even a neighbour's loads are, about."""

_MOST_STAGES = 64
"""With more, neighbours are too many to look at."""

_FRESHER_SHARE = 0.6
"""Of these, for smaller version differences."""

_VISIBLE = 0.005
"""What loads have to be more even by for borders to be tried."""

_HALF_FULL = 5
"""Tenths of a device's memory that are no reason to prefer another plan."""

Regard = tuple[int, int, int, int, float, float, float, int]
"""What is minded, the first things first."""


def regard(found: Evaluation, cluster: Cluster) -> Regard:
    """What is minded of a plan that fits a cluster."""
    share = max(found.memory_shares(cluster), default=0.0)
    uneven = _unevenness(found.pipeline)
    return (
        found.difference,
        max(ceil(share * 10), _HALF_FULL),
        round(uneven * 100),
        len(found.stages),
        _rounded(found.prediction.period_s),
        _rounded(uneven),
        share,
        sum(found.limits),
    )


def _unevenness(pipeline: Pipeline) -> float:
    busy = busy_s(pipeline)
    return _unevenness_of([busy[stages[0]] for stages in pipeline.stages_of])


def _unevenness_of(loads: Sequence[float]) -> float:
    """The standard deviation of devices' loads as a share of their mean, but for the busiest."""
    loads = sorted(loads)[:-1] if len(loads) > 2 else loads
    return pstdev(loads) / mean if (mean := fmean(loads)) else 0.0


def _rounded(value: float) -> float:
    """Without what the sequence of additions alone makes."""
    return float(f"{value:.7g}")


class Candidates:
    """Of the plans met so far, those that may be signed in the end.

    Args:
        tolerance: share of the period that may be given away.
        least_s: no period is shorter, whatever the plan.
    """

    def __init__(self, cluster: Cluster, tolerance: float, least_s: float = 0.0) -> None:
        self.cluster = cluster
        self._within, self._least_s = max(1 + tolerance, SAME), least_s
        self._kept: dict[tuple[bool, bool], list[tuple[Evaluation, Regard]]] = {}

    def limit_s(self, shortest_s: float) -> float:
        """The longest period that may be signed where that is the shortest."""
        return max(shortest_s, self._least_s) * self._within

    def add(self, found: Evaluation) -> None:
        """Keep a plan that fits, unless one that is kept is as good in everything."""
        kept = self._kept.setdefault(_kind(found), [])
        shortest_s = min((other.prediction.period_s for other, _ in kept), default=float("inf"))
        if found.prediction.period_s > self.limit_s(shortest_s):
            return
        mine = regard(found, self.cluster)
        if any(_as_good(other, its, found, mine) for other, its in kept):
            return
        limit_s = self.limit_s(min(shortest_s, found.prediction.period_s))
        kept[:] = [
            (other, its)
            for other, its in kept
            if other.prediction.period_s <= limit_s and not _as_good(found, mine, other, its)
        ]
        kept.append((found, mine))

    def preferred(self, fastest: Evaluation) -> Evaluation:
        """The plan to sign.

        Where the fastest one has a device for each stage, so has this; and where it takes them as
        they are listed, so does this.
        """
        several, listed = _kind(fastest)
        kinds = [(several, True)] if listed else [(several, True), (several, False)]
        met = [found for kind in kinds for found, _ in self._kept.get(kind, [])]
        return prefer(met, fastest, self.limit_s(fastest.prediction.period_s), self.cluster)

    def allows(self, plan: Evaluation, fastest: Evaluation) -> bool:
        """Whether it is within the tolerance, and takes no more devices."""
        return _allows(plan, fastest, self.limit_s(fastest.prediction.period_s))


def prefer(
    plans: Sequence[Evaluation], fastest: Evaluation, limit_s: float, cluster: Cluster
) -> Evaluation:
    """Of plans whose period is no longer than this, and that take no more devices than the fastest
    one, the one that is preferred; the fastest may be the only one."""
    fair = [plan for plan in plans if _allows(plan, fastest, limit_s)]
    return min([fastest, *fair], key=lambda plan: regard(plan, cluster))


def _allows(plan: Evaluation, fastest: Evaluation, limit_s: float) -> bool:
    return plan.prediction.period_s <= limit_s and _devices(plan) <= _devices(fastest)


def fastest_of(
    found: Evaluation, chosen: Evaluation, cluster: Cluster, least_s: float = 0.0
) -> FastestPlan | msgspec.UnsetType:
    """What the fastest plan has, for the chosen one's file; unset where that is as fast, as no
    period is shorter than `least_s`."""
    if chosen.prediction.period_s <= max(found.prediction.period_s, least_s) * SAME:
        return msgspec.UNSET
    pairs = zip(regard(found, cluster), regard(chosen, cluster), strict=True)
    first = next(k for k, (its, mine) in enumerate(pairs) if its != mine)
    return FastestPlan(
        version_difference=found.difference,
        memory_bytes=found.prediction.most_bytes,
        given_for=("staleness", "memory", "evenness", "stages")[first],
    )


def _kind(found: Evaluation) -> tuple[bool, bool]:
    """Whether devices have several stages, and whether they are taken as they are listed."""
    several = bool(found.pipeline.placement)
    return several, several or follows_list([stage.devices for stage in found.stages])


def _devices(found: Evaluation) -> int:
    return len({d for stage in found.stages for d in stage.devices})


def _as_good(one: Evaluation, its: Regard, other: Evaluation, others: Regard) -> bool:
    """Whether nothing is gained by keeping the other one, too."""
    shorter = one.prediction.period_s <= other.prediction.period_s
    return shorter and _devices(one) <= _devices(other) and its <= others


# Looking around ----------------------------------------------------------------------------------


Moves = Callable[[SearchState], LocalSearch]
"""The moves that there are among a search's plans."""


def signed_plan(search: SearchState, met: Candidates, moves: Moves | None) -> Evaluation:
    """The plan to sign: the preferred one, after looking around it. The search's best plan, the
    fastest, may get better by that.

    Args:
        met: plans that the search met; it goes on telling it (`SearchState.seen`).
        moves: makes the local search of plans; None: with a stage for each device.
    """
    keep_more(search)
    moves = moves or LocalSearch
    assert search.best is not None
    met.add(search.best)
    budget = search.budget
    deadline = None if budget.deadline is None else budget.deadline + SOON_S
    # Looking around takes no longer than it is worth, however long simulations are.
    search.budget = replace(budget, effort=_EFFORT, deadline=deadline, by_length=True)
    try:
        _lowest_caps(search, met)
        if len(search.best.stages) <= _MOST_STAGES:
            with suppress(OutOfBudget), search.budget.part(_FRESHER_SHARE):
                _fresher(search, met, moves)
            _descend(search, met, moves(search))
    except (OutOfBudget, KeyboardInterrupt):
        pass
    budget.tried, budget.hurried = search.budget.tried, search.budget.hurried
    search.budget = budget
    return met.preferred(search.best)


def _lowest_caps(search: SearchState, met: Candidates) -> None:
    """Look for the lowest limit that all stages of the fastest plan's cut may have within the
    tolerance, with any number of micro-batches, supposing that with fewer in flight it is no
    faster."""
    best = search.best
    assert best is not None
    choice = Choice.of(best.stages)
    ranges = search.ranges(choice)

    def fast_enough(n: int, cap: int) -> bool:
        pairs = zip(best.limits, ranges, strict=True)
        limits = tuple(max(least, min(limit, cap)) for limit, (least, _) in pairs)
        found = search.look(choice, n, limits)
        return found is not None and search.counts(found) and met.allows(found, best)

    others = sorted({b.micro_batches for b in search.branches} - {best.micro_batches})
    for n in [best.micro_batches, *others]:
        low, high = min(least for least, _ in ranges), max(best.limits)
        counts = search.relaxation.replica_counts(n)
        can_be = all(len(mine) in counts for mine in choice.devices)
        can_be = can_be and search.relaxation.allows(choice.stages, n)
        if not can_be or not fast_enough(n, high):
            continue
        while low < high:
            middle = (low + high) // 2
            if fast_enough(n, middle):
                high = middle
            else:
                low = middle + 1


def _fresher(search: SearchState, met: Candidates, moves: Moves) -> None:
    """Look for plans with ever smaller version differences within the tolerance, from the preferred
    plan and from even cuts, by the local search that looks for the shortest period."""
    while True:
        fastest = search.best
        assert fastest is not None
        chosen = met.preferred(fastest)
        ranges = search.relaxation.limit_ranges(len(chosen.stages), several=_kind(chosen)[0])
        if not chosen.difference or all(least == most for least, most in ranges):
            return
        limit_s = met.limit_s(fastest.prediction.period_s)
        there = _with_difference(search, chosen.difference - 1, met, limit_s)
        if search.branches and not there.branches:
            return
        # What is within the tolerance is fast enough.
        there.bounds = dict.fromkeys(there.branches or [Branch(chosen.micro_batches)], limit_s)
        local = moves(there)
        start(there, local)
        begun = local.look(local.near.point_of(chosen))
        if begun is not None:
            local.descend(begun)
        if there.period_s > limit_s:
            return


def _with_difference(
    search: SearchState, most: int, met: Candidates, limit_s: float
) -> SearchState:
    """A search on the same budget for plans with no larger version difference, in branches whose
    periods may be so short."""
    relaxation = search.relaxation
    staleness = replace(relaxation.freedom.staleness, max_difference=most)
    freedom = replace(relaxation.freedom, staleness=staleness)
    fresher = Relaxation(search.question, freedom, relaxation.graph)
    trip_s = fresher.seconds.round_trip_s
    return SearchState(
        relaxation=fresher,
        source=search.source,
        branches=[branch for branch in search.branches if trip_s(branch.micro_batches) <= limit_s],
        most_stages=search.most_stages,
        budget=search.budget,
        seen=met.add,
    )


def _descend(search: SearchState, met: Candidates, local: LocalSearch) -> None:
    """Go from the preferred plan to neighbours that are preferred to it: first those with other
    borders, until there is none, then those with fewer in flight, from the last stage on."""
    assert search.best is not None
    here, there = met.preferred(search.best), None
    while there is not here:
        there = here
        point = _point(local, here)
        if point is None:
            return
        for move in _other_borders(local, point, here, met):
            if (found := _preferred_to(here, move, search, met, local)) is not None:
                here = found
                break
    for s in reversed(range(len(here.stages))):
        while (point := _point(local, here)) is not None:
            limits = (*point.limits[:s], point.limits[s] - 1, *point.limits[s + 1 :])
            least, _ = local.relaxation.limit_ranges(point.stages, several=_kind(here)[0])[s]
            if limits[s] < max([least, *limits[s + 1 : s + 2]]):
                break
            found = _preferred_to(here, replace(point, limits=limits), search, met, local)
            if found is None:
                break
            here = found


def _point(local: LocalSearch, found: Evaluation) -> Point | None:
    """None where its stages compute other layers again than the search has sets of."""
    point = local.near.point_of(found)
    same = local.near.choice(point).with_limits(point.limits) == found.stages
    return point if same else None


def _preferred_to(
    here: Evaluation, move: Point, search: SearchState, met: Candidates, local: LocalSearch
) -> Evaluation | None:
    """The plan of a move, if it is preferred to another one."""
    fastest, seen = search.best, local.foreseen(move)
    assert fastest is not None
    if seen is None or seen.least_s > met.limit_s(fastest.prediction.period_s):
        return None
    standing = local.look(move)
    if standing is None or standing.over or not met.allows(standing.found, fastest):
        return None
    preferred = regard(standing.found, met.cluster) < regard(here, met.cluster)
    return standing.found if preferred else None


def _other_borders(
    local: LocalSearch, point: Point, here: Evaluation, met: Candidates
) -> Iterator[Point]:
    """Those that leave loads most even come first, by what layers take."""
    shares = here.memory_shares(met.cluster)
    # Stages without limits of memory have no shares.
    full = max(range(len(shares)), key=shares.__getitem__) if len(shares) == point.stages else None
    sequence = sorted(range(point.stages), key=lambda s: s != full)
    even, found = _unevenness_of(_work(local, point)), dict[Point, float]()
    for kind in (local.near.border_moves, local.near.row_moves):
        for move in kind(point, sequence):
            found[move] = _unevenness_of(_work(local, move))
    local.search.budget.take(_PER_MOVE * len(found))
    for move in sorted(found, key=found.__getitem__):
        relieves = full is not None and _layers(move, full) < _layers(point, full)
        if found[move] < even - _VISIBLE or relieves:
            yield move


def _work(local: LocalSearch, point: Point) -> list[float]:
    """Per device, the seconds of its layers."""
    seconds = local.near.layers.seconds(point.micro_batches)
    devices = local.question.cluster.devices
    found = dict.fromkeys(point.devices, 0.0)
    for (a, b), mine in zip(pairwise(point.downsets), point.devices, strict=True):
        speed = len(mine) * min(devices[d].speed for d in mine)
        found[mine] += sum(seconds[j] for j in members(b & ~a)) / speed
    return list(found.values())


def _layers(point: Point, stage: int) -> int:
    return (point.downsets[stage + 1] & ~point.downsets[stage]).bit_count()


def placed_first(question: Question, found: Evaluation) -> Evaluation:
    """The same plan on the first of devices that are alike, where it is as fast there: replicas
    change places, and which of them exchange messages with which."""
    lying = tuple(stage.devices for stage in found.stages)
    first = lying if question.order else on_first_devices(question.cluster, lying)
    if first == lying:
        return found
    stages = [
        msgspec.structs.replace(x, devices=mine)
        for x, mine in zip(found.stages, first, strict=True)
    ]
    there = evaluate(question, stages, found.micro_batches)
    longest_s = found.prediction.period_s * SAME
    return there if there.prediction.period_s <= longest_s else found
