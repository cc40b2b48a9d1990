"""Whether planning for the loss pays: `make bench-objective`, for docs/objective.md.

Of each cell, a task on 2, 4 or 8 devices: plans of several systems at several delays are trained at
full length, and their times to the target are compared with that of the plan which `tp-plan solve
--objective loss` chooses by a study of a tenth of the steps, whose trainings have the smallest and
the largest delays alone, and go on where a plan's period may still make it the soonest; and with
that of the plan with the shortest period. What was trained before isn't trained again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import msgspec
from timeprest.planner.plan import Plan
from timeprest.planner.search.request import PlanRequest
from timeprest.profiles.errors import TimeprestError
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.study.choices import StudyChoices
from timeprest.runtime.study.command.judge import StudyJudge
from timeprest.runtime.study.figures.results import PlanResult, StudyResults, results_of
from timeprest.runtime.study.figures.study import write_study
from timeprest.runtime.study.trainings.conduct import conduct, prospect

HERE = Path(__file__).resolve().parent
DEVICE = HERE.parent / "claims" / "device.toml"
SYSTEMS = (
    *("pipedream-flush", "timeprest", "v-timeprest", "pipedream", "pipedream-2bw"),
    *("spectrain", "pipedream-nesterov"),
)
CELLS = (
    *("regression-2", "regression-4", "regression-8", "letters-2", "letters-4", "letters-8"),
    *("waves-4", "waves-8", "rows-4", "rows-8"),
)
MINI_BATCH, STEPS = 64, 240
LONGEST = 6.0
"""Times the steps: what may be the soonest by its period trains for so long."""
TASKS = {
    "regression": OptimizerChoice(name="sgd", lr=0.1, momentum=0.9),
    "letters": OptimizerChoice(name="adam", lr=0.005),
    "waves": OptimizerChoice(name="sgd", lr=0.01, momentum=0.9),
    "rows": OptimizerChoice(name="adamw", lr=0.002),
}


@dataclass(frozen=True)
class Cell:
    """A task on so many devices, a stage on each."""

    task: str
    stages: int
    work: Path

    @property
    def target(self) -> str:
        """The task, as commands take it."""
        return f"{HERE / 'tasks.py'}:{self.task}"

    @property
    def delays(self) -> tuple[int, ...]:
        """The largest of a plan, which candidates have."""
        return tuple(sorted({1, self.stages // 2 - 1 or 1, self.stages - 1}))

    def profile(self) -> Path:
        """The task's, reckoned."""
        path = self.work / f"{self.task}.json"
        if not path.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            how = ["--device", "meta", "--spec", str(DEVICE), "-q", "-o", str(path)]
            size = ["--batch-size", str(MINI_BATCH)]
            command = [sys.executable, "-m", "timeprest.cli.profile", self.target, *size, *how]
            subprocess.run(command, check=True)
        return path

    def request(self, system: str | Sequence[str], **more: Any) -> PlanRequest:
        """What is asked of the planner."""
        n = max(4, self.stages) if system in ("timeprest", "v-timeprest") else None
        return PlanRequest(
            self.profile(),
            variant=system,
            devices=self.stages,
            bandwidth="10Gbit/s",
            stages=self.stages,
            stages_per_device=1,
            replicas="off",
            micro_batches=more.pop("micro_batches", n),
            **more,
        )

    def plans(self, delays: Sequence[int]) -> list[Plan]:
        """Candidates of these delays at the most; each once."""
        found: list[Plan] = []
        for system in SYSTEMS:
            planning = self.request(system).read()
            for most in delays:
                plan = planning.best(max_delay=most)
                if not any(_same(plan, other) for other in found):
                    found.append(plan)
        return found

    def study(
        self,
        plans: Sequence[Plan],
        steps: int,
        seeds: int,
        path: Path,
        confirm: int,
        **more: Any,
    ) -> tuple[StudyResults, int]:
        """Train by plans, of whose 3 rates `confirm` train with all seeds; and for how many
        mini-batches in all. `more`: of the study's choices."""
        settings = RunSettings(task=self.target, steps=steps, optimizer=TASKS[self.task])
        more = {"eval_every": 0, "longest": LONGEST, **more}
        choices = StudyChoices(seeds=seeds, tune=3, confirm=confirm, **more)
        files = [f"{plan.variant}.json" for plan in plans]
        due = prospect(plans, files, settings, choices)
        kept = self.work / f"{self.task}.trainings"
        found = conduct(due, kept.absolute(), 1, lambda *_: None)
        write_study(path, found)
        return results_of(found), sum(c.length for arm in found.arms for c in arm.curves)


def _same(plan: Plan, other: Plan) -> bool:
    return (plan.variant, plan.stages, plan.micro_batches) == (
        *(other.variant, other.stages),
        other.micro_batches,
    )


