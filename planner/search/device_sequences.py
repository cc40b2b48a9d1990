"""Devices of several kinds in other sequences than the cluster lists them in.

What a plan gains by its sequence no search over cuts on listed devices can tell. So the relaxed
problem is solved once more with a kind of device for each stage (`partition.dp.kinds`): as a
bound, which then holds for all sequences, and as guesses. What it finds is evaluated on devices of
those kinds; as everywhere, all that stays below the best plan's period is tried in turn. At the end
a local search moves devices of the best plan, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, product
from math import sqrt

from ..cluster.cluster import Cluster
from ..costs.recomputation import of_stage
from ..partition.dp.blocks import Blocks, blocks
from ..partition.dp.kinds import KindCut, KindProgram, Kinds, KindStage, few_enough
from ..partition.dp.kinds_waiting import WaitingProgram
from ..partition.dp.lattice import Lattice, joined, lattice_of
from ..partition.dp.program import just_below
from ..partition.dp.sweep import OutOfTime
from ..partition.one_by_one.answers import AnsweringProgram
from ..partition.problem import StageProblem, members
from ..partition.solve import DpSource
from .choices import Branch, Choice, InFlight
from .local_search.improve import LocalSearch, improve
from .relaxed import messages
from .relaxed.places import Assumptions
from .state import CLOSE, OutOfBudget, SearchState

SEQUENCES = ("best", "listed")
"""In which sequence devices are used: whichever is best, or as the cluster lists them."""

_MOST_BLOCKS = 200
"""Where not all stages can be listed, guesses cut between so many blocks of layers at most."""

_MOST_PLACES = 300
"""With more places to cut, guesses are between blocks too, though all stages can be listed."""

_TRIES = 200
"""Times that a plan is improved from elsewhere without gain."""

_RISE, _STEP = 1.08, 1.03
"""By so much targets rise where those far above the bound take long to look at: until cuts are
found, and then at the most."""

_MOST_HOMES = 8
"""With more kinds of devices and machines, guesses take all links for the fastest there is."""


def sequence_matters(cluster: Cluster) -> bool:
    """Whether the sequence of a cluster's devices makes a difference: they are of several kinds, by
    memory and speed, or in machines with more and fewer of them, or listed in turns."""
    if len({(d.usable_bytes, d.speed) for d in cluster.devices}) > 1:
        return True
    homes = [d.machine for d in cluster.devices]
    sizes, rows = Counter(homes), sum(1 for _ in groupby(homes))
    return not cluster.flat and (len(set(sizes.values())) > 1 or rows > len(sizes))


def try_sequences(search: SearchState) -> None:
    """Look for better plans in all sequences of the cluster's devices; the bounds are theirs then.

    Raises OutOfBudget when the budget is used up.
    """
    search.forget_bounds()
    alike = kinds_of_devices(search)
    _bound_all(search, alike)
    groupings = [alike]
    if not search.question.cluster.flat:
        near = _Grouping.of(search, lambda d: (d.usable_bytes, d.speed, d.machine))
        if len(near.positions) <= _MOST_HOMES:
            groupings.insert(0, near)
    _try_guesses(search, groupings)
    _prove(search, alike)


def bound_sequences(search: SearchState) -> None:
    """Bound the plans in all sequences by what stages wait for, and try cuts that keep to such
    bounds.

    Raises OutOfBudget when the budget is used up.
    """
    search.forget_bounds()
    for branch in search.branches:
        least_s = search.relaxation.seconds.shared_out_s(branch.micro_batches)
        search.bounds[branch] = max(search.bounds[branch], least_s)
    try:
        _raise_by_waits(search, kinds_of_devices(search))
    finally:
        search.floors = dict(search.bounds)


# Devices by kind ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grouping:
    """The cluster's devices by kind, the fastest kinds first.

    Attributes:
        positions: per kind, in the cluster's list.
        homes: per kind, the machine they are in; empty where kinds have devices of several.
    """

    search: SearchState
    positions: tuple[tuple[int, ...], ...]
    homes: tuple[Hashable, ...]

    @staticmethod
    def of(search: SearchState, key: Callable[..., tuple[Hashable, ...]]) -> _Grouping:
        """Devices with the same key are of one kind; a third entry is their machine."""
        devices, groups = search.question.cluster.devices, dict[Hashable, list[int]]()
        for position, device in enumerate(devices):
            groups.setdefault(key(device), []).append(position)
        ordered = sorted(groups.values(), key=lambda mine: -devices[mine[0]].speed)
        homes = [key(devices[mine[0]])[2:] for mine in ordered]
        return _Grouping(search, tuple(map(tuple, ordered)), tuple(homes) if any(homes) else ())

    @property
    def speeds(self) -> tuple[float, ...]:
        """Per kind."""
        devices = self.search.question.cluster.devices
        return tuple(devices[mine[0]].speed for mine in self.positions)

    def kinds(self, branch: Branch, assumed: Assumptions) -> Kinds:
        """The relaxed problem for each kind of device."""
        relaxation, cluster = self.search.relaxation, self.search.question.cluster

        def problems(assumed: Assumptions) -> tuple[StageProblem, ...]:
            return tuple(
                relaxation.problem(
                    branch, replace(assumed, identical=True, device=cluster.devices[mine[0]])
                )
                for mine in self.positions
            )

        far: tuple[StageProblem, ...] = ()
        between = cluster.between_machines
        if self.homes and between is not None and between != cluster.network:
            far = problems(replace(assumed, link=between))
            assumed = replace(assumed, link=cluster.network)
        found = problems(assumed)
        replicas = any(option.replicas > 1 for option in found[0].options)
        counts = tuple(map(len, self.positions))
        # Replicas in several machines are for kinds that don't tell machines apart.
        mixed = replicas and not self.homes
        return Kinds(found, counts, self.speeds, mixed, self.homes, far)

    def choice(self, problem: StageProblem, cut: KindCut) -> Choice:
        """A cut as names and positions of devices, the first of each kind."""
        left, speeds = [list(mine) for mine in self.positions], self.speeds
        chosen = [tuple[int, ...]()] * len(cut.stages)
        # Faster devices that stand in for others are those that stages of their own leave.
        for s in sorted(range(len(cut.stages)), key=lambda s: cut.stages[s].kind):
            kind, r = cut.stages[s].kind, problem.options[cut.stages[s].option].replicas
            others = [g for g in range(len(left)) if speeds[g] >= speeds[kind] and g != kind]
            mine: list[int] = []
            for g in [kind, *sorted(others, reverse=True)]:
                while left[g] and len(mine) < r:
                    mine.append(left[g].pop(0))
            chosen[s] = tuple(mine)
        return _choice(problem, cut, chosen)

    def choices(self, problem: StageProblem, cut: KindCut) -> Iterator[Choice]:
        """All that a cut may mean where no machine or link makes a difference: replicas may be of
        its stage's kind and of any that are as fast, in any sequence."""
        speeds = self.speeds

        def kinds_of(
            kind: int, r: int, used: tuple[int, ...], mine: tuple[int, ...]
        ) -> Iterator[tuple[int, ...]]:
            if len(mine) == r:
                if kind in mine:
                    yield mine
                return
            for g, speed in enumerate(speeds):
                there = len(self.positions[g]) - used[g] - mine.count(g)
                if speed >= speeds[kind] and there > 0:
                    yield from kinds_of(kind, r, used, (*mine, g))

        def extend(
            used: tuple[int, ...], chosen: tuple[tuple[int, ...], ...]
        ) -> Iterator[tuple[tuple[int, ...], ...]]:
            if len(chosen) == len(cut.stages):
                yield chosen
                return
            stage = cut.stages[len(chosen)]
            r = problem.options[stage.option].replicas
            for found in kinds_of(stage.kind, r, used, ()):
                taken, mine = list(used), []
                for g in found:
                    mine.append(self.positions[g][taken[g]])
                    taken[g] += 1
                yield from extend(tuple(taken), (*chosen, tuple(mine)))

        for chosen in extend((0,) * len(speeds), ()):
            yield _choice(problem, cut, chosen)


