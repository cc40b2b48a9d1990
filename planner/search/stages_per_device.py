"""Plans whose devices have several stages: which placements there are, and the search over each.

No program over the chain of stages knows a device's load, as its stages lie apart. So cuts are
listed by the load of their busiest device (`partition.device_loads`), a little further each time,
and each is evaluated by its real schedule. When the next load isn't below the best plan's period,
that is proven best of this placement. Where there are too many cuts, the bound is the load below
which all were tried.

Index letters: S stages; D devices; v stages of each; N micro-batches.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise

import msgspec
import numpy as np

from ...profiles.errors import PlanError
from ..cluster.cluster import Cluster
from ..costs.layer_graph import held_together
from ..costs.memory import room_bytes
from ..costs.recomputation import Selection, of_stage
from ..costs.tied_parameters import misplaced
from ..evaluate import Evaluation
from ..partition.device_loads import Counted, DeviceCount, PlacedCuts, StageEnds
from ..partition.dp.lattice import Lattice, joined, lattice_of
from ..partition.placings import pattern
from ..partition.problem import SAME, StageProblem, members
from ..partition.solve import DpSource, Enough, Source, source_for
from ..systems.placement import placements
from ..systems.variants import Variant
from .choices import Branch, Choice, Freedom, PlacedBranch, StagesAsked, unforeseen
from .local_search.improve import LocalSearch, improve
from .relaxed import messages
from .relaxed.places import Assumptions
from .relaxed.relaxation import Relaxation
from .state import CLOSE, FAR, OutOfBudget, SearchState, is_late

_MOST_DOWNSETS = 3_000
"""Of graphs with more, cuts are tried in one topological order alone, between so many places."""

_MOST_PLACES = 128

_FAR_EFFORT = 50_000
"""What may be spent on cuts by their loads where nothing comes near to fitting."""

_MOST_SUBSETS = 32
"""Of the ways to leave devices out, so many are looked at."""

_MOST_STATES = 100_000
"""So many times the devices there are may be gone through to find them."""

_STEP, _FASTER = 1.0005, 2.0
"""How much further loads are listed the first time, and how much faster each further time."""

_APART_S = 1.0
"""For a cut as if each stage had a device of its own."""

_MOST_BEGUN = 3
"""Branches whose first cuts are improved before others."""

_IMPROVING_SHARE, _TRIES = 0.3, 20
"""Of effort and time, for improving a plan, and times that this is tried without gain."""


def placed_branches(
    relaxation: Relaxation,
    asked: StagesAsked,
    per_device: int,
    counts: Sequence[int],
    stages: int | None,
    least: int,
) -> list[PlacedBranch]:
    """All with so many stages on each of so many devices at the least; there may be none."""
    cluster, variant = relaxation.question.cluster, relaxation.variant
    most = relaxation.graph.most_stages
    found = []
    for number in range(len(cluster.devices), least - 1, -1):
        placed = {
            placement: None
            for name in asked.patterns
            for size in sorted(
                {number * per_device, 2 * number - (per_device == 2 and name == "v")}
            )
            if size <= most and stages in (None, size)
            for placement in placements(name, size, number)
            if _has(placement, per_device, variant)
        }
        subsets = _subsets(cluster, number)[0] if placed else ()
        for placement in placed:
            found += [
                PlacedBranch(n, placement, devices, recompute)
                for devices in subsets
                for n in counts
                if relaxation.allows(len(placement), n)
                for recompute in relaxation.recompute
            ]
    return found


def _has(placement: tuple[int, ...], per_device: int, variant: Variant) -> bool:
    """Whether devices have so many stages; the one at a V's bottom may have one."""
    devices = max(placement) + 1
    if variant.placement == "v" and (len(placement) != 2 * devices or devices == 1):
        return False
    return max(Counter(placement).values()) == per_device


