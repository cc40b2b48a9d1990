"""Overhead as a function of delays: what a study's trainings say of delays it didn't train with.

What training needs in samples, over plain training, grows with how late its gradients are. Of all
systems whose weights follow the same rules a study gives one function of one number, made of the
stages' delays; it never falls. The number is that of a few (`_NUMBERS`) by which trainings are
foretold best by the others. The logarithms of the ratios, means over seeds, are fitted by isotonic
regression (scipy). Delays of 0 are plain training: their overhead is 1, or what plain training of
the same micro-batches needs. A training that never reached the target isn't left out: of it is
known that its ratio is above that of its length, so only a fit below that is an error.

Between two trainings the function is a straight line, and its interval all that rising allows: from
the next with smaller delays to the next with larger ones that reached the target, and beyond these
ends t·√(s²/n + r²): s² the variance between a training's n seeds, pooled; r² the mean square of how
far each training lies outside of what the others allow it (leave one out), or, where one seed has
no s, from what they foretell; t Student's 97.5 % quantile, of the degrees of freedom that such a
sum of variances has (Welch-Satterthwaite). Of trainings that didn't reach the target, those that
contradict the others count in r² alone: the rest can't be off. Beyond the largest delays that
reached the target there is a lower end alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul, sub
from statistics import fmean, variance
from typing import NamedTuple

import msgspec

from ....planner.systems.variants import variant_named
from ....profiles.errors import UserError
from .reckoning import Reckoning
from .spread import t_quantile
from .study import PLAIN, StudiedPlan, Study, StudyArm, trains_plainly

FEWEST = 3
"""Trainings with delays, one of whose kind there is another: fewer say nothing of others."""


class LatePlan(NamedTuple):
    """What an overhead goes with, of a plan that wasn't studied."""

    variant: str
    update_every: int
    micro_batches: int
    delays: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    cure: str = ""


class TrainedWith(NamedTuple):
    """What a study has trainings with: mini-batches per update; micro-batches, where these count;
    a cure."""

    update_every: int
    micro_batches: int | None
    cure: str


Late = StudiedPlan | LatePlan


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An overhead, with its 95 % interval."""

    mean: float
    """Where the target isn't reached: what is known to be needed at the least."""
    low: float | None
    """None: nothing bounds it, or there is one seed."""
    high: float | None
    """None: as `low`, or no training with such delays reached the target."""
    reached: bool
    """Whether a training with delays as large reached the target."""
    exact: bool
    """Whether the study trained with these very delays, and so needed no fit."""


class _Rules(NamedTuple):
    """What overheads depend on besides delays: trainings with the same share a function."""

    flushes: bool = False
    backward: str = "forward"
    prediction: str = ""
    horizon: str = ""
    update: str = "optimizer"
    outside: str = ""
    cure: str = ""
    update_every: int = 1
    micro_batches: int = 0
    """Where a layer mixes the samples of a batch; else 0."""

    @property
    def plain_without_delay(self) -> bool:
        """Whether it is plain training where there is no delay."""
        return self.update == "optimizer" and not self.outside


def _rules_of(plan: Late, mixes: bool) -> _Rules:
    system = variant_named(plan.variant)
    return _Rules(
        flushes=system.flushes,
        backward=system.backward_weights,
        prediction=system.prediction,
        horizon=system.horizon,
        update=system.update_rule,
        outside="" if system.outside is None else plan.variant,
        cure=plan.cure or "",
        update_every=plan.update_every,
        micro_batches=plan.micro_batches if mixes and plan.micro_batches > 1 else 0,
    )


class _Trained(NamedTuple):
    """A training with delays.

    Attributes:
        weights: of the stages, 1 in all.
        logs: by seed, of its samples over plain training's; of its length where it doesn't get
            to the target.
        reached: whether all seeds do.
    """

    arm: StudyArm
    rules: _Rules
    delays: Sequence[int]
    weights: Sequence[float]
    logs: tuple[float, ...]
    reached: bool


