"""Bounds, first plans and proofs by the critical cycles of plans.

What a plan waits for is known from its cut (`partition.dp.critical_cycles`), where stages have a
device each, and where some have replicas on up to 16 equal devices: the least period that any cut
keeps to bounds all plans, and that cut, with what the period has in flight, is a plan to begin
with. Where bounds and the best plan are close, all cuts between them are tried.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, product
from typing import NamedTuple

from ...profiles.errors import PlanError, ScheduleError
from ..costs.recomputation import of_stage
from ..evaluate import Evaluation, lay_out
from ..partition.dp.critical_cycles import (
    CriticalCycles,
    CycleAnswer,
    CycleCut,
    CycleStep,
    quick,
    thinned,
)
from ..partition.dp.cycle_stages import CycleProblem, StageTable
from ..partition.dp.turns import Turn, least_turning, turnings
from ..partition.problem import SAME, OutOfTime, members
from ..partition.solve import DpSource
from ..simulator.timeline import filled_and_drained_s, least_period_s, round_trip_s
from .choices import MOST_VECTORS, Branch, Choice, caps
from .limits import try_some
from .relaxed.cycles import (
    cycle_problem,
    filled_up,
    has_cycles,
    has_replicated_cycles,
    kinds_of,
    same_anywhere,
)
from .relaxed.turns import turns_of
from .state import OutOfBudget, SearchState

_MOST_COUNTS = 16
"""Where any number of stages was asked for, all are looked at up to so many; with more some."""

_MOST_WITH_REPLICAS = 16
"""Devices that plans with replicas are looked at for: of more, tables take too long."""

_PER_OPERATION = 200
"""Entries of tables that take as long as a simulated operation, about."""

_ROOMIER = (1.0, 0.93)
"""Of the memory, what guesses may use by what is known of them: less, where they need more."""

_REPAIRS = 3
"""Times that a cut is looked for anew with less memory where its plan needs more than was known."""

_PER_CUT = 200
"""Simulated operations that take as long as laying a cut out, about."""

_PACES = (1.0, 1.03, 1.1)
"""What stages but the last may take longer, where a list schedule makes what they run."""

_GUESSED_SHARE = 0.2
"""Of the budget, for them."""

_COARSE, _COARSER, _WORTH_IT = 2e-3, 5, 1.01
"""Bounds are first found so closely, guesses so many times less, and bounds to the end where the
best plan is that near."""

_LARGE = 4_000_000
"""Of S stages and D downsets, S D²: with more, bounds are first found as closely as guesses, and
from all places to cut at once."""

_TABLES_SHARE = 0.7
"""Of the time that there is, for a cut; the rest is for its plan."""

_THINNED_SHARE = 0.4
"""Of the budget, for first plans with fewer places to cut, before there are bounds."""


class _Way(NamedTuple):
    """A branch, and what its dynamic program assumes of plans; key of `CycleSearch`'s caches.

    Attributes:
        every_mode, share: as of `cycle_problem`.
        thinned: with fewer places to cut.
        filled: what is in flight at the most, and the pace, as of `filled_up`; None: what cycles
            leave.
        lacks: per stage, bytes that it needs besides what is known of it; empty: none.
        replicated: plans where some stages have replicas, instead of those where none has.
    """

    branch: Branch
    every_mode: bool = False
    share: float = 1.0
    thinned: bool = False
    filled: tuple[int, float] | None = None
    lacks: tuple[float, ...] = ()
    replicated: bool = False


class CycleSearch:
    """The cycles of one search's branches.

    Attributes:
        tables: of stages, by how they are looked at, the largest numbers of stages alone.
        alone_s: per branch, what none of its plans without replicas is below.
        found: plans of the cuts that bounds and guesses are from.
        suffice: all that may be better than the best plan is bounded by cycles, and can be tried.
    """

    def __init__(self, search: SearchState) -> None:
        self.search, self.suffice = search, False
        self._programs: dict[_Way, CriticalCycles] = {}
        self.tables: dict[_Way, StageTable] = {}
        self.alone_s: dict[Branch, float] = {}
        self.found = list[Evaluation]()

    def reaches(self, branch: Branch) -> bool:
        """Whether some plans of a branch are looked at."""
        source, relaxation = self.search.source, self.search.relaxation
        if not isinstance(source, DpSource) or not quick(source.lattice, len(relaxation.recompute)):
            return False
        parts = list(self._parts(branch))
        return bool(parts) and all(has_cycles(relaxation, part) for part in parts)

    def covers(self, branch: Branch) -> bool:
        """Whether all plans of a branch are bounded."""
        search, relaxation = self.search, self.search.relaxation
        alone = relaxation.replica_counts(branch.micro_batches) == [1]
        alone |= (branch.stages or 0) >= len(search.question.cluster.devices)
        known = alone or _replicated(search, branch)
        return known and self.reaches(branch) and _all_alone(search, branch)

    def proves(self, branch: Branch) -> bool:
        """Whether all plans of a branch can be tried."""
        cluster, any_sequence = self.search.question.cluster, self.search.any_sequence
        return self.covers(branch) and all(
            same_anywhere(cluster, part.stages or 0, any_sequence=any_sequence)
            for part in self._parts(branch)
        )

    def _parts(self, branch: Branch) -> Iterator[Branch]:
        """The branch by numbers of stages that the system runs; where they are many, by some."""
        n, most = branch.micro_batches, self.search.most_stages
        counts: Iterable[int] = range(1, most + 1)
        if branch.stages is not None:
            counts = (branch.stages,)
        elif most > _MOST_COUNTS:
            counts = sorted({most >> k for k in range(most.bit_length())})
        allows = self.search.relaxation.allows
        yield from (replace(branch, stages=stages) for stages in counts if allows(stages, n))

    def _ways(self, way: _Way) -> Iterator[_Way]:
        """All those of a branch: without replicas by numbers of stages, and with them."""
        yield from (way._replace(branch=part) for part in self._parts(way.branch))
        if _replicated(self.search, way.branch):
            yield way._replace(replicated=True)

    def _program(self, way: _Way) -> CriticalCycles:
        """The dynamic program of `way`, cached. Raises OutOfBudget when the time is over."""
        if way not in self._programs:
            problem = _problem(self.search, way)
            assert problem is not None
            self._programs[way] = CriticalCycles(problem, self._table(way))
        return self._programs[way]

    def _table(self, way: _Way) -> StageTable:
        """Cached stages with costs, one table for all stage counts; another one with replicas."""
        search, n = self.search, way.branch.micro_batches
        alike = (part for b in search.branches if b.micro_batches == n for part in self._parts(b))
        largest = max(alike, key=lambda part: part.stages or 0)
        branch = way.branch if way.replicated else largest
        way = way._replace(branch=branch, filled=None, lacks=())
        if way not in self.tables:
            problem, source = _problem(search, way), search.source
            assert problem is not None
            assert isinstance(source, DpSource)
            lattice = thinned(problem, source.lattice) if way.thinned else source.lattice
            try:
                self.tables[way] = StageTable(problem, lattice, search.budget.deadline)
            except OutOfTime:
                raise search.budget.over() from None
        return self.tables[way]

    # Bounds and first plans --------------------------------------------------------------------

    def bound(self) -> None:
        """Bound all branches that this can be done for; plans from their best cuts.

        Raises OutOfBudget when the budget is used up.
        """
        search = self.search
        branches = [branch for branch in search.branches if self.reaches(branch)]
        branches.sort(key=partial(_hoped_s, search))
        for branch in filter(self.covers, branches):
            trip_s = search.relaxation.seconds.way_and_back_s(branch.micro_batches)
            search.bounds[branch] = max(search.bounds[branch], trip_s)
        if search.any_sequence and search.anywhere:
            # There are plans, and bounds, from devices as listed: the lowest one is raised first.
            branches.sort(key=lambda branch: search.bounds[branch])
        else:
            with suppress(OutOfBudget), search.budget.part(_THINNED_SHARE):
                self._bound_each(branches, thinned=True)
        self._bound_each(branches, thinned=False)

    def _bound_each(self, branches: Iterable[Branch], *, thinned: bool) -> None:
        search, todo = self.search, list(branches)
        for done, branch in enumerate(todo):
            search.say(f"{search.standing}; critical cycles", done, len(todo))
            bounds_s = dict[_Way, float]()
            for way in self._ways(_Way(branch, thinned=thinned)):
                # Of replicas tables take so long that none is for what is known not to be.
                low_s = search.bounds[branch] if way.replicated else 0.0
                bounds_s[way] = self._bounded(way, low_s)
            if not thinned and _all_alone(search, branch):
                alone_s = min(bound_s for way, bound_s in bounds_s.items() if not way.replicated)
                self.alone_s[branch] = max(self.alone_s.get(branch, 0.0), alone_s)
                if self.covers(branch):
                    _raise(search, branch, min(bounds_s.values()))

    def guess(self) -> None:
        """Where a list schedule makes what stages run: plans of the cuts that guesses at it like
        best, as many as there is effort for."""
        search = self.search
        branches = [branch for branch in search.branches if self.reaches(branch)]
        if search.relaxation.list_scheduled:
            with suppress(OutOfBudget), search.budget.part(_GUESSED_SHARE):
                for branch in sorted(branches, key=partial(_hoped_s, search)):
                    search.say(f"{search.standing}; guesses")
                    for part in reversed([*self._parts(branch)]):
                        if not _is_large(self.search, _Way(part)):
                            self._guess(part)

    def _guess(self, part: Branch) -> None:
        """Add plans with so many stages: with less and less in flight, where memory is limited, and
        with some memory left free where it is too small for what was guessed."""
        search, relaxation, tried = self.search, self.search.relaxation, set[CycleCut]()
        assert part.stages is not None
        most, shares = caps(relaxation.limit_ranges(part.stages)), _ROOMIER
        low_s = relaxation.seconds.shared_out_s(part.micro_batches) / 2
        for cap, pace in product(most if relaxation.limited else most[:1], _PACES):
            for share in shares:
                way = _Way(part, thinned=True, share=share, filled=(cap, pace))
                cut = self._best(way, low_s, _COARSE * _COARSER).cut
                if cut is None or cut in tried:
                    break
                tried.add(cut)
                plan = self._plan(way, cut)
                self.found += [] if plan is None else [plan]
                if plan is None or not plan.over_limit(search.question.cluster):
                    break

    def _bounded(self, way: _Way, low_s: float) -> float:
        """A lower bound on the periods of `way`'s plans, in s. Plans of the cut that it is from, if
        that may be better than the best plan, go into `found`.

        Args:
            low_s: a lower bound that is known before.
        """
        search, n = self.search, way.branch.micro_batches
        large = _is_large(self.search, way)
        if way.thinned and large:
            return 0.0
        within = _COARSE * (_COARSER if way.thinned or large else 1)
        low_s = max(low_s, search.relaxation.seconds.shared_out_s(n) / 2)
        answer = self._best(way, low_s, within)
        whole = [*self._ways(way)] == [way]
        if whole and not way.thinned and way.branch in search.bounds and self.covers(way.branch):
            # Whatever comes of its plans.
            _raise(search, way.branch, answer.bound_s)
        if answer.cut is None:
            return answer.bound_s
        # One by one: those before the budget was used up count, too.
        for each in self._plans(way, answer.cut):
            self.found.append(each)
        if not way.thinned and search.period_s < answer.bound_s * (_WORTH_IT + within):
            answer = self._best(way, answer.bound_s, _COARSE if large else 0.0)
            if answer.cut is not None and (plan := self._plan(way, answer.cut)) is not None:
                self.found.append(plan)
        return answer.bound_s

    def _best(self, way: _Way, low_s: float, within: float = 0.0) -> CycleAnswer:
        """The best cut below the best plan's period, and what no plan is below."""
        search, program = self.search, self._program(way)
        search.budget.take(0)
        before, left, deadline = program.entries, search.budget.seconds_left, None
        if left is not None:
            # The cut's plan has to be looked at, too.
            deadline = time.monotonic() + left * _TABLES_SHARE
        found = program.best(low_s, search.period_s, deadline, within=within)
        search.budget.noted(deadline)
        # What was found is kept, whether there was room for it or not.
        search.budget.effort -= (program.entries - before) // _PER_OPERATION
        return found

    def _plans(self, way: _Way, cut: CycleCut) -> Iterator[Evaluation]:
        """The cut's plan, and while that takes too much memory on some stages, those of cuts that
        reckon with what these were seen to need besides what is known of them; from the second on
        at every stage, as it is others that lack it then."""
        at: CycleCut | None = cut
        for repair in range(_REPAIRS + 1):
            found = None if at is None else self._plan(way, at)
            if at is None or found is None:
                return
            yield found
            over = found.over_limit(self.search.question.cluster)
            if not over:
                return
            program = self._program(way)
            lacks, places = _lacks(program, way.lacks, at, over), program.problem.devices.places
            alike = repair or way.replicated
            way = way._replace(lacks=(max(lacks),) * len(places) if alike else lacks)
            at = self._best(way, at.period_s, _COARSE * _COARSER).cut

    def _plan(self, way: _Way, cut: CycleCut) -> Evaluation | None:
        program = self._program(way)
        if not self.search.relaxation.allows(len(cut.steps), way.branch.micro_batches):
            return None
        limits = [step.flight.limit for step in cut.steps]
        limits = [*accumulate(reversed(limits), max)][::-1]
        choice = self._choice(program, cut.steps)
        return self.search.look(choice, way.branch.micro_batches, tuple(limits))

    def _choice(self, program: CriticalCycles, steps: Sequence[CycleStep]) -> Choice:
        loads, masks = program.problem.loads, program.lattice.masks
        nodes, recompute = list[tuple[str, ...]](), []
        for step in steps:
            inside = masks[step.above] & ~masks[step.below]
            nodes.append(tuple(loads.names[j] for j in members(inside)))
            recompute.append(of_stage(loads.modes[step.mode].recompute, nodes[-1]))
        return Choice(tuple(nodes), _positions(self.search, steps), tuple(recompute))

    # Proofs ------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Try all cuts whose cycles are shorter than the best plan, branch by branch.

        Raises OutOfBudget when the budget is used up.
        """
        for branch in self.search.promising():
            if not self.search.hopeless(branch) and self.proves(branch):
                self._prove(branch)

    def _prove(self, branch: Branch) -> None:
        search, unresolved = self.search, float("inf")
        every_mode = len(search.relaxation.recompute) > 1
        for way in self._ways(_Way(branch, every_mode=every_mode)):
            program = self._program(way)
            before = program.entries
            cuts = program.each_below(lambda: search.period_s, search.budget.deadline)
            try:
                for steps in cuts:
                    search.say(search.standing)
                    search.budget.take(_PER_CUT)
                    unresolved = min(unresolved, self._resolved(program, branch, steps))
            except OutOfTime:
                raise search.budget.over() from None
            search.budget.take((program.entries - before) // _PER_OPERATION)
        search.bounds[branch] = max(search.bounds[branch], min(unresolved, search.period_s))

    def _resolved(
        self, program: CriticalCycles, branch: Branch, steps: Sequence[CycleStep]
    ) -> float:
        """Try a cut under the limits that suit it. Returns what no other plan of it is below;
        infinite: there is no other that is better."""
        search, n = self.search, branch.micro_batches
        choice = self._choice(program, steps)
        # What each stage's memory has room for at the most.
        limits = tuple(accumulate((step.flight.limit for step in steps), min))
        try:
            pipeline = lay_out(search.question, choice.with_limits(limits), n).pipeline
        except (PlanError, ScheduleError):
            return float("inf")
        least_s, below_s = least_period_s(pipeline), min(search.period_s, program.slow_s)
        replicated, turns = program.problem.devices.replicated, list[Turn]()
        if program.problem.rule == "turns" and not any(x.place.stage.turns > 1 for x in steps):
            flights = [
                [each for each in step.place.stage.flights if each.limit <= limit]
                for step, limit in zip(steps, limits, strict=True)
            ]
            turns = turns_of(pipeline, flights)
            turning_s, lowest = least_turning(turns, n, below_s)
            least_s = max(least_s, turning_s)
            limits = tuple(each.limit for each in lowest or [mine[-1] for mine in flights])
        elif search.relaxation.variant.flushes:
            if not replicated:
                least_s = max(least_s, filled_and_drained_s(pipeline))
        elif not replicated or program.problem.rule == "room":
            least_s = max(least_s, round_trip_s(pipeline))
        if least_s * SAME >= search.period_s:
            return float("inf")
        if program.problem.rule == "room":
            done = try_some(search, choice, n, least_s, every_limit=True)
            return float("inf") if done else least_s
        search.look(choice, n, limits)
        only = all(len(stage.flights) == 1 for stage in program.problem.devices.every)
        if only or least_s * SAME >= search.period_s:
            return float("inf")
        if turns:
            # Of all other limits those that cycles leave below the best plan, where they are few.
            vectors = [*islice(turnings(turns, n, search.period_s), MOST_VECTORS + 1)]
            if len(vectors) <= MOST_VECTORS:
                for each in vectors:
                    search.look(choice, n, tuple(flight.limit for flight in each))
                return float("inf")
        done = try_some(search, choice, n, least_s, every_limit=not turns)
        return float("inf") if done or least_s * SAME >= search.period_s else least_s


def _positions(search: SearchState, steps: Sequence[CycleStep]) -> tuple[tuple[int, ...], ...]:
    """Of a cut's devices, as the cluster lists them: of those of a kind, the last ones."""
    cluster, mine = search.question.cluster, [step.place.device for step in steps]
    replicas = [step.place.stage.replicas for step in steps]
    if any(step.place.wires.apart for step in steps):
        found = _by_machine(search, steps)
        if found is not None:
            return found
    if max(replicas) > 1:
        return tuple(tuple(range(d, d + r)) for d, r in zip(mine, replicas, strict=True))
    if not (search.any_sequence or cluster.uniform):
        return tuple((device,) for device in mine)
    left = [
        iter(positions[len(positions) - mine.count(kind) :])
        for kind, positions in enumerate(kinds_of(cluster))
    ]
    return tuple((next(left[kind]),) for kind in mine)


