"""What a study says: samples to the target, overheads, time to target, and which system to take.

All are pure functions of the study. The overhead of an arm is, seed by seed, its samples to the
target over plain training's with the same seed: the same weights and the same samples in the same
sequence. The predicted time to target of a plan is

    overhead × samples of plain training (geometric mean over seeds) × period / mini-batch

with the interval of the overhead (`spread`): what all arms of a seed have in common is in no
comparison. Pipelines that flush are plain training: their overhead is 1 and has no spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import msgspec

from ....planner.comparison.pareto import unbeaten
from .curves import noise_of, points_of, samples_to, smoothed, value_at
from .rungs import expected, said_in_rungs
from .spread import Spread, spread_of
from .study import PLAIN, RISES, Curve, StudiedPlan, Study, StudyArm

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the steps: where plain training then is are the levels that overheads are given at."""


class OverheadAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An arm's overhead at a level that plain training reaches on its way."""

    mini_batches: int
    """Where plain training has that level."""
    level: float | None
    overhead: Spread | None
    """None: not all seeds get there."""


class ArmResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an arm needs to the target."""

    arm: str
    samples: tuple[float | None, ...]
    """By seed; None: it isn't reached, in as many samples as it trained with."""
    reached: int
    """By how many seeds."""
    overhead: Spread | None
    """Over plain training; None: some seed doesn't reach the target, of this or of plain."""
    at_least: float | None = None
    """What the overhead is more than, where the target isn't reached by all seeds; None where they
    all diverged, too."""
    diverged: int = 0
    """Final trainings that did."""
    by_level: tuple[OverheadAt, ...] = ()


class PlanResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan needs to the target."""

    plan: str
    arm: str
    time_s: Spread | None
    """Predicted; None: the target isn't reached by all seeds."""
    at_least_s: float | None = None
    """Then it is more than this; None where all diverged, too."""
    period_s: float
    memory_bytes: int
    on_front: bool
    """No other plan is as good in time to target and memory, and better in one."""
    over_best: Spread | None = None
    """Times the time of the plan with the shortest, paired by seed."""
    equal: bool = False
    """The interval of that has 1 in it."""


class DroppedResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is expected of a plan whose arm a study with a budget didn't train to the end."""

    plan: str
    arm: str
    after: int
    """Mini-batches of the trainings that it was dropped after."""
    rate: float
    """The best of them."""
    overhead: Spread | None
    """Of a whole training (`rungs`); None: it diverged at all rates."""
    time_s: Spread | None
    """None: that, or plain training doesn't reach the target."""
    overlap: float
    """The share of the time's interval, in logarithms, that lies below the upper end of the best
    plan's: 0 where it is ruled out."""


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which plan to take, and how sure that is."""

    plan: str | None
    """None: no plan reaches the target."""
    equal: tuple[str, ...] = ()
    """Others that are equal to it within the seeds' spread."""
    open: tuple[str, ...] = ()
    """Others that may be as fast: they don't reach the target in what was trained, which takes
    them less time than this one; or they were dropped, and their interval is below its end."""
    begun: bool = True
    """False: plain training has hardly begun where it reaches the target."""
    why: str


class StudyResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it, as `--json` prints it."""

    target: float | None
    """None: plain training diverges at all rates, and none was given."""
    arms: tuple[ArmResult, ...]
    plans: tuple[PlanResult, ...]
    recommendation: Recommendation
    dropped: tuple[DroppedResult, ...] = ()
    """The one that may be the best first."""

    def arm(self, name: str) -> ArmResult:
        """Of the arm of this name."""
        return next(arm for arm in self.arms if arm.arm == name)

    def plan(self, name: str) -> PlanResult:
        """Of the plan of this name."""
        return next(plan for plan in self.plans if plan.plan == name)


class Reckoning:
    """The figures of one study; curves are smoothed once.

    Attributes:
        target: the level that counts.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self._smooth = {
            arm.name: [self._smoothed(curve) for curve in arm.finals()] for arm in study.arms
        }
        given = study.question.target
        self.target = self._level(study.question.steps) if given is None else given

    def _smoothed(self, curve: Curve) -> list[tuple[float, float]]:
        asked = self.study.question
        return smoothed(points_of(curve, asked.metric, asked.mini_batch))

    def _level(self, steps: float) -> float:
        """Of plain training after so many mini-batches: the mean over seeds that don't diverge; NaN
        where all do."""
        finals = zip(self._smooth[PLAIN], self.study.plain.finals(), strict=True)
        whole = [points for points, curve in finals if curve.diverged_at is None]
        found = (value_at(points, steps * self.study.question.mini_batch) for points in whole)
        values = [value for value in found if value is not None]
        return sum(values) / len(values) if values else math.nan

    def samples(self, arm: str, level: float) -> tuple[float | None, ...]:
        """To a level, by seed."""
        rises = RISES[self.study.question.metric]
        return tuple(samples_to(points, level, rises=rises) for points in self._smooth[arm])

    def overhead(self, arm: str, level: float) -> Spread | None:
        """Over plain training at a level; None: some seed of either doesn't reach it."""
        # Plain training may have more seeds.
        pairs = list(zip(self.samples(arm, level), self.samples(PLAIN, level), strict=False))
        known = [ratio for pair in pairs if (ratio := _ratio(*pair)) is not None]
        return spread_of(known) if len(known) == len(pairs) else None

    @cached_property
    def plain_samples(self) -> float | None:
        """To the target, the geometric mean over seeds; None: plain training doesn't reach it."""
        samples = self.samples(PLAIN, self.target)
        found = [s for s in samples if s is not None]
        return spread_of(found).mean if len(found) == len(samples) else None

    @cached_property
    def begun(self) -> bool:
        """Whether at the target, with every seed, plain training's loss has fallen by more than one
        mini-batch's differs from the next's: else which system is ahead is mostly chance, and says
        little of a longer training."""
        asked = self.study.question
        if asked.metric != "loss":
            return True
        for curve in self.study.plain.finals():
            points = points_of(curve, asked.metric, asked.mini_batch)
            if points and points[0][1] - self.target < noise_of(points):
                return False
        return True

    def arm_result(self, arm: StudyArm) -> ArmResult:
        """What an arm needs."""
        asked = self.study.question
        samples = self.samples(arm.name, self.target)
        missed, most = None in samples, asked.length * asked.mini_batch
        diverged = sum(curve.diverged_at is not None for curve in arm.finals())
        overhead = None if missed else self.overhead(arm.name, self.target)
        return ArmResult(
            arm=arm.name,
            samples=samples,
            reached=sum(s is not None for s in samples),
            overhead=overhead,
            at_least=(
                most / self.plain_samples
                if missed and self.plain_samples and diverged < len(samples)
                else None
            ),
            diverged=diverged,
            by_level=tuple(self._at(arm.name, share) for share in SHARES),
        )

    def _at(self, arm: str, share: float) -> OverheadAt:
        steps = share * self.study.question.steps
        level = self._level(steps)
        return OverheadAt(
            mini_batches=round(steps),
            level=None if math.isnan(level) else level,
            overhead=self.overhead(arm, level),
        )

    def seconds(self, arm: str, period_s: float) -> Spread | None:
        """Predicted time to the target of a plan with this period; None: it isn't reached."""
        samples = self.samples(arm, self.target)
        known = [s for s in samples if s is not None]
        if len(known) < len(samples):
            return None
        a_sample = period_s / self.study.question.mini_batch
        overhead = self.overhead(arm, self.target)
        if overhead is None or self.plain_samples is None:
            # Plain training doesn't get there: nothing to pair with.
            return spread_of(known) * a_sample
        return overhead * (self.plain_samples * a_sample)

    def over(self, one: StudiedPlan, other: StudiedPlan) -> Spread | None:
        """Time to target of a plan over another's, paired by seed; None: one doesn't get there."""
        pairs = zip(
            self.samples(one.arm, self.target), self.samples(other.arm, self.target), strict=False
        )
        ratios = [_ratio(a, b) for a, b in pairs]
        known = [ratio for ratio in ratios if ratio is not None]
        return (
            spread_of(known) * (one.period_s / other.period_s)
            if len(known) == len(ratios)
            else None
        )


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def results_of(study: Study) -> StudyResults:
    """All figures of a study."""
    reckoning = Reckoning(study)
    arms = tuple(map(reckoning.arm_result, study.arms))
    times = {p.name: reckoning.seconds(p.arm, p.period_s) for p in study.plans}
    known = {name: time.mean for name, time in times.items() if time is not None}
    best = min(study.plans, key=lambda p: known.get(p.name, math.inf), default=None)
    prices = {
        p.name: (known[p.name], float(p.memory_bytes)) for p in study.plans if p.name in known
    }
    front = unbeaten(prices)
    plans = []
    for plan in study.plans:
        arm = next(found for found in arms if found.arm == plan.arm)
        over = reckoning.over(plan, best) if best is not None and best.name in known else None
        plans.append(
            PlanResult(
                plan=plan.name,
                arm=plan.arm,
                time_s=times[plan.name],
                at_least_s=_at_least(reckoning, plan, arm),
                period_s=plan.period_s,
                memory_bytes=plan.memory_bytes,
                on_front=plan.name in front,
                over_best=over,
                equal=over is not None and over.low is not None and over.low <= 1 + 1e-9,
            )
        )
    first = next((p for p in plans if best is not None and p.plan == best.name), None)
    dropped = _dropped(reckoning, arms, first)
    return StudyResults(
        target=None if math.isnan(reckoning.target) else reckoning.target,
        arms=arms,
        plans=tuple(plans),
        recommendation=_recommend(reckoning, plans, dropped, first),
        dropped=dropped,
    )


