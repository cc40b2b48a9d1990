"""Which trainings a study needs, by what those that are done gave.

Without a budget every arm finds its rate in trainings of the whole length (`figures.tuning`), and
trains with all seeds. With one, rungs of short trainings (`figures.rungs`) say which arm begins;
after it that one is trained to the end whose interval overlaps the best's most, until none does or
the budget is over. Its rates are tried anew at the whole length, around the rung's best: short
trainings tend to favour rates that are too low.

Samples aren't time: while a pipeline with a flush trains once, one with a fifth of its period does
five times. So a plan that doesn't reach the target, but in less time than the best takes to it,
trains anew for twice as long, or as long as decides it; the one with the least such time first,
until no plan is open in that way, up to `StudyQuestion.longest`, or the budget.

What is due follows from curves alone, never from what came first: the study is the same whatever
the number of processes, and however often it was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from ....profiles.errors import UserError
from ..figures.results import StudyResults, results_of
from ..figures.rungs import RATES
from ..figures.spread import Spread
from ..figures.study import Budget, Curve, DroppedArm, StudiedPlan, Study, StudyArm, StudyQuestion
from ..figures.tuning import (
    Trial,
    TuningGrid,
    at_edge,
    badness_of,
    best_trial,
    candidates,
    level_of,
    next_trials,
    together,
)
from .race import Race, Wanted
from .work import ArmSpec, Asked


@dataclass(frozen=True)
class _Effort:
    """How an arm is trained to the end.

    Attributes:
        grid: of its rates.
        confirm: of these, so many train with all seeds.
        length: mini-batches of its trainings.
        tune_length: of those that rates are judged by.
    """

    grid: TuningGrid
    confirm: int
    length: int
    tune_length: int


def _effort(asked: StudyQuestion, rate: float, tune: int, confirm: int, length: int = 0) -> _Effort:
    """Around a rate that is known to be good for shorter trainings."""
    grid = TuningGrid(rate, asked.factor, tune, asked.warmups, halves=False)
    same = asked.tune_length == asked.length
    length = length or asked.length
    return _Effort(grid, confirm, length, length if same else asked.tune_length)


def _cost(asked: StudyQuestion, effort: _Effort) -> float:
    """At most, in trainings of the whole length."""
    # The best trials are among the others.
    seeds = asked.seeds - (effort.tune_length == effort.length)
    mini_batches = effort.grid.budget * effort.tune_length + effort.confirm * seeds * effort.length
    return mini_batches / asked.length


def _whole(asked: StudyQuestion) -> float:
    """What an arm takes without a budget."""
    return _cost(asked, _effort(asked, asked.rate, asked.tune, asked.confirm))


def _few(asked: StudyQuestion) -> int:
    """Trials of rates where as many as are asked for would be too many."""
    return min(asked.tune, max(RATES, len(asked.warmups)))


def _to_go_on(study: Study, results: StudyResults, longest: float) -> tuple[StudyArm, int] | None:
    """What trains for longer, and for how many mini-batches: of the plans that don't reach the
    target, but in less time than the best takes to it, the one with the least; None: there is none.
    """
    asked = study.question
    best_s = min((p.time_s.mean for p in results.plans if p.time_s is not None), default=math.inf)
    for plan in sorted(results.plans, key=lambda plan: plan.at_least_s or math.inf):
        arm = study.arm(plan.arm)
        sets_target = arm is study.plain and asked.target is None
        if sets_target or plan.at_least_s is None or plan.at_least_s >= best_s:
            continue
        found = results.arm(plan.arm)
        # Where some seeds reach it, the others' share of the mean is so much smaller.
        share = len(found.samples) / (len(found.samples) - found.reached)
        decided = arm.length * (best_s / plan.at_least_s) ** share + 1
        length = min(2 * arm.length, longest, decided)
        if length >= arm.length + 1:
            return arm, int(length)
    return None


ENOUGH = 1.05
"""Plans that differ by less, by the interval of their ratio, needn't be told apart."""


def _wide(over: Spread) -> bool:
    return over.high is not None and over.high > ENOUGH and over.high > over.mean


