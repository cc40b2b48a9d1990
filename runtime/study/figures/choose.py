"""The plans with the least time to a study's target: period × overhead, over systems and delays.

Of each system the plan with the shortest period is looked for, then that of the largest delay
below, and so on down to none (`SearchRequest.max_delay`): each search says what no period with so
small delays is below. That times the lower end of the overheads of plans whose delays aren't
smaller, times plain training's samples, bounds the time of what lies between two searches; the
least of these bounds all. Where it shows that nothing there can beat the best plan so far, there
is no search. Every plan that a search meets is judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from ....planner.comparison.plans import NOT_TRIED, naming_system
from ....planner.evaluate import Evaluation, evaluate, gap_between, make_plan
from ....planner.plan import Plan, Prediction, TargetPrediction
from ....planner.search.answer.recheck import question_of, signed
from ....planner.search.parts import INTERRUPTED
from ....planner.search.planning import Planning
from ....planner.search.state import Progress
from ....planner.systems.variants import variant_named
from ....profiles.errors import InfeasibleError, PlanError, UserError
from .overhead import Estimate, LatePlan, TrainedWith, fit_overheads
from .results import results_of
from .study import Study, delays_of

LEAST_S = 1.0
"""A search has so much time at the least."""


@dataclass(frozen=True)
class Judged:
    """A plan that was met, with its overhead.

    Attributes:
        time_s: to the target; at the least, where no training with such delays reached it.
        late: what the overhead goes with.
    """

    overhead: Estimate
    period_s: float
    time_s: float
    memory_bytes: int
    late: LatePlan

    @property
    def price(self) -> tuple[float, int]:
        """Of equally fast ones the one with less memory is better."""
        return self.time_s, self.memory_bytes

    @property
    def least_s(self) -> float:
        """The lower end of its time."""
        return self.time_s * (self.overhead.low or 0.0) / self.overhead.mean


class StudyFigures:
    """A study that plans are judged by. Its curves are read once.

    Attributes:
        fit: its overheads.
        dropped: systems with plans that its budget wasn't spent on to the end, and whether one of
            them may be the best.
    """

    def __init__(self, study: Study) -> None:
        """Raises UserError as `fit_overheads`."""
        self.study, self.fit = study, fit_overheads(study)
        systems = {plan.name: plan.variant for each in study.dropped for plan in each.plans}
        self.dropped: dict[str, bool] = {}
        for each in results_of(study).dropped if systems else ():
            system = systems[each.plan]
            self.dropped[system] = self.dropped.get(system, False) or each.overlap > 0

    def check(self, fingerprint: str, mini_batch: int, where: str) -> None:
        """Raise UserError where the study is of another model or mini-batch, or too old."""
        asked = self.study.question
        if asked.profile.fingerprint != fingerprint:
            raise UserError(
                f"{where}: is a study of another model ({asked.profile.target}, fingerprint "
                f"{asked.profile.fingerprint}) than the profile's (fingerprint {fingerprint}); "
                "study plans of this profile"
            )
        if asked.mini_batch != mini_batch:
            raise UserError(
                f"{where}: is a study of mini-batches of {asked.mini_batch}, not {mini_batch}; "
                f"plan with --mini-batch {asked.mini_batch}, or study again"
            )
        if any(plan.delays is None for plan in self.study.plans):
            raise UserError(
                f"{where}: its plans are of before delays were written; plan anew and study these "
                "(trainings that are done aren't done again)"
            )

    def judge(
        self,
        system: str,
        update_every: int,
        micro_batches: int,
        predicted: Prediction,
        cure: str = "",
    ) -> Judged | None:
        """A plan by what it predicts; None: the study says nothing of it."""
        stages = predicted.stages
        parameters = tuple(stage.parameter_bytes for stage in stages)
        delays = delays_of(stages) or ()
        # Without a delay there is nothing to cure.
        cure = cure if any(delays) else ""
        late = LatePlan(system, update_every, micro_batches, delays, parameters, cure)
        overhead = self.fit.at(late)
        if overhead is None or (self.fit.refusal and not overhead.exact):
            return None
        time_s = self.seconds(predicted.period_s) * overhead.mean
        return Judged(overhead, predicted.period_s, time_s, predicted.most_bytes, late)

    def seconds(self, period_s: float) -> float:
        """Of plain training's samples in that period."""
        return self.fit.plain_samples * period_s / self.study.question.mini_batch