@lru_cache(maxsize=4096)
def _subsets(cluster: Cluster, number: int) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Devices to use, so many, one choice of those that make no difference; the fastest first.

    Of neighbours that are alike the first ones stand for any. What may follow is looked at once for
    all choices so far that make no difference to it.

    Returns:
        `_MOST_SUBSETS` at most, and whether they are all there are.
    """
    homes = [d.machine for d in cluster.devices]
    kinds = [(d.usable_bytes, d.speed) for d in cluster.devices]
    fastest = sorted(range(len(kinds)), key=lambda d: -kinds[d][1])
    last = {homes[d]: at for at, d in enumerate(fastest)}
    found: dict[Hashable, tuple[int, ...]] = {}
    states, most = set[Hashable](), _MOST_STATES // len(kinds)
    # How many of the fastest were looked at, and which of them are chosen.
    going: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while going and len(found) < _MOST_SUBSETS and len(states) < most:
        at, chosen = going.pop()
        devices = tuple(sorted(chosen))
        key = pattern(devices, homes, kinds)
        if len(devices) == number:
            found.setdefault(key, devices)
            continue
        used, left = dict.fromkeys(homes[d] for d in devices), sorted(fastest[at:])
        # Machines that go on, and where later devices come between those chosen.
        on = tuple(home if last[home] >= at else None for home in used)
        state = at, key, on, tuple(bisect(left, d) for d in devices)
        if state in states:
            continue
        states.add(state)
        end = at + 1
        while end < len(fastest) and _alike(cluster, *fastest[end - 1 : end + 1]):
            end += 1
        missing = number - len(devices)
        for count in range(max(missing - len(fastest) + end, 0), min(end - at, missing) + 1):
            going.append((end, (*chosen, *fastest[at : at + count])))
    return tuple(found.values()), not going and len(found) < _MOST_SUBSETS


def _alike(cluster: Cluster, a: int, b: int) -> bool:
    """Whether device b follows device a in the list, and is like it, in the same machine."""
    first, second = cluster.devices[a], cluster.devices[b]
    return b == a + 1 and first == msgspec.structs.replace(second, name=first.name)


def no_branches(relaxation: Relaxation, asked: StagesAsked, stages: int | None) -> PlanError:
    """Why there are none: no placement has so many stages, or the model too few layers."""
    question, most = relaxation.question, relaxation.graph.most_stages
    devices, least = len(question.cluster.devices), min(asked.per_device)
    where = f"--stages-per-device {least}" if stages is None else f"--stages {stages}"
    if most < (least if stages is None else stages):
        tie = None
        if not relaxation.graph.one_device:
            tie = held_together(question.profile, relaxation.variant, question.tied)
        count = "1 stage" if most == 1 else f"{most} stages"
        return PlanError(
            f"{where}: the model can be cut into {count} at most "
            f"({len(question.profile.layers)} layers)" + (f": {tie}" if tie else "")
        )
    several = " or ".join(map(str, asked.per_device))
    names = " or ".join(asked.patterns)
    return PlanError(
        f"{where}: {relaxation.variant.name} can't have that with {several} stages on each of up "
        f"to {devices} {'device' if devices == 1 else 'devices'} (placement {names}), a model of "
        f"{most} stages at most, and the micro-batches asked for"
    )


# The search over them ----------------------------------------------------------------------------


@dataclass
class _Course:
    """How far one branch is.

    Attributes:
        whole: all places to cut at are known to it.
        below_s: all cuts with smaller loads were looked at.
        listed_s: all cuts with loads up to it were listed.
        step: how much further the next time.
        stuck: there are too many cuts.
        open: cuts that other limits may still make better: their least periods, and choices.
    """

    branch: PlacedBranch
    cuts: PlacedCuts
    whole: bool
    below_s: float
    listed_s: float = -1.0
    step: float = _STEP
    stuck: bool = False
    open: list[tuple[float, Choice]] = field(default_factory=list)

    @property
    def bound_s(self) -> float:
        """No plan of the branch has a shorter period."""
        known_s = self.below_s if self.whole else self.cuts.least_s
        return min([known_s, *(floor_s for floor_s, _ in self.open)])


class PlacedSearch:
    """Adds plans with several stages on each device to a search.

    Args:
        counts: N to look at.
        stages: S; None: any.
        pins: (layer, stage).
    """

    def __init__(
        self,
        search: SearchState,
        asked: StagesAsked,
        counts: Sequence[int],
        stages: int | None,
        pins: Sequence[tuple[int, int]],
    ) -> None:
        self.search, self.asked, self._pins = search, asked, pins
        self._counts, self._stages = counts, stages
        self.relaxation = search.relaxation.with_several_stages()
        # Fewer needn't be looked at: several stages on a device of their own are no faster than
        # one, where that may be; but they may take less memory, of what an operation needs.
        one = asked.straight and stages is None and not any(stage for _, stage in pins)
        self._least = 2 if one and not search.relaxation.limited else 1
        self.branches = [
            placed_branches(self.relaxation, asked, v, counts, stages, self._least)
            for v in asked.per_device
        ]
        self._counted: dict[tuple[int, Selection], Counted] = {}

    def run(self) -> None:
        """Look for the best plan. Raises OutOfBudget when the budget is used up; the search's
        bounds are true then, too."""
        self.enter_bounds()
        if self._look_at_more() and not self._left_out():
            for n in self._counts:
                del self.search.bounds[PlacedBranch(n)]

    def enter_bounds(self) -> None:
        """Give the search bounds that hold whatever is found here."""
        for n in self._counts:
            self.search.bounds[PlacedBranch(n)] = self._least_s(n)

    def _look_at_more(self) -> bool:
        """Look at 2, 3, … stages on each device while they pay. Returns whether that were all that
        were asked for, and are possible."""
        search, asked = self.search, self.asked
        open_end = asked.open_end and asked.patterns != ("v",)
        most = self._stages or self.relaxation.graph.most_stages
        for per_device, branches in zip(asked.per_device, self.branches, strict=True):
            before_s = search.period_s
            self.look_at(branches)
            if open_end and self._least * (per_device + 1) > most:
                return True
            pays = search.best is None or search.period_s * SAME < before_s
            if not pays and self._stages is None:
                break
        return not open_end

    def _left_out(self) -> bool:
        """Whether there may be more ways to leave devices out than were looked at."""
        cluster = self.search.question.cluster
        numbers = {len(branch.devices) for branch in chain.from_iterable(self.branches)}
        return not all(_subsets(cluster, number)[1] for number in numbers)

    def look_at(self, branches: Sequence[PlacedBranch]) -> None:
        """Look for the best plan of these branches alone. Raises as `run`."""
        courses, left = list[_Course](), self.search.budget.seconds_left
        until = None if left is None else time.monotonic() + left / 2
        for branch in branches:
            self.search.bounds[branch] = self._least_s(branch.micro_batches)
            # Where there are so many that they take all the time, the first ones get the rest.
            if courses and is_late(until):
                continue
            cuts = self._cuts(branch)
            courses.append(_Course(branch, cuts, self._places.lattice.complete, cuts.least_s))
            self.search.bounds[branch] = cuts.least_s
        try:
            self._explore(courses)
            self._prove(courses)
        finally:
            for course in courses:
                self.search.bounds[course.branch] = course.bound_s

    # Problems --------------------------------------------------------------------------------

    @cached_property
    def _problem(self) -> StageProblem:
        return self.relaxation.problem(Branch(self._counts[0]))

    @cached_property
    def _source(self) -> Source:
        """For cuts of the graph where devices have several stages."""
        if self.relaxation is self.search.relaxation:
            return self.search.source
        return source_for(self._problem, deadline=self.search.budget.deadline)

    @cached_property
    def _places(self) -> StageEnds:
        """Where stages may end: everywhere, or, where that is too much, along one order."""
        lattice = self._source.lattice if isinstance(self._source, DpSource) else None
        if lattice is None or lattice.size > _MOST_DOWNSETS:
            lattice = _along_one_order(self._problem)
        return StageEnds(self._problem, lattice)

    def _count(self, micro_batches: int, *, recompute: Selection) -> Counted:
        key = micro_batches, recompute
        if key not in self._counted:
            counts = list(_counts(self.relaxation, micro_batches, recompute=recompute))
            sent = messages.sent_on(self.relaxation.seconds, micro_batches)
            self._counted[key] = Counted(self._places, counts, sent)
        return self._counted[key]

    def _cuts(self, branch: PlacedBranch) -> PlacedCuts:
        cluster = self.search.question.cluster
        devices, fastest = cluster.devices, cluster.fastest_bytes_per_s
        speeds = [devices[d].speed for d in branch.devices]
        counted = self._count(branch.micro_batches, recompute=branch.recompute)
        profile = self.search.question.profile
        room = [room_bytes(devices[d], profile) for d in branch.devices]

        def pace(a: int, b: int) -> float:
            link = cluster.link(branch.devices[a], branch.devices[b])
            return fastest / link.bandwidth_bytes_per_s

        ties = self.relaxation.graph.one_device
        return PlacedCuts(counted, speeds, branch.placement, self._pins, room, pace, ties)

    def _least_s(self, micro_batches: int) -> float:
        """No plan with so many micro-batches has a shorter period, whatever the placement."""
        search = self.search
        speeds = [device.speed for device in search.question.cluster.devices]
        return min(
            self._count(micro_batches, recompute=recompute).least_s(speeds)
            for recompute in self.relaxation.recompute
        )

    # Cuts ------------------------------------------------------------------------------------

    def _explore(self, courses: Sequence[_Course]) -> None:
        """Try cuts from the lowest loads on, a little further in one branch after another."""
        search = self.search
        for start in (lambda course: course.cuts.even(), self._apart):
            for course in sorted(courses, key=lambda c: (c.below_s, c.cuts.stages)):
                search.budget.check()
                downsets = start(course) if self._may_gain(course) else None
                if downsets is not None:
                    self._try(course, downsets)
            self._move(courses)
        if self.relaxation.limited:
            self._begin(courses)
        if search.best is None and FAR < search.least_share < float("inf"):
            search.budget.effort = min(search.budget.effort, _FAR_EFFORT)
        while going := [c for c in courses if not c.stuck and self._may_gain(c)]:
            self._go_on(min(going, key=lambda c: (c.below_s, c.cuts.stages)), len(going))
        if any(course.stuck for course in courses):
            self._move(courses)
        for course in courses:
            if not course.stuck:
                course.below_s = max(course.below_s, search.period_s)

    def _apart(self, course: _Course) -> tuple[int, ...] | None:
        """The best cut as if each stage had a device of its own, and wires for itself; None where
        none is found."""
        search, branch = self.search, course.branch
        question, stages = search.question, len(branch.placement)
        if any(stage >= stages for _, stage in self._pins):
            return None
        each = max(map(branch.placement.count, branch.placement))
        devices = []
        for d in branch.placement:
            device = question.cluster.devices[branch.devices[d]]
            # One with fewer stages has time for more of each.
            speed = device.speed * each / branch.placement.count(d)
            devices.append(msgspec.structs.replace(device, speed=speed))
        cluster = msgspec.structs.replace(question.cluster, devices=tuple(devices))
        alone = Relaxation(replace(question, cluster=cluster), Freedom(), self.relaxation.graph)
        assumed = Assumptions(guess=True, memory_share=1 / each)
        problem = alone.problem(Branch(branch.micro_batches, stages, tuple(self._pins)), assumed)
        left = search.budget.seconds_left
        seconds = _APART_S if left is None else min(_APART_S, left / 4)
        cut = self._source.best(problem, Enough(seconds, within=CLOSE)).cut
        if cut is None:
            return None
        return (0, *accumulate((stage.layers for stage in cut.stages), int.__or__))

    def _may_gain(self, course: _Course) -> bool:
        return course.below_s * SAME < self.search.period_s

    def _go_on(self, course: _Course, branches: int) -> None:
        """Try the cuts of a branch with loads up to a little more than before.

        Args:
            branches: that there still are; what may be spent is for all of them.
        """
        search, budget = self.search, self.search.budget
        count = len(course.branch.devices)
        search.say(f"{search.standing}; {course.cuts.stages} stages on {count} devices")
        target_s = min(max(course.below_s, 1e-12) * course.step, search.period_s / SAME)
        course.step = 1 + (course.step - 1) * _FASTER
        most = budget.steps_left // branches
        found, complete, steps = course.cuts.below(target_s, course.listed_s, budget.deadline, most)
        budget.spend_steps(steps)
        course.stuck = not complete
        for cut in found:
            if cut.load_s * SAME >= search.period_s:
                break
            if complete:
                course.below_s = max(course.below_s, cut.load_s)
            floor_s, choice = self._try(course, cut.downsets, cut.load_s)
            if floor_s * SAME < search.period_s:
                course.open.append((floor_s, choice))
            budget.check()
        if complete:
            course.listed_s = target_s
            course.below_s = max(course.below_s, target_s)
            if target_s >= course.cuts.most_s:
                course.below_s = float("inf")

    def _try(
        self, course: _Course, downsets: Sequence[int], load_s: float = 0.0
    ) -> tuple[float, Choice]:
        """Evaluate a cut under some limits. Returns the least period that others may lead to, and
        the choice; infinite: to none."""
        branch, names = course.branch, self.relaxation.graph.names
        nodes = tuple(tuple(names[j] for j in members(b & ~a)) for a, b in pairwise(downsets))
        choice = Choice(
            nodes,
            tuple((branch.devices[d],) for d in branch.placement),
            tuple(of_stage(branch.recompute, mine) for mine in nodes),
        )
        question = self.search.question
        apart = misplaced(question.profile, choice.nodes, choice.devices, question.tied) is not None
        if apart or unforeseen(question, choice):
            return float("inf"), choice
        return self.search.try_placed(choice, branch.micro_batches, load_s), choice

    def _begin(self, courses: Sequence[_Course]) -> None:
        """Improve the best first cuts of some branches, whether they fit at first or not: of that
        which comes nearest to fitting, where none does, and of those that may gain most."""
        search, local = self.search, self.local_search(self.search)
        near = search.closest.micro_batches if search.closest and search.best is None else None
        ranked = sorted(
            courses, key=lambda c: (c.branch.micro_batches != near, c.below_s, c.cuts.stages)
        )
        with suppress(OutOfBudget), search.budget.part(_IMPROVING_SHARE):
            for course in ranked[:_MOST_BEGUN]:
                branch = course.branch
                lying = tuple((branch.devices[d],) for d in branch.placement)
                found = local.starts_on(lying, branch.micro_batches)
                for standing in sorted(found, key=lambda s: (s.over, s.period_s))[:1]:
                    local.descend(standing)
        search.budget.check()

    def _move(self, courses: Sequence[_Course]) -> None:
        """Improve the best plan, if it is one of these branches'."""
        search, best = self.search, self.search.best
        if best is not None and any(_is_of(course, best) for course in courses):
            local = self.local_search(search)
            with suppress(OutOfBudget), search.budget.part(_IMPROVING_SHARE):
                improve(search, local, _TRIES)
            search.budget.check()

    def local_search(self, search: SearchState) -> LocalSearch:
        """Moves among plans with several stages on each device, of this search or one like it."""
        return LocalSearch(search, search.relaxation.with_several_stages(), self._pins)

    def _prove(self, courses: Sequence[_Course]) -> None:
        """Try all limits of the cuts that others than the usual ones may make better."""
        search = self.search
        left = [
            (floor_s, number, choice, course)
            for course in courses
            for number, (floor_s, choice) in enumerate(course.open)
        ]
        for floor_s, _, choice, course in sorted(left, key=lambda item: item[:2]):
            gone = floor_s * SAME >= search.period_s
            if not gone:
                search.say(search.standing)
            if gone or search.try_every_limit(choice, course.branch.micro_batches, floor_s):
                course.open.remove((floor_s, choice))


