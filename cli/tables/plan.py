"""A plan in the terminal: its verdict, warnings, and first operations."""

from __future__ import annotations

from itertools import islice

import msgspec
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...planner.costs.layer_graph import LayerGraph, held_together
from ...planner.costs.stage_costs import UNMEASURED_WEIGHT_SHARE, unmeasured_weight_parts
from ...planner.plan import Plan, TargetPrediction, pipeline_of
from ...planner.schedules.schedules import make_schedule
from ...planner.search.answer.recheck import was_edited
from ...planner.simulator.timeline import running_ahead
from ...planner.systems.operations import op_text
from ...planner.systems.variants import variant_named
from ...profiles.profile import Profile
from ...profiles.units import format_bytes, format_rate, format_seconds
from ..errors import log, output
from .layout import counted, labelled
from .stages import (
    MOST_ROWS,
    device_name,
    kept_free,
    memory_limit,
    memory_table,
    notes,
    on_devices,
    placement_name,
    stage_table,
)

# Verdict, warnings and first operations -----------------------------------------------------------


def print_plan(plan: Plan, count: int, *, every: bool = False) -> None:
    """Print tables, verdict, notes and each stage's first `count` operations, in the console's
    width. `every`: each stage has a row of its own, however many there are."""
    console = output()
    console.print(stage_table(plan, console.width, every=every))
    console.print(memory_table(plan, console, console.width, every=every))
    console.print(notes(plan, every=every))
    console.print(verdict(plan))
    if count:
        console.print(operations(plan, count, every=every), soft_wrap=False)
    for warning in filter(None, (slower_than_one(plan), piling_up(plan))):
        log(f"warning: {warning}")


def warn_if_edited(plan: Plan, path: str) -> None:
    """Say of a plan file that what it predicts isn't what it says now, where that shows."""
    if was_edited(plan):
        log(
            f"{path}: edited since it was made: tp-plan check {path} --profile PROFILE says what "
            "it does now"
        )


def verdict(plan: Plan) -> Table:
    """Period, rate, what holds it back, and what the solver can prove."""
    predicted = plan.predicted
    stages, devices = predicted.stages, on_devices(plan)
    idle = [device.predicted.idle_share for device in devices]
    busiest = min(range(len(idle)), key=idle.__getitem__)
    stalest = max(range(len(stages)), key=lambda s: stages[s].version_difference)
    busy = f"{device_name(plan, devices[busiest])}, {idle[busiest]:.0%} idle"
    if len(idle) > 1 and max(idle) < min(idle) + 0.005:
        every = "devices" if plan.placement else "stages"
        busy = f"all {every} alike, {idle[busiest]:.0%} idle"
    elif len(idle) > 1:
        busy += f"; {sum(idle) / len(idle):.0%} on average"
    most = max(stage.versions_held for stage in stages)
    held = f"{counted(most, 'weight version')} held"
    staleness = "no version difference"
    if stages[stalest].version_difference:
        staleness = (
            f"version difference up to {stages[stalest].version_difference} (stage {stalest})"
        )
    if predicted.delay > stages[stalest].version_difference:
        # Of weights that are stashed, or doubly buffered: the same ones, and yet late.
        staleness += f"; gradients up to {counted(predicted.delay, 'update')} late"
    return labelled(
        [
            ("period", f"{format_seconds(predicted.period_s)} per mini-batch of {plan.mini_batch}"),
            *[("loading", _SLOW_LOADING)] * predicted.waits_for_samples,
            ("rate", rate(plan)),
            *_placed(plan),
            ("busiest", busy),
            ("memory", fullest(plan)),
            ("staleness", f"{staleness}{sequences(plan)}; {held}"),
            *_advice(plan),
            *_to_target(plan),
            *_given(plan),
            *(("chosen", line) for line in plan.solver.chosen or ()),
            ("solver", f"{plan.solver.method}: {proof(plan)}"),
        ]
    )


_SLOW_LOADING = (
    "takes as long, and no pipeline is faster than its samples come: give the DataLoader more "
    "workers"
)


def _given(plan: Plan) -> list[tuple[str, str]]:
    """What a plan gives away of the shortest period, and for what; nothing where it is as fast."""
    fastest, shortest_s = plan.solver.fastest, plan.solver.objective_s
    if fastest is msgspec.UNSET or not shortest_s:
        return []
    lost = plan.predicted.period_s / shortest_s - 1
    difference = plan.predicted.version_difference
    held = plan.predicted.most_bytes
    gained = {
        "staleness": f"d {difference} instead of {fastest.version_difference}",
        "memory": f"{format_bytes(held)} at most instead of {format_bytes(fastest.memory_bytes)}",
        "evenness": "stages that are more even",
        "stages": "fewer stages",
    }[fastest.given_for]
    share = f"{lost:.1%}" if lost >= 5e-4 else "under 0.1%"
    return [("given", f"{share} of the period for {gained} (--tolerance)")]


def target_name(metric: str, level: float) -> str:
    """``training loss of 0.412``."""
    if metric == "accuracy":
        return f"test accuracy of {level:.2%}"
    return f"{'training' if metric == 'loss' else 'test'} loss of {level:.4g}"