class Choosing:
    """What is due, and the study once nothing is.

    Attributes:
        notes: what was decided, in lines for people.
    """

    def __init__(
        self,
        question: StudyQuestion,
        arms: Sequence[ArmSpec],
        plans: Sequence[StudiedPlan],
        curve_of: Callable[[Asked], Curve | None],
        seconds_of: Callable[[Asked], float] = lambda asked: 0.0,
    ) -> None:
        """
        Args:
            plans: each names its arm.
            curve_of: a training that is done; None: it isn't.
            seconds_of: what it took.
        """
        self._question, self._arms, self._plans = question, arms, plans
        self.notes: list[str] = []
        self._wanted = Wanted(curve_of)
        self._seconds_of = seconds_of
        self._found: Study | None = None
        self._level: float | None = None
        self._efforts: dict[int, _Effort] = {}
        self._seeds = [question.seeds] * len(arms)
        self._budget, budget = math.inf, question.budget
        self._race: Race | None = None
        if not isinstance(budget, msgspec.UnsetType):
            self._budget = budget.trainings or math.inf
            whole = len(arms) * _whole(question)
            if len(arms) > 1 and (budget.trainings is None or whole > budget.trainings):
                self._race = Race(question, [arm.name for arm in arms], plans, self._wanted)
                self._check_budget()
        if self._race is None:
            grid = TuningGrid(question.rate, question.factor, question.tune, question.warmups)
            effort = _Effort(grid, question.confirm, question.length, question.tune_length)
            self._efforts = dict.fromkeys(range(len(arms)), effort)

    @property
    def mini_batches(self) -> float:
        """Of all trainings, about."""
        asked = self._question
        if self._race is None:
            return len(self._arms) * _whole(asked) * asked.length
        return (self._budget if self._budget < math.inf else self._least(self._race)) * asked.length

    def due(self) -> list[Asked]:
        """Trainings that are due."""
        self._wanted.due.clear()
        while self._found is None and self._raced():
            study = self._trained()
            if study is None:
                break
            if not self._go_on(study):
                self._found = study
        return list(self._wanted.due)

    def _raced(self) -> bool:
        """Whether all rungs are done, if there are any."""
        race = self._race
        while race is not None and not race.over:
            first, length = not race.rates, race.length
            line = race.go_on()
            if line is None:
                return False
            self.notes.append(line)
            if first:
                took = fmean(map(self._seconds_of, self._wanted.met))
                self._check_budget(took * self._question.length / length)
        if race is not None and not self._efforts:
            self._spend(0, race.first)
        return True

    def study(self) -> Study:
        """The study; nothing is due any more."""
        assert self._found is not None
        return self._found

    def _go_on(self, study: Study) -> bool:
        """Have the arm trained to the end whose interval overlaps the best plan's most. False: none
        does, or the budget is over."""
        results = results_of(study)
        first = next(iter(results.dropped), None)
        if first is None or not first.overlap:
            return self._further(study, results) or (
                self._budget < math.inf and self._more_seeds(results)
            )
        arm = next(k for k, arm in enumerate(self._arms) if arm.name == first.arm)
        if not self._spend(arm):
            self.notes.append(f"the budget is over; {first.plan} may be the best, too")
            return False
        self.notes.append(f"next {first.arm}, which may be the best")
        return True

    def _further(self, study: Study, results: StudyResults) -> bool:
        """Have a plan trained for longer that may be the best though it doesn't reach the target.
        False: there is none, or the budget is over."""
        asked = self._question
        longest = math.inf if self._budget < math.inf else 0.0
        if not isinstance(asked.longest, msgspec.UnsetType):
            longest = asked.longest * asked.steps
        found = _to_go_on(study, results, longest)
        if found is None:
            return False
        arm, length = found
        effort = _effort(asked, arm.rate, _few(asked), asked.confirm, length)
        if self._spent + _cost(asked, effort) > self._budget + 1e-9:
            self.notes.append(f"the budget is over; {arm.name} may be the best, too")
            return False
        self._efforts[next(k for k, a in enumerate(self._arms) if a.name == arm.name)] = effort
        self.notes.append(f"{arm.name} may be the best: for {length} mini-batches")
        return True

    def _more_seeds(self, results: StudyResults) -> bool:
        """Have what isn't apart from the best plan trained with one seed more, as far as they may
        differ by more than `ENOUGH`. False: nothing is so, or the budget is over."""
        best = next((p for p in results.plans if p.plan == results.recommendation.plan), None)
        rivals = [
            plan
            for plan in results.plans
            if plan.equal and plan is not best and plan.over_best and _wide(plan.over_best)
        ]
        if best is None or not rivals:
            if results.dropped:
                self.notes.append("no plan that was dropped may be the best")
            return False
        names = {self._arms[0].name, best.arm, *(plan.arm for plan in rivals)}
        arms = [k for k, arm in enumerate(self._arms) if arm.name in names]
        seeds = max(self._seeds[k] for k in arms) + 1
        which = ", ".join(plan.plan for plan in (best, *rivals))
        whole = self._question.length
        more = sum((seeds - self._seeds[k]) * self._efforts[k].length / whole for k in arms)
        if self._spent + more > self._budget + 1e-9:
            self.notes.append(f"the budget is over; {which} are equal so far")
            return False
        self.notes.append(f"another seed, since {which} are equal so far")
        for k in arms:
            self._seeds[k] = seeds
        return True

    # The budget, in trainings of the whole length -----------------------------------------------

    @property
    def _spent(self) -> float:
        return sum(each.length for each in self._wanted.met) / self._question.length

    def _spend(self, *arms: int) -> bool:
        """Train arms to the end, as well as the budget allows; or not."""
        asked, race = self._question, self._race
        assert race is not None
        for tune, confirm in ((asked.tune, asked.confirm), (_few(asked), 1)):
            efforts = {k: _effort(asked, race.rates[k], tune, confirm) for k in arms}
            cost = sum(_cost(asked, effort) for effort in efforts.values())
            if self._spent + cost <= self._budget + 1e-9:
                self._efforts |= efforts
                return True
        return False

    def _least(self, race: Race) -> float:
        """What a race takes at least: its rungs, plain training and one arm."""
        asked = self._question
        arm = _cost(asked, _effort(asked, asked.rate, _few(asked), 1))
        return race.mini_batches / asked.length + 2 * arm

    def _check_budget(self, each_s: float = 0.0) -> None:
        """Raise UserError where the budget is too small for the rungs and what comes after them, at
        `each_s` seconds for a training of the whole length."""
        budget, race = self._question.budget, self._race
        assert isinstance(budget, Budget)
        assert race is not None
        least = self._least(race)
        if budget.seconds is not None and not each_s:
            return
        if budget.seconds is not None:
            self._budget = budget.seconds * budget.processes / each_s
        if self._budget < least:
            enough = (
                f"{math.ceil(least)} trainings"
                if budget.seconds is None
                else f"{math.ceil(least * each_s / budget.processes / 60)}min"
            )
            raise UserError(
                f"--budget: too little for {len(self._arms)} things to train; give {enough} or "
                "more, fewer plans, or fewer --seeds; what is trained already stays"
            )

    # Arms that are trained to the end -----------------------------------------------------------

    def _trials(self, arm: int) -> list[Trial] | None:
        """An arm's trials of rates; None: some are due, or plain training has to set the target
        before they can be judged."""
        trials: list[Trial] = []
        effort = self._efforts[arm]
        while following := next_trials(effort.grid, trials):
            curves = self._wanted.curves(
                [
                    Asked(arm=arm, rate=rate, warmup=warmup, seed=0, length=effort.tune_length)
                    for rate, warmup in following
                ]
            )
            if curves is None or (arm and self.target() is None):
                return None
            trials += [
                Trial(rate, warmup, self._badness(arm, curve))
                for (rate, warmup), curve in zip(following, curves, strict=True)
            ]
        return trials

    def _badness(self, arm: int, curve: Curve) -> tuple[float, float]:
        asked = self._question
        target = self.target() if arm else asked.target
        return badness_of(curve, asked.metric, target=target, steps=asked.steps)

    def target(self) -> float | None:
        """What arms are tuned for; None: plain training hasn't set it yet."""
        asked = self._question
        if asked.target is not None:
            return asked.target
        if self._level is None and (found := self._best(0)) is not None:
            curves = self._wanted.curves(self._finals(0, found[1])[: asked.seeds]) or []
            # As the study's target: of seeds that don't diverge, if there are any.
            sound = [curve for curve in curves if curve.diverged_at is None]
            levels = [level_of(curve, asked.metric, asked.steps) for curve in sound]
            self._level = sum(levels) / len(levels) if levels else math.nan
        return self._level

    def _best(self, arm: int) -> tuple[list[Trial], Trial] | None:
        """An arm's trials, and the best over all seeds; None: all that it takes isn't trained."""
        trials = self._trials(arm)
        if trials is None:
            return None
        best = candidates(trials, self._efforts[arm].confirm)
        # Seeds that come later change no rate.
        first = self._question.seeds
        over_seeds = [self._wanted.curves(self._finals(arm, trial)[:first]) for trial in best]
        judged = [
            replace(trial, badness=together([self._badness(arm, curve) for curve in curves]))
            for trial, curves in zip(best, over_seeds, strict=True)
            if curves is not None
        ]
        return (trials, best_trial(judged)) if len(judged) == len(best) else None

    def _finals(self, arm: int, trial: Trial) -> list[Asked]:
        length = self._efforts[arm].length
        return [
            Asked(arm=arm, rate=trial.rate, warmup=trial.warmup, seed=seed, length=length)
            for seed in range(self._seeds[arm])
        ]

    # The study ----------------------------------------------------------------------------------

    def _trained(self) -> Study | None:
        """The study of the arms that there is an effort for; None: some of it is due."""
        found = {k: self._best(k) for k in sorted(self._efforts)}
        best = {k: each for k, each in found.items() if each is not None}
        more = [self._wanted.curves(self._finals(k, each[1])) for k, each in best.items()]
        if len(best) < len(found) or None in more:
            return None
        arms = [self._arm(k, *each) for k, each in best.items()]
        names, race = {arm.name for arm in arms}, self._race
        dropped = [
            DroppedArm(
                arm=self._made(k, race.curves[k], race.rates[k], race.curves[k][-1].warmup),
                plans=tuple(plan for plan in self._plans if plan.arm == arm.name),
            )
            for k, arm in enumerate(self._arms)
            if race is not None and k not in best
        ]
        return Study(
            question=self._question,
            arms=tuple(arms),
            plans=tuple(plan for plan in self._plans if plan.arm in names),
            dropped=tuple(dropped),
        )

    def _arm(self, k: int, trials: Sequence[Trial], best: Trial) -> StudyArm:
        asked, tune_length = self._question, self._efforts[k].tune_length
        finals = self._finals(k, best)
        tried = [
            Asked(arm=k, rate=trial.rate, warmup=trial.warmup, seed=0, length=tune_length)
            for trial in trials
        ]
        for trial in candidates(trials, self._efforts[k].confirm):
            seeds = self._finals(k, trial)[: asked.seeds]
            tried += [each for each in seeds if each not in tried]
        tuning = self._wanted.curves([each for each in tried if each not in finals]) or []
        curves = [
            *(self._race.curves[k] if self._race is not None else ()),
            *(msgspec.structs.replace(curve, phase="tuning") for curve in tuning),
            *(self._wanted.curves(finals) or ()),
        ]
        first = [trial for trial in trials if trial.warmup == asked.warmups[0]]
        return self._made(k, curves, best.rate, best.warmup, at_edge(first, best.rate))

    def _made(
        self, k: int, curves: Sequence[Curve], rate: float, warmup: int, edge: bool = False
    ) -> StudyArm:
        arm = self._arms[k]
        return StudyArm(
            name=arm.name,
            kind=arm.kind,
            micro_batches=arm.micro_batches,
            update_every=arm.update_every,
            delay=arm.delay,
            rate=rate,
            warmup=warmup,
            at_edge=edge,
            curves=tuple(curves),
        )
