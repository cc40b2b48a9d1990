"""What the papers claim, and what the studies say of it, cell by cell.

A comparison of two systems is of samples to a level, paired by seed, with its interval (95 %,
`runtime/study/figures/spread.py`): a claim holds in a cell where the interval is on its side,
doesn't hold where it is on the other, and is undecided, "equal", where 1 lies within. The level is
the lowest loss of `LEVELS` that says anything: that one of both reaches with every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from timeprest.planner.systems.variants import VARIANTS
from timeprest.runtime.study.figures.reckoning import Reckoning
from timeprest.runtime.study.figures.results import StudyResults, results_of
from timeprest.runtime.study.figures.spread import Spread, spread_of
from timeprest.runtime.study.figures.study import PLAIN, StudiedPlan, Study

from .plans import CellPlans, SystemPlan
from .studies import BANDWIDTH, Cell

ENOUGH = 0.1
"""So many more samples, as a share, are as many: a wide interval with 1 in it shows nothing, nor
does a bound that isn't above that."""

LEVELS = {"": 1.0, " at ⅔": 2 / 3, " at ⅓": 1 / 3}
"""Shares of the steps: levels are those that plain training has there."""

Outcome = Literal["yes", "no", "equal", "unknown"]


@dataclass(frozen=True)
class FoundCell:
    """Everything known of a cell.

    Attributes:
        short: the study of a tenth of the steps; None: there is none.
    """

    cell: Cell
    study: Study
    short: Study | None
    plans: CellPlans

    @cached_property
    def reckoning(self) -> Reckoning:
        """Of the full study."""
        return Reckoning(self.study)

    @cached_property
    def results(self) -> StudyResults:
        """Of the full study."""
        return results_of(self.study)

    def plan(self, name: str) -> StudiedPlan:
        """The plan of this name: a system's own at its paper's limits."""
        return next(plan for plan in self.study.plans if plan.name == name)

    def arm(self, name: str) -> str:
        """What was trained for a plan, or the name of what isn't a pipeline."""
        return next((plan.arm for plan in self.study.plans if plan.name == name), name)

    @cached_property
    def levels(self) -> dict[str, float]:
        """Losses, by what figures at them end in."""
        steps = self.study.question.steps
        return {name: self.reckoning.level(steps * share) for name, share in LEVELS.items()}

    def samples(self, name: str, level: float) -> tuple[float | None, ...]:
        """To a level, by seed."""
        return self.reckoning.samples(self.arm(name), level)

    def samples_over(self, one: str, other: str, level: float) -> Spread | None:
        """One system's samples to a level over another's; None: one doesn't get there."""
        if self.arm(one) == self.arm(other):
            return spread_of([1.0] * self.study.question.seeds)
        pairs = list(zip(self.samples(one, level), self.samples(other, level), strict=True))
        ratios = [a / b for a, b in pairs if a is not None and b]
        return spread_of(ratios) if len(ratios) == len(pairs) else None

    def at_least(self, one: str, other: str, level: float) -> float | None:
        """What `samples_over` is more than, where `one` doesn't get there and the other does."""
        reached = [b for b in self.samples(other, level) if b]
        if None not in self.samples(one, level) or len(reached) < self.study.question.seeds:
            return None
        least = self.reckoning.least(self.study.arm(self.arm(one)), level)
        return spread_of([a / b for a, b in zip(least, reached, strict=True)]).mean

    def seconds(self, name: str, level: float) -> float | None:
        """Predicted, to a level, the mean over seeds; None: it isn't reached."""
        found = [samples for samples in self.samples(name, level) if samples is not None]
        if len(found) < self.study.question.seeds:
            return None
        plan = self.plan(name)
        return spread_of(found).mean * plan.period_s / self.study.question.mini_batch

    def untrained(self, *names: str) -> list[str]:
        """Those of these systems that weren't trained at their papers' limits."""
        known = {*(plan.name for plan in self.study.plans), *(arm.name for arm in self.study.arms)}
        return [name for name in names if name not in known]

    def period_over(self, one: str, other: str) -> float:
        """Periods."""
        mine, its = (self.plans.systems[name].periods_s[BANDWIDTH] for name in (one, other))
        return mine / its

    def accuracy(self, variant: str) -> float | None:
        """On the test data at the last evaluation, the mean over seeds; None: some had none."""
        arm = self.study.arm(PLAIN if variant == PLAIN else self.plan(variant).arm)
        found = [curve.tests[-1].figures.get("accuracy") for curve in arm.finals() if curve.tests]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if len(known) == len(arm.finals()) else None


