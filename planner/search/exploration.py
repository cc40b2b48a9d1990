"""The search for one system: bounds, cuts worth trying, and the proof that nothing is better.

For each micro-batch count N a relaxed problem bounds every plan (`relaxation`). Its optimum, and
those of guesses at what is in flight, are cuts to try: each is evaluated by its real order, under
the in-flight limits that suit it. Then, from the lowest bound on, all cuts whose relaxed load is
below the best plan's period are tried in turn; when none is left the plan is proven best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from ...profiles.units import format_seconds
from ..evaluate import SAME, Evaluation, Question, better, evaluate, lay_out
from ..partition.dp.blocks import Blocks
from ..partition.dp.sweep import OutOfTime
from ..partition.placings import Placings, pattern
from ..partition.problem import Cut, StageProblem
from ..partition.solve import DpSource, Found, Source
from ..schedules.schedules import limit_ranges
from ..simulator.timeline import least_period_s
from .budget import SOON_S, Budget, OutOfBudget, operations_of
from .choices import Choice, Held, all_limits, capped, caps, choice_of, held_under
from .first_plans import CLOSE, try_blocks
from .relaxation import Freedom, Relaxation, least_shared_s
from .tightening import tightened

Progress = Callable[[str, int, int], None]

_MOST_UNITS = 512
"""With more devices, guesses let stages take several at once."""

_BOUND_S = 3.0
"""For a bound then: what the dynamic program has excluded by that time."""

_LARGE = 20_000
"""With more layers × devices, guesses leave the number of stages open."""

_GLANCE = 10
"""What it takes to lay out a stage, as so many simulated operations."""

_ELSEWHERE = 0.125
"""Of the effort, for cuts of one case tried in others."""

_MOST_WIDENED = 16
"""With more stages, single limits aren't raised or lowered: each takes a simulation."""


@dataclass(frozen=True)
class Case:
    """Micro-batches, and a stage count or None for any."""

    micro_batches: int
    stages: int | None