def _is_of(course: _Course, found: Evaluation | None) -> bool:
    """Whether a plan is one of a branch's."""
    branch = course.branch
    return (
        found is not None
        and found.micro_batches == branch.micro_batches
        and [stage.devices for stage in found.stages]
        == [(branch.devices[d],) for d in branch.placement]
        and all(x.recompute == of_stage(branch.recompute, x.nodes) for x in found.stages)
    )


def _counts(
    relaxation: Relaxation, micro_batches: int, *, recompute: Selection
) -> Iterator[DeviceCount]:
    """What layers cost at the least, whatever the schedule, by each view of `Relaxation.views`; and
    the bytes that are always there."""
    for view in relaxation.views:
        if view == "return":
            continue
        assumed = Assumptions(view=view, unreplicated=True)
        problem = relaxation.problem(Branch(micro_batches), assumed)
        (option,) = [
            o
            for o, each in enumerate(problem.options)
            if problem.modes[each.mode].again == recompute
        ]
        place = problem.place(option, problem.devices)
        each = problem.modes[problem.options[option].mode].compute_s
        each = each + place.speed * place.sync_s_per_byte * problem.parameter_bytes
        if problem.serial_s is not None:
            each = each + problem.serial_s
        yield DeviceCount(each, problem.serial_fixed_s, problem.before_s, problem.after_s)
    graph = relaxation.graph
    always = (1 + relaxation.question.least_state_factor) * graph.parameter_bytes
    yield DeviceCount(always + graph.buffer_bytes, in_bytes=True)


def _along_one_order(problem: StageProblem) -> Lattice:
    """Some downsets, each with all before a place in a topological order."""
    masks = list(accumulate(joined(problem), int.__or__))
    work = problem.modes[0].compute_s
    done = np.cumsum([sum(work[j] for j in members(group)) for group in joined(problem)])
    if len(masks) > _MOST_PLACES:
        wanted = np.linspace(0, done[-1], _MOST_PLACES)
        masks = [masks[k] for k in sorted({*np.searchsorted(done, wanted[:-1]).tolist()})]
    return lattice_of(problem, masks)