def _choice(problem: StageProblem, cut: KindCut, devices: Sequence[tuple[int, ...]]) -> Choice:
    nodes = tuple(tuple(problem.names[j] for j in members(x.layers)) for x in cut.stages)
    again = (problem.modes[problem.options[x.option].mode].again for x in cut.stages)
    return Choice(nodes, tuple(devices), tuple(map(of_stage, again, nodes)))


def kinds_of_devices(search: SearchState) -> _Grouping:
    """The cluster's devices by memory and speed."""
    return _Grouping.of(search, lambda d: (d.usable_bytes, d.speed))


@dataclass(frozen=True)
class _Solver:
    """A relaxed problem for devices in any sequence.

    Attributes:
        problem: of one of the kinds; layers, modes and options are those of all.
        exact: no cut is left out.
        blocks: of layers, where cuts are between them alone.
    """

    problem: StageProblem
    program: KindProgram
    exact: bool
    blocks: Blocks | None = None

    def best(self, below: float, within: float) -> tuple[KindCut | None, float]:
        """The best cut, and a bound on all."""
        found = self.program.best(below, within)
        bound_s = found.bound_s if self.exact else self.program.floor_s
        return (None if found.cut is None else self.fine(found.cut)), bound_s

    def fine(self, cut: KindCut) -> KindCut:
        """A cut between blocks as one between layers."""
        if self.blocks is None:
            return cut
        masks = self.blocks.masks
        stages = (
            KindStage(sum(masks[g] for g in members(x.layers)), x.option, x.kind)
            for x in cut.stages
        )
        return KindCut(tuple(stages), cut.objective_s)


