"""The search for one system: first plans, bounds, cuts worth trying, and the proof that nothing is
better.

Plans are bounded, found and proven by critical cycles where these are known (`critical_cycles`).
First cuts are improved by local search (`local_search`). Where cycles aren't known, or leave a gap
and stages may have replicas or devices differ, a relaxed problem bounds every plan (`relaxed`). Its
optimum, and those of guesses at what is in flight, are cuts to try: each is evaluated by its real
schedule, under the in-flight limits that suit it. Then, from the lowest bound on, all cuts whose
relaxed load is below the best plan's period are tried in turn; when none is left the plan is proven
best. Else what effort is left goes into local search again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import sqrt

from ..partition.dp.identical_devices_by_target import IdenticalByTargets, targets_of
from ..partition.dp.kinds import MOST_DOWNSETS, MOST_STATES, Kinds, least_load_s
from ..partition.dp.lattice import lattice_of
from ..partition.dp.program import just_below
from ..partition.placings import Placings, load_of
from ..partition.problem import SAME, Answer, Cut, OutOfTime, StageProblem
from ..partition.solve import DpSource, StopRule
from .choices import Branch, Choice, InFlight, choice_of
from .critical_cycles import CycleSearch
from .first_plans import try_blocks
from .limits import try_choice, try_cut
from .local_search.improve import (
    LocalSearch,
    climb_on,
    climbing_effort,
    improve,
    improve_others,
    start,
)
from .placed_bounds import straight_along_path
from .relaxed.places import Assumptions, fixed_in_flight
from .state import CLOSE, OutOfBudget, SearchState, standing_of

_MOST_UNITS = 512
"""With more devices, guesses let stages take several at once."""

_BOUND_S = 3.0
"""For a bound then: what the dynamic program has excluded by that time."""

_MOST_KEPT = 2
"""Relaxed problems of large models that are kept with all their stages."""

_STEP = 1.01
"""Bounds of large models are raised until they are so close to what can't be excluded."""

_WIDE = 1.15
"""The first target of each branch is so much below the best period, and no later one further below
what can't be excluded: what is excluded at once is worth more than what may be with more targets,
and it takes less where it is further from what can be had."""

_RAISING_SHARE = 0.9
"""Of the time that first plans leave, for that."""

_ELSEWHERE = 0.125
"""Of the effort, for cuts of one branch tried in others."""

_STARTING_SHARE = 0.3
"""Of effort and time, for first plans, before there are bounds, and for improving the best plan
after that."""

_BOUNDING = 0.8
"""Of the time for bounds by critical cycles and plans of their cuts, for the bounds."""

_DESCENDED = 3
"""Of plans of the branches' best cuts by critical cycles, those that are improved at once."""

_MANY = 12
"""Devices: with more, or in any sequence, and replicas, bounds by critical cycles come after first
plans, as those of large models do: they take as long."""

_GUESSING = 0.3
"""Of the time that there is for bounds, and is left, for guesses at what is in flight: those of
many devices may take long."""

_CLOSE, _NEARLY, _FAR = 1.1, 0.5, 0.15
"""How far the best plan may be above the bound, for so much of what is left to be spent on a proof;
and what is spent where it is further."""

_PROVING = 2
"""Times the effort, for a proof in the end."""

_SHARP = 1.02
"""Where cycles leave a wider gap, and devices aren't alike, or stages may have replicas, other
bounds and guesses at what is in flight are worth their time."""

_FEW_TRIES, _TRIES = 6, 40
"""Times that a plan is improved from elsewhere without gain: before the proof, and after it."""


def run(search: SearchState) -> str | None:
    """Search until all is proven, or the budget is used up: says then what was."""
    source = search.source
    if isinstance(source, DpSource) and {branch.stages for branch in search.branches} == {1}:
        # One stage has all layers: there is nowhere to cut.
        problem = search.relaxation.problem(search.branches[0])
        search.source = DpSource(lattice_of(problem, (), complete=True))
    try:
        return _run(search)
    finally:
        search.source = source


