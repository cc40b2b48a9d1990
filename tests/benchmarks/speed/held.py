"""What systems hold at four stages: a part of `make bench`.

    python -m timeprest.tests.benchmarks.speed.held

The same cuts for all, those that the planner chose for `timeprest`, and four micro-batches for
those that have any; each is trained for a few mini-batches, in four processes: at in-flight limits
that are alike for all, and at those that the planner chooses where they are others.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import msgspec
import torch
from timeprest import profile as measure
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.memory import MemoryByKind
from timeprest.planner.plan import Plan
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.profile import Profile
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

from .machine.machine import machine
from .report.page import write_page
from .report.records import DOCS, Held, read_results, write_results
from .tasks import MEMORY_RACES, target_of

STAGES = MICRO_BATCHES = 4
STEPS = 24
"""Mini-batches: with the planner's limits, stages fill up over a dozen."""
SYSTEMS = (
    "v-timeprest",
    "timeprest",
    "timeprest-stashed",
    "i-timeprest",
    "pipedream-unstashed",
    "pipedream",
    "pipedream-2bw",
    "spectrain",
    "pipedream-flush",
    "gpipe",
)


def plan_for(profile: Profile, variant: str, like: Plan | None) -> Plan:
    """A plan with four stages. `like`: with the same cuts."""
    whole = VARIANTS[variant].whole_mini_batches
    pins = like.stages if like else ()
    return solve(
        profile,
        uniform_cluster(STAGES),
        variant,
        stages=STAGES,
        replicas=False,
        micro_batches=1 if whole else MICRO_BATCHES,
        pins=tuple((name, s) for s, stage in enumerate(pins) for name in stage.nodes),
    )


def at_equal_limits(plan: Plan, profile: Profile) -> Plan:
    """With a mini-batch in flight for each stage from its own on, where the system may have it."""
    ranges = limit_ranges(VARIANTS[plan.variant], len(plan.stages))
    stages = tuple(
        msgspec.structs.replace(stage, in_flight=max(least, min(most, len(plan.stages) - s)))
        for s, (stage, (least, most)) in enumerate(zip(plan.stages, ranges, strict=True))
    )
    return recheck(msgspec.structs.replace(plan, stages=stages), profile).plan


def held_by(model: str, plan: Plan, *, equal_limits: bool) -> Held:
    """What it should hold, and does."""
    settings = RunSettings(
        task=target_of(model), steps=STEPS, evaluate=False, distances=False, checkpoint_every=0
    )
    with tempfile.TemporaryDirectory() as folder:
        summary = run(plan, settings, Path(folder) / "run")
    peaks = [stage.peak for stage in summary.stages if stage.peak is not None]
    wanted = plan.predicted.stages
    return Held(
        model=model,
        variant=plan.variant,
        micro_batches=plan.micro_batches,
        predicted_bytes=tuple(s.accounted_memory.total for s in wanted),
        accounted_bytes=tuple(peak.total for peak in peaks),
        predicted_weight_bytes=tuple(_weights(s.accounted_memory) for s in wanted),
        accounted_weight_bytes=tuple(_weights(peak) for peak in peaks),
        versions=tuple(stage.versions_held for stage in summary.stages),
        differences=tuple(max(stage.version_differences) for stage in summary.stages),
        in_flight=tuple(stage.in_flight for stage in plan.stages),
        equal_limits=equal_limits,
        predicted_period_s=plan.predicted.period_s,
    )


def _weights(memory: MemoryByKind) -> int:
    return memory.weights_bytes + memory.versions_bytes


@click.command()
@click.option("--models", default=",".join(MEMORY_RACES), show_default=True)
@click.option("--systems", default=",".join(SYSTEMS), show_default=True)
@click.option("--results", default=str(DOCS / "benchmarks" / "races.json"))
@click.option("--page", default=str(DOCS / "benchmarks.md"))
def main(models: str, systems: str, results: str, page: str) -> None:
    """Account for what every system holds, and add it to the results."""
    torch.set_num_threads(1)
    path = Path(results)
    for model in models.split(","):
        size = MEMORY_RACES[model].mini_batch
        profile = measure(target_of(model), batch_size=size, seconds=8.0)
        like = plan_for(profile, "timeprest", None)
        for name in systems.split(","):
            own = plan_for(profile, name, like)
            equal = at_equal_limits(own, profile)
            found = [held_by(model, equal, equal_limits=True)]
            if own.stages != equal.stages:
                found.append(held_by(model, own, equal_limits=False))
            for each in found:
                print(
                    f"{model} {name}, in flight {each.in_flight}: accounted "
                    f"{each.accounted_bytes}, predicted {each.predicted_bytes}, versions "
                    f"{each.versions}",
                    flush=True,
                )
            before = read_results(path, machine())
            others = [e for e in before.held if (e.model, e.variant) != (model, name)]
            write_results(path, msgspec.structs.replace(before, held=(*others, *found)))
    write_page(path, Path(page))


if __name__ == "__main__":
    main()