def _solver(
    search: SearchState, grouping: _Grouping, branch: Branch, assumed: Assumptions
) -> _Solver | None:
    """None where no options are left. Raises OutOfBudget when time is up."""
    kinds, deadline = grouping.kinds(branch, assumed), search.budget.deadline
    problem = kinds.problems[0]
    if not problem.options:
        return None
    lattice = _lattice(search, problem)
    try:
        exact = lattice.complete and few_enough(kinds, lattice)
        if exact and not (assumed.guess and lattice.size > _MOST_PLACES):
            return _Solver(problem, KindProgram(kinds, lattice, deadline), True)
        most, found = _MOST_BLOCKS, None
        while found is None:
            parts = blocks(problem, lattice, most)
            coarse, smaller = _coarse(parts, kinds)
            if most <= 2 or few_enough(coarse, smaller):
                found = _Solver(problem, KindProgram(coarse, smaller, deadline), False, parts)
            most //= 2
        return found
    except OutOfTime:
        raise OutOfBudget("time limit") from None


def _coarse(parts: Blocks, kinds: Kinds) -> tuple[Kinds, Lattice]:
    pairs = [parts.coarse(problem) for problem in kinds.problems]
    far = tuple(parts.coarse(problem)[0] for problem in kinds.far)
    return replace(kinds, problems=tuple(p for p, _ in pairs), far=far), pairs[0][1]


def _lattice(search: SearchState, problem: StageProblem) -> Lattice:
    if isinstance(search.source, DpSource):
        return search.source.lattice
    # Of graphs with too many downsets, those along one topological order.
    return lattice_of(problem, accumulate(joined(problem), int.__or__))


# Bounds, guesses, the proof ----------------------------------------------------------------------