_Number = Callable[[Sequence[int], Sequence[float]], float]
"""Of delays by stage, and weights of the stages."""

_NUMBERS: dict[str, _Number] = {
    "the mean delay of a parameter": lambda delays, weights: sum(map(mul, delays, weights)),
    "the mean log(1 + delay) of a parameter": lambda delays, weights: sum(
        map(mul, map(math.log1p, delays), weights)
    ),
    "the mean delay of a stage": lambda delays, _: fmean(delays),
    "the largest delay": lambda delays, _: float(max(delays)),
}
"""By what messages call them; of equally good ones the first is taken."""


class _LeftOut(NamedTuple):
    """How far a training is from others of its kind: logarithms.

    Attributes:
        miss: from what they foretell.
        beyond: what they allow.
        told: whether it could be off: it reached the target, or has a bound that contradicts them.
    """

    miss: float
    beyond: float
    told: bool


class _Knot(NamedTuple):
    """A number of delays that was trained with.

    Attributes:
        height: of the function there: a logarithm.
        reached: whether all that was trained there reached the target.
    """

    at: float
    height: float
    reached: bool


@dataclass(frozen=True)
class _Allowed:
    """What trainings allow the function's value to be. None: anything."""

    low: float | None
    height: float | None
    high: float | None


@dataclass(frozen=True)
class _Function:
    """A function that never falls, through knots by ascending number."""

    knots: tuple[_Knot, ...]

    def at(self, number: float) -> _Allowed:
        """At a number: between its neighbours."""
        below = bisect_right(self.knots, number, key=lambda knot: knot.at)
        low = self.knots[below - 1] if below else None
        above = bisect_left(self.knots, number, key=lambda knot: knot.at)
        high = next((knot for knot in self.knots[above:] if knot.reached), None)
        if low is None or high is None:
            some = low or high
            return _Allowed(
                None if low is None else low.height,
                None if some is None else some.height,
                None if high is None else high.height,
            )
        after = self.knots[min(below, len(self.knots) - 1)]
        share = (number - low.at) / (after.at - low.at) if after.at > low.at else 0.0
        height = low.height + share * (after.height - low.height)
        return _Allowed(low.height, height, high.height)


def _fitted(
    numbers: Sequence[float], trained: Sequence[_Trained], start: float | None
) -> _Function:
    """The function by isotonic regression. `start`: at a number of 0, if it is known.

    A log that is but a lower bound pulls the function up to it, and no further: each round fits to
    the larger of bound and function, which makes the sum of one-sided squares ever smaller.
    """
    from scipy.optimize import isotonic_regression

    at = sorted(set(numbers))
    logs: list[list[tuple[float, bool]]] = [[] for _ in at]
    for number, each in zip(numbers, trained, strict=True):
        logs[bisect_left(at, number)].append((fmean(each.logs), each.reached))
    heights = [fmean(log for log, _ in group) for group in logs]
    least = -math.inf if start is None else start
    for _ in range(_ROUNDS):
        means = [
            fmean(log if reached else max(log, height) for log, reached in group)
            for group, height in zip(logs, heights, strict=True)
        ]
        before, found = heights, isotonic_regression(means, weights=[len(g) for g in logs]).x
        heights = [max(float(height), least) for height in found]
        if max(map(abs, map(sub, heights, before)), default=0.0) < _SMALL:
            break
    knots = [
        _Knot(number, height, all(reached for _, reached in group))
        for number, height, group in zip(at, heights, logs, strict=True)
    ]
    if start is not None:
        knots = [_Knot(0.0, start, True), *(knot for knot in knots if knot.at)]
    return _Function(tuple(knots))


_ROUNDS, _SMALL = 1000, 1e-6


