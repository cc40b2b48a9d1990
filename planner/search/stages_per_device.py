"""Plans whose devices have several stages: the search over each placement (`placed_branches`).

No program over the chain of stages knows a device's load, as its stages lie apart. So each branch
is bounded by weighted sums of what its stages cost (`partition.chains`), and the cuts that come
near to that, and even ones, are improved by local search. Where few cuts are left below the best
period, all are tried: then it is proven.

Index letters: S stages; D devices; v stages of each; N micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise

from ..costs.recomputation import Selection, of_stage
from ..costs.tied_parameters import misplaced
from ..evaluate import Evaluation
from ..partition.problem import SAME, members
from ..partition.solve import source_for
from ..question import Question
from .branching import SearchRequest, pins_of
from .choices import (
    Branch,
    Choice,
    Freedom,
    PlacedBranch,
    StagesAsked,
    micro_batch_counts,
    stages_asked,
    unforeseen,
)
from .limits import try_placed
from .local_search.improve import (
    LocalSearch,
    climb_on,
    climbing_effort,
    fastest_first,
    improve,
    starts_with,
)
from .local_search.neighbours import Standing
from .placed_bounds import PlacedBounds
from .placed_branches import device_subsets, no_branches, placed_branches
from .relaxed.relaxation import Relaxation
from .state import FAR, FAR_OFF, Budget, OutOfBudget, SearchState

_STARTING_SHARE, _PROVING_SHARE = 0.4, 0.5
"""Of effort and time, for first plans; and of what is left then, for a proof."""

_HALF = 0.5
"""Of the time, for a proof before the best plan is improved; and of what is left then, for that,
before there are climbs from anywhere."""

_CLOSE, _HARDLY = 1.3, 3
"""Where the best plan is further above the bound, so much less goes into raising that."""

_PLENTY = 200_000
"""With so much effort, all first cuts are laid out, besides the even ones."""

_LOOKING_SHARE, _SPREAD = 0.5, 1.15
"""Of that, for finding first plans; and those are improved that are within so much of the best."""

_DESCENTS, _WORTH_IT = 5, 2e-3
"""So many of them, by moves that gain so much."""

_FAR_EFFORT = 100_000
"""What may be spent on each of them where nothing comes near to fitting."""

_FITTING_EFFORT = 800_000
"""And in all where nothing fits after first plans."""

_FITTING_S = 0.4
"""For finding out whether something would do."""

_CUTS, _EVEN = 4, 2
"""Of cuts that come near to a bound, by what they need at the least, and of even ones, those that
are looked at."""

_AGAIN = 2
"""Times that cuts are looked for which need less memory than the fastest ones."""

_MOST_STEPS, _MANY_STEPS = 50_000, 800_000
"""Stages that are begun while the cuts of a branch are listed; with more, they aren't. And in the
end."""

_TRIES = 40
"""Times that a plan is improved from elsewhere without gain."""

_PROVING, _EACH_SHARE = 2, 0.5
"""Times the effort, for a proof in the end; and of what is left of that, for each branch."""

_PATHS_SHARE = 0.4
"""Of the time that is left after the best plan is improved, for bounds by critical paths."""


# The search over them ----------------------------------------------------------------------------


class PlacedSearch:
    """Adds plans with several stages on each device to a search.

    Args:
        counts: N to look at.
        stages: S; None: any.
        pins: (layer, stage).
        branches: for each number of stages on a device; None: all that may be.
    """

    def __init__(
        self,
        search: SearchState,
        asked: StagesAsked,
        counts: Sequence[int],
        stages: int | None,
        pins: Sequence[tuple[int, int]],
        branches: Sequence[Sequence[PlacedBranch]] | None = None,
    ) -> None:
        self.search, self.asked, self._pins = search, asked, pins
        self._counts, self._stages = counts, stages
        self.relaxation = search.relaxation.with_several_stages()
        # Fewer needn't be looked at: several stages on a device of their own are no faster than
        # one, where that may be; but they may take less memory, of what an operation needs.
        one = asked.straight and stages is None and not any(stage for _, stage in pins)
        self._least = 2 if one and not search.relaxation.limited else 1
        self._given = branches is not None
        self.branches = branches or [
            placed_branches(self.relaxation, asked, v, counts, stages, self._least)
            for v in asked.per_device
        ]
        self._bounds = PlacedBounds(search, self.relaxation, counts[0], pins)

    def run(self) -> None:
        """Look for the best plan. Raises OutOfBudget when the budget is used up; the search's
        bounds are true then, too."""
        _leave_out(self)
        self.enter_bounds()
        asked, known = self.asked, not self._left_out()
        if known and (not asked.open_end or asked.patterns == ("v",)):
            # All that was asked for is in these branches.
            self._enter(list(chain.from_iterable(self.branches)))
            self._forget()
        if self._look_at_more() and known:
            self._forget()

    def _enter(self, branches: Sequence[PlacedBranch]) -> None:
        """Give branches what bounds there are before they are looked at."""
        bounds = self.search.bounds
        for branch in branches:
            least_s = self._bounds.least_s(branch.micro_batches, branch.devices)
            bounds[branch] = max(bounds.get(branch, 0.0), least_s)

    def _forget(self) -> None:
        """Drop the bounds of all other branches (`PlacedBranch(N)`): there are no others."""
        for n in self._counts:
            self.search.bounds.pop(PlacedBranch(n), None)

    def enter_bounds(self) -> None:
        """Give the search bounds that hold whatever is found here."""
        for n in self._counts:
            self.search.bounds[PlacedBranch(n)] = self._bounds.least_s(n)

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
        if self._given:
            return False
        numbers = {len(branch.devices) for branch in chain.from_iterable(self.branches)}
        return not all(device_subsets(cluster, number)[1] for number in numbers)

    def look_at(self, branches: Sequence[PlacedBranch]) -> None:
        """Look for the best plan of these branches alone. Raises as `run`."""
        search, budget = self.search, self.search.budget
        effort = budget.effort
        self._enter(branches)
        self._bounds.share_out(len(branches))
        local = self.local_search(search)
        begun, hopeless = list[Standing](), False
        with suppress(OutOfBudget), budget.part(_STARTING_SHARE):
            # When that is used up the rest of the time is left.
            begun = self._begin(local, branches)
            hopeless = self._is_far
        budget.check()
        if hopeless:
            raise OutOfBudget(FAR_OFF)
        far = search.period_s > search.bound_s * _CLOSE
        part, time_part = budget.part(_PROVING_SHARE), budget.time_part(_HALF)
        if self.relaxation.in_sequence:
            # What paths take would be missing for better plans.
            part = budget.on_top(0 if far else round(budget.effort * _PROVING_SHARE))
        with suppress(OutOfBudget), part, time_part:
            self._prove(branches if search.best else (), _MOST_STEPS)
        budget.check()
        if search.best is None:
            budget.effort = min(budget.effort, _FITTING_EFFORT)
        stopped: OutOfBudget | None = None
        try:
            with budget.time_part(_HALF):
                improve(search, local, _TRIES, None if search.best else next(iter(begun), None))
        except OutOfBudget as why:
            stopped = why
        else:
            with suppress(OutOfBudget):
                self._prove(branches, _MOST_STEPS)
        if self.relaxation.in_sequence:
            # Where plans are far above their bound, paths raise it most.
            top, time_part = budget.on_top(_PROVING * effort), budget.time_part(_PATHS_SHARE)
            with suppress(OutOfBudget), top, time_part:
                for branch in filter(self._may_gain, branches):
                    self._bounds.bound_soon(branch)
                self._prove(branches, _MOST_STEPS)
        with suppress(OutOfBudget), budget.on_top(climbing_effort(search, effort)):
            climb_on(search, local, branches)
        budget.check()
        with suppress(OutOfBudget), budget.on_top(_PROVING * effort):
            _prove_each(self, branches)
        budget.check()
        if any(map(self._may_gain, branches)):
            raise stopped or OutOfBudget("effort")

    def local_search(self, search: SearchState) -> LocalSearch:
        """Moves among plans with several stages on each device, of this search or one like it."""
        return LocalSearch(search, search.relaxation.with_several_stages(), self._pins)

    def fitting(
        self, question: Question, freedom: Freedom, counts: Sequence[int]
    ) -> Evaluation | None:
        """A plan for another question, where one that fits is soon found.

        Args:
            counts: N to look at.
        """
        relaxation = Relaxation(question, freedom)
        problem = relaxation.problem(Branch(counts[0]))
        deadline = time.monotonic() + _FITTING_S
        search = SearchState(
            relaxation=relaxation,
            source=source_for(problem, deadline=deadline),
            branches=[],
            most_stages=self.search.most_stages,
            budget=Budget(_FAR_EFFORT, deadline),
        )
        other = PlacedSearch(search, self.asked, counts, self._stages, self._pins)
        for branches in other.branches:
            with suppress(OutOfBudget):
                other._enter(branches)
                other._begin(other.local_search(search), branches)
            if search.best is not None:
                break
        return search.best

    def is_hopeless(self) -> bool:
        """Whether it is soon proven that nothing fits; what lacks least is looked at then."""
        if not _none_fits(self, self._counts):
            return False
        local = self.local_search(self.search)
        with suppress(OutOfBudget):
            least = _least_memory(self._bounds, local, list(chain.from_iterable(self.branches)))
            return least is not None
        return False

    # First plans -----------------------------------------------------------------------------

    def _begin(self, local: LocalSearch, branches: Sequence[PlacedBranch]) -> list[Standing]:
        """Bounds and first plans, some of them improved; of those, what fits best first. Raises
        OutOfBudget when the time is over."""
        search, found, looked = self.search, list[Standing](), list[PlacedBranch]()
        least: Standing | None = None
        with suppress(OutOfBudget), search.budget.part(_LOOKING_SHARE):
            for branch, cuts in self._promising(branches):
                search.say(f"{search.standing}; first cuts")
                found += self._look(local, branch, cuts)
                looked.append(branch)
                if search.best is None and len(looked) == 1:
                    least = _least_memory(self._bounds, local, branches)
            for branch in looked if search.best is None else ():
                first = local.near.first_cuts(branch.micro_batches, branch.lying)[_EVEN:]
                near = fastest_first(local, branch, first, by_memory=True)[:_CUTS]
                found += starts_with(local, branch, near)
        search.budget.check()
        if not found and search.closest is None and branches:
            # What lacks least is asked for where nothing can fit, too.
            branch = max(branches, key=lambda b: (len(b.devices), b.micro_batches))
            even = local.near.first_cuts(branch.micro_batches, branch.lying)[:_EVEN]
            found += starts_with(local, branch, even)
        if search.best is None and least is None:
            # There was no time for it: without it nothing tells whether anything may fit.
            least = _least_memory(self._bounds, local, branches)
        found += [] if least is None else [least]
        # Of fast ones that don't fit as of slow ones that do better ones may come.
        fast = sorted(found, key=lambda s: s.period_s * (1 + s.over))
        fitting = sorted(found, key=lambda s: (s.over, s.period_s))
        begun = list(dict.fromkeys(chain.from_iterable(zip(fast, fitting, strict=True))))
        for left in range(_DESCENTS, 0, -1):
            if not begun:
                break
            standing, share = begun.pop(0), 2 / (left + 1)
            if self._is_far:
                share = min(share, _FAR_EFFORT / max(search.budget.effort, 1))
            if search.best is None or standing.period_s <= search.period_s * _SPREAD:
                with suppress(OutOfBudget), search.budget.part(share):
                    local.descend(standing, _WORTH_IT)
                search.budget.check()
        return fitting

    @property
    def _is_far(self) -> bool:
        """Whether nothing comes near to fitting."""
        return self.search.best is None and FAR < self.search.least_share < float("inf")

    def _promising(
        self, branches: Sequence[PlacedBranch]
    ) -> Iterator[tuple[PlacedBranch, Sequence[tuple[int, ...]]]]:
        """Branches that may gain, with cuts that come near to their bounds: from the lowest bound
        on; and where nothing fits yet, those in turn that are likely to need least."""
        bounds, bounded = self.search.bounds, dict[PlacedBranch, list[tuple[int, ...]]]()
        left, turn = list(branches), 0
        while left:
            branch = min(left, key=lambda b: (bounds[b], -b.micro_batches, len(b.placement)))
            if self.search.best is None and turn % 2:
                branch = max(left, key=lambda b: (len(b.devices), b.micro_batches))
            if not self._may_gain(branch):
                left.remove(branch)
            elif branch not in bounded:
                bounded[branch] = self._bounds.cuts(branch)
            else:
                left.remove(branch)
                turn += 1
                yield branch, bounded[branch]

    def _may_gain(self, branch: PlacedBranch) -> bool:
        return self.search.bounds[branch] * SAME < self.search.period_s

    def _look(
        self, local: LocalSearch, branch: PlacedBranch, cuts: Sequence[tuple[int, ...]]
    ) -> Iterator[Standing]:
        """First cuts of a branch: some that come near to its bound, even ones, and where the
        fastest doesn't fit, those that may by what it has in flight."""
        first = local.near.first_cuts(branch.micro_batches, branch.lying)
        if self.search.budget.effort > _PLENTY:
            cuts = list(dict.fromkeys([*cuts, *first]))
        near = fastest_first(local, branch, cuts)[:_CUTS]
        found = list(starts_with(local, branch, dict.fromkeys([*near, *first[:_EVEN]])))
        yield from found
        for _ in range(_AGAIN if found else 0):
            some = {min(found, key=lambda s: s.period_s), min(found, key=lambda s: s.over)}
            found = []
            for standing in some:
                if standing.over:
                    near = self._bounds.cuts_like(branch, standing)
                    points = [
                        replace(standing.point, downsets=cut)
                        for cut in fastest_first(local, branch, near)[:_CUTS]
                    ]
                    found += [x for point in points if (x := local.look(point)) is not None]
            yield from found
            if not found:
                return

    # Bounds, and the proof -------------------------------------------------------------------

    def _prove(self, branches: Sequence[PlacedBranch], most: int) -> None:
        """Try all cuts that the bounds leave, where they are begun with no more stages.

        Raises OutOfBudget when the budget is used up; the bounds are true then, too.
        """
        search, bounds = self.search, self.search.bounds
        self._bounds.share_out(1 if search.period_s <= search.bound_s * _CLOSE else _HARDLY)
        for branch in sorted(branches, key=lambda b: (bounds[b], len(b.placement))):
            if self._may_gain(branch):
                search.say(search.standing)
                self._bounds.bound(branch)
            if self._may_gain(branch):
                self._try_all(branch, most)

    def _try_all(self, branch: PlacedBranch, most: int) -> None:
        """Try all cuts of a branch, unless so many stages are begun while they are listed."""
        search, left, chains = self.search, [most], self._bounds.chains(branch)
        if chains is None:
            return

        def go_on(begun: int) -> bool:
            search.budget.spend_steps(begun)
            left[0] -= begun
            return left[0] >= 0

        found = chains.below(search.period_s / SAME, go_on)
        unresolved = float("inf")
        for load_s, downsets in found or ():
            if load_s * SAME >= search.period_s:
                break
            unresolved = min(unresolved, self._try_ways(branch, downsets, load_s))
            known_s = min(load_s, unresolved, search.period_s)
            search.bounds[branch] = max(search.bounds[branch], known_s)
        if found is not None:
            known_s = min(unresolved, search.period_s)
            search.bounds[branch] = max(search.bounds[branch], known_s)

    def _try_ways(self, branch: PlacedBranch, downsets: Sequence[int], load_s: float) -> float:
        """Try a cut with each way of recomputation, the same at all stages, unless it fits with
        everything kept. Returns a lower bound on the periods of its plans that weren't tried."""
        search, ways, n = self.search, self.relaxation.recompute, branch.micro_batches
        unresolved = float("inf")
        for way in ways:
            choice = self._choice(branch, downsets, way)
            if choice is None:
                return float("inf")
            unresolved = min(unresolved, try_placed(search, choice, n, load_s))
            search.budget.check()
            if len(ways) > 1 and way == ways[0] and load_s * SAME < search.period_s:
                widest = tuple(most for _, most in search.ranges(choice))
                found = search.look(choice, n, widest)
                if found is not None and search.counts(found):
                    return unresolved
        return min(unresolved, load_s) if len(ways) > 1 else unresolved

    def _choice(
        self, branch: PlacedBranch, downsets: Sequence[int], recompute: Selection
    ) -> Choice | None:
        """A cut of a branch; None where it is none that was asked for."""
        names = self.relaxation.graph.names
        nodes = tuple(tuple(names[j] for j in members(b & ~a)) for a, b in pairwise(downsets))
        choice = Choice(nodes, branch.lying, tuple(of_stage(recompute, mine) for mine in nodes))
        question = self.search.question
        apart = misplaced(question.profile, choice.nodes, choice.devices, question.tied) is not None
        return None if apart or unforeseen(question, choice) else choice


