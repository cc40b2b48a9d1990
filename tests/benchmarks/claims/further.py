"""What stands beside a cell's study: longer trainings, the smallest limits, unit times, N = 3,
and PipeDream's mini-batches of M / N.

A study gives all its systems one length and one grid. What doesn't get to the level of a third of
plain training's way within that length trains here for longer, at rates around those that its kin
was best at: all of them with seed 0, the best with all seeds. Plans that train alike (`alike`)
share a training, whichever cell has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import msgspec
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.plan import Plan, pipeline_of, read_plan
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.simulator.timeline import simulate
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import read_file, write_bytes
from timeprest.runtime.settings import OptimizerChoice, settings_of
from timeprest.runtime.study.choices import StudyChoices
from timeprest.runtime.study.figures.reckoning import Reckoning
from timeprest.runtime.study.figures.study import (
    PLAIN,
    Curve,
    StudiedPlan,
    Study,
    StudyArm,
    read_study,
    studied,
    write_study,
)
from timeprest.runtime.study.figures.tuning import badness_of
from timeprest.runtime.study.trainings.conduct import prospect
from timeprest.runtime.study.trainings.training import train_one
from timeprest.runtime.study.trainings.work import Asked, Finished

from . import tasks
from .alike import delayed, lags_of, order_on_two, training_of
from .studies import (
    BANDWIDTH,
    FULL,
    Cell,
    TaskPlan,
    command,
    in_repository,
    profiled,
    solved_as,
    study_path,
)

A_THIRD = 1 / 3
"""Of plain training's way: the level that everything is to reach."""
FEWEST = 2
"""Mini-batches in flight at the most: with 1 there is no pipeline."""
FEW = 4
"""N at the smallest limits, so that they train alike on any number of stages."""
UNIT = "unit times"
UNIFORM: Final = "uniform delay"
PARTS = "M / N"
"""A mini-batch is one of N parts of what the others have."""


class Further(NamedTuple):
    """A training beside a study.

    Attributes:
        system: or `UNIFORM`: plain training with gradients S − 1 updates late.
        rates: tried with seed 0; the best is taken.
        length: mini-batches.
        where: "" is the papers' limits; `UNIT`: in the schedule of unit times; "N = 3"; `PARTS`.
    """

    task: str
    devices: int
    system: str
    micro_batches: int
    rates: tuple[float, ...]
    length: int
    where: str = ""

    @property
    def arm(self) -> str:
        """Its name."""
        if self.system == UNIFORM:
            return f"{UNIFORM} of {self.devices - 1}"
        return named(self.system, self.where)


def named(system: str, where: str) -> str:
    """Of a plan or training."""
    return f"{system}, {where}" if where else system


def further_of(cell: Cell) -> list[Further]:
    """Those of a cell."""
    return [f for f in FURTHER if (f.task, f.devices) == (cell.task.name, cell.devices)]


# Plans ------------------------------------------------------------------------------------------


def plan_at(cell: Cell, system: str, micro_batches: int, where: str, work: Path) -> Path:
    """A system's plan with so many micro-batches, at the papers' limits or the smallest."""
    most = FEWEST if where == f"L = {FEWEST}" else None
    return solved_as(cell, system, work, micro_batches, most, parts=FEW if where == PARTS else 1)


def at_unit_times(plan: Plan) -> Plan:
    """The plan in the schedule that TiMePReSt's figures have: a backward of a mini-batch is as long
    as a forward of one micro-batch, all stages are equal and messages take no time."""
    replace, n = msgspec.structs.replace, plan.micro_batches
    stages = [
        replace(stage, forward_s=1.0, backward_s=1.0 / n, update_s=0.0)
        for stage in plan.predicted.stages
    ]
    return replace(
        plan,
        edges=tuple(replace(edge, bytes_per_micro_batch=0) for edge in plan.edges),
        cluster=uniform_cluster(len(stages), latency="0s"),
        predicted=replace(plan.predicted, stages=tuple(stages)),
    )


