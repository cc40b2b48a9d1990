"""Plans as people read them: a table of stages, the verdict, the first operations; and several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..planner.front import FrontPoint
from ..planner.operations import op_text
from ..planner.orders import make_order
from ..planner.plan import Plan, PlanStage, pipeline_of
from ..planner.stage_costs import UNMEASURED_WEIGHT_SHARE, unmeasured_weight_parts
from ..planner.variants import variant_named
from ..profiles.profile import Profile
from ..profiles.units import format_bytes, format_seconds
from .common import output
from .tables import compact_table, counted


def print_plan(plan: Plan, count: int) -> None:
    """Print all there is to say; `count` operations of each stage's order."""
    console = output()
    console.print(stage_table(plan))
    console.print(legend())
    console.print(verdict(plan))
    if count:
        console.print(operations(plan, count), soft_wrap=False)


def stage_table(plan: Plan) -> Table:
    """One row per stage."""
    table = compact_table(
        f"{plan.variant}: {counted(len(plan.stages), 'stage', 'stages')}, mini-batch "
        f"{plan.mini_batch} in {counted(plan.micro_batches, 'micro-batch', 'micro-batches')} of "
        f"{plan.micro_batch}",
        ["stage", "layers", "device"],
        ["forward", "backward", "transfer", "memory", "limit", "L", "ver", "d", "idle"],
    )
    for s, (stage, predicted) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        limits = [plan.cluster.devices[d].memory_bytes for d in stage.devices]
        limit = min((size for size in limits if size is not None), default=None)
        table.add_row(
            str(s),
            _layers(stage.nodes) + (" ↻" if stage.recompute else ""),
            _devices(plan, stage),
            format_seconds(predicted.forward_s),
            format_seconds(predicted.backward_s),
            format_seconds(predicted.transfer_s),
            format_bytes(predicted.memory_bytes),
            "-" if limit is None else format_bytes(limit),
            str(stage.in_flight),
            str(predicted.versions_held),
            str(predicted.version_difference),
            f"{predicted.idle_share:.0%}",
        )
    return table


def _layers(nodes: tuple[str, ...]) -> str:
    if len(nodes) == 1:
        return nodes[0]
    return f"{nodes[0]} … {nodes[-1]} ({len(nodes)})"


def _devices(plan: Plan, stage: PlanStage) -> str:
    names = [plan.cluster.devices[d].name for d in stage.devices]
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


def verdict(plan: Plan) -> Text:
    """Period, rate, and what the solver can prove."""
    predicted, solver = plan.predicted, plan.solver
    if solver.optimal:
        proof = "proven optimal"
    else:
        proof = f"lower bound {format_seconds(solver.bound_s)}, gap {solver.gap:.1%}"
        proof += f" (ended by {solver.stopped})" if solver.stopped else ""
    return Text(
        f"period {format_seconds(predicted.period_s)} per mini-batch, "
        f"{predicted.samples_per_s:.0f} samples/s, {predicted.speedup:.2f} × one device\n"
        f"{solver.method}: {proof}, {solver.plans_tried} plans in "
        f"{format_seconds(solver.seconds)}"
    )


def legend() -> Text:
    """What the columns mean."""
    return Text(
        "forward, backward, transfer: per micro-batch. L: mini-batches in flight at most. "
        "ver: weight versions held. d: version difference, backward less forward. "
        "↻: activations are computed again.",
        style="dim",
    )


def assumed(profile: Profile, variant: str) -> str | None:
    """What a plan of this system takes for granted, since the profile doesn't say; or None."""
    layers = unmeasured_weight_parts(profile)
    if not layers or not variant_named(variant).split_backward:
        return None
    return (
        f"{variant}: the profile doesn't say how much of a backward is for the weights; "
        f"{UNMEASURED_WEIGHT_SHARE:.0%} is assumed in "
        f"{counted(len(layers), 'layer', 'layers')} (profile again to measure it)"
    )


def comparison(plans: Mapping[str, Plan], failed: Mapping[str, str]) -> Group:
    """A row for each system's best plan; and why others have none."""
    table = compact_table(
        "the best plan of each system",
        ["system"],
        ["S", "devices", "N", "period", "samples/s", "memory", "ver", "d", "idle", "gap"],
    )
    for name, plan in plans.items():
        stages = plan.predicted.stages
        table.add_row(
            name,
            str(len(plan.stages)),
            str(sum(len(stage.devices) for stage in plan.stages)),
            str(plan.micro_batches),
            format_seconds(plan.predicted.period_s),
            f"{plan.predicted.samples_per_s:.0f}",
            format_bytes(max(stage.memory_bytes for stage in stages)),
            str(max(stage.versions_held for stage in stages)),
            str(max(stage.version_difference for stage in stages)),
            f"{min(stage.idle_share for stage in stages):.0%}",
            "0" if plan.solver.optimal else f"{plan.solver.gap:.1%}",
        )
    notes = [Text(f"{name}: {why}", style="dim") for name, why in failed.items()]
    note = Text(
        "S: stages. N: micro-batches. memory, ver, d: of the stage with most. idle: of the busiest "
        "stage.",
        style="dim",
    )
    return Group(table, note, *notes)


def front_table(points: Iterable[FrontPoint]) -> Group:
    """The plans that none beats in period, memory and version difference at once."""
    table = compact_table(
        "Pareto front of period, memory per device and version difference, of all plans seen",
        ["system"],
        ["period", "memory", "d", "S", "devices", "N", "L"],
    )
    for point in points:
        found = point.evaluation
        limits = [stage.in_flight for stage in found.stages]
        table.add_row(
            point.variant,
            format_seconds(point.period_s),
            format_bytes(point.memory_bytes),
            str(point.version_difference),
            str(len(found.stages)),
            str(sum(len(stage.devices) for stage in found.stages)),
            str(found.micro_batches),
            _limits(limits),
        )
    return Group(table)


def _limits(limits: list[int]) -> str:
    if len(limits) <= 6:
        return " ".join(map(str, limits))
    return f"{limits[0]} … {limits[-1]}"


def operations(plan: Plan, count: int) -> Group:
    """Each stage's first operations as text: 1F0.2 is stage 1, mini-batch 0, micro-batch 2."""
    pipeline = pipeline_of(plan)
    order = make_order(pipeline, 2 * len(plan.stages) + count // max(plan.micro_batches, 1) + 2)
    letters = "F forward, B backward, U update"
    if pipeline.variant.split_backward:
        letters = "F forward, B backward to the stage's inputs, W to its weights, U update"
    lines = [Text(f"first {count} operations of each stage ({letters}):")]
    for s, ops in enumerate(order):
        lines.append(Text("  " + " ".join(op_text(s, op) for op in islice(ops, count))))
    return Group(*lines)