class Verdict(NamedTuple):
    """Of a claim in one cell."""

    outcome: Outcome
    figure: str


_MARKS = {"yes": "✓", "no": "✗", "equal": "=", "unknown": "?"}


def marked(verdict: Verdict) -> str:
    """With its outcome's sign."""
    return f"{_MARKS[verdict.outcome]} {verdict.figure}"


@dataclass(frozen=True)
class Claim:
    """Something that a paper says.

    Attributes:
        source: the paper.
        text: what it says, in our words.
        figure: what the table's figures are.
        judge: of a cell.
    """

    source: str
    text: str
    figure: str
    judge: Callable[[FoundCell], Verdict]


def shown(spread: Spread) -> str:
    """``1.23 (1.10–1.38)``."""
    if spread.low is None or spread.high is None:
        return f"{spread.mean:.2f}"
    return f"{spread.mean:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _compared(
    found: FoundCell, one: str, other: str, factor: float = 1.0, levels: Sequence[str] = (*LEVELS,)
) -> Verdict:
    """Whether samples, times a factor, are fewer: by the interval, or by what was trained where one
    of both doesn't get there.

    Args:
        levels: which count, the first that says anything.
    """
    if missing := found.untrained(one, other):
        return Verdict("unknown", f"{', '.join(missing)}: not trained")
    if found.arm(one) == found.arm(other):
        alike = by_interval(spread_of([factor] * found.study.question.seeds))
        return Verdict(alike.outcome, f"{factor:.2f}; they train alike")
    for where in levels:
        level = found.levels[where]
        spread = found.samples_over(one, other, level)
        if spread is not None:
            outcome, figure = by_interval(spread * factor)
            return Verdict(outcome, figure + where)
        more, less = found.at_least(one, other, level), found.at_least(other, one, level)
        # A bound has no interval: it has to be clear.
        if more is not None and more * factor > 1 + ENOUGH:
            return Verdict("no", f"> {more * factor:.2f}{where} ({one} not reached)")
        if less is not None and less > factor * (1 + ENOUGH):
            return Verdict("yes", f"< {factor / less:.2f}{where} ({other} not reached)")
    missed = [name for name in (one, other) if None in found.samples(name, level)]
    return Verdict("unknown", f"{', '.join(missed)}: not reached{where}")


def by_interval(spread: Spread) -> Verdict:
    low, high = spread.low or spread.mean, spread.high or spread.mean
    outcome: Outcome = "yes" if high < 1 else "no" if low > 1 else "equal"
    return Verdict(outcome, shown(spread))


def _turned(verdict: Verdict) -> Verdict:
    swapped: dict[Outcome, Outcome] = {"yes": "no", "no": "yes"}
    return Verdict(swapped.get(verdict.outcome, verdict.outcome), verdict.figure)