def target_interval(found: TargetPrediction, before: str = ", 95 % ") -> str:
    """``, 95 % 67.8 ms … 123 ms``; nothing where it isn't known, or has no width."""
    low_s, high_s = map(found.seconds, (found.overhead_low, found.overhead_high))
    if low_s is None or low_s == high_s:
        return ""
    return f"{before}{format_seconds(low_s)} … {'' if high_s is None else format_seconds(high_s)}"


def target_bound(found: TargetPrediction) -> str:
    """What no plan takes less than whose overhead has a lower end."""
    if not found.bound_s:
        return "nothing bounds what others take"
    least = format_seconds(found.bound_s)
    return f"none that the study bounds takes less than {least} (gap {found.gap:.1%})"


def shortest_text(plan: Plan, found: TargetPrediction) -> str:
    """What the shortest period would cost in samples."""
    shortest, own = map(format_seconds, (found.shortest_period_s, plan.predicted.period_s))
    if shortest == own:
        return f"no period is shorter than its {own}"
    least = "" if found.shortest_reaches else "at least "
    times = found.shortest_overhead / found.overhead
    return (
        f"the shortest period, {shortest} instead of {own}, would need {least}{times:.2f} × the "
        "samples"
    )


def _to_target(plan: Plan) -> list[tuple[str, str]]:
    """What a study said of it, where it was planned by one."""
    found = plan.to_target
    if found is msgspec.UNSET:
        return []
    about = "as trained" if found.exact else "by fitted delays"
    return [
        (
            "to target",
            f"{format_seconds(found.time_s)}{target_interval(found)}, to a "
            f"{target_name(found.metric, found.level)}; "
            f"{found.overhead:.2f} × the samples of plain training, {about}; "
            f"{target_bound(found)}",
        ),
        ("shortest", shortest_text(plan, found)),
        *([("train with", found.options)] if found.options else []),
    ]


def _placed(plan: Plan) -> list[tuple[str, str]]:
    """Which device has which stages, in short; nothing where each stage has its own."""
    if not plan.placement:
        return []
    stages = counted(len(plan.stages), "stage")
    devices = counted(plan.workers, "device")
    with_replicas = " with replicas" * any(len(stage.devices) > 1 for stage in plan.stages)
    return [("placement", f"{placement_name(plan)}: {stages} on {devices}{with_replicas}")]


def sequences(plan: Plan) -> str:
    """``, v = 1``; nothing in plans of before it was counted."""
    v = plan.predicted.sequence_distance
    return "" if v is None else f", v = {v}"


def _advice(plan: Plan) -> list[tuple[str, str]]:
    """That there are several sequences of updates; under nF1B also what would make one of them."""
    v, variant = plan.predicted.sequence_distance or 1, plan.system
    if v < 2 or variant.whole_mini_batches:
        return []
    # The formula is of nF1B with a device for each stage; other orders have several by their rule.
    if plan.placement or variant.schedule != "nf1b":
        return [("sequences", f"{v} of updates side by side (v = {v})")]
    least = len(plan.stages) - 1
    advice = f"N ≥ S − 1 = {least} micro-batches would avoid it, with unit times (TiMePReSt)"
    if plan.micro_batches >= least:
        advice = "N ≥ S − 1 avoids it with unit times; here backwards take longer"
    return [("sequences", f"{v} of updates side by side (v = {v}); {advice}")]


def rate(plan: Plan) -> str:
    """``7641 samples/s, 1.16 × one device``."""
    predicted = plan.predicted
    if not predicted.samples_per_s:
        return "unknown: the profile's times are 0"
    speedup = f"{predicted.speedup:.2f} × one device" if predicted.speedup else "speed-up unknown"
    return f"{format_rate(predicted.samples_per_s, 'samples')}, {speedup}"


def bare_rate(samples_per_s: float) -> str:
    """The rate without its unit; ``-`` where there is none."""
    return format_rate(samples_per_s, "").partition(" ")[0] if samples_per_s else "-"


def slower_than_one(plan: Plan) -> str | None:
    """A warning where the pipeline doesn't pay; None where it does, or nobody knows."""
    predicted = plan.predicted
    # 0.995 is printed as 1.00.
    if not 0 < predicted.speedup < 0.995 or plan.workers == 1:
        return None
    one_s = predicted.speedup * predicted.period_s
    return (
        f"slower than one device: alone, with memory enough and the speed of the one that was "
        f"profiled, it would take {format_seconds(one_s)} per mini-batch instead of "
        f"{format_seconds(predicted.period_s)} ({1 / predicted.speedup:.2f} × as fast)"
    )


def piling_up(plan: Plan) -> str | None:
    """A warning where messages wait for ever slower stages; None where none do."""
    found = []
    for link, lead in running_ahead(pipeline_of(plan), plan.predicted.period_s):
        nbytes = sum(
            edge.bytes_per_micro_batch * plan.micro_batches
            for edge in plan.edges
            if (edge.source, edge.target) == (link.source, link.target)
        )
        if nbytes * lead >= 1.0:
            found.append((nbytes * lead, link))
    if not found:
        return None
    most, link = max(found, key=lambda item: item[0])
    return (
        f"stage {link.source} gets no gradients back from stage {link.target} and may run ahead "
        f"of it: after each mini-batch up to {format_bytes(round(most))} more wait to be sent; "
        "its memory has those of a few dozen mini-batches"
    )