def _bound_all(search: SearchState, grouping: _Grouping) -> None:
    """Bound every branch in each view, and try the cuts that the bounds are from."""
    found: list[tuple[float, Branch, StageProblem, KindCut]] = []
    for done, branch in enumerate(search.branches):
        what = f"{search.standing}; sequences for {branch.micro_batches} micro-batches"
        search.say(what, done, len(search.branches))
        for view in search.relaxation.views:
            solver = _solver(search, grouping, branch, Assumptions(view=view))
            search.budget.check()
            cut, bound_s = None, float("inf")
            if solver is not None:
                cut, bound_s = solver.best(search.period_s, CLOSE if search.large else 1.0)
            search.bounds[branch] = max(search.bounds[branch], bound_s)
            if cut is not None and solver is not None:
                found.append((cut.objective_s, branch, solver.problem, cut))
            if search.hopeless(branch):
                break
    for _, branch, problem, cut in sorted(found, key=lambda item: item[0]):
        if not search.hopeless(branch):
            choice = grouping.choice(problem, cut)
            search.try_some(choice, branch.micro_batches, cut.objective_s)


def _try_guesses(search: SearchState, groupings: Sequence[_Grouping]) -> None:
    """Try the best cuts of guesses at what is in flight, with and without replicas."""
    unreplicated = (False, True) if search.relaxation.freedom.replicas else (False,)
    for branch in search.promising():
        search.say(f"{search.standing}; sequences for {branch.micro_batches} micro-batches")
        for in_flight, alone, grouping in product(
            list(search.in_flight_guesses(branch.stages)), unreplicated, groupings
        ):
            if search.hopeless(branch):
                break
            _guess(search, grouping, branch, in_flight, unreplicated=alone)
            search.budget.check()


def _guess(
    search: SearchState,
    grouping: _Grouping,
    branch: Branch,
    in_flight: InFlight | None,
    *,
    unreplicated: bool,
) -> None:
    assumed = Assumptions(in_flight, guess=True, unreplicated=unreplicated)
    solver = _solver(search, grouping, branch, assumed)
    if solver is None:
        return
    # A guess isn't a bound: what it says is a little more than the best plan's period may be less.
    cut, _ = solver.best(float("inf"), 1.0)
    if cut is not None:
        search.try_some(grouping.choice(solver.problem, cut), branch.micro_batches, cut.objective_s)


def _raise_by_waits(search: SearchState, grouping: _Grouping) -> None:
    """Raise the lowest bounds, one target at a time, and try the cuts that these can't exclude."""
    programs: dict[Branch, tuple[StageProblem, WaitingProgram] | None] = {}
    # Per branch, the lowest target that can't be excluded.
    within: dict[Branch, float] = {}
    # And the highest one that may be excluded or not, while targets rise.
    looked: dict[Branch, float] = {}
    while True:
        search.budget.check()
        search.say(search.standing)
        promising = [b for b in search.promising() if programs.get(b, ()) is not None]
        if not promising:
            return
        # First a look at all, for a good plan to be below.
        branch = next((b for b in promising if b not in programs), promising[0])
        if branch not in programs:
            programs[branch] = waiting(search, grouping, branch)
            _begin(search, grouping, branch, programs[branch])
            continue
        found, low = programs[branch], search.bounds[branch]
        high = min(within.get(branch, search.period_s), search.period_s)
        close = high <= low * CLOSE
        if found is None or (close and high < search.period_s):
            programs[branch] = None
            continue
        problem, program = found
        rises = program.rises and branch not in within
        # All of a branch may be above the best plan, unless that takes long to see.
        target = sqrt(low * high) if branch in within else high
        if rises:
            target = max(low, looked.get(branch, low)) * _RISE
        elif program.rises:
            target = min(target, low * _STEP)
        if rises and target >= high:
            within[branch] = high
            continue
        whole = close or target >= high
        target = just_below(high) if whole else target
        cuts = _in_time(program.soon if rises else program.under, target)
        if cuts is None:
            looked[branch] = target
            continue
        if not cuts:
            search.bounds[branch] = high if whole else target
            continue
        within[branch] = target
        for cut in cuts:
            _try_asked(search, branch, grouping.choice(problem, cut), low)


def _in_time(cuts: Callable[[float], list[KindCut] | None], target: float) -> list[KindCut] | None:
    """Cuts up to a target. Raises OutOfBudget when time is up."""
    try:
        return cuts(target)
    except OutOfTime:
        raise OutOfBudget("time limit") from None