def _run(search: SearchState) -> str | None:
    search.forget_bounds()
    budget, cycles, effort = search.budget, CycleSearch(search), search.budget.effort
    local = LocalSearch(search, moves_devices=search.any_sequence)
    try:
        _first_plans(search, local, cycles)
        if not any(search.promising()):
            return None
        cycles.suffice = all(map(cycles.proves, search.promising()))
        _bound_along_path(search, cycles)
        vague = search.period_s > search.bound_s * _SHARP
        alike = search.question.cluster.uniform and not search.relaxation.freedom.replicas
        if not cycles.suffice or (vague and not alike):
            _bound_by_kinds(search)
            with budget.part(_NEARLY):
                _bound_all(search)
                if not search.any_sequence:
                    with suppress(OutOfBudget), budget.time_part(_GUESSING):
                        _try_guesses(search)
        with suppress(OutOfBudget), budget.part(_STARTING_SHARE):
            improve(search, local, _FEW_TRIES)
        close = search.period_s <= search.bound_s * _CLOSE
        with budget.part(_NEARLY if close else _FAR):
            _prove_all(search, cycles)
    except OutOfBudget as why:
        stopped = str(why)
    else:
        # Of some cut too many limits may be left to try all.
        stopped = "effort"
    if search.bound_s * SAME >= search.period_s:
        return None
    tried_s = search.period_s
    try:
        with suppress(OutOfBudget), budget.part(_STARTING_SHARE):
            improve_others(search, local, _FEW_TRIES)
        with budget.time_part(_NEARLY):
            improve(search, local, _TRIES)
    except OutOfBudget as why:
        stopped = str(why)
    else:
        stopped = stopped if budget.is_late else "effort"
    try:
        with budget.on_top(climbing_effort(search, effort)):
            if search.period_s < min(tried_s, search.bound_s * _CLOSE):
                with suppress(OutOfBudget), budget.part(_STARTING_SHARE):
                    cycles.prove()
            climb_on(search, local, search.branches)
    except OutOfBudget as why:
        stopped = str(why)
    try:
        # Of small questions all that is left can be tried, however wide the gap is.
        with budget.on_top(_PROVING * effort):
            _prove_all(search, cycles)
    except OutOfBudget as why:
        stopped = str(why)
    return stopped if search.bound_s * SAME < search.period_s else None


def _first_plans(search: SearchState, local: LocalSearch, cycles: CycleSearch) -> None:
    """Plans, and bounds by critical cycles. Where these are of some of the plans alone, and others
    are asked for, too, they come later and on top: else those would get less than without that
    freedom."""
    covered, budget = any(map(cycles.covers, search.branches)), search.budget
    # Bounds of large models and of split backwards take long, and less where there is a plan.
    relaxation = search.relaxation
    many = len(search.question.cluster.devices) > _MANY or search.any_sequence
    many = many and relaxation.freedom.replicas
    first = covered and (search.large or many or relaxation.variant.split_backward)
    if first:
        _start(search, local)
    if covered:
        with suppress(OutOfBudget), budget.part(_NEARLY):
            _bound_by_cycles(search, local, cycles)
    # Bounds are still worth looking for where more of these plans would take too long.
    if search.best is None:
        with suppress(OutOfBudget):
            try_blocks(search)
    if any(search.promising()) and not first:
        _start(search, local)
    if not covered:
        with suppress(OutOfBudget), budget.part(_STARTING_SHARE, besides=True):
            _bound_by_cycles(search, local, cycles)


def _bound_by_cycles(search: SearchState, local: LocalSearch, cycles: CycleSearch) -> None:
    """Bounds by critical cycles, and those plans of the cuts that they are from improved that
    fit, with and without replicas; where none does, that one which lacks least."""
    with suppress(OutOfBudget), search.budget.time_part(_BOUNDING):
        cycles.guess()
        cycles.bound()
    found = [x for each in cycles.found if (x := local.look(local.near.point_of(each)))]
    found.sort(key=lambda s: (s.over, s.period_s))
    fitting = [s for s in found if not s.over]
    alone = [s for s in fitting if max(map(len, s.point.devices)) == 1]
    others = [s for s in fitting if s not in alone]
    for standing in [*others[:_DESCENDED], *alone[:_DESCENDED]] or found[:1]:
        local.descend(standing)


def _start(search: SearchState, local: LocalSearch) -> None:
    """First plans; where there is time for few, and none yet, more of it goes there."""
    for share in (_STARTING_SHARE, _NEARLY):
        try:
            with search.budget.part(share):
                start(search, local)
        except OutOfBudget as why:
            if search.best is not None or str(why) != "time limit":
                return
        else:
            return