def _raise(search: SearchState, branch: Branch, bound_s: float) -> None:
    """Raise a branch's lower bound; on equal devices also the one for any sequence of them, since
    links count there as the fastest, or as if machines came in any sequence."""
    search.bounds[branch] = max(search.bounds[branch], bound_s)
    if search.question.cluster.uniform:
        search.anywhere[branch] = max(search.anywhere.get(branch, 0.0), bound_s)


def _by_machine(
    search: SearchState, steps: Sequence[CycleStep]
) -> tuple[tuple[int, ...], ...] | None:
    """Devices for stages that are in another machine where wires between are slow; None where there
    are none left in one."""
    left = dict[str | None, list[int]]()
    for d, device in enumerate(search.question.cluster.devices):
        left.setdefault(device.machine, []).append(d)
    rows, found = [list[int]()], list[tuple[int, ...]]()
    for step in steps:
        rows[-1].append(step.place.stage.replicas)
        if step.place.wires.apart:
            rows.append([])
    for row in rows:
        free = next((mine for mine in left.values() if len(mine) >= sum(row)), None)
        if free is None:
            return None
        for replicas in row:
            found.append(tuple(free[:replicas]))
            del free[:replicas]
    return tuple(found)


def _all_alone(search: SearchState, branch: Branch) -> bool:
    """Whether what is looked at bounds all plans of a branch without replicas."""
    return branch.stages is not None or search.most_stages <= _MOST_COUNTS