def _begin(
    search: SearchState,
    grouping: _Grouping,
    branch: Branch,
    found: tuple[StageProblem, WaitingProgram] | None,
) -> None:
    """Bound a branch by its loads alone, and try the cut that the bound is from."""
    if found is None:
        return
    problem, program = found
    answer = program.best(search.period_s, CLOSE)
    search.bounds[branch] = max(search.bounds[branch], answer.bound_s)
    if answer.cut is not None:
        choice = grouping.choice(problem, answer.cut)
        _try_asked(search, branch, choice, answer.cut.objective_s)


def _try_asked(search: SearchState, branch: Branch, choice: Choice, objective_s: float) -> None:
    """Evaluate a choice if it is one of the branch's."""
    names = search.relaxation.graph.names
    if branch.stages in (None, choice.stages) and all(
        names[layer] in choice.nodes[stage] for layer, stage in branch.pins
    ):
        search.try_some(choice, branch.micro_batches, objective_s)


def waiting(
    search: SearchState, grouping: _Grouping, branch: Branch
) -> tuple[StageProblem, WaitingProgram] | None:
    """A branch's problem with what stages wait for, whatever their number: no plan with so many is
    faster than the best with any. None where that isn't known, or takes long."""
    ways = messages.ways(search.relaxation.seconds, branch.micro_batches)
    if ways is None:
        return None
    kinds = grouping.kinds(Branch(branch.micro_batches), Assumptions(view="cycle"))
    problem = kinds.problems[0]
    lattice = _lattice(search, problem)
    if not (problem.options and lattice.complete and few_enough(kinds, lattice)):
        return None
    for make in (AnsweringProgram, WaitingProgram):
        try:
            program = make(kinds, lattice, ways, search.budget.deadline)
        except OutOfTime:
            raise OutOfBudget("time limit") from None
        if program.quick:
            return problem, program
    return None


def _prove(search: SearchState, grouping: _Grouping) -> None:
    """Try all cuts, with a kind of device for each stage, that the bounds leave."""
    cluster = search.question.cluster
    # Else there are more plans than the cuts that are listed: devices of other machines, stages
    # that needn't compute their activations again.
    only = cluster.flat and len(search.relaxation.recompute) == 1
    for branch in search.promising():
        if search.hopeless(branch):
            continue
        unresolved = float("inf")
        solvers = (
            _solver(search, grouping, branch, Assumptions(view=view))
            for view in search.relaxation.views
        )
        sharpest = max(
            (solver for solver in solvers if solver is not None and solver.exact),
            key=lambda solver: solver.best(float("inf"), CLOSE)[1],
            default=None,
        )
        if sharpest is None:
            continue
        for cut in _each_below(search, sharpest):
            search.say(search.standing)
            for choice in grouping.choices(sharpest.problem, cut):
                search.budget.spend_steps(1)
                every = search.try_some(
                    choice, branch.micro_batches, cut.objective_s, every_limit=True
                )
                if not (every and only):
                    unresolved = min(unresolved, cut.objective_s)
        search.bounds[branch] = max(search.bounds[branch], min(unresolved, search.period_s))


def _each_below(search: SearchState, solver: _Solver) -> Iterator[KindCut]:
    try:
        for cut in solver.program.each_below(lambda: search.period_s):
            search.budget.spend_steps(1)
            yield cut
    except OutOfTime:
        raise OutOfBudget("time limit") from None
    except MemoryError:
        raise OutOfBudget("memory for all sequences") from None


# Sequences near the best plan's ------------------------------------------------------------------


def try_near(search: SearchState) -> None:
    """Improve the best plan with devices in each other's places, too.

    Of kinds of devices guesses know less than a local search, which moves borders and tries limits:
    a sequence may be better than what was found in it. Raises OutOfBudget when the budget is used
    up.
    """
    improve(search, LocalSearch(search, moves_devices=True), _TRIES)
