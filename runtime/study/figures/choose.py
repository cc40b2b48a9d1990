"""Time to target of plans that a study wasn't made with: another cluster's, or a search's.

What a system needs in samples goes with its version differences, so a plan has the figures of one
of the study's with the same system, number of stages, micro-batches and differences by stage; or,
about, of the nearest with the same system and stages. Pipelines that flush have plain training's,
but for those whose updates rules from outside have a part in.
The study's figure in samples, times the plan's own period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from ....planner.comparison.pareto import ParetoPoint, unbeaten
from ....planner.evaluate import Evaluation, gap_between, make_plan
from ....planner.plan import Plan
from ....planner.search.answer.recheck import question_of, signed
from ....planner.systems.variants import variant_named
from ....profiles.errors import UserError
from ....profiles.profile import Profile
from .results import Reckoning
from .spread import Spread
from .study import PLAIN, StudiedPlan, Study


@dataclass(frozen=True)
class TimeForecast:
    """A plan's time to target by a study.

    Attributes:
        exact: the study trained with these version differences; else the nearest.
    """

    time_s: Spread
    overhead: Spread | None
    exact: bool


class StudyFigures:
    """A study that plans are judged by. Its curves are read once."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.target = (reckoning := Reckoning(study)).target
        self._reckoning = reckoning

    def check(self, fingerprint: str, mini_batch: int, where: str) -> None:
        """Raise UserError where the study is of another model or mini-batch."""
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

    def trained(self, variant: str) -> bool:
        """Whether the study has trained some plan of a system."""
        return any(plan.variant == variant for plan in self.study.plans)

    def predict_time(
        self, variant: str, update_every: int, found: Evaluation
    ) -> TimeForecast | None:
        """The time to target; None: the study has no figure for it, or it isn't reached."""
        arm, exact = self._arm(variant, update_every, found)
        if arm is None:
            return None
        time = self._reckoning.seconds(arm, found.prediction.period_s)
        overhead = self._reckoning.overhead(arm, self.target)
        return None if time is None else TimeForecast(time, overhead, exact)

    def _arm(self, variant: str, update_every: int, found: Evaluation) -> tuple[str | None, bool]:
        stages, n = len(found.stages), found.micro_batches
        system, mixes = variant_named(variant), self.study.question.mixes
        one_stage = stages == update_every == 1 and not mixes
        if one_stage and replace(system, flushes=True).is_plain_training:
            # Without versions to wait for, any system is as if it flushed.
            return PLAIN, True
        if system.is_plain_training:
            for arm in self.study.arms:
                one_by_one = n if mixes and n > 1 else 0
                same = (arm.micro_batches, arm.update_every) == (one_by_one, update_every)
                if arm.kind == "plain" and same:
                    return arm.name, True
            return None, False
        near = [
            plan
            for plan in self.study.plans
            if (plan.variant, plan.stages, plan.update_every) == (variant, stages, update_every)
        ]
        if not near:
            return None, False
        own = tuple(stage.version_difference for stage in found.prediction.stages)
        best = min(near, key=lambda plan: _apart(plan, own, n))
        return best.arm, _apart(best, own, n) == (0, 0)


def _apart(plan: StudiedPlan, differences: Sequence[int], n: int) -> tuple[int, int]:
    pairs = zip(plan.version_differences, differences, strict=True)
    return sum(abs(a - b) for a, b in pairs), abs(plan.micro_batches - n)


@dataclass(frozen=True)
class TargetPoint:
    """A plan that a search has seen, with its time to target.

    Attributes:
        on_front: no other is as good in time to target and memory, and better in one.
    """

    point: ParetoPoint
    forecast: TimeForecast
    on_front: bool


def by_time_to_target(
    points: Sequence[ParetoPoint], figures: StudyFigures, update_every: int
) -> list[TargetPoint]:
    """The plans that the study has a figure for, by ascending time to target; of equal ones the one
    with less memory, then the one whose very differences were studied."""
    found = [
        (point, forecast)
        for point in points
        if (forecast := figures.predict_time(point.variant, update_every, point.evaluation))
        is not None
    ]
    prices = {
        str(k): (forecast.time_s.mean, float(point.memory_bytes))
        for k, (point, forecast) in enumerate(found)
    }
    front = unbeaten(prices)
    all_points = [TargetPoint(*pair, str(k) in front) for k, pair in enumerate(found)]
    return sorted(
        all_points,
        key=lambda t: (t.forecast.time_s.mean, t.point.memory_bytes, not t.forecast.exact),
    )


def chosen_by_study(profile: Profile, own: Plan, best: TargetPoint) -> Plan:
    """The plan file of the best by a study. `own`: the best of its system, by period."""
    found = best.point.evaluation
    if found.stages == own.stages and found.micro_batches == own.micro_batches:
        return own
    question = question_of(own, profile)
    report = msgspec.structs.replace(
        own.solver,
        fastest=msgspec.UNSET,
        objective_s=found.prediction.period_s,
        gap=gap_between(found.prediction.period_s, own.solver.bound_s),
        optimal=False,
    )
    return signed(make_plan(question, found, report), question)