# Bounds ------------------------------------------------------------------------------------------


def _bound_along_path(search: SearchState, cycles: CycleSearch) -> None:
    """Bounds of branches without replicas whose graph has too many downsets for critical cycles."""
    question, relaxation, cluster = search.question, search.relaxation, search.question.cluster
    alike = cluster.flat and cluster.uniform
    for branch in search.promising():
        every = branch.stages == len(cluster.devices) and not search.any_sequence
        alone = relaxation.replica_counts(branch.micro_batches) == [1]
        known = branch.pins or question.update_every > 1 or cycles.reaches(branch)
        if (every or alike) and alone and not known:
            bound_s = straight_along_path(search, branch)
            search.bounds[branch] = max(search.bounds[branch], bound_s)


def _bound_by_kinds(search: SearchState) -> None:
    """Bounds of branches on devices of several speeds that stages may have replicas on, by what
    these leave the busiest one to do at the least."""
    source, speeds = search.source, Counter(d.speed for d in search.question.cluster.devices)
    kinds = Kinds(tuple(speeds), tuple(speeds.values()))
    if not isinstance(source, DpSource) or len(speeds) == 1:
        return
    if kinds.states > MOST_STATES or source.lattice.size > MOST_DOWNSETS:
        return
    for branch, view in product(search.promising(), search.relaxation.views):
        if not search.budget.is_late:
            problem = search.relaxation.problem(branch, Assumptions(view=view, identical=True))
            low_s, high_s = search.bounds[branch], search.period_s
            search.bounds[branch] = least_load_s(problem, source.lattice, kinds, low_s, high_s)


def _bound_all(search: SearchState) -> None:
    """Bound every branch, in each view, and try the cuts that the bounds are from."""
    if search.identical and search.best is not None and isinstance(search.source, DpSource):
        _raise_lowest(search, search.source)
        return
    found: dict[Branch, list[tuple[float, StageProblem, Cut]]] = {}
    # The bound of the branch that the best plan is from counts most: it gets the time that the
    # others leave.
    branches = sorted(search.branches, key=lambda branch: _has_best(search, branch))
    end, views, sharper = _bounds_end(search), _views(search), search.sharper_views
    for done, branch in enumerate(branches):
        what = f"{search.standing}; bound for {branch.micro_batches} micro-batches"
        search.say(what, done, len(branches))
        found[branch] = []
        for number, assumed in enumerate(views):
            solves = len(views) * (len(branches) - done) - number
            if search.large:
                # Most branches are soon seen to hold nothing better than the best plan; what
                # time they leave is for those that may.
                solves = min(solves, 2)
            seconds = None if end is None else max(end - time.monotonic(), 0.0) / solves
            if _grain(search) > 1 and not assumed.identical:
                seconds = _BOUND_S if seconds is None else min(seconds, _BOUND_S)
            problem = search.relaxation.problem(branch, assumed)
            until = None if seconds is None else time.monotonic() + seconds
            answer = _solve(search, problem, seconds)
            search.budget.noted(until)
            if answer.bound_s >= search.bounds[branch]:
                search.bounds[branch], sharper[branch] = answer.bound_s, assumed.view
            if answer.cut is not None:
                found[branch].append((answer.bound_s, problem, answer.cut))
            search.budget.check()
            if search.hopeless(branch):
                break
    for branch in search.promising():
        for _, problem, cut in sorted(found[branch], key=lambda item: -item[0]):
            try_cut(search, problem, cut, branch.micro_batches)
    if not search.large:
        _try_elsewhere(
            search,
            [(choice_of(problem, cut), cut) for cuts in found.values() for _, problem, cut in cuts],
        )