@dataclass
class _System:
    """What was found of a system.

    Attributes:
        best: of the plans that reach the target.
        open_s: the least time that one may take that isn't known to reach it.
        found: the best, where there is no file of it yet.
        plan: its file.
    """

    best: Judged | None = None
    open_s: float = inf
    found: Evaluation | None = None
    plan: Plan | None = None


@dataclass
class TargetSearch:
    """The search over systems, updates, micro-batches and delays.

    Attributes:
        shortest: of all plans judged, that with the shortest period.
        bound_s: no plan that was looked for takes less, but for those of `unbounded` systems, of
            some of whose delays nothing is known; infinite: nothing bounds any.
        undecided: systems with plans that the study dropped, and that may be the best.
        systems: by name as it was given.
        failed: why others have no plan.
    """

    planning: Planning
    figures: StudyFigures
    progress: Progress | None = None
    shortest: Judged | None = None
    bound_s: float = inf
    unbounded: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    systems: dict[str, _System] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    _interrupted: bool = False

    @property
    def best(self) -> Judged | None:
        """Of all systems."""
        found = (one.best for one in self.systems.values() if one.best is not None)
        return min(found, key=lambda judged: judged.price, default=None)

    def look_at(self, name: str, system: str) -> None:
        """Look for a system's plans. A study that says nothing of them: why is said in `failed`."""
        if self._interrupted:
            self.failed[name] = NOT_TRIED
            return
        limit_s = self.planning.asked["time_limit_s"]
        end = None if limit_s is None else time.monotonic() + limit_s
        settings, dropped = self._settings(system), self.figures.dropped.get(system)
        if dropped:
            self.undecided.append(name)
        if not settings:
            known = {None: "says nothing of such plans", True: "dropped such plans undecided"}
            self.failed[name] = f"the study {known.get(dropped, 'dropped such plans as slower')}"
        for how in settings:
            self.systems.setdefault(name, _System())
            self._descend(name, system, how, end)
        if name in self.systems and self.systems[name].best is None:
            self.failed.setdefault(name, "no plan of it that may be the best reaches the target")

    def _settings(self, system: str) -> list[TrainedWith]:
        """What the study can say something of, of what is asked for."""
        asked = self.planning.asked
        every, n = asked.get("update_every"), asked["micro_batches"]
        return [
            TrainedWith(k, n if own is None else own, cure)
            for k, own, cure in self.figures.fit.trained_with(system)
            if every in (None, k) and (None in (n, own) or n == own)
        ]

    def _descend(self, name: str, system: str, how: TrainedWith, end: float | None) -> None:
        most, bound_s = None, 0.0
        while most is None or most >= 0:
            best_s = inf if (best := self.best) is None else best.time_s
            if most is not None and self._floor_s(system, how, most, bound_s) > best_s:
                most -= 1
                continue
            left = None if end is None else max((end - time.monotonic()) / 2, LEAST_S)
            try:
                plan = self.planning.best(
                    naming_system(name, self.progress),
                    variant=system,
                    update_every=how.update_every,
                    micro_batches=how.micro_batches,
                    max_delay=most,
                    time_limit_s=left,
                    seen=self._judging(name, system, how),
                )
            except (InfeasibleError, PlanError) as error:
                if most is None:
                    self.failed[name] = str(error)
                return
            self._keep_file(name, plan)
            delay = max(delays_of(plan.predicted.stages) or (0,))
            bound_s = plan.solver.bound_s
            floor_s = self._floor_s(system, how, delay, bound_s)
            self.bound_s = min(self.bound_s, floor_s or inf)
            if not floor_s and name not in self.unbounded:
                self.unbounded.append(name)
            if plan.solver.stopped == INTERRUPTED:
                self._interrupted, self.bound_s = True, 0.0
                return
            most = delay - 1

    def _floor_s(self, system: str, how: TrainedWith, delay: int, period_s: float) -> float:
        """No plan whose largest delay is this one and whose period isn't shorter takes less; 0:
        nothing is known."""
        stages = len(self.planning.cluster.devices)
        # One version at all stages makes them all as late.
        others = delay if variant_named(system).synchronises else 0
        delays = (delay, *(others,) * (stages - 1))
        every, n, cure = how
        late = LatePlan(system, every, n or 1, delays, (1,) * stages, cure)
        return self.figures.seconds(period_s) * self.figures.fit.least(late)

    def _judging(self, name: str, system: str, how: TrainedWith) -> Callable[[Evaluation], None]:
        mine, told = self.systems[name], self.planning.asked["seen"]
        a_sample_s = self.planning.profile.loading_s_per_sample or 0.0
        loading_s = a_sample_s * self.figures.study.question.mini_batch

        def judge(found: Evaluation) -> None:
            if told is not None:
                told(found)
            predicted = found.prediction.loading(loading_s) if loading_s else found.prediction
            judged = self.figures.judge(
                system, how.update_every, found.micro_batches, predicted, how.cure
            )
            if judged is None:
                return
            if judged.overhead.low is not None:
                self.bound_s = min(self.bound_s, judged.least_s)
            if self.shortest is None or judged.period_s < self.shortest.period_s:
                self.shortest = judged
            if not judged.overhead.reached:
                mine.open_s = min(mine.open_s, judged.least_s)
            elif mine.best is None or judged.price < mine.best.price:
                mine.best, mine.found = judged, found

        return judge

    def _keep_file(self, name: str, own: Plan) -> None:
        """Make a file of the system's best if it was met by the search that found this plan, which
        is taken where it is as good within the tolerance."""
        mine = self.systems[name]
        if mine.best is None or mine.found is None:
            return
        found, profile, mine.found = mine.found, self.planning.profile, None
        judged = self.figures.judge(
            own.variant, own.update_every, own.micro_batches, own.predicted, mine.best.late.cure
        )
        within = 1 + self.planning.asked["tolerance"]
        reaches = judged is not None and judged.overhead.reached
        if judged is not None and reaches and judged.time_s <= mine.best.time_s * within:
            mine.best, mine.plan = judged, own
            return
        question = question_of(own, profile)
        try:
            again = evaluate(question, found.stages, found.micro_batches)
        except PlanError:
            # It has copies of parameters that the plan which was signed keeps together.
            mine.best, mine.plan = (judged, own) if reaches else (None, None)
            return
        report = msgspec.structs.replace(
            own.solver,
            fastest=msgspec.UNSET,
            objective_s=again.prediction.period_s,
            gap=gap_between(again.prediction.period_s, own.solver.bound_s),
            optimal=False,
        )
        mine.plan = signed(make_plan(question, again, report), question)

    def prediction(self, judged: Judged) -> TargetPrediction:
        """What a plan's file says of its time to the target."""
        assert self.shortest is not None
        overhead, study = judged.overhead, self.figures.study
        like = self.figures.fit.arm_like(judged.late)
        bound_s = min(self.bound_s, judged.time_s) if self.bound_s < inf else 0.0
        return TargetPrediction(
            metric=study.question.metric,
            level=self.figures.fit.target,
            overhead=overhead.mean,
            overhead_low=overhead.low,
            overhead_high=overhead.high,
            exact=overhead.exact,
            samples=self.figures.fit.plain_samples,
            time_s=judged.time_s,
            bound_s=bound_s,
            gap=gap_between(judged.time_s, bound_s),
            shortest_period_s=self.shortest.period_s,
            shortest_overhead=self.shortest.overhead.mean,
            shortest_reaches=self.shortest.overhead.reached,
            cure=judged.late.cure or msgspec.UNSET,
            rate=like.rate,
            rate_of=study.question.rate_of,
            warmup=like.warmup,
            trained_with=study.question.options or msgspec.UNSET,
        )


def search_to_target(
    planning: Planning,
    systems: Mapping[str, str],
    figures: StudyFigures,
    progress: Progress | None = None,
) -> tuple[TargetSearch, dict[str, Plan]]:
    """The best plan of each system, the best of all first, each with its `to_target`.

    Args:
        systems: by the name that was given.

    Raises UserError where the study says nothing of any plan; InfeasibleError where nothing fits.
    """
    search = TargetSearch(planning, figures, progress)
    # Where all flush there are no delays to look through: what they take soon bounds the others.
    for name in sorted(systems, key=lambda name: not variant_named(systems[name]).flushes):
        search.look_at(name, systems[name])
    found = {
        name: (one.best, one.plan)
        for name, one in search.systems.items()
        if one.best is not None and one.plan is not None
    }
    if not found:
        whys = "; ".join(f"{name}: {why}" for name, why in search.failed.items())
        raise InfeasibleError(f"by the study: {whys}")
    plans = {
        name: msgspec.structs.replace(plan, to_target=search.prediction(best))
        for name, (best, plan) in sorted(found.items(), key=lambda each: each[1][0].price)
    }
    return search, plans