def _least_memory(
    bounds: PlacedBounds, local: LocalSearch, branches: Sequence[PlacedBranch]
) -> Standing | None:
    """The plan that needs the least, where it is soon found, evaluated; of unequal devices any
    number, as those with less memory may be what plans don't fit. Raises OutOfBudget."""
    numbers = sorted({len(branch.devices) for branch in branches}, reverse=True)
    if local.question.cluster.uniform:
        del numbers[1:]
    found = list[Standing]()
    for number in numbers:
        point = bounds.least([b for b in branches if len(b.devices) == number], local.near)
        standing = None if point is None else local.look(point)
        found += [] if standing is None else [standing]
    return min(found, key=lambda s: (s.over, s.period_s), default=None)


def _leave_out(placed: PlacedSearch) -> None:
    """Leave out micro-batch counts of which it is soon proven that none of their plans fits: from
    the fewest on, which need most, up to the first of which it isn't."""
    left = sorted(placed._counts)
    while left and _none_fits(placed, left[:1]):
        del left[0]
    if left:
        placed._counts = left
        placed.branches = [
            [branch for branch in branches if branch.micro_batches in left]
            for branches in placed.branches
        ]


def _none_fits(placed: PlacedSearch, counts: Sequence[int]) -> bool:
    """Whether it is soon proven that no plan with so many micro-batches does."""
    asked, most = placed.asked, placed.relaxation.graph.most_stages
    each = most if asked.open_end else max(asked.per_device)
    return not placed._given and placed._bounds.none_fits(counts, each)