def _raise_lowest(search: SearchState, source: DpSource) -> None:
    """Raise the lowest bound of all branches, one target at a time.

    One target takes a second where there are thousands of devices. What is proven is the lowest of
    all bounds; so that is where to go on, whichever branch it is of.
    """
    left, views = search.budget.seconds_left, _views(search)
    end = None if left is None else time.monotonic() + left * _RAISING_SHARE
    if fixed_in_flight(search.relaxation.variant):
        # What stages wait for is more than what other views of them count, as good as always.
        views = [replace(views[-1], waits=True)]
    kept: dict[tuple[Branch, int], IdenticalByTargets | None] = {}
    # Per view of a branch, loads that some cut keeps to: no bound from there is above them.
    reached: dict[tuple[Branch, int], float] = {}

    def program(branch: Branch, view: int) -> IdenticalByTargets | None:
        key = branch, view
        if key not in kept:
            problem = search.relaxation.problem(branch, views[view])
            while len(kept) >= _MOST_KEPT:
                del kept[next(iter(kept))]
            found = kept[key] = targets_of(problem, source.lattice)
            if found is not None:
                search.bounds[branch] = max(search.bounds[branch], found.least_s)
        return kept[key]

    begun, done = set[Branch](), set[Branch]()
    while not search.budget.noted(end):
        search.budget.check()
        search.say(search.standing)
        lowest = next((b for b in search.promising() if b not in done), None)
        # No bound is worth more than the lowest that can't be raised.
        if lowest is None or any(search.bounds[b] <= search.bounds[lowest] for b in done):
            return
        highs = [reached.get((lowest, view), search.period_s) for view in range(len(views))]
        low, high = search.bounds[lowest], min(search.period_s, max(highs))
        close, target = high <= low * _STEP, high / _WIDE
        if close:
            target = just_below(high)
        elif lowest in begun or target <= low:
            target = max(target, sqrt(low * high))
        begun.add(lowest)
        if (close and high < search.period_s) or target <= low:
            done.add(lowest)
            continue
        looked = False
        for view, within in enumerate(highs):
            solver = program(lowest, view) if within > target else None
            if solver is None:
                continue
            looked = True
            if search.bounds[lowest] >= target:
                break
            try:
                cut = solver.under(target, end)
            except OutOfTime:
                break
            if cut is None:
                search.bounds[lowest] = target
                break
            # Loads leave out what stages wait for.
            reached[lowest, view] = target if views[view].waits else cut.objective_s
        if not looked:
            done.add(lowest)


def _views(search: SearchState) -> list[Assumptions]:
    """Of the relaxed problem, those that make the bound. Where devices are taken as identical,
    what is in flight is known better."""
    relaxation, cluster = search.relaxation, search.question.cluster
    if search.any_sequence:
        best = cluster.best_device
        return [Assumptions(view=v, identical=True, device=best) for v in relaxation.views]
    listed = [Assumptions(view=view) for view in relaxation.views]
    identical = [Assumptions(view=view, identical=True) for view in relaxation.views]
    if search.identical:
        return [replace(assumed, alike=True) for assumed in identical[:2]]
    fixed = relaxation.limited and fixed_in_flight(relaxation.variant)
    if fixed and search.question.cluster.uniform and isinstance(search.source, DpSource):
        return listed + identical
    return listed


def _has_best(search: SearchState, branch: Branch) -> bool:
    return search.best is not None and search.best.micro_batches == branch.micro_batches


def _bounds_end(search: SearchState) -> float | None:
    """When bounds must be done: half of the time is for them, the rest for plans; more where
    there are plans already."""
    left = search.budget.seconds_left
    share = 0.5 if search.best is None else 0.7
    return None if left is None else time.monotonic() + left * share


def _try_elsewhere(search: SearchState, found: Sequence[tuple[Choice, Cut]]) -> None:
    """Try cuts with the micro-batches of the other branches too.

    Of many cuts with the same bound one branch may have found another one, which doesn't fit.
    That takes little beside looking for more of them.
    """
    least = search.budget.effort * (1 - _ELSEWHERE)
    cuts = dict(found)
    for branch in search.promising():
        for choice, cut in cuts.items():
            if search.hopeless(branch) or search.budget.effort < least:
                break
            if _suits(search, choice, branch):
                try_choice(search, choice, branch.micro_batches, cut.objective_s)


def _suits(search: SearchState, choice: Choice, branch: Branch) -> bool:
    """Whether a choice for other micro-batches is one for this branch."""
    relaxation, n = search.relaxation, branch.micro_batches
    counts = relaxation.replica_counts(n)
    return relaxation.allows(choice.stages, n) and all(
        len(mine) in counts for mine in choice.devices
    )


# Guesses -----------------------------------------------------------------------------------------


