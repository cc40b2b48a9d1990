"""The state of a search: the best plan, the bound of each branch, what has been tried and spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from ...profiles.errors import ScheduleError
from ...profiles.units import format_seconds
from ..cluster.cluster import Cluster
from ..evaluate import Evaluation, better, evaluate_within
from ..partition.dp.blocks import Blocks
from ..partition.placings import pattern
from ..partition.problem import SAME
from ..partition.solve import Source
from ..question import Question
from ..systems.placement import numbered_devices
from .choices import Branch, Choice, InFlight, PlacedBranch, Ranges, capped, caps, in_flight_under
from .effort import operations_of, placed_operations, unsettled_operations
from .relaxed.relaxation import Relaxation

# What a search may spend: simulated operations, and time -----------------------------------------

EFFORT = 4_000_000
"""Simulated operations that a search may spend; the same everywhere, so plans repeat."""

_LEAST_TRIED = 24
"""Plans that may be tried whatever they take."""

_PER_STEP = 1
"""Simulated operations that take as long as a step of listing cuts, about."""

CLOSE = 1.001
"""Of a large model, cuts and bounds of the relaxed problem are found up to this factor."""

SOON_S = 1.0
"""What is done after the time limit may take so long in all."""

_FADES = 0.9
"""Of what the slowest simulation took for an operation, with each one after it: a small one that
others on the machine held up says little of those to come."""

FAR, FAR_OFF = 1.4, "nothing comes near to fitting"
"""Where plans that are to need little memory need so many times what there is, others hardly fit;
and what ends a search then."""


class OutOfBudget(Exception):  # noqa: N818 - it ends a search, nothing went wrong
    """The search has used what it was given; `args[0]` says what."""


@dataclass
class Budget:
    """What a search may still spend.

    Attributes:
        effort: simulated operations.
        deadline: by `time.monotonic`; None: no limit.
        by_length: simulations of several stages on each device count by how long they really were.
        hurried: some part of the search ended by its share of the time: another run may find
            another plan.
    """

    effort: int = EFFORT
    deadline: float | None = None
    by_length: bool = False
    tried: int = 0
    hurried: bool = False
    _slowest: float = 0.0

    def spend(self, operations: int, *, needed: bool = True) -> None:
        """Take so many operations. Raises OutOfBudget when the budget is used up.

        Args:
            needed: though they may take longer than there is time.
        """
        if not needed:
            self.check_time_for(operations)
        self.tried += 1
        self.take(operations)

    def check_time_for(self, operations: int) -> None:
        """Raises OutOfBudget where so many may take longer than there is time."""
        left = self.seconds_left
        if left is not None and self.expected_s(operations) > left:
            raise self.over()

    def take(self, operations: int) -> None:
        """Take what so many operations take, for what isn't a plan tried. Raises as `spend`."""
        self.effort -= operations
        if self.effort < 0 and self.tried > _LEAST_TRIED:
            raise OutOfBudget("effort")
        self.check()

    def spend_steps(self, steps: int) -> None:
        """Take what so many steps of listing cuts take. Raises OutOfBudget as `spend`."""
        self.effort -= _PER_STEP * steps
        if self.effort < 0:
            raise OutOfBudget("effort")
        self.check()

    @contextmanager
    def part(self, share: float, *, besides: bool = False) -> Iterator[None]:
        """A context that may spend this share of the effort and of the time that are left.

        Args:
            besides: its effort isn't taken from what follows.
        """
        deadline, left, rest = self.deadline, self.seconds_left, self.effort
        mine = int(self.effort * share)
        rest -= 0 if besides else mine
        self.effort = mine
        self.deadline = None if left is None else time.monotonic() + left * share
        try:
            yield
        finally:
            self.noted(self.deadline)
            left_over = 0 if besides else max(self.effort, 0)
            self.effort, self.deadline = left_over + rest, deadline

    @contextmanager
    def time_part(self, share: float) -> Iterator[None]:
        """A context that may take this share of the time left, and all the effort."""
        deadline, left = self.deadline, self.seconds_left
        self.deadline = None if left is None else time.monotonic() + left * share
        try:
            yield
        finally:
            self.noted(self.deadline)
            self.deadline = deadline

    @contextmanager
    def on_top(self, effort: int) -> Iterator[None]:
        """A context with so much effort of its own, which isn't taken from what follows."""
        rest, self.effort = self.effort, effort
        try:
            yield
        finally:
            self.effort = rest

    def check(self) -> None:
        """Raises OutOfBudget when the time is over."""
        if self.is_late:
            raise self.over()

    def over(self) -> OutOfBudget:
        """Mark the search as `hurried`; returns the error for a part whose time is over."""
        self.hurried = True
        return OutOfBudget("time limit")

    def noted(self, until: float | None) -> bool:
        """Whether a part's own deadline has passed (`is_late`); then it is `hurried`."""
        late = is_late(until)
        self.hurried |= late
        return late

    def took(self, operations: int, seconds: float) -> None:
        """So many operations were simulated in so much time."""
        self._slowest = max(_FADES * self._slowest, seconds / operations)

    def expected_s(self, operations: int) -> float:
        """What so many may take, by the slowest of late."""
        return operations * self._slowest

    @property
    def seconds_left(self) -> float | None:
        """Until the deadline."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return is_late(self.deadline)


def is_late(until: float | None) -> bool:
    """Whether a time, by `time.monotonic`, has passed; None never does."""
    return until is not None and time.monotonic() > until


# The state of a search ---------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]

_LARGE = 20_000
"""With more layers × devices, guesses leave the number of stages open."""

_ROOMY = 0.4
"""Of the memory, on the fullest device, at the most."""


@dataclass
class SearchState:
    """One system's search.

    Attributes:
        branches: what to look at, all together everything that was asked for.
        most_stages: stages that the cluster and the graph allow.
        seen: called with every plan that fits.
        best: the best plan so far.
        bounds: no plan of a branch has a shorter period.
        sharper_views: of each branch, the view that its bound is from.
        least_difference: the least version difference, or delay, of plans that fit but for that.
        least_over: per choice, of the largest share of a device's memory that it takes, the least
            so far.
        shortest_s: per choice, its shortest period so far, whether it fits or not.
        by_kind: the best plan with so many micro-batches, and replicas of each stage.
        blocks: of layers, by their number, for first plans.
        any_sequence: devices may be taken in any, not only as the cluster lists them.
        anywhere: bounds that hold in any.
        closest: of all plans, the one that needs the smallest share of some device's memory.
        least_share: that share.
    """

    relaxation: Relaxation
    source: Source
    branches: Sequence[Branch]
    most_stages: int
    budget: Budget
    progress: Progress = lambda *_: None
    seen: Callable[[Evaluation], None] = lambda _: None
    best: Evaluation | None = None
    bounds: dict[Branch | PlacedBranch, float] = field(default_factory=dict)
    sharper_views: dict[Branch, str] = field(default_factory=dict)
    least_over: dict[Choice, float] = field(default_factory=dict)
    shortest_s: dict[Choice, float] = field(default_factory=dict)
    by_kind: dict[Hashable, Evaluation] = field(default_factory=dict)
    blocks: dict[int, Blocks] = field(default_factory=dict)
    closest: Evaluation | None = None
    any_sequence: bool = False
    anywhere: dict[Branch, float] = field(default_factory=dict)
    least_difference: int | None = None
    least_share: float = float("inf")
    _tried: dict[Hashable, Evaluation | None] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """What is to be planned."""
        return self.relaxation.question

    @property
    def bound_s(self) -> float:
        """No plan that was asked for has a shorter period; infinite where none can fit."""
        return min(self.bounds.values(), default=float("inf"))

    @property
    def period_s(self) -> float:
        """Of the best plan so far."""
        return self.best.prediction.period_s if self.best else float("inf")

    def ranges(self, choice: Choice) -> Ranges:
        """The in-flight limits that a choice may have."""
        return self.relaxation.limit_ranges(choice.stages, several=choice.several)

    def counts(self, found: Evaluation, cluster: Cluster | None = None) -> bool:
        """Whether a plan is one that was asked for: it fits the devices, and no stage's version
        difference is larger than may be.

        Args:
            cluster: in the place of the question's.
        """
        if found.over_limit(cluster or self.question.cluster):
            return False
        most = self.relaxation.most_late
        if most is None or found.delay <= most:
            return True
        least = self.least_difference
        self.least_difference = found.delay if least is None else min(least, found.delay)
        return False

    def forget_bounds(self) -> None:
        """Keep those alone that hold for every sequence of devices."""
        seconds = self.relaxation.seconds
        counts = {branch.micro_batches for branch in self.branches}
        least_s = {n: max(seconds.least_s(n), seconds.round_trip_s(n)) for n in counts}
        self.bounds = {
            branch: max(least_s[branch.micro_batches], self.anywhere.get(branch, 0.0))
            for branch in self.branches
        }

    def hopeless(self, branch: Branch) -> bool:
        """Whether no plan of a branch can beat the best one so far."""
        return self.bounds[branch] * SAME >= self.period_s

    def promising(self) -> Iterator[Branch]:
        """Branches from the lowest bound on, while they can beat the best plan."""
        for branch in sorted(self.branches, key=lambda b: (self.bounds[b], b.micro_batches)):
            if self.hopeless(branch):
                return
            yield branch

    @cached_property
    def large(self) -> bool:
        """Whether there is so much to look at that plans come before bounds."""
        return self.most_stages * len(self.question.profile.layers) > _LARGE

    @property
    def roomy(self) -> bool:
        """Whether the best plan leaves so much memory free that it hardly decides."""
        shares = self.best.memory_shares(self.question.cluster) if self.best else [1.0]
        return max(shares, default=0.0) < _ROOMY

    @cached_property
    def identical(self) -> bool:
        """Whether guesses leave open where devices lie (`Assumptions.identical`)."""
        open_counts = all(branch.stages is None for branch in self.branches)
        return self.large and self.question.cluster.uniform and open_counts

    @cached_property
    def device_kinds(self) -> tuple[list[Hashable], list[Hashable]]:
        """Each device's machine, and what it is like."""
        cluster = self.question.cluster
        homes: list[Hashable] = [d.machine for d in cluster.devices]
        return homes, [cluster.like(d) for d in range(len(homes))]

    def in_flight_guesses(self, stages: int | None) -> Iterator[InFlight | None]:
        """What plans may have in flight under different limits, for any stage count or a given."""
        variant, most = self.relaxation.variant, stages or self.most_stages
        if not self.relaxation.limited:
            yield None
            return
        ranges, tried = self.relaxation.limit_ranges(most), set()
        for cap in caps(ranges):
            limits = capped(ranges, cap)
            if limits not in tried:
                tried.add(limits)
                yield in_flight_under(variant, most, cap)

    # Plans -------------------------------------------------------------------------------------

    def look(
        self,
        choice: Choice,
        micro_batches: int,
        limits: tuple[int, ...],
        most_s: float = inf,
    ) -> Evaluation | None:
        """The plan, whether it fits the devices or not; the best one that does is kept. None where
        its stages wait for each other, or the period is longer than `most_s`. Raises OutOfBudget
        when the budget is used up."""
        used = pattern([d for mine in choice.devices for d in mine], *self.device_kinds)
        each = tuple(map(len, choice.devices))
        shared = numbered_devices(choice.devices)
        key = (choice.nodes, choice.recompute, each, used, shared, micro_batches, limits)
        if key not in self._tried:
            count = placed_operations if shared else operations_of
            operations = count(self.relaxation.variant, choice.stages, micro_batches)
            self.budget.spend(operations, needed=self.best is None)
            begin = time.monotonic()
            found = self._simulated(choice, micro_batches, limits, most_s)
            self.budget.took(operations, time.monotonic() - begin)
            if found is not None and shared and self.budget.by_length:
                variant, length = self.relaxation.variant, found.mini_batches
                self.budget.effort -= unsettled_operations(variant, operations, length)
            if found is None and most_s < inf:
                return None
            self._tried[key] = found
        found = self._tried[key]
        if found is None:
            return None
        over = max(found.memory_shares(self.question.cluster), default=0.0)
        self.least_over[choice] = min(over, self.least_over.get(choice, over))
        period_s = found.prediction.period_s
        self.shortest_s[choice] = min(period_s, self.shortest_s.get(choice, period_s))
        if over < self.least_share:
            self.closest, self.least_share = found, over
        if not self.counts(found):
            return found
        self.seen(found)
        kind = micro_batches, each
        if kind not in self.by_kind or better(found, self.by_kind[kind]):
            self.by_kind[kind] = found
        if self.best is None or better(found, self.best):
            self.best = found
        return found

    def _simulated(
        self, choice: Choice, micro_batches: int, limits: tuple[int, ...], most_s: float
    ) -> Evaluation | None:
        stages = choice.with_limits(limits)
        try:
            return evaluate_within(self.question, stages, micro_batches, most_s)
        except ScheduleError:
            # Where a graph's parts have nothing to do with each other, stages of one device that
            # may keep only so much together can wait for each other.
            return None

    def say(self, what: str, done: int = 0, total: int = 0) -> None:
        """Tell what is being done, and how much of it, of how much."""
        self.progress(what, done, total)

    @property
    def standing(self) -> str:
        """Bound and best period so far, for people."""
        return standing_of(self.bound_s, self.period_s)


def standing_of(bound_s: float, best_s: float) -> str:
    """A bound, where one is known, and the best period so far, for people."""
    best = f"best {format_seconds(best_s) if best_s < inf else 'none yet'}"
    return f"bound {format_seconds(bound_s)}, {best}" if 0 < bound_s < inf else best