def _prove_each(placed: PlacedSearch, branches: Sequence[PlacedBranch]) -> None:
    """Try all cuts of each branch, from the lowest bound on, for a share of what there is: of
    one with few of them none would be tried behind one with many. Raises OutOfBudget when the
    time is over."""
    search = placed.search
    left = sorted(filter(placed._may_gain, branches), key=lambda b: search.bounds[b])
    for branch in left:
        share = 1.0 if branch == left[-1] else _EACH_SHARE
        with suppress(OutOfBudget), search.budget.part(share):
            placed._prove([branch], _MANY_STEPS)
        search.budget.check()


def placed_search(search: SearchState, request: SearchRequest) -> PlacedSearch | None:
    """The search for plans with several stages on each device; None where there can be none.

    Raises PlanError where all that was asked for are such plans, and there can be none.
    """
    question, stages = search.question, request.stages
    asked = stages_asked(
        question.system, request.stages_per_device, request.placement, request.stages
    )
    alone = len(question.cluster.devices) == 1 and not search.relaxation.limited
    if not asked.per_device or (search.branches and alone):
        return None
    counts = micro_batch_counts(question, request.micro_batches)
    most = max(asked.per_device) * len(question.cluster.devices)
    pins = pins_of(search.relaxation, request.pins, stages or most)
    placed = PlacedSearch(search, asked, counts, stages, pins)
    if any(placed.branches):
        return placed
    if search.branches:
        return None
    raise no_branches(placed.relaxation, asked, stages)