def _try_guesses(search: SearchState) -> None:
    """Try the best cuts of guesses at what is in flight, with and without replicas."""
    unreplicated = (False, True) if search.relaxation.freedom.replicas else (False,)
    guessed = set[Hashable]()
    for done, branch in enumerate(search.promising()):
        what = f"{search.standing}; plans of {branch.micro_batches} micro-batches"
        search.say(what, done, len(search.branches))
        for stages in _stage_counts(search, branch):
            for in_flight, alone in product(search.in_flight_guesses(stages), unreplicated):
                if search.hopeless(branch):
                    break
                if search.roomy and (branch, stages, alone) in guessed:
                    continue
                guessed.add((branch, stages, alone))
                counted = branch if stages is None else replace(branch, stages=stages)
                _guess(search, counted, in_flight, unreplicated=alone)
                search.budget.check()


def _guess(
    search: SearchState, branch: Branch, in_flight: InFlight | None, *, unreplicated: bool
) -> None:
    grain = 1 if unreplicated else _grain(search)
    assumed = Assumptions(
        in_flight,
        guess=True,
        unreplicated=unreplicated,
        grain=grain,
        identical=search.identical,
    )
    problem = search.relaxation.problem(branch, assumed)
    if not problem.options:
        return
    left = search.budget.seconds_left
    answer = _solve(search, problem, None if left is None else left / 4)
    if answer.cut is not None:
        try_cut(search, problem, answer.cut, branch.micro_batches, grain=grain)


def _grain(search: SearchState) -> int:
    """Devices that guesses count as one."""
    if not search.relaxation.freedom.replicas or search.identical:
        return 1
    return -(-len(search.question.cluster.devices) // _MOST_UNITS)


def _stage_counts(search: SearchState, branch: Branch) -> list[int | None]:
    """Stage counts to guess with besides the branch's own: all where they are few, else by
    doubling."""
    most = search.most_stages
    if branch.stages is not None or search.large:
        return [None]
    if most <= 8:
        return [None, *range(most, 0, -1)]
    doubled = {1 << k for k in range(most.bit_length())} | {most}
    return [None, *sorted(doubled, reverse=True)]


# The proof ---------------------------------------------------------------------------------------


def _prove_all(search: SearchState, cycles: CycleSearch) -> None:
    """Try all cuts that the bounds leave. Raises OutOfBudget when the budget is used up."""
    cycles.prove()
    if not (cycles.suffice or search.any_sequence):
        _prove(search, cycles)


def _prove(search: SearchState, cycles: CycleSearch) -> None:
    """Try all cuts that the bounds leave, branch by branch."""
    for branch in search.promising():
        if search.hopeless(branch):
            continue
        assumed = Assumptions(view=search.sharper_views.get(branch, ""))
        problem = search.relaxation.problem(branch, assumed)
        unresolved = float("inf")
        cuts = search.source.each_below(
            problem, lambda: search.period_s, deadline=search.budget.deadline
        )
        try:
            for cut in _placed(search, problem, cuts):
                search.say(search.standing)
                alone = all(problem.options[x.option].replicas == 1 for x in cut.stages)
                if alone and cycles.alone_s.get(branch, 0.0) * SAME >= search.period_s:
                    continue
                if not try_cut(search, problem, cut, branch.micro_batches, every_limit=True):
                    unresolved = min(unresolved, cut.objective_s)
        except OutOfTime:
            raise search.budget.over() from None
        search.bounds[branch] = max(search.bounds[branch], min(unresolved, search.period_s))


def _placed(search: SearchState, problem: StageProblem, cuts: Iterable[Cut]) -> Iterator[Cut]:
    """Each cut once, in every placement below the best period that differs in kinds of devices, or
    in which of them share a machine: loads needn't tell those apart."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    load = load_of(problem)
    for cut in cuts:
        stages = tuple((stage.layers, stage.option) for stage in cut.stages)
        if stages not in seen:
            seen.add(stages)
            every = Placings(problem, cut, load).below(
                lambda: search.period_s, *search.device_kinds
            )
            for placed in every:
                yield placed
                search.budget.check()


def _solve(search: SearchState, problem: StageProblem, seconds: float | None) -> Answer:
    def report(bound_s: float, best_s: float) -> None:
        search.say(standing_of(bound_s, min(best_s, search.period_s)))

    # Cuts that can't beat the best plan are of no use.
    stop = StopRule(seconds, search.period_s, CLOSE) if search.large else StopRule(seconds)
    answer = search.source.best(problem, stop, report)
    if answer.interrupted:
        raise KeyboardInterrupt
    return answer