@dataclass
class Exploration:
    """One system's search.

    Attributes:
        cases: what to look at, all together everything that was asked for.
        most_stages: stages that the cluster and the graph allow.
        pins: (layer, stage).
        seen: called with every plan that fits.
    """

    question: Question
    freedom: Freedom
    source: Source
    cases: Sequence[Case]
    most_stages: int
    budget: Budget
    pins: tuple[tuple[int, int], ...] = ()
    progress: Progress = lambda *_: None
    seen: Callable[[Evaluation], None] = lambda _: None
    best: Evaluation | None = None
    bounds: dict[Case, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.relaxation = Relaxation(self.question, self.freedom)
        self._sharper: dict[Case, str] = {}
        self.blocks: dict[int, Blocks] = {}
        # Per choice, of the largest share of a device's memory that it takes, the least so far.
        self.over: dict[Choice, float] = {}
        self._tried: dict[Hashable, Evaluation] = {}

    @property
    def bound_s(self) -> float:
        """No plan that was asked for has a shorter period; infinite where none can fit."""
        return min(self.bounds.values(), default=float("inf"))

    @property
    def period_s(self) -> float:
        """Of the best plan so far."""
        return self.best.prediction.period_s if self.best else float("inf")

    @property
    def proven(self) -> bool:
        """Whether nothing can be better than the best plan so far."""
        return self.period_s <= self.bound_s * SAME

    # The three passes --------------------------------------------------------------------------

    def run(self) -> str | None:
        """Search until all is proven, or the budget is used up: says then what was."""
        # A case that isn't reached keeps the trivial bound.
        self.bounds = {
            case: max(
                self.relaxation.round_trip_s(case.micro_batches),
                least_shared_s(
                    self.relaxation, case.micro_batches, case.stages or self.most_stages
                ),
            )
            for case in self.cases
        }
        try:
            # Bounds are still worth looking for where more of these plans would take too long.
            with suppress(OutOfBudget):
                try_blocks(self)
            self._bound_all()
            self._try_guesses()
            self._prove()
        except OutOfBudget as reason:
            return str(reason)
        return None

    def _bound_all(self) -> None:
        found: dict[Case, list[tuple[float, StageProblem, Cut]]] = {}
        # The bound of the case that the best plan is from counts most: it gets the time that the
        # others leave.
        cases = sorted(self.cases, key=lambda c: self._best_so_far(c))
        end = self._bounds_end
        for done, case in enumerate(cases):
            what = f"{self._standing}; bound for {case.micro_batches} micro-batches"
            self.say(what, done, len(cases))
            found[case] = []
            for number, (view, alike) in enumerate(self._views):
                solves = len(self._views) * (len(cases) - done) - number
                if self.large:
                    # Most cases are soon seen to hold nothing better than the best plan; what
                    # time they leave is for those that may.
                    solves = min(solves, 2)
                seconds = None if end is None else max(end - time.monotonic(), 0.0) / solves
                if self._grain > 1 and not alike:
                    seconds = min(seconds or _BOUND_S, _BOUND_S)
                problem = self.problem_for(case, view=view, alike=alike)
                answer = self._solve(problem, seconds)
                if answer.bound_s >= self.bounds[case]:
                    self.bounds[case], self._sharper[case] = answer.bound_s, view
                if answer.cut is not None:
                    found[case].append((answer.bound_s, problem, answer.cut))
                self.budget.check()
                if self.bounds[case] * SAME >= self.period_s:
                    break
        for case in self._promising():
            for _, problem, cut in sorted(found[case], key=lambda item: -item[0]):
                self.try_cut(problem, cut, case.micro_batches)
        if not self.large:
            self._try_elsewhere(
                [
                    (choice_of(problem, cut), cut)
                    for cuts in found.values()
                    for _, problem, cut in cuts
                ]
            )

    def _try_elsewhere(self, found: Sequence[tuple[Choice, Cut]]) -> None:
        """Try cuts with the micro-batches of the other cases too.

        Of many cuts with the same bound one case may have found another one, which doesn't fit.
        That takes little beside looking for more of them.
        """
        least = self.budget.effort * (1 - _ELSEWHERE)
        cuts = dict(found)
        for case in self._promising():
            for choice, cut in cuts.items():
                if self.bounds[case] * SAME >= self.period_s or self.budget.effort < least:
                    break
                if self._suits(choice, case):
                    self._try_choice(choice, case.micro_batches, cut.objective_s)

    def _suits(self, choice: Choice, case: Case) -> bool:
        """Whether a choice for other micro-batches is one for this case."""
        counts = self.relaxation.replica_counts(case.micro_batches)
        return self.relaxation.allows(choice.stages, case.micro_batches) and all(
            len(mine) in counts for mine in choice.devices
        )

    def _best_so_far(self, case: Case) -> bool:
        return self.best is not None and self.best.micro_batches == case.micro_batches

    @property
    def _bounds_end(self) -> float | None:
        """When bounds must be done: half of the time is for them, the rest for plans; more where
        there are plans already."""
        left = self.budget.seconds_left
        share = 0.5 if self.best is None else 0.7
        return None if left is None else time.monotonic() + left * share

    def _try_guesses(self) -> None:
        for done, case in enumerate(self._promising()):
            what = f"{self._standing}; plans of {case.micro_batches} micro-batches"
            self.say(what, done, len(self.cases))
            for stages in self._stage_counts(case):
                for held, lone in product(self.guesses(stages), self._lone):
                    if self.bounds[case] * SAME >= self.period_s:
                        break
                    self._guess(case, held, stages, lone=lone)
                    self.budget.check()

    def _guess(self, case: Case, held: Held | None, stages: int | None, *, lone: bool) -> None:
        grain = 1 if lone else self._grain
        problem = self.problem_for(
            case, held, guess=True, lone=lone, grain=grain, stages=stages, alike=self.alike
        )
        if not problem.options:
            return
        answer = self._solve(problem, self._guess_seconds)
        if answer.cut is not None:
            self.try_cut(problem, answer.cut, case.micro_batches, grain=grain)

    def _prove(self) -> None:
        for case in self._promising():
            if self.bounds[case] * SAME >= self.period_s:
                continue
            problem = self.problem_for(case, view=self._sharper.get(case, ""))
            unresolved = float("inf")
            cuts = self.source.each_below(
                problem, lambda: self.period_s, deadline=self.budget.deadline
            )
            try:
                for cut in self._placed(problem, cuts):
                    self.say(self._standing, 0, 0)
                    if not self.try_cut(problem, cut, case.micro_batches, every_limit=True):
                        unresolved = min(unresolved, cut.objective_s)
            except OutOfTime:
                raise OutOfBudget("time limit") from None
            self.bounds[case] = max(self.bounds[case], min(unresolved, self.period_s))

    def _placed(self, problem: StageProblem, cuts: Iterable[Cut]) -> Iterator[Cut]:
        """Cuts on all devices that make a difference; those that come on several come once.

        Machines, and the cores of each, make one that loads needn't tell.
        """
        seen: set[tuple[tuple[int, int], ...]] = set()
        for cut in cuts:
            stages = tuple((stage.layers, stage.option) for stage in cut.stages)
            if stages not in seen:
                seen.add(stages)
                every = Placings(problem, cut).below(lambda: self.period_s, *self._devices)
                for placed in every:
                    yield placed
                    self.budget.check()

    @cached_property
    def _devices(self) -> tuple[list[Hashable], list[Hashable]]:
        """Each device's machine, and what it is like."""
        devices = self.question.cluster.devices
        return [d.machine for d in devices], [(d.memory_bytes, d.speed) for d in devices]

    def _solve(self, problem: StageProblem, seconds: float | None) -> Found:
        def tell(bound_s: float, best_s: float) -> None:
            best = min(best_s, self.period_s)
            self.say(f"bound {format_seconds(bound_s)}, best {_shown(best)}", 0, 0)

        # Cuts that can't beat the best plan are of no use.
        below, within = (self.period_s, CLOSE) if self.large else (float("inf"), 1.0)
        answer = self.source.best(
            problem, seconds=seconds, below=below, within=within, progress=tell
        )
        if answer.interrupted:
            raise KeyboardInterrupt
        return answer

    @property
    def _standing(self) -> str:
        best = f"best {_shown(self.period_s)}"
        known = 0 < self.bound_s < float("inf")
        return f"bound {format_seconds(self.bound_s)}, {best}" if known else best

    def _promising(self) -> Iterator[Case]:
        """Cases from the lowest bound on, while they can beat the best plan."""
        for case in sorted(self.cases, key=lambda c: (self.bounds[c], c.micro_batches)):
            if self.bounds[case] * SAME >= self.period_s:
                return
            yield case

    # Problems ----------------------------------------------------------------------------------

    def problem_for(
        self,
        case: Case,
        held: Held | None = None,
        *,
        guess: bool = False,
        lone: bool = False,
        each: int | None = None,
        grain: int = 1,
        view: str = "",
        alike: bool = False,
        memory_share: float = 1.0,
        stages: int | None = None,
    ) -> StageProblem:
        return self.relaxation.problem(
            case.micro_batches,
            held=held,
            guess=guess,
            lone=lone,
            each=each,
            grain=grain,
            view=view,
            alike=alike,
            memory_share=memory_share,
            stages=case.stages if case.stages is not None else stages,
            pins=self.pins,
        )

    @cached_property
    def large(self) -> bool:
        """Whether there is so much to look at that plans come before bounds."""
        return self.most_stages * len(self.question.profile.layers) > _LARGE

    @cached_property
    def alike(self) -> bool:
        """Whether guesses leave open where devices lie (`Relaxation.problem`)."""
        open_counts = all(case.stages is None for case in self.cases)
        return self.large and self.question.cluster.uniform and open_counts

    @cached_property
    def _views(self) -> list[tuple[str, bool]]:
        """Views of the relaxed problem that make the bound; and which leave open where devices
        lie, and know better what is in flight."""
        views, relaxation = self.relaxation.views, self.relaxation
        if self.alike:
            return [(view, True) for view in views[:2]]
        plain = [(view, False) for view in views]
        known = self.question.cluster.uniform and relaxation.limited and relaxation.counted
        if known and isinstance(self.source, DpSource):
            return plain + [(view, True) for view in views]
        return plain

    @property
    def _grain(self) -> int:
        """Devices that guesses count as one."""
        if not self.freedom.replicas or self.alike:
            return 1
        return -(-len(self.question.cluster.devices) // _MOST_UNITS)

    @property
    def _guess_seconds(self) -> float | None:
        left = self.budget.seconds_left
        return None if left is None else left / 4

    @property
    def _lone(self) -> tuple[bool, ...]:
        """Guess with replicas, where they may be, and without."""
        return (False, True) if self.freedom.replicas else (False,)

    def _stage_counts(self, case: Case) -> list[int | None]:
        """Stage counts to guess with: all where they are few, else by doubling."""
        most = self.most_stages
        if case.stages is not None or self.large:
            return [None]
        if most <= 8:
            return [None, *range(most, 0, -1)]
        doubled = {1 << k for k in range(most.bit_length())} | {most}
        return [None, *sorted(doubled, reverse=True)]

    def guesses(self, stages: int | None) -> Iterator[Held | None]:
        variant, most = self.relaxation.variant, stages or self.most_stages
        if not self.relaxation.limited:
            yield None
            return
        ranges, tried = limit_ranges(variant, most), set()
        for cap in caps(ranges):
            limits = capped(ranges, cap)
            if limits not in tried:
                tried.add(limits)
                yield held_under(variant, most, cap)

    # Plans -------------------------------------------------------------------------------------

    def try_cut(
        self,
        problem: StageProblem,
        cut: Cut,
        micro_batches: int,
        *,
        grain: int = 1,
        every_limit: bool = False,
    ) -> bool:
        """Evaluate a cut under limits that suit it. Returns whether all limits were looked at."""
        choice = choice_of(problem, cut, grain)
        if not self.relaxation.allows(choice.stages, micro_batches):
            return True
        ranges = limit_ranges(self.relaxation.variant, choice.stages)
        if every_limit and self._cores_are_too_slow(choice, micro_batches):
            return True
        vectors = all_limits(ranges)
        if vectors is not None and (every_limit or len(vectors) == 1):
            for limits in vectors:
                self._evaluate(choice, micro_batches, limits)
            return True
        self._try_choice(choice, micro_batches, cut.objective_s)
        return False

    def _try_choice(self, choice: Choice, micro_batches: int, objective_s: float) -> None:
        """Evaluate a choice under some limits; under more while its relaxed load is less."""
        found = self._first_that_fits(choice, micro_batches)
        if found is not None and self.period_s > objective_s * SAME:
            ranges = limit_ranges(self.relaxation.variant, choice.stages)
            widest = tuple(most for _, most in ranges)
            if self._evaluate(choice, micro_batches, widest) is None:
                self._widen(found, choice, micro_batches)

    def _cores_are_too_slow(self, choice: Choice, micro_batches: int) -> bool:
        """Whether the cores that devices share have too much to do for a better plan than the best.

        That is known without simulating, whatever the limits. Where devices have cores of their
        own, the relaxed load of the cut says as much.
        """
        if self.question.cluster.cores is None:
            return False
        self.budget.glance(_GLANCE * choice.stages)
        limits = [most for _, most in limit_ranges(self.relaxation.variant, choice.stages)]
        found = lay_out(self.question, choice.with_limits(limits), micro_batches)
        return least_period_s(found.pipeline) * SAME >= self.period_s

    def _first_that_fits(self, choice: Choice, micro_batches: int) -> Evaluation | None:
        """With a mini-batch in flight for each stage behind, or as many as memory allows."""
        ranges = limit_ranges(self.relaxation.variant, choice.stages)
        behind = range(choice.stages - 1, -1, -1)
        usual = [
            (low, max(low, min(high, 1 + d))) for (low, high), d in zip(ranges, behind, strict=True)
        ]
        for cap in caps(usual):
            found = self._evaluate(choice, micro_batches, capped(usual, cap))
            if found is not None:
                return found
        return None

    def _widen(self, found: Evaluation, choice: Choice, micro_batches: int) -> None:
        """Raise single limits, while memory allows and the period gets shorter."""
        ranges = limit_ranges(self.relaxation.variant, choice.stages)
        limits = [stage.in_flight for stage in found.stages]
        if choice.stages > _MOST_WIDENED:
            return
        for s, (_, most) in enumerate(ranges):
            while limits[s] < most and (s == 0 or limits[s] < limits[s - 1]):
                limits[s] += 1
                wider = self._evaluate(choice, micro_batches, tuple(limits))
                if wider is None:
                    limits[s] -= 1
                    break

    def _evaluate(
        self, choice: Choice, micro_batches: int, limits: tuple[int, ...]
    ) -> Evaluation | None:
        """The plan, if it fits the devices; the best one is kept."""
        used = pattern([d for mine in choice.devices for d in mine], *self._devices)
        each = tuple(map(len, choice.devices))
        key = (choice.nodes, choice.recompute, each, used, micro_batches, limits)
        if key not in self._tried:
            operations = operations_of(self.relaxation.variant, choice.stages, micro_batches)
            self.budget.spend(operations, needed=self.best is None)
            begin = time.monotonic()
            self._tried[key] = evaluate(self.question, choice.with_limits(limits), micro_batches)
            self.budget.took(operations, time.monotonic() - begin)
        found = self._tried[key]
        over = max(found.memory_shares(self.question.cluster), default=0.0)
        self.over[choice] = min(over, self.over.get(choice, over))
        if found.over_limit(self.question.cluster):
            return None
        self.seen(found)
        if self.best is None or better(found, self.best):
            self.best = found
        return found

    def tighten(self) -> None:
        """Lower the best plan's limits as far as its period stays, and there is time."""
        if self.best is not None and len(self.best.stages) <= _MOST_WIDENED:
            for found in tightened(self.question, self.best, lambda: not self._too_late):
                self.best = found

    @property
    def _too_late(self) -> bool:
        """Whether simulating the best plan anew takes long, and longer than there is time."""
        if self.best is None or self.budget.seconds_left is None:
            return False
        operations = operations_of(
            self.relaxation.variant, len(self.best.stages), self.best.micro_batches
        )
        return self.budget.expected_s(operations) > max(self.budget.seconds_left, SOON_S)

    def say(self, what: str, done: int, total: int) -> None:
        self.progress(what, done, total)


def _shown(seconds: float) -> str:
    return format_seconds(seconds) if seconds < float("inf") else "none yet"