class Times(NamedTuple):
    """A plan's time to the target, over the best one's.

    Attributes:
        ratio: infinite where it diverged.
        reached: False: it is more than that.
    """

    ratio: float
    reached: bool

    @property
    def close(self) -> bool:
        """Within 5 %."""
        return self.reached and self.ratio <= 1.05

    def __str__(self) -> str:
        if not self.ratio < inf:
            return "diverged"
        return f"{'' if self.reached else '> '}{self.ratio:.2f}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A cell's figures; times are to the target of the full trainings."""

    cell: str
    best: str
    chosen: str
    over_best: Times
    equal: bool
    """It is equal to the best within the seeds' spread."""
    said: bool
    """The choice's interval reaches down so far, or it called the best one's system undecided."""
    predicted: float
    """Its overhead by the short study, over that of the full training."""
    cost: float
    """Mini-batches that the short study trained, over those of the full trainings."""
    shortest: str
    shortest_over_best: Times


def outcome(cell: Cell) -> Outcome:
    """Train and choose."""
    name = f"{cell.task}-{cell.stages}"
    short = cell.work / f"{name}-short.json"
    ends = cell.plans((1, cell.stages - 1))
    _, trained_short = cell.study(ends, STEPS // 10, 3, short, 1)
    planning = cell.request(SYSTEMS, study=str(short), micro_batches=None).read()
    judged = StudyJudge(planning, str(short)).plans(planning, {s: s for s in SYSTEMS}, None).judged
    assert judged is not None
    chosen = judged.chosen
    candidates = cell.plans(cell.delays)
    if not any(_same(chosen, plan) for plan in candidates):
        candidates.append(chosen)
    full, trained = cell.study(candidates, STEPS, 2, cell.work / f"{name}.json", 3)
    known = {k: found.time_s.mean for k, found in enumerate(full.plans) if found.time_s is not None}
    best = min(known, key=lambda k: known[k])
    best_s = known[best]
    mine = next(k for k, plan in enumerate(candidates) if _same(plan, chosen))
    own, arms = full.plans[mine], full
    if own.time_s is None:
        # A training ends where it can't be the best any more; how far off it is counts here.
        longer = {"longer": LONGEST, "target_loss": full.target}
        arms, _ = cell.study([chosen], STEPS, 2, cell.work / f"{name}-chosen.json", 3, **longer)
        own = arms.plans[0]
    over = _over(own, best_s)
    shortest = min(
        range(len(candidates)),
        key=lambda k: (candidates[k].predicted.period_s, -_delay(candidates[k])),
    )
    target, overhead = chosen.to_target, arms.arm(own.arm).overhead
    assert target is not msgspec.UNSET
    wide = target.overhead_high is None or target.overhead_low is None
    wide = wide or (
        over.reached and (target.overhead_high or 1) / (target.overhead_low or 1) >= over.ratio
    )
    open_systems = judged.as_json()["open"]
    low_s = None if own.time_s is None else own.time_s.low
    return Outcome(
        cell=name,
        best=_text(candidates[best]),
        chosen=_text(chosen),
        over_best=over,
        equal=full.plans[mine].equal or (low_s is not None and low_s <= best_s < inf),
        said=wide or candidates[best].variant in open_systems,
        predicted=inf if overhead is None else target.overhead / overhead.mean,
        cost=trained_short / trained,
        shortest=_text(candidates[shortest]),
        shortest_over_best=_over(full.plans[shortest], best_s),
    )


def _over(found: PlanResult, best_s: float) -> Times:
    if found.time_s is not None:
        return Times(found.time_s.mean / best_s, True)
    return Times((found.at_least_s or inf) / best_s, False)


def _delay(plan: Plan) -> int:
    return max(stage.delay or 0 for stage in plan.predicted.stages)


def _text(plan: Plan) -> str:
    return f"`{plan.variant}`, delay {_delay(plan)}"


def _row(found: Outcome) -> str:
    cells = (
        found.cell,
        found.best,
        found.chosen,
        str(found.over_best),
        "=" if found.equal else "",
        "" if found.over_best.close else "yes" if found.said else "no",
        f"{found.predicted:.2f}" if found.predicted < inf else "–",
        f"{found.cost:.0%}",
        found.shortest,
        str(found.shortest_over_best),
    )
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option("--cells", "names", default=",".join(CELLS), show_default=True, help="TASK-STAGES")
@click.option("--work", default="runs/objective", show_default=True)
def main(names: str, work: str) -> None:
    """Print a table with a row for each cell, and what it comes to."""
    try:
        cells = [
            Cell(task, int(stages), Path(work))
            for task, stages in (name.split("-") for name in names.split(","))
        ]
        head = "cell | best | chosen | its time | | said | overhead | cost"
        head += " | shortest period | its time"
        print(f"| {head} |\n|{' --- |' * 10}", flush=True)
        found = []
        for cell in cells:
            found.append(outcome(cell))
            print(_row(found[-1]), flush=True)
        reached = [one for one in found if one.over_best.reached]
        close = sum(one.over_best.close for one in found)
        far = [one for one in found if one not in reached or one.over_best.ratio > 1.15]
        silent = sum(not one.said for one in far)
        gains = [one.shortest_over_best.ratio / one.over_best.ratio for one in reached]
        print(
            f"\nwithin 5 % of the best in {close} of {len(found)} cells; more than 15 % off "
            f"without a word in {silent}; time by the shortest period over that by the study, "
            f"median, at least: {f'{median(gains):.2f}' if gains else '-'}"
        )
    except TimeprestError as error:
        print(f"bench-objective: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