def fewer_samples(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One reaches the target in fewer samples."""
    return lambda found: _compared(found, one, other)


def ahead_on_the_way(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One reaches what plain training has in the middle of its way in fewer samples."""
    return lambda found: _compared(found, one, other, levels=[*LEVELS][1:])


def more_samples(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One reaches the target in more samples."""
    return lambda found: _turned(fewer_samples(one, other)(found))


def as_many_samples(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One needs no more samples than the other: by its interval, a tenth more at the most."""

    def judge(found: FoundCell) -> Verdict:
        outcome, figure = _compared(found, one, other)
        if found.untrained(one, other):
            return Verdict(outcome, figure)
        spreads = (found.samples_over(one, other, level) for level in found.levels.values())
        spread = next((each for each in spreads if each is not None), None)
        if spread is not None and (spread.high or spread.mean) <= 1 + ENOUGH:
            outcome = "yes"
        return Verdict(outcome, figure)

    return judge


def less_time(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One reaches the target sooner, by the plans' periods."""
    return lambda found: _compared(found, one, other, found.period_over(one, other))


def shorter_period(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One's mini-batches take less time."""

    def judge(found: FoundCell) -> Verdict:
        ratio = found.period_over(one, other)
        return Verdict("yes" if ratio < 1 - 1e-9 else "no", f"{ratio:.2f}")

    return judge


def less_memory(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One's stages hold less, all together; the figure has them by stage, too."""

    def judge(found: FoundCell) -> Verdict:
        mine, its = (found.plans.systems[name].memory_bytes for name in (one, other))
        stages = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, its, strict=True))
        outcome: Outcome = "yes" if sum(mine) < sum(its) else "no"
        return Verdict(outcome, f"{sum(mine) / sum(its):.2f}; by stage {stages}")

    return judge


def _without_flush(found: FoundCell) -> dict[str, SystemPlan]:
    return {n: plan for n, plan in found.plans.systems.items() if not VARIANTS[n].flushes}


def least_weights(found: FoundCell) -> Verdict:
    """`v-timeprest` holds the fewest bytes of weights among systems without a flush."""
    of = {name: sum(plan.weight_bytes) for name, plan in _without_flush(found).items()}
    mine, most = of["v-timeprest"], max(of.values())
    outcome: Outcome = "yes" if mine == min(of.values()) else "no"
    return Verdict(outcome, f"{most / mine:.1f} × less than the most")


def latest_weights_cost(found: FoundCell) -> Verdict:
    """`v-timeprest`'s forwards are on newer weights than `timeprest`'s, on no stage on older."""
    mine, its = (found.plans.systems[n].differences for n in ("v-timeprest", "timeprest"))
    outcome: Outcome = "yes" if all(a <= b for a, b in zip(mine, its, strict=True)) else "no"
    return Verdict(outcome, f"{_listed(mine)} against {_listed(its)}")


def _listed(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def two_versions(found: FoundCell) -> Verdict:
    """`pipedream-2bw` holds two versions on every stage."""
    versions = found.plans.systems["pipedream-2bw"].versions
    return Verdict("yes" if set(versions) <= {1, 2} else "no", _listed(versions))


def fewer_bytes(least: float) -> Callable[[FoundCell], Verdict]:
    """A pipeline sends so much less than data parallelism."""

    def judge(found: FoundCell) -> Verdict:
        fewer = 1 - found.plans.systems["pipedream"].message_bytes / found.plans.parallel_bytes
        return Verdict("yes" if fewer >= least else "no", f"{fewer:.0%} fewer")

    return judge


def loses_less(one: str, other: str) -> Callable[[FoundCell], Verdict]:
    """One's accuracy after the whole training isn't below the other's by more than 0.3 points."""

    def judge(found: FoundCell) -> Verdict:
        mine, its = found.accuracy(one), found.accuracy(other)
        if mine is None or its is None:
            return Verdict("unknown", "not evaluated to the end")
        return Verdict("yes" if mine >= its - 0.003 else "no", f"{(mine - its) * 100:+.1f} points")

    return judge


def flush_is_plain(found: FoundCell) -> Verdict:
    """Systems that flush need what plain training does."""
    over = {
        p.name: found.samples_over(p.name, PLAIN, found.reckoning.target)
        for p in found.study.plans
        if p.is_plain_training
    }
    means = [spread.mean for spread in over.values() if spread is not None]
    if len(means) < len(over):
        return Verdict("unknown", "target not reached")
    worst = max(means, key=lambda mean: abs(mean - 1))
    return Verdict("yes" if abs(worst - 1) < 1e-6 else "no", f"{worst:.3f}")


def real_delays_cost_less(found: FoundCell) -> Verdict:
    """The real delays of `pipedream`'s stages cost fewer samples than a uniform S − 1."""
    uniform = f"uniform delay of {found.cell.devices - 1}"
    return _compared(found, "pipedream", uniform)


CLAIMS = (
    Claim(
        "TiMePReSt (2410.14312; FGCS 178)",
        "`timeprest` holds less memory than `pipedream`",
        "its bytes over PipeDream's",
        less_memory("timeprest", "pipedream"),
    ),
    Claim(
        "the same",
        "`timeprest` needs more epochs than `pipedream`",
        "its samples over PipeDream's",
        more_samples("timeprest", "pipedream"),
    ),
    Claim(
        "the same",
        "each of its epochs is shorter",
        "its period over PipeDream's",
        shorter_period("timeprest", "pipedream"),
    ),
    Claim(
        "the same",
        "`timeprest` reaches a loss sooner than `pipedream`",
        "its time over PipeDream's",
        less_time("timeprest", "pipedream"),
    ),
    Claim(
        "the same, Variant 1",
        "with the stash kept (`timeprest-stashed`) it needs fewer epochs",
        "samples over those of `timeprest`",
        fewer_samples("timeprest-stashed", "timeprest"),
    ),
    Claim(
        "the same, Variant 1",
        "and holds more memory",
        "bytes of `timeprest` over its own",
        less_memory("timeprest", "timeprest-stashed"),
    ),
    Claim(
        "the same, Variant 2",
        "1F1B without a stash (`pipedream-unstashed`) learns as well per epoch",
        "samples over those of `timeprest`",
        as_many_samples("pipedream-unstashed", "timeprest"),
    ),
    Claim(
        "the same, Variant 2",
        "and is slower",
        "period of `timeprest` over its own",
        shorter_period("timeprest", "pipedream-unstashed"),
    ),
    Claim(
        "its reproduction (GitHub cotda/timeprest-reproduction)",
        "in mid-training `timeprest` is ahead of synchronous training",
        "samples over plain training's at ⅔ or ⅓ of its way",
        ahead_on_the_way("timeprest", PLAIN),
    ),
    Claim(
        "V-TiMePReSt (2509.23241)",
        "`v-timeprest` holds the least weights of all without a flush",
        "bytes of weights",
        least_weights,
    ),
    Claim(
        "the same",
        "its weights are the least stale: no stage has a larger version difference than "
        "`timeprest`'s",
        "version differences by stage",
        latest_weights_cost,
    ),
    Claim(
        "I-TiMePReSt (2509.23241)",
        "`i-timeprest` needs fewer epochs than `v-timeprest`",
        "its samples over V-TiMePReSt's",
        fewer_samples("i-timeprest", "v-timeprest"),
    ),
    Claim(
        "the same",
        "`i-timeprest` needs fewer epochs than `timeprest`",
        "its samples over those of `timeprest`",
        fewer_samples("i-timeprest", "timeprest"),
    ),
    Claim(
        "the same",
        "with less memory than `timeprest-stashed`",
        "its bytes over those",
        less_memory("i-timeprest", "timeprest-stashed"),
    ),
    Claim(
        "PipeDream-2BW (2006.09503)",
        "two versions of the weights are enough",
        "versions held by stage",
        two_versions,
    ),
    Claim(
        "the same",
        "it trains as plain training does",
        "its samples over plain training's",
        as_many_samples("pipedream-2bw", PLAIN),
    ),
    Claim(
        "SpecTrain (1809.02839)",
        "predicted weights train better than stale ones: `spectrain` needs fewer samples than "
        "`pipedream`",
        "its samples over PipeDream's",
        fewer_samples("spectrain", "pipedream"),
    ),
    Claim(
        "the same",
        "it loses no accuracy against synchronous training (0.3 points at the most)",
        "test accuracy less plain training's",
        loses_less("spectrain", PLAIN),
    ),
    Claim(
        "PipeDream (1806.03377)",
        "up to 95 % fewer bytes than data parallelism: half of them or fewer here",
        "bytes of a mini-batch",
        fewer_bytes(0.5),
    ),
    Claim(
        "PipeDream; 2006.09503",
        "systems that flush are plain training",
        "their samples over plain training's, the farthest from 1",
        flush_is_plain,
    ),
    Claim(
        "measured by hand elsewhere",
        "the real delays of stages cost less than a delay of S − 1 at all of them",
        "samples of `pipedream` over those of the uniform delay",
        real_delays_cost_less,
    ),
)
"""In the page's sequence."""