def fit_overheads(study: Study) -> OverheadFit:
    """The overheads of a study. Raises UserError where plain training doesn't reach its target."""
    reckoning = Reckoning(study)
    if reckoning.plain_samples is None:
        raise UserError(
            "plain training doesn't reach the target with all seeds, so there is nothing to "
            "compare with: train for longer, or set another target"
        )
    return OverheadFit(reckoning)


class OverheadFit:
    """A study's overheads as functions of delays.

    Attributes:
        target: the level that counts.
        plain_samples: that plain training needs to it.
        begun: whether its loss has fallen by more than its noise by then (`Reckoning.begun`); else
            nothing is known of any delay.
        number: what of the delays they are functions of, in words.
        trainings: that were left out in turn: those that have others of their kind.
        told: those of them that others can be wrong about (`_LeftOut`).
        miss: how far they are from what the others foretell; the root of the mean square, of
            logarithms.
        residual: how far they are outside of what the others allow: r.
    """

    def __init__(self, reckoning: Reckoning) -> None:
        """Plain training has to reach the target with all seeds."""
        self._reckoning, self._study = reckoning, reckoning.study
        self.target, self.plain_samples = reckoning.target, reckoning.plain_samples or math.nan
        self.begun, self._mixes = reckoning.begun, self._study.question.mixes
        self._trained = self._trainings()
        self._starts = self._plain_trainings()
        errors = {name: self._errors(number) for name, number in _NUMBERS.items()}
        self.number = min(errors, key=lambda name: sum(each.miss**2 for each in errors[name]))
        self._number = _NUMBERS[self.number]
        self.trainings = len(errors[self.number])
        told = [each for each in errors[self.number] if each.told]
        self.told = len(told)
        self.miss = _root_mean_square([each.miss for each in told])
        self.residual = _root_mean_square([each.beyond for each in told])
        self._half = self._half_width()
        self._functions = {
            rules: self._function([t for t in self._trained if t.rules == rules], self._number)
            for rules in {*(t.rules for t in self._trained), *self._starts}
        }

    @property
    def refusal(self) -> str:
        """Why overheads of delays that weren't trained can't be told; empty: they can."""
        if self.trainings >= FEWEST:
            return ""
        return (
            f"{self.trainings} trainings with delays are too few to say what others need, "
            f"{FEWEST} at the least of systems that have another like them: study more plans"
        )

    def at(self, plan: Late) -> Estimate | None:
        """The overhead of a plan; None: nothing with its rules was trained.

        A plan of the study's own systems, stages, micro-batches and delays has what was trained.
        """
        exact = self._exact(plan)
        if exact is not None:
            return exact if self.begun or not any(plan.delays or ()) else _unsure(exact)
        function = self._functions.get(rules := _rules_of(plan, self._mixes))
        if function is None or plan.delays is None or plan.parameter_bytes is None:
            return None
        number = self._number(plan.delays, _shares(plan.parameter_bytes))
        found = self._estimate(rules, function.at(round(number, 9)))
        return found if self.begun else _unsure(found)

    def least(self, plan: Late) -> float:
        """The lower end of the overheads of all plans with these rules and no smaller delays at any
        stage, however parameters lie; 0: nothing bounds them."""
        none = None if plan.delays is None or any(plan.delays) else self._exact(plan)
        if none is not None:
            return none.low or none.mean
        function = self._functions.get(rules := _rules_of(plan, self._mixes))
        if function is None or plan.delays is None or self.refusal or not self.begun:
            return 0.0
        ends = [
            self._number(plan.delays, [float(k == s) for k in range(len(plan.delays))])
            for s in range(len(plan.delays))
        ]
        return self._estimate(rules, function.at(min(ends))).low or 0.0

    def arm_like(self, plan: LatePlan) -> StudyArm:
        """What was trained that a plan has its learning rate of: its own training, or of those with
        its rules that with the nearest delays; else plain training."""
        own = self.arm_of(plan)
        if own is not None:
            return self._study.arm(own)
        rules, number = _rules_of(plan, self._mixes), self._number
        asked = number(plan.delays, _shares(plan.parameter_bytes))
        alike = [each for each in self._trained if each.rules == rules]
        apart = [abs(number(each.delays, each.weights) - asked) for each in alike]
        return alike[apart.index(min(apart))].arm if alike else self._study.plain

    def trained_with(self, system: str) -> list[TrainedWith]:
        """Of all plans of a system that this says something of; those without a cure first."""
        asked = LatePlan(system, 1, 1, (), ())
        own = _rules_of(asked, self._mixes)
        alike = {
            (rules.cure, rules.update_every, rules.micro_batches)
            for rules in self._functions
            if rules._replace(cure="", update_every=1, micro_batches=0) == own
        }
        if variant_named(system).is_plain_training:
            plain = (arm for arm in self._study.arms if arm.kind == "plain")
            alike = {("", arm.update_every, arm.micro_batches) for arm in plain}
        return [
            TrainedWith(every, max(n, 1) if self._mixes else None, cure)
            for cure, every, n in sorted(alike)
        ]

    def _half_width(self) -> float:
        """Of an interval, beyond what rising allows; infinite where nothing says how far one
        training may be off."""
        own = [t.logs for t in self._trained if t.reached and len(t.logs) > 1]
        seeds = self._study.question.seeds
        if not own:
            off = self.residual if seeds > 1 else self.miss or math.inf
            return t_quantile(max(self.told, 1)) * off
        of_seeds = fmean(map(variance, own)) / seeds
        parts = [(of_seeds, sum(len(logs) - 1 for logs in own)), (self.residual**2, self.told)]
        total = of_seeds + self.residual**2
        squares = sum(part**2 / freedom for part, freedom in parts if part)
        return t_quantile(max(int(total**2 / squares), 1)) * math.sqrt(total) if total else 0.0

    def _estimate(self, rules: _Rules, allowed: _Allowed) -> Estimate:
        # No delay has an interval of its own: it is what others are compared with.
        low, high, start = allowed.low, allowed.high, self._starts.get(rules, -math.inf)
        sure = self._half < math.inf
        return Estimate(
            mean=math.exp(allowed.height or 0.0),
            low=None if low is None else math.exp(max(low - self._half, start)) or None,
            high=None if high is None or not sure else math.exp(high + self._half),
            reached=high is not None,
            exact=False,
        )

    # What was trained ----------------------------------------------------------------------------

    def _trainings(self) -> list[_Trained]:
        """Of pipelines that don't flush, and of uniform delays."""
        plans = {plan.arm: plan for plan in self._study.plans}
        found = []
        for arm in self._study.arms:
            plan, logs = plans.get(arm.name), self._logs(arm)
            if arm.kind == "uniform delay":
                rules = _Rules(update_every=arm.update_every)
                found.append(_Trained(arm, rules, (arm.delay,), (1.0,), *logs))
            elif arm.kind == "pipeline" and plan and plan.delays and plan.parameter_bytes:
                rules, shares = _rules_of(plan, self._mixes), _shares(plan.parameter_bytes)
                found.append(_Trained(arm, rules, plan.delays, shares, *logs))
        return found

    def _logs(self, arm: StudyArm) -> tuple[tuple[float, ...], bool]:
        reckoning = self._reckoning
        plain = [s or math.nan for s in reckoning.samples(PLAIN, reckoning.target)]
        pairs = zip(reckoning.least(arm, reckoning.target), plain, strict=False)
        return (
            tuple(math.log(mine / its) for mine, its in pairs),
            None not in reckoning.samples(arm.name, reckoning.target),
        )

    def _plain_trainings(self) -> dict[_Rules, float]:
        """Without delays: the functions' values at 0, by what they depend on."""
        of = {
            (arm.update_every, arm.micro_batches): fmean(logs)
            for arm in self._study.arms
            if arm.kind == "plain"
            for logs, reached in [self._logs(arm)]
            if reached
        }
        return {
            rules: of[rules.update_every, rules.micro_batches]
            for rules in {t.rules for t in self._trained}
            if rules.plain_without_delay and (rules.update_every, rules.micro_batches) in of
        }

    def _function(self, trained: Sequence[_Trained], number: _Number) -> _Function:
        # What the sequence of additions alone makes isn't another number.
        numbers = [round(number(each.delays, each.weights), 9) for each in trained]
        return _fitted(numbers, trained, self._starts.get(trained[0].rules))

    def _errors(self, number: _Number) -> list[_LeftOut]:
        """Leaving out each training in turn that has others of its kind: how far it is from what
        these foretell, and from what they allow."""
        found = []
        for k, left_out in enumerate(self._trained):
            others = [
                each
                for j, each in enumerate(self._trained)
                if j != k and each.rules == left_out.rules
            ]
            if not others:
                continue
            at = round(number(left_out.delays, left_out.weights), 9)
            allowed = self._function(others, number).at(at)
            mean, low, told, high = fmean(left_out.logs), allowed.low, allowed.height, allowed.high
            above = 0.0 if high is None else mean - high
            below = 0.0 if low is None or not left_out.reached else low - mean
            miss = 0.0 if high is None or told is None else mean - told
            if not left_out.reached:
                miss = max(miss, 0.0)
            miss, beyond = max(abs(miss), above, below), max(above, below, 0.0)
            found.append(_LeftOut(miss, beyond, left_out.reached or miss > 0))
        return found

    def _exact(self, plan: Late) -> Estimate | None:
        """What was trained of a plan with the same delays; it reaches the target where more than
        half of the seeds do, without an upper end where not all do."""
        name = self.arm_of(plan)
        if name is None:
            return None
        spread = self._reckoning.overhead(name, self._reckoning.target)
        if spread is not None:
            return Estimate(
                mean=spread.mean, low=spread.low, high=spread.high, reached=True, exact=True
            )
        logs, _ = self._logs(self._study.arm(name))
        samples = self._reckoning.samples(name, self.target)
        pairs = list(zip(logs, samples, strict=True))
        known = [log for log, own in pairs if own is not None]
        least, reached = fmean(logs), 2 * len(known) > len(logs)
        # Those that don't get there count as the slowest that do, if they aren't slower already.
        slowest = max(known) if reached else -math.inf
        mean = fmean(max(log, slowest) if own is None else log for log, own in pairs)
        return Estimate(
            mean=math.exp(mean), low=math.exp(least), high=None, reached=reached, exact=True
        )

    def arm_of(self, plan: Late) -> str | None:
        """The training that is a plan's own; None: there is none.

        A pipeline that flushes is plain training, but for one whose updates rules from outside have
        a part in; and so is one without delays, unless it was studied with clipping by stages.
        """
        if plan.delays is None:
            return None
        studied = (
            other.arm
            for other in self._study.plans
            if other.variant == plan.variant
            and (other.update_every, other.micro_batches) == (plan.update_every, plan.micro_batches)
            and (other.delays, other.cure or "") == (plan.delays, plan.cure or "")
        )
        own = next(studied, None)
        if own is None and trains_plainly(plan.variant, plan.delays):
            n = plan.micro_batches if self._mixes and plan.micro_batches > 1 else 0
            plain = (a for a in self._study.arms if a.kind == "plain")
            wanted = (plan.update_every, n)
            same = (a.name for a in plain if (a.update_every, a.micro_batches) == wanted)
            return next(same, None)
        return own


def _unsure(found: Estimate) -> Estimate:
    """As good as not reached: what is ahead where training has hardly begun is mostly chance."""
    return msgspec.structs.replace(found, low=None, high=None, reached=False)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values)) if values else 0.0


def _shares(parameter_bytes: Sequence[int]) -> tuple[float, ...]:
    """Of the stages, in all parameters; equal ones where there are none."""
    total = sum(parameter_bytes)
    return tuple(b / total if total else 1 / len(parameter_bytes) for b in parameter_bytes)
