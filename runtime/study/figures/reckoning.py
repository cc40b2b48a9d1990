"""An arm's samples to a level, and its overhead over plain training.

The overhead of an arm is, seed by seed, its samples to the target over plain training's with the
same seed: the same weights and the same samples in the same sequence. The predicted time to target
of a plan is

    overhead × samples of plain training (geometric mean over seeds) × period / mini-batch

with the interval of the overhead (`spread`): what all arms of a seed have in common is in no
comparison. Pipelines that flush are plain training: their overhead is 1 and has no spread.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from .curves import noise_of, points_of, samples_to, smoothed, value_at
from .spread import Spread, spread_of
from .study import PLAIN, RISES, StudiedPlan, Study, StudyArm

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
    """What the overhead is more than, where the target isn't reached by all seeds: the others count
    with what they trained. None where they all diverged, too."""
    diverged: int = 0
    """Final trainings that did."""
    by_level: tuple[OverheadAt, ...] = ()


class Reckoning:
    """The figures of one study; curves are smoothed once.

    Attributes:
        target: the level that counts.
    """

    def __init__(self, study: Study) -> None:
        self.study, asked = study, study.question
        self._smooth = {
            arm.name: [
                smoothed(points_of(curve, asked.metric, asked.mini_batch)) for curve in arm.finals()
            ]
            for arm in study.arms
        }
        self.target = self.level(asked.steps) if asked.target is None else asked.target

    def level(self, steps: float) -> float:
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

    def least(self, arm: StudyArm, level: float) -> list[float]:
        """Samples to a level, by seed; where it isn't reached those trained with: it needs more."""
        most = float(arm.length * self.study.question.mini_batch)
        return [most if s is None else s for s in self.samples(arm.name, level)]

    def overhead(self, arm: str, level: float) -> Spread | None:
        """Over plain training at a level; None: some seed of either doesn't reach it."""
        known = self._ratios(arm, PLAIN, level)
        if known is None:
            return None
        # With one seed, too, it is known to be as long as itself.
        return Spread(mean=1.0, low=1.0, high=1.0) if arm == PLAIN else spread_of(known)

    def _ratios(self, one: str, other: str, level: float) -> list[float] | None:
        """Samples of an arm over another's, by seed; None: not all get there."""
        # Plain training may have more seeds.
        pairs = list(zip(self.samples(one, level), self.samples(other, level), strict=False))
        known = [a / b for a, b in pairs if a is not None and b]
        return known if len(known) == len(pairs) else None

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
        samples = self.samples(arm.name, self.target)
        missed, plain = None in samples, self.samples(PLAIN, self.target)
        diverged = sum(curve.diverged_at is not None for curve in arm.finals())
        overhead = None if missed else self.overhead(arm.name, self.target)
        pairs = zip(self.least(arm, self.target), plain, strict=False)
        ratios = [a / b for a, b in pairs if b]
        return ArmResult(
            arm=arm.name,
            samples=samples,
            reached=sum(s is not None for s in samples),
            overhead=overhead,
            at_least=(
                spread_of(ratios).mean
                if missed and self.plain_samples and diverged < len(samples)
                else None
            ),
            diverged=diverged,
            by_level=tuple(self._at(arm.name, share) for share in SHARES),
        )

    def _at(self, arm: str, share: float) -> OverheadAt:
        steps = share * self.study.question.steps
        level = self.level(steps)
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
        known = self._ratios(one.arm, other.arm, self.target)
        return None if known is None else spread_of(known) * (one.period_s / other.period_s)