def _replicated(search: SearchState, branch: Branch) -> bool:
    """Whether those with replicas are looked at: large models have plans first, and with many
    devices tables take too long."""
    few = len(search.question.cluster.devices) <= _MOST_WITH_REPLICAS and not search.large
    return few and has_replicated_cycles(search.relaxation, branch)


def _problem(search: SearchState, way: _Way) -> CycleProblem | None:
    problem = cycle_problem(
        search.relaxation,
        way.branch,
        any_sequence=search.any_sequence,
        every_mode=way.every_mode,
        share=way.share,
        replicated=way.replicated,
    )
    if problem is not None and way.lacks:
        devices = problem.devices.changed(
            lambda s, x: replace(x, memory_bytes=x.memory_bytes - way.lacks[s])
        )
        problem = replace(problem, devices=devices)
    if problem is None or way.filled is None:
        return problem
    return filled_up(problem, search.relaxation.variant, *way.filled)


def _hoped_s(search: SearchState, branch: Branch) -> tuple[float, int]:
    """Sort key: an ideal period in s, work shared out and a flush's round trip; then N."""
    seconds, n = search.relaxation.seconds, branch.micro_batches
    whole_s = seconds.shared_out_s(n)
    if search.relaxation.variant.flushes:
        whole_s += seconds.way_and_back_s(n)
    return whole_s, n


def _is_large(search: SearchState, way: _Way) -> bool:
    """Whether stages · downsets² is above `_LARGE`: tables take long then, thinned ones too."""
    assert isinstance(search.source, DpSource)
    stages, size = way.branch.stages or search.most_stages, search.source.lattice.size
    return stages * size**2 > _LARGE


def _lacks(
    program: CriticalCycles, before: Sequence[float], cut: CycleCut, over: Sequence[tuple[int, int]]
) -> tuple[float, ...]:
    """Per stage, bytes to take off its memory, so that a cut whose plan was over won't fit.

    Args:
        before: what was known of that; empty: nothing.
        over: of the cut's plan, stages and what these lack.
    """
    problem = program.problem
    lacks = list(before) or [0.0] * len(cut.steps)
    for s, missing in over:
        unused = 0.0
        if problem.rule != "room":
            held = program.held_bytes(cut.steps[s], cut.steps[0].flight.units)
            unused = cut.steps[s].place.stage.memory_bytes - held
        lacks[s] += max(unused, 0.0) + missing
    return tuple(lacks)