def fullest(plan: Plan) -> str:
    """The stage, or the device with several, that needs most of its limit, or, without limits,
    most."""
    devices = on_devices(plan)
    held = [device.predicted.memory_bytes for device in devices]
    limits = [memory_limit(plan, device.stages[0]) for device in devices]
    shares = [
        (nbytes / limit if limit else 0.0, nbytes)
        for nbytes, limit in zip(held, limits, strict=True)
    ]
    k = max(range(len(held)), key=shares.__getitem__)
    text = f"most on {device_name(plan, devices[k])}: {format_bytes(held[k])}"
    limit, free = limits[k], kept_free(plan, devices[k].stages[0])
    if limit is None:
        return f"{text}; its device has no limit"
    over = held[k] - (limit - free)
    left = f", {format_bytes(free)} kept free" if free else ""
    if over > 0:
        return f"{text}, {format_bytes(over)} over its limit of {format_bytes(limit)}{left}"
    return f"{text}, {shares[k][0]:.0%} of its limit of {format_bytes(limit)}{left}"


def proof(plan: Plan) -> str:
    """What the solver can prove, and what it took."""
    solver = plan.solver
    if solver.optimal:
        found = "proven optimal"
        if plan.placement and not plan.cluster.uniform:
            # Only where each has one stage are others looked at (docs/proofs.md).
            found += ", devices as listed"
    elif not solver.bound_s:
        found = "no lower bound"
    else:
        found = f"lower bound {format_seconds(solver.bound_s)}, gap {gap(plan)}"
        found += f" (ended by {solver.stopped})" if solver.stopped else ""
    tried = counted(solver.plans_tried, "plan")
    ours = "" if plan.engine is msgspec.UNSET else "with tp-run "
    return f"{ours}{found}; {tried} in {format_seconds(solver.seconds)}"


def gap(plan: Plan) -> str:
    """How far the plan may be from the best: ``0``, ``4.2%``, or ``-`` where nothing is known."""
    solver = plan.solver
    if solver.optimal:
        return "0"
    if not solver.bound_s:
        return "-"
    return f"{solver.gap:.1%}" if solver.gap < 10 else f"{solver.gap * 100:.3g}%"


def assumed(profile: Profile, variant: str) -> str | None:
    """What a plan of this system takes for granted, since the profile doesn't say; or None."""
    layers = unmeasured_weight_parts(profile)
    if not layers or not variant_named(variant).split_backward:
        return None
    return (
        f"{variant}: the profile doesn't say how much of a backward is for the weights; "
        f"{UNMEASURED_WEIGHT_SHARE:.0%} is assumed in "
        f"{counted(len(layers), 'layer')} (profile again to measure it)"
    )


def few_stages(profile: Profile, plan: Plan) -> str | None:
    """A line for a plan that ties keep in few stages; None where they don't."""
    devices = len(plan.cluster.devices)
    if not profile.tied or len(plan.stages) >= devices:
        return None
    if LayerGraph(profile, plan.tied).most_stages > len(plan.stages):
        return None
    tie = held_together(profile, plan.system, plan.tied)
    count = counted(len(plan.stages), "stage")
    return None if tie is None else f"{count} at most: {tie}"


def idle_devices(plan: Plan) -> str | None:
    """A line for a plan of as many stages as were asked for that leaves devices without one, as it
    has several on each; else None."""
    stages, used, devices = len(plan.stages), plan.workers, len(plan.cluster.devices)
    if stages <= used or used == devices:
        return None
    each = stages // used
    return (
        f"{stages} stages, {each} on each device, take {used} of {devices} devices; "
        f"--stages {each * devices} takes all"
    )


def operations(plan: Plan, count: int, *, every: bool = False) -> Group:
    """Each stage's first operations as text: 1F0.2 is stage 1, mini-batch 0, micro-batch 2; with
    `every`, of all stages, however many there are."""
    pipeline = pipeline_of(plan)
    schedule = make_schedule(
        pipeline, 2 * len(plan.stages) + count // max(plan.micro_batches, 1) + 2
    )
    letters = "F forward, B backward, U update"
    if pipeline.variant.split_backward:
        letters = "F forward, B backward to the stage's inputs, W to its weights, U update"
    each = "device" if pipeline.placement else "stage"
    head = Text(f"first {count} operations of each {each} ({letters}):")
    lines = Table.grid()
    found = schedule.on_devices()
    shown = found if every else found[:MOST_ROWS]
    for ops in shown:
        lines.add_row(" ".join(op_text(s, op) for s, op in islice(ops, count)))
    if len(shown) < len(found):
        lines.add_row(Text(f"… {len(found) - len(shown)} more {each}s (-v)", style="dim"))
    return Group(head, Padding(lines, (0, 0, 0, 2)))
