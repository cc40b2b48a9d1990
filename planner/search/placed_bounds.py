"""Bounds of plans with several stages on each device, and cuts that come near to them.

Index letters: N micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, TypeAlias

from ..partition.chains import PERIODS, Chains, Found
from ..partition.dp.lattice import Lattice, joined
from ..partition.dp.program import Program
from ..partition.least_memory import LeastMemory, several_each
from ..partition.problem import SAME, OutOfTime, StageProblem, members
from ..partition.solve import DpSource, source_for
from .answer.fitting import proven
from .choices import Branch, PlacedBranch
from .local_search.neighbours import Neighbours, Point, Standing
from .relaxed.places import Assumptions
from .relaxed.relaxation import Relaxation
from .relaxed.rows import Rows
from .state import SearchState

_MOST_DOWNSETS = 1_200
"""Of graphs with more, cuts are guessed at with few places alone."""

_MOST_ALONG_PATH = 20_000
"""The same of graphs where only what is along one path counts."""

_PER_OPERATION = 80
"""Links of stages that are gone through while an operation is simulated, about."""

_BOUND_SHARE, _LEAST_SHARE = 0.3, 0.05
"""Of the effort, for bounds of all branches together, and for each at the least."""

_FIRST_PERIODS = 2
"""Periods that are asked about where first cuts are looked for."""

_BY_PATHS = 3
"""Times that, where critical paths come up."""

_ROUNDS, _LEAST_ROUNDS = 15, 3
"""Where there is effort for fewer, first cuts are guessed with fewer places to cut; and nothing is
bound."""

_PER_PAIR, _FEW_LINKS = 2.5, 4_000_000
"""Links for each pair of places, about; and what is soon done whatever the effort."""

_PER_NUMBER = 20
"""Of the table of cuts with the least memory, numbers that take as long as an operation, about."""

_SHARES, _CHEAPEST = 48, 2
"""Those: of so many equal shares of the work, so many that are cheapest to cut at."""


Places: TypeAlias = Literal["all", "few", "path"]
"""To cut at: all; few that are cheap, for guesses; or told apart by what of one path is before them
alone."""


class PlacedBounds:
    """Bounds the branches of a search.

    Attributes:
        share: of the effort, for the bound of one branch.

    Args:
        relaxation: of plans with several stages on each device.
        pins: (layer, stage).
    """

    def __init__(
        self,
        search: SearchState,
        relaxation: Relaxation,
        micro_batches: int,
        pins: Sequence[tuple[int, int]],
    ) -> None:
        """`micro_batches`: any N that may be looked at."""
        self.search, self.relaxation, self._pins = search, relaxation, pins
        self._problem, self.share = relaxation.problem(Branch(micro_batches)), _BOUND_SHARE
        self._rows: dict[tuple[int, Places], Rows] = {}
        self._chains: dict[PlacedBranch, Chains] = {}
        self._on_path: dict[PlacedBranch, Chains] = {}
        # Whose weights of the terms others begin with.
        self._before: dict[PlacedBranch, Chains] = {}

    def share_out(self, branches: int) -> None:
        """Set `share` for bounds of so many branches."""
        self.share = max(_BOUND_SHARE / max(branches, 1), _LEAST_SHARE)

    def cuts(self, branch: PlacedBranch) -> list[tuple[int, ...]]:
        """Cuts that come near to a branch's bound, which is found where that is soon done."""
        soon = self._soon(branch, _ROUNDS)
        rows = self.rows(branch.micro_batches, "all" if soon else "few")
        if rows is None:
            return []
        # Within what is kept at one time, guesses begin further from the best plan: that of
        # densenet121 on eight devices, interleaved, was 12 % longer in the end.
        self._before[branch] = chains = rows.chains(branch.on, at_once=False)
        return self._solved(branch, chains, holds=soon).cuts

    def cuts_like(self, branch: PlacedBranch, standing: Standing) -> list[tuple[int, ...]]:
        """As `cuts`, within memory for what an evaluated plan's stages have in flight: a guess."""
        rows = self.rows(branch.micro_batches, "all" if self._soon(branch, _ROUNDS) else "few")
        if rows is None:
            return []
        chains = rows.chains_like(standing.found, standing.point.downsets)
        return self._solved(branch, chains).cuts

    def _soon(self, branch: PlacedBranch, rounds: int) -> bool:
        """Whether there is effort for so many rounds with all places to cut."""
        lattice = self.lattice
        size = 0 if lattice is None else lattice.size
        links = _PER_PAIR * size**2 * len(branch.placement) * rounds
        return links <= max(self._most_links, _FEW_LINKS)

    def bound_soon(self, branch: PlacedBranch) -> None:
        """Bound a branch by the layers of one path alone (`_along_path`), where that is quick."""
        self._bound(branch, self._along_path(branch))

    def bound(self, branch: PlacedBranch) -> None:
        """Bound a branch: first by what is soon known."""
        self.bound_soon(branch)
        path = self._on_path.get(branch)
        if self.search.bounds[branch] * SAME < self.search.period_s:
            chains = self.chains(branch)
            self._bound(branch, chains if chains is not path else None)

    def _bound(self, branch: PlacedBranch, chains: Chains | None) -> None:
        """Bound a branch by chains."""
        if chains is not None:
            self._solved(branch, chains, PERIODS, holds=True)

    def _along_path(self, branch: PlacedBranch) -> Chains | None:
        """Of what is known along the path alone; None: it would take long, or layers are pinned."""
        if self.lattice is None or self._pins or not _has_few(self.lattice):
            return None
        rows = self.rows(branch.micro_batches, "path")
        if rows is not None and branch not in self._on_path:
            self._on_path[branch] = self._before[branch] = rows.chains(branch.on)
        return self._on_path.get(branch)

    def _solved(
        self,
        branch: PlacedBranch,
        chains: Chains,
        periods: int = _FIRST_PERIODS,
        *,
        holds: bool = False,
    ) -> Found:
        """A lower bound on chains' periods, up to the best plan's. Raises OutOfBudget.

        Args:
            holds: they stand for all plans of the branch, whose bound is raised to it.
        """
        bounds, most = self.search.bounds, self._most_links
        if holds and self.relaxation.in_sequence:
            most *= _BY_PATHS
        until = self.search.budget.deadline or inf
        found = chains.bound(bounds[branch], self.search.period_s, most, periods, until)
        if holds:
            bounds[branch] = max(bounds[branch], found.bound_s)
        self.search.budget.take(found.spent // _PER_OPERATION)
        # Along the path stages may have none of its layers, and others aren't known.
        cuts = [cut for cut in found.cuts if all(a != b for a, b in pairwise(cut))]
        return found._replace(cuts=cuts)

    @property
    def _most_links(self) -> float:
        """Links, stages between two places, that one bound may go through by its effort."""
        return max(self.search.budget.effort * self.share, 1) * _PER_OPERATION

    def chains(self, branch: PlacedBranch) -> Chains | None:
        """The branch's; None: there are too many places to cut for what effort there is. Raises
        OutOfBudget."""
        if branch not in self._chains:
            rows = self.rows(branch.micro_batches) if self._soon(branch, _LEAST_ROUNDS) else None
            if rows is None:
                path = self._along_path(branch)
                along = None if path is None else self.rows(branch.micro_batches, "path")
                return path if along is not None and along.every_cut else None
            self._chains[branch] = chains = rows.chains(branch.on)
            if branch in self._before:
                chains.begin_as(self._before[branch])
        return self._chains[branch]

    @cached_property
    def _groups(self) -> list[int]:
        return joined(self._problem)

    @cached_property
    def lattice(self) -> Lattice | None:
        """Places to cut at; None: they are too many."""
        source = self.search.source
        if self.relaxation is not self.search.relaxation:
            source = source_for(self._problem, deadline=self.search.budget.deadline)
            self.search.budget.noted(self.search.budget.deadline)
        return source.lattice if isinstance(source, DpSource) else None

    def rows(self, micro_batches: int, places: Places = "all") -> Rows | None:
        """Terms of plans with so many micro-batches, cached; None without a lattice, or where
        `places` is "all" and it is too large or not complete. Raises OutOfBudget."""
        lattice, budget, key = self.lattice, self.search.budget, (micro_batches, places)
        if lattice is None:
            return None
        if places == "all" and not (lattice.complete and lattice.size <= _MOST_DOWNSETS):
            return None
        if key not in self._rows:
            if places == "few":
                lattice = Program(self._problem, lattice).thinned(_SHARES, _CHEAPEST)
            asked = self.relaxation, lattice, micro_batches, self._pins, budget.deadline
            try:
                found = Rows(*asked, along_path=places == "path")
            except OutOfTime:
                raise budget.over() from None
            budget.take(len(found.links.begin) // _PER_OPERATION)
            self._rows[key] = found
        return self._rows[key]

    def none_fits(self, counts: Sequence[int], each: int) -> bool:
        """Whether it is soon proven that none does (`fitting.proven`).

        Args:
            counts: N that may be looked at.
            each: stages of a device at the most.
        """
        lattice, question = self.lattice, self.search.question
        if lattice is None or not lattice.complete:
            return False
        at_once = self.relaxation.graph.kept_at_once
        return proven(map(self._alone, counts), lattice, question, None, each, at_once)

    def _alone(self, micro_batches: int) -> StageProblem:
        """The bound of stages on a device each."""
        return self.relaxation.problem(Branch(micro_batches), Assumptions(unreplicated=True))

    def least(self, branches: Sequence[PlacedBranch], near: Neighbours) -> Point | None:
        """The cut whose fullest stage holds the least, with as little in flight and as many
        micro-batches as there may be, on the most devices, of so many those that have most memory;
        None where there is none, or it would take long to find. Raises OutOfBudget."""
        cluster = self.search.question.cluster

        def room(branch: PlacedBranch) -> float:
            smallest = cluster.tightest(branch.devices)
            return inf if smallest is None else smallest.usable_bytes or inf

        branch = max(
            branches,
            key=lambda b: (len(b.devices), b.micro_batches, room(b), len(b.placement)),
            default=None,
        )
        if branch is None or self.lattice is None:
            return None
        count = len(branch.placement)
        problem = several_each(self._alone(branch.micro_batches), count)
        # What is kept adds up over a device's stages; what is computed again doesn't.
        problem = replace(problem, options=problem.options[-1:], stages=count)
        try:
            table = LeastMemory(problem, self.lattice, self.search.budget.deadline or inf)
        except OutOfTime:
            return None
        self.search.budget.take(table.bytes.size // _PER_NUMBER)
        if table.on(count) == inf:
            return None
        downsets = (0, *accumulate((x.layers for x in table.cut(count).stages), int.__or__))
        ways = (problem.modes[problem.options[0].mode].recompute,) * count
        *_, limits = near.usual_limits(count, branch.lying)
        return Point(downsets, branch.lying, ways, branch.micro_batches, limits)

    def least_s(self, micro_batches: int, devices: Sequence[int] = ()) -> float:
        """No plan with so many micro-batches has a shorter period, whatever the placement.

        Args:
            devices: those that it uses; empty: any.
        """
        relaxation, listed = self.relaxation, self.search.question.cluster.devices
        costs = relaxation.graph.costs(relaxation.seconds.size(micro_batches, 1))
        speeds = [listed[d].speed for d in devices or range(len(listed))]
        each = (costs.forward_s + costs.backward_s) * micro_batches
        alone = max(float(each[[*members(group)]].sum()) for group in self._groups)
        least_s = max(alone / max(speeds), float(each.sum()) / sum(speeds))
        if relaxation.variant.flushes:
            trip, _ = relaxation.seconds.heads(costs, both=False)
            least_s = max(least_s, float(trip.sum()))
        return least_s


def _has_few(lattice: Lattice) -> bool:
    """Whether there is a bound along the path, which soon is found."""
    few = lattice.layers <= _MOST_DOWNSETS and lattice.size <= _MOST_ALONG_PATH
    return lattice.complete and few


def straight_along_path(search: SearchState, branch: Branch) -> float:
    """What no plan of a branch is below by the layers of one path: of those where each stage has
    the device at its place. 0 where there are too many places to cut. Raises OutOfBudget."""
    source, budget, relaxation = search.source, search.budget, search.relaxation
    if not (isinstance(source, DpSource) and _has_few(source.lattice) and branch.stages):
        return 0.0
    most = max(budget.effort * _BOUND_SHARE, 1) * _PER_OPERATION
    rows = Rows(relaxation, source.lattice, branch.micro_batches, along_path=True)
    chains = rows.chains(range(branch.stages))
    until = budget.deadline or inf
    found = chains.bound(search.bounds[branch], search.period_s, most, until=until)
    budget.take(found.spent // _PER_OPERATION)
    return found.bound_s
