"""tp-plan show --timeline: which part of a plan's run to draw, and drawing it."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.text import Text

from ...planner.plan import Plan
from ...planner.recording import Recording, predicted
from ...planner.systems.operations import FORWARD
from ...planner.systems.variants import variant_named
from ...profiles.errors import UserError
from ...profiles.units import format_seconds
from ..paints import operation_style
from ..palette import OPERATIONS
from .timetable import Panel, lane_name, timetable

_MOST_OPERATIONS = 200_000
_MOST_LANES = 32
_FORWARD_COLUMNS = 3
"""As wide a forward should be, as long as a few mini-batches have room beside each other."""


def timeline(
    console: Console, plan: Plan, first: int | None, count: int | None, *, every: bool = False
) -> Group:
    """The plan's order as a timetable in the console's width.

    Args:
        first: the first mini-batch to show. None: the beginning of the run, and a part of its
            steady state.
        count: mini-batches to show; by default as many as are easy to read.
        every: all lanes, however many there are.

    Raises UserError where that would be too many operations.
    """
    shown = count or _readable(console, plan)
    settled = _settled(plan)
    if first is None and count is None and settled + shown > _affordable(plan):
        # Only the beginning of what is so large.
        first, shown = 0, min(shown, _affordable(plan))
    begin = settled if first is None else first
    recording = record(plan, begin, shown)
    panels = [_panel(recording, f"from mini-batch {begin} on", begin, shown)]
    if first is None:
        panels = _two_panels(plan, recording, begin, shown)
    lanes = _lanes(plan, recording, every=every)
    return Group(
        timetable(console, recording, lanes, panels), _legend(console, plan, recording, lanes)
    )


def timeline_json(plan: Plan, first: int | None, count: int | None) -> dict[str, Any]:
    """The same as data: lanes, and the operations of all mini-batches up to the last one shown.

    Raises UserError as `timeline`.
    """
    begin = min(_settled(plan), max(_affordable(plan) - 2, 0)) if first is None else first
    recording = record(plan, begin, count or 1)
    return {
        "source": recording.source,
        "variant": recording.variant,
        "period_s": recording.period_s,
        "lanes": [lane._asdict() for lane in recording.lanes],
        "spans": [span._asdict() for span in recording.spans if span.mini_batch >= (first or 0)],
    }


def record(plan: Plan, begin: int, count: int) -> Recording:
    """A plan's run up to `count` mini-batches from `begin` on, and some more that they don't
    notice its end. Raises UserError where they are too many."""
    fits = _affordable(plan)
    if begin + count > fits:
        raise UserError(
            f"--timeline: {begin + count} mini-batches, counted from the run's first, have more "
            f"than {_MOST_OPERATIONS:,} operations; show some of the first {fits} with "
            "--from-mini-batch and --mini-batches"
        )
    return predicted(plan, min(begin + count + _settled(plan), fits))


def _affordable(plan: Plan) -> int:
    """Mini-batches whose operations aren't too many."""
    workers = sum(len(stage.devices) for stage in plan.stages)
    each = max(workers, len(plan.stages) * plan.micro_batches) * 2 + len(plan.stages)
    return max(_MOST_OPERATIONS // each, 1)


def _settled(plan: Plan) -> int:
    """A mini-batch by which the pipeline has filled."""
    if variant_named(plan.variant).flushes or len(plan.stages) == 1:
        return 1
    # Limits of an edited plan may be far above what is ever in flight.
    deepest = max(stage.in_flight for stage in plan.stages)
    return min(deepest, 4 * len(plan.stages)) + 1


def _readable(console: Console, plan: Plan) -> int:
    """Mini-batches that have room."""
    forward_s = min(stage.forward_s for stage in plan.predicted.stages)
    room_s = (console.width - 6) * forward_s / _FORWARD_COLUMNS
    period_s = plan.predicted.period_s
    least = 2 if plan.micro_batches <= 16 else 1
    return min(max(int(room_s / period_s), least), 6) if period_s else least


def _panel(recording: Recording, title: str, begin: int, count: int) -> Panel:
    """From a mini-batch's first operation to the last of the last of `count`."""
    spans = [span for span in recording.spans if begin <= span.mini_batch < begin + count]
    return Panel(title, min(s.start_s for s in spans), max(s.end_s for s in spans))


def _two_panels(plan: Plan, recording: Recording, settled: int, count: int) -> list[Panel]:
    """The pipeline as it fills, and from where it has filled; one panel if they are the same."""
    start = _panel(recording, "from the start", 0, count)
    if variant_named(plan.variant).flushes or len(plan.stages) == 1:
        return [start]
    begin_s = _panel(recording, "", settled, 1).begin_s
    length_s = max(start.length_s, count * recording.period_s)
    if begin_s < length_s / 2:
        # It fills at once: what would be shown twice is one picture.
        return [Panel("from the start", 0.0, begin_s + length_s)]
    after = format_seconds(begin_s)
    return [
        Panel("from the start: the pipeline fills", 0.0, length_s),
        Panel(f"steady: from mini-batch {settled} on, {after} later", begin_s, begin_s + length_s),
    ]


def _lanes(plan: Plan, recording: Recording, *, every: bool) -> list[int]:
    """Lanes to draw: all, or the first replicas, or those of some stages from first to last."""
    lanes = list(range(len(recording.lanes)))
    if every or len(lanes) <= _MOST_LANES:
        return lanes
    lanes = [k for k in lanes if recording.lanes[k].replica == 0]
    if len(lanes) <= _MOST_LANES:
        return lanes
    last = len(lanes) - 1
    chosen = {round(j * last / (_MOST_LANES - 1)) for j in range(_MOST_LANES)}
    return [lanes[k] for k in sorted(chosen)]


def _legend(console: Console, plan: Plan, recording: Recording, lanes: list[int]) -> Group:
    kinds = sorted({span.kind for span in recording.spans}, key=list(OPERATIONS).index)
    text = Text()
    for kind in kinds:
        text.append(kind, operation_style(console, kind, 0))
        text.append(f" {OPERATIONS[kind].label}  ")
    text.append("· idle")
    if plan.micro_batches > 1:
        text.append(f"  {FORWARD}3.1: micro-batch 1 of mini-batch 3")
    said = [text]
    period = format_seconds(plan.predicted.period_s)
    note = f"period {period} per mini-batch in the steady state; messages aren't drawn"
    if len(lanes) < len(recording.lanes):
        note += f"; {len(lanes)} of {len(recording.lanes)} lanes (-v: all)"
    elif any("." in lane_name(recording.lanes, k) for k in lanes):
        note += "; 1.0: replica 0 of stage 1"
    said.append(Text(note, style="dim"))
    return Group(*said)
