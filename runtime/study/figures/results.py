"""What a study says: time to target of each plan, and which system to take.

All are pure functions of the study (`reckoning`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ....planner.comparison.pareto import unbeaten
from .overhead import OverheadFit
from .reckoning import ArmResult, Reckoning
from .rungs import expected, said_in_rungs
from .spread import Spread, spread_of
from .study import StudiedPlan, Study


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
    """Of a whole training, by the rung (`rungs`) and within it by the delays of those that were
    trained to the end (`overhead`); None: it diverged at all rates."""
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


def results_of(study: Study) -> StudyResults:
    """All figures of a study."""
    reckoning = Reckoning(study)
    arms = tuple(map(reckoning.arm_result, study.arms))
    times = {p.name: reckoning.seconds(p.arm, p.period_s) for p in study.plans}
    known = {name: time.mean for name, time in times.items() if time is not None}
    prices = {
        p.name: (known[p.name], float(p.memory_bytes)) for p in study.plans if p.name in known
    }
    best = min(study.plans, key=lambda p: prices.get(p.name, (math.inf, 0)), default=None)
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
    fit = OverheadFit(reckoning) if study.dropped and samples is not None else None
    found = []
    for each in study.dropped:
        last = said_in_rungs(study, each.arm)[-1]
        sound = last.overhead < math.inf
        by_rung = expected(last.overhead, errors.get(last.after, ())) if sound else None
        for plan in each.plans:
            overhead, time = by_rung and _within(by_rung, plan, fit), None
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


def _within(spread: Spread, plan: StudiedPlan, fit: OverheadFit | None) -> Spread:
    """That part of an interval that delays allow; all of it where they say nothing of it."""
    found = fit.at(plan) if fit is not None and not fit.refusal else None
    low, high = spread.low or spread.mean, spread.high or spread.mean
    if found is not None and found.low is not None and low < found.low < high:
        low = found.low
    if found is not None and found.high is not None and low < found.high < high:
        high = found.high
    return Spread(mean=min(max(spread.mean, low), high), low=low, high=high)


def _expected_s(dropped: DroppedResult, period_s: float) -> float:
    return math.inf if dropped.overhead is None else dropped.overhead.mean * period_s


def _overlap(time: Spread | None, best: PlanResult | None) -> float:
    if time is None or best is None or best.time_s is None:
        return 1.0
    low, high = time.low or time.mean, time.high or time.mean
    end = best.time_s.high or best.time_s.mean
    return min(max(math.log(end / low) / math.log(high / low), 0.0), 1.0)


def _at_least(reckoning: Reckoning, plan: StudiedPlan, arm: ArmResult) -> float | None:
    if len(arm.samples) in (arm.reached, arm.diverged):
        return None
    a_sample = plan.period_s / reckoning.study.question.mini_batch
    if arm.at_least is None or reckoning.plain_samples is None:
        # Plain training doesn't get there: nothing to pair with.
        least = reckoning.least(reckoning.study.arm(plan.arm), reckoning.target)
        return spread_of(least).mean * a_sample
    return arm.at_least * reckoning.plain_samples * a_sample


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
            f"{', '.join(undecided)} (a larger --longest)"
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
