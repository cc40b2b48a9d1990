"""A plan as people read it: a table of its stages, the verdict, the first operations."""

from __future__ import annotations

from itertools import islice

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..planner.operations import op_text
from ..planner.orders import make_order
from ..planner.plan import Plan, pipeline_of
from ..profiles.units import format_bytes, format_seconds
from .tables import compact_table, counted


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
        device = plan.cluster.devices[stage.devices[0]]
        limit = device.memory_bytes
        table.add_row(
            str(s),
            _layers(stage.nodes),
            device.name,
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


def verdict(plan: Plan) -> Text:
    """Period, rate, and what the solver can prove."""
    predicted, solver = plan.predicted, plan.solver
    if solver.optimal:
        proof = "proven optimal"
    else:
        proof = f"lower bound {format_seconds(solver.bound_s)}, gap {solver.gap:.1%}"
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
        "ver: weight versions held. d: version difference, backward less forward.",
        style="dim",
    )


def operations(plan: Plan, count: int) -> Group:
    """Each stage's first operations as text: 1F0.2 is stage 1, mini-batch 0, micro-batch 2."""
    pipeline = pipeline_of(plan)
    order = make_order(pipeline, 2 * len(plan.stages) + count // max(plan.micro_batches, 1) + 2)
    lines = [Text(f"first {count} operations of each stage (F forward, B backward, U update):")]
    for s, ops in enumerate(order):
        lines.append(Text("  " + " ".join(op_text(s, op) for op in islice(ops, count))))
    return Group(*lines)