def in_whole(curve: Curve, parts: int) -> Curve:
    """A curve of mini-batches that are so small a part of the study's, counted in those."""
    at = curve.diverged_at
    return msgspec.structs.replace(
        curve,
        length=curve.length // parts,
        window=curve.window // parts,
        diverged_at=None if at is None else max(at // parts, 1),
    )


def period_in(schedule_of: Plan, plan: Plan) -> float:
    """Seconds of a mini-batch of a plan whose operations run in the sequence of another's."""
    count = 24 * len(plan.stages)
    timeline = simulate(pipeline_of(plan), make_schedule(pipeline_of(schedule_of), count))
    ends = [e.end_s for e in timeline.lanes[0][0] if e.op.kind == "U" and e.stage == 0]
    return (ends[-1] - ends[count // 2]) / (count - 1 - count // 2)


# Trainings --------------------------------------------------------------------------------------


def _options(task: TaskPlan, rate: float) -> OptimizerChoice:
    given = dict(zip(task.options[::2], task.options[1::2], strict=True))
    return OptimizerChoice(
        name=given["--optimizer"], lr=rate, momentum=float(given.get("--momentum", 0))
    )


def _trained(
    wanted: Further, cell: Cell, level: float, work: Path
) -> tuple[StudyArm, tuple[Hashable, int]]:
    """Train what isn't yet; and the key of what trains alike, with the parts of a mini-batch."""
    uniform = wanted.system == UNIFORM
    system = "pipedream" if uniform else wanted.system
    path = plan_at(cell, system, wanted.micro_batches, wanted.where, work)
    plan = read_plan(path)
    if wanted.where == UNIT:
        plan = at_unit_times(plan)
    if plan.system.synchronises and cell.devices > FEWEST:
        path = _on_two_stages(plan, wanted, cell, work)
        plan = read_plan(path)
    first, *_ = wanted.rates
    parts = FEW if wanted.where == PARTS else 1
    length = wanted.length * parts
    settings = settings_of(plan, {"optimizer": _options(cell.task, first), "steps": length})
    choices = StudyChoices(
        longer=1, tune=1, confirm=1, target_loss=level, eval_every=0, uniform_delay=uniform
    )
    due = prospect([plan], [str(path)], settings, choices)
    kept = Finished(work / cell.task.name / "further", due.work)

    def curve(rate: float, seed: int) -> Curve:
        last = len(due.work.arms) - 1
        asked = Asked(arm=last, rate=rate, warmup=0, seed=seed, length=length)
        done = kept.read(asked)
        if done is None:
            begun = monotonic()
            found = train_one(due.work, asked)
            done = kept.write(asked, found, monotonic() - begun)
        return in_whole(done.curve, parts)

    trials = [curve(rate, 0) for rate in wanted.rates]
    best = min(trials, key=lambda c: badness_of(c, "loss", target=level, steps=1))
    finals = [best, *(curve(best.rate, seed) for seed in range(1, FULL.seeds))]
    tuning = [msgspec.structs.replace(c, phase="tuning") for c in trials if c is not best]
    arm = StudyArm(
        name=wanted.arm,
        kind=UNIFORM if uniform else "pipeline",
        delay=cell.devices - 1 if uniform else 0,
        rate=best.rate,
        warmup=0,
        at_edge=best.rate in (min(wanted.rates), max(wanted.rates)),
        curves=(*tuning, *finals),
    )
    key = delayed(cell.devices - 1) if uniform else training_of(plan, mixes=due.question.mixes)
    return arm, (key, parts)


def _on_two_stages(plan: Plan, wanted: Further, cell: Cell, work: Path) -> Path:
    """A plan of two stages that trains alike, in less time."""
    name = "-".join(filter(None, (wanted.system, f"N{wanted.micro_batches}", wanted.where)))
    stem = work / cell.task.name / str(cell.devices) / f"{name}-on-two"
    path, order = stem.with_suffix(".json"), stem.with_suffix(".txt")
    if not path.exists():
        epoch = len(getattr(tasks, cell.task.name).data("train")) // cell.task.mini_batch
        write_bytes(order, order_on_two(plan, epoch).encode())
        what = ["--variant", wanted.system, "--order", str(order)]
        what += ["--devices", "2", "--bandwidth", BANDWIDTH]
        command("plan", "solve", str(profiled(cell.task, work)), *what, "-q", "-o", str(path))
    return path


# The study --------------------------------------------------------------------------------------


def further_path(cell: Cell, studies: Path) -> Path:
    """Where it is kept."""
    return studies / f"{cell.name}-further.json"


def write_further(cell: Cell, work: Path, studies: Path) -> None:
    """Train what a cell has beside its study, and write it with today's plans of everything."""
    own = read_study(study_path(cell, FULL, studies))
    reckoning = Reckoning(own)
    level = reckoning.level(own.question.steps * A_THIRD)
    trained = [_trained(each, cell, level, work) for each in further_of(cell)]
    arms = {arm.name: arm for arm, _ in trained}
    longer = {key: arm for arm, (key, parts) in reversed(trained) if parts == 1}
    before = dict(reversed([*_studied_before(cell, own, work, studies)]))
    plans = [plan for plan in own.plans if plan.is_plain_training]
    for name, plan, path in _wanted(cell, work):
        key = training_of(plan, mixes=own.question.mixes)
        arm = arms.get(name) or longer.get(key) or _own_arm(own, name) or before.get(key)
        if arm is None:
            continue
        if arm.name not in arms and all(arm.name != each.name for each in own.arms):
            arms[arm.name] = arm
        plans.append(_recorded(plan, name, path, arm.name))
    asked = msgspec.structs.replace(
        own.question, length=max(c.length for a in (*arms.values(), own.plain) for c in a.curves)
    )
    found = Study(question=asked, arms=(own.plain, *arms.values()), plans=tuple(plans))
    path = further_path(cell, studies)
    write_study(path, found)
    write_bytes(path, in_repository(path.read_text(encoding="utf-8"), work).encode())


def _own_arm(own: Study, name: str) -> StudyArm | None:
    return next((own.arm(plan.arm) for plan in own.plans if plan.name == name), None)


def _recorded(plan: Plan, name: str, path: Path, arm: str) -> StudiedPlan:
    found = studied(plan, name, str(path), arm)
    if name.endswith(PARTS):
        found = msgspec.structs.replace(found, period_s=FEW * found.period_s)
    if name.endswith(UNIT):
        in_its = at_unit_times(plan)
        found = msgspec.structs.replace(
            found,
            version_differences=tuple(max(row[-1]) for row in lags_of(in_its)),
            delays=None,
            period_s=period_in(in_its, plan),
        )
    return found


def _wanted(cell: Cell, work: Path) -> Iterator[tuple[str, Plan, Path]]:
    """Every plan without a flush that a cell has, by name."""
    endless = {name: system for name, system in VARIANTS.items() if not system.flushes}
    for name in endless:
        path = solved_as(cell, name, work)
        yield name, read_plan(path), path
    if cell.devices > FEWEST:
        where = f"L = {FEWEST}"
        for name, system in endless.items():
            # What isn't synchronised trains otherwise on each number of stages.
            if system.synchronises and not system.micro_batch_per_stage:
                n = 1 if system.whole_mini_batches else FEW
                path = plan_at(cell, name, n, where, work)
                yield named(name, where), read_plan(path), path
    # The journal's own N.
    path = plan_at(cell, "timeprest", 3, "", work)
    yield "timeprest, N = 3", read_plan(path), path
    for each in further_of(cell):
        if each.where:
            path = plan_at(cell, each.system, each.micro_batches, each.where, work)
            yield each.arm, read_plan(path), path


def _studied_before(
    cell: Cell, own: Study, work: Path, studies: Path
) -> Iterator[tuple[Hashable, StudyArm]]:
    """Trainings of this cell's study and of the one on two devices, by what trains alike; of
    systems whose cut doesn't matter, so that today's plans stand for those that were trained."""
    mixes = own.question.mixes
    for where, study in ((cell, own), *_on_two(cell, studies)):
        for arm in study.arms:
            if arm.kind == UNIFORM:
                yield delayed(arm.delay), arm
        for plan in study.plans:
            arm = study.arm(plan.arm)
            if VARIANTS[plan.variant].flushes:
                continue
            today = read_plan(solved_as(where, plan.variant, work))
            if tuple(s.in_flight for s in today.stages) != plan.in_flight:
                continue
            key = training_of(today, mixes=mixes)
            vertical = not key[2]  # type: ignore[index]
            if vertical:
                name = arm.name if where == cell else f"{arm.name}, S = {where.devices}"
                finals = tuple(c for c in arm.curves if c.phase == "final")
                curves = arm.curves if where == cell else finals
                yield key, msgspec.structs.replace(arm, name=name, curves=curves)


def _on_two(cell: Cell, studies: Path) -> Iterator[tuple[Cell, Study]]:
    if cell.devices > FEWEST:
        two = Cell(cell.task, FEWEST)
        path = study_path(two, FULL, studies)
        if path.exists():
            yield two, read_study(path)


def whole_study(cell: Cell, studies: Path) -> Study:
    """A cell's study with what stands beside it, whose plans are of all its trainings."""
    own = read_study(study_path(cell, FULL, studies))
    path = further_path(cell, studies)
    if not path.exists():
        return own
    more = read_file(path, Study)
    arms = {arm.name: arm for arm in (*own.arms, *more.arms)}
    arms[PLAIN] = own.plain
    return Study(question=more.question, arms=tuple(arms.values()), plans=more.plans)


_LATE = "pipedream-unstashed"
"""Trains as `timeprest` does where no layer mixes samples, and is the cheapest to train."""
FURTHER = (
    Further("plain", 2, "timeprest", 4, (0.01,), 600, UNIT),
    Further("plain", 4, _LATE, 1, (0.0025, 0.005, 0.00125), 1200),
    Further("plain", 4, UNIFORM, 1, (0.0025, 0.005), 1200),
    Further("plain", 4, "v-timeprest", 4, (0.01,), 600),
    Further("plain", 4, "i-timeprest", 1, (0.0025,), 1200),
    Further("plain", 4, "timeprest", 4, (0.01, 0.005), 600, UNIT),
    Further("plain", 4, "pipedream", 1, (0.005, 0.0025, 0.00125), 600, PARTS),
    Further("plain", 8, _LATE, 1, (0.00125,), 1800),
    Further("plain", 8, UNIFORM, 1, (0.00125,), 1800),
    Further("plain", 8, "v-timeprest", 8, (0.005,), 600),
    Further("plain", 8, "i-timeprest", 1, (0.00125,), 1800),
    Further("plain", 8, "pipedream", 1, (0.005,), 1200),
    Further("plain", 8, "timeprest", 8, (0.01,), 600, UNIT),
    Further("characters", 2, "timeprest", 4, (0.002828,), 600, UNIT),
    Further("characters", 4, "timeprest", 4, (0.002828,), 600, UNIT),
    Further("characters", 8, _LATE, 1, (0.001414,), 1200),
    Further("characters", 8, UNIFORM, 1, (0.001414,), 1200),
    Further("characters", 8, "i-timeprest", 1, (0.001414,), 1200),
    Further("characters", 8, "timeprest", 8, (0.002,), 600, UNIT),
    Further("normed", 2, "timeprest", 4, (0.07071,), 600, UNIT),
    Further("normed", 2, "timeprest", 3, (0.05, 0.025), 600, "N = 3"),
    Further("normed", 4, "timeprest", 4, (0.025, 0.0125), 600),
    Further("normed", 4, "timeprest-stashed", 4, (0.025,), 600),
    Further("normed", 4, "i-timeprest", 4, (0.025,), 600),
    Further("normed", 4, "v-timeprest", 4, (0.07071,), 600),
    Further("normed", 4, "timeprest", 4, (0.05,), 600, UNIT),
    Further("normed", 4, "timeprest", 3, (0.025, 0.0125), 600, "N = 3"),
    Further("normed", 4, "pipedream", 1, (0.05, 0.025, 0.0125), 600, PARTS),
    Further("normed", 8, "timeprest", 8, (0.0125,), 1000),
    Further("normed", 8, "timeprest-stashed", 8, (0.0125,), 1000),
    Further("normed", 8, "i-timeprest", 8, (0.0125,), 1000),
    Further("normed", 8, "v-timeprest", 8, (0.07071,), 600),
    Further("normed", 8, "timeprest", 8, (0.05,), 600, UNIT),
    Further("normed", 8, "timeprest", 3, (0.0125, 0.00625), 1000, "N = 3"),
)
"""Beside the studies."""