def _dropped(
    reckoning: Reckoning, arms: Sequence[ArmResult], best: PlanResult | None
) -> tuple[DroppedResult, ...]:
    study, samples = reckoning.study, reckoning.plain_samples
    errors: dict[int, list[float]] = {}
    for arm in arms[1:]:
        for rung in said_in_rungs(study, study.arm(arm.arm)):
            whole = arm.overhead.mean if arm.overhead is not None else arm.at_least
            # What doesn't get there says something only where that was not to be expected.
            if whole is not None and (arm.overhead is not None or whole > rung.overhead):
                errors.setdefault(rung.after, []).append(math.log(whole / rung.overhead))
    found = []
    for each in study.dropped:
        last = said_in_rungs(study, each.arm)[-1]
        sound = last.overhead < math.inf
        overhead = expected(last.overhead, errors.get(last.after, ())) if sound else None
        for plan in each.plans:
            time = None
            if overhead is not None and samples is not None:
                time = overhead * (samples * plan.period_s / study.question.mini_batch)
            found.append(
                DroppedResult(
                    plan=plan.name,
                    arm=plan.arm,
                    after=last.after,
                    rate=last.rate,
                    overhead=overhead,
                    time_s=time,
                    overlap=_overlap(time, best) if sound else 0.0,
                )
            )
    periods = {plan.name: plan.period_s for each in study.dropped for plan in each.plans}
    return tuple(sorted(found, key=lambda d: (-d.overlap, _expected_s(d, periods[d.plan]))))


def _expected_s(dropped: DroppedResult, period_s: float) -> float:
    return math.inf if dropped.overhead is None else dropped.overhead.mean * period_s


def _overlap(time: Spread | None, best: PlanResult | None) -> float:
    if time is None or best is None or best.time_s is None:
        return 1.0
    low, high = time.low or time.mean, time.high or time.mean
    end = best.time_s.high or best.time_s.mean
    return min(max(math.log(end / low) / math.log(high / low), 0.0), 1.0)


def _at_least(reckoning: Reckoning, plan: StudiedPlan, arm: ArmResult) -> float | None:
    asked = reckoning.study.question
    if len(arm.samples) in (arm.reached, arm.diverged):
        return None
    return asked.length * plan.period_s


def _recommend(
    reckoning: Reckoning,
    plans: Sequence[PlanResult],
    dropped: Sequence[DroppedResult],
    first: PlanResult | None,
) -> Recommendation:
    study, begun = reckoning.study, reckoning.begun
    asked = study.question
    reached = [plan for plan in plans if plan.time_s is not None]
    if all(curve.diverged_at is not None for curve in study.plain.finals()):
        return Recommendation(
            plan=first.plan if reached and first is not None else None,
            why="plain training diverges at all rates that were tried: begin with a lower --lr",
        )
    left = tuple(plan.plan for plan in dropped if plan.overlap)
    if not reached or first is None:
        return Recommendation(
            plan=None,
            open=left,
            why=f"no plan reaches the target in {asked.length} mini-batches: train for longer, "
            "or set another target",
        )
    equal = tuple(plan.plan for plan in reached if plan.equal and plan is not first)
    undecided = tuple(plan.plan for plan in plans if _may_be_faster(plan, first))
    why = _why(asked.seeds, reached, first, equal)
    if undecided:
        why += (
            f"; not decided, since the target isn't reached in what was trained: "
            f"{', '.join(undecided)} (a larger --longer)"
        )
    if left:
        why += f"; not decided within the budget: {', '.join(left)} (a larger --budget)"
    if not begun:
        why += (
            "; training has hardly begun at this target, which lies within the noise of one "
            "mini-batch of the first loss: a longer study may say otherwise (more --steps or "
            "--epochs)"
        )
    return Recommendation(
        plan=first.plan, equal=equal, open=(*undecided, *left), begun=begun, why=why
    )


def _may_be_faster(plan: PlanResult, best: PlanResult) -> bool:
    assert best.time_s is not None
    return plan.at_least_s is not None and plan.at_least_s < best.time_s.mean


def _why(seeds: int, reached: Sequence[PlanResult], best: PlanResult, equal: Sequence[str]) -> str:
    others = [plan for plan in reached if plan is not best]
    if not others:
        return "the only plan that reaches the target"
    if seeds == 1:
        return "one seed has no spread: how sure this is isn't known; study more seeds"
    if equal:
        tied = [best, *(plan for plan in others if plan.plan in equal)]
        # Of those with as little the fastest.
        tied.sort(key=lambda plan: plan.time_s.mean if plan.time_s is not None else math.inf)
        least = min(tied, key=lambda plan: plan.memory_bytes)
        why = f"equal within the seeds' spread: {', '.join(plan.plan for plan in tied)}"
        return why if least is best else f"{why}; of these {least.plan} holds least memory"
    _, name, over = min((p.over_best.mean, p.plan, p.over_best) for p in others if p.over_best)
    return f"the next, {name}, takes {over.mean:.2f} × as long, beyond the seeds' spread"
