"""A recording as text: a line for each lane, time to the right, letters and colours for operations.

stage |0 s        |5 ms       |10 ms
0     F0.0F0.1F0.2F0.3F1.0F1.1············B0=========F2.0
1     ····F0.0F0.1F0.2F0.3B0=========F1.0F1.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console, Group
from rich.style import Style
from rich.text import Text

from ...planner.plan import Plan
from ...planner.recordings.predicted import predicted
from ...planner.recordings.recording import Lane, Recording, Span, stages_text
from ...planner.systems.operations import BACKWARD, FORWARD, UPDATE, WEIGHT
from ...profiles.errors import UserError
from ...profiles.units import format_seconds
from ..tables.palette import OPERATIONS, has_colours, operation_style

_FILL = {FORWARD: "-", BACKWARD: "=", WEIGHT: "~", UPDATE: "+"}
"""What follows an operation's name as far as it goes, where colours don't say it."""

_IDLE = "·"
_TICK_COLUMNS = 12
_LEAST_COLUMNS = 20


@dataclass(frozen=True)
class Panel:
    """A part of a recording, in seconds from its beginning."""

    title: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


def timetable(
    console: Console, recording: Recording, lanes: Sequence[int], panels: Sequence[Panel]
) -> Group:
    """The panels below each other, in the console's width and all at one scale, with the lanes at
    these positions."""
    names = [lane_name(recording.lanes, k) for k in lanes]
    head = "stages" if _several(recording) else "stage"
    label = 1 + max(len(head), *map(len, names))
    columns = max(console.width - label, _LEAST_COLUMNS)
    longest = max(panel.length_s for panel in panels)
    # All times being 0, everything happens at once.
    column_s = longest / columns or 1.0
    spans = by_lane(recording.spans, lanes)
    lines: list[Text] = []
    for panel in panels:
        width = min(columns, max(1, round(panel.length_s / column_s)))
        lines.append(Text(panel.title, style="bold"))
        lines.append(Text(head.ljust(label)).append(_scale(width, column_s), "dim"))
        for words, k in zip(names, lanes, strict=True):
            line = Text(words.ljust(label))
            shown = _shown(spans[k], panel.begin_s, column_s, width)
            for text, style in _lane(console, recording, spans[k], shown):
                line.append(text, style)
            line.no_wrap = True
            lines.append(line)
    return Group(*lines)


def lane_name(lanes: Sequence[Lane], k: int) -> str:
    """``3``; ``3.1`` for replica 1 of stage 3; ``0,3`` for a device with both."""
    lane = lanes[k]
    beside = any(0 <= j < len(lanes) and lanes[j].stages == lane.stages for j in (k - 1, k + 1))
    name = stages_text(lane.stages).partition(" ")[2].replace(", ", ",")
    return f"{name}.{lane.replica}" if beside else name


def by_lane(spans: Iterable[Span], lanes: Iterable[int]) -> dict[int, list[Span]]:
    """The spans of these lanes, by time."""
    found: dict[int, list[Span]] = {k: [] for k in lanes}
    for span in spans:
        if span.lane in found:
            found[span.lane].append(span)
    for mine in found.values():
        mine.sort(key=lambda span: span.start_s)
    return found


def _scale(columns: int, column_s: float) -> str:
    """Ticks with their times, from 0."""
    step_s = _round_up(_TICK_COLUMNS * column_s)
    line = [" "] * columns
    k = 0
    while (at := round(k * step_s / column_s)) < columns:
        text = "|" + format_seconds(k * step_s)
        if at + len(text) <= columns:
            line[at : at + len(text)] = text
        k += 1
    return "".join(line)


def _round_up(seconds: float) -> float:
    """The next 1, 2 or 5 with zeros."""
    power = 10.0 ** int(f"{seconds:e}".partition("e")[2])
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= seconds * (1 - 1e-9))


def _several(recording: Recording) -> bool:
    return any(len(lane.stages) > 1 for lane in recording.lanes)


def _lane(
    console: Console, recording: Recording, spans: Sequence[Span], shown: Sequence[Span | None]
) -> Iterator[tuple[str, Style | str]]:
    """Pieces of a lane's line with their styles."""
    colours = has_colours(console)
    several = any(span.micro_batch for span in spans)
    for piece in _pieces(shown, recording.name):
        if piece.span is None:
            yield _IDLE * piece.width, "dim"
        else:
            span = piece.span
            stage = recording.name(span).removesuffix(span.name)
            names = [stage + span.name] if several and not piece.many else []
            names += [f"{stage}{span.kind}{span.mini_batch}", stage + span.kind]
            # Where colours say the kind, rather the stage.
            names += [stage] if stage and colours else []
            text = next((name for name in names if len(name) <= piece.width), span.kind)
            text = text.ljust(piece.width, " " if colours else _FILL[span.kind])
            yield text, operation_style(console, span.kind, span.mini_batch)


def _shown(
    spans: Sequence[Span], begin_s: float, column_s: float, columns: int
) -> list[Span | None]:
    """For each column what most of it is; None: idle."""
    best: list[Span | None] = [None] * columns
    most = [0.0] * columns
    busy = [0.0] * columns
    updates = []
    for span in spans:
        a, b = ((t - begin_s) / column_s for t in (span.start_s, span.end_s))
        if b < 0 or a >= columns:
            continue
        if span.kind == UPDATE:
            updates.append((b, span))
        for x in range(max(int(a), 0), min(int(b) + 1, columns)):
            share = min(b, x + 1) - max(a, x)
            busy[x] += max(share, 0.0)
            if share > most[x]:
                best[x], most[x] = span, share
    found = [span if busy[x] >= 0.5 else None for x, span in enumerate(best)]
    # What is short amid idle time has a column all the same, one for each kind and mini-batch.
    drawn = {_alike(span) for span in found if span is not None}
    for x, short in enumerate(best):
        if short is not None and found[x] is None and _alike(short) not in drawn:
            found[x] = short
            drawn.add(_alike(short))
    for b, span in updates:
        # Too short for a column: it has the last one of what went before, if that has others.
        at = int(b - 1e-6 * max(b, 1.0))
        for x in (at, at - 1):
            before = found[x] if 2 <= x < columns else None
            if span in found or before is None:
                break
            if found[x - 2] is found[x - 1] is before and before.kind != FORWARD:
                found[x] = span
    return found


def _alike(span: Span) -> tuple[int, str, int]:
    return span.stage, span.kind, span.mini_batch


@dataclass(frozen=True)
class _Piece:
    """Columns of one operation, or of several of a kind and mini-batch (`many`); or idle ones."""

    span: Span | None
    width: int
    many: bool = False


def _pieces(shown: Sequence[Span | None], name: Callable[[Span], str]) -> Iterator[_Piece]:
    runs = [(span, len(list(group))) for span, group in groupby(shown)]
    for _, group in groupby(runs, key=lambda run: run[0] and _alike(run[0])):
        several = list(group)
        # Where no micro-batch has room for its name, all of a mini-batch in a row share one.
        if any(span is None or len(name(span)) <= width for span, width in several):
            yield from (_Piece(span, width) for span, width in several)
        else:
            yield _Piece(several[0][0], sum(width for _, width in several), many=True)


# tp-plan show --timeline --------------------------------------------------------------------------

_MOST_OPERATIONS = 200_000
_MOST_LANES = 32
_FORWARD_COLUMNS = 3
"""As wide a forward should be, as long as a few mini-batches have room beside each other."""


def timeline(
    console: Console, plan: Plan, first: int | None, count: int | None, *, every: bool = False
) -> Group:
    """The plan's schedule as a timetable in the console's width, of all lanes, however many there
    are, with `every`.

    Args:
        first: the first mini-batch to show. None: the beginning of the run, and a part of its
            steady state.
        count: mini-batches to show; by default as many as are easy to read.

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
    lanes = _lanes(recording, every=every)
    return Group(
        timetable(console, recording, lanes, panels), _legend(console, plan, recording, lanes)
    )


def timeline_json(plan: Plan, first: int | None, count: int | None) -> dict[str, Any]:
    """The same as data: lanes, and the operations of all mini-batches up to the last one shown.

    Raises UserError as `timeline`.
    """
    begin = min(_settled(plan), max(_affordable(plan) - 2, 0)) if first is None else first
    count = count or 1
    recording = record(plan, begin, count)
    shown = range(first or 0, begin + count)
    return {
        "source": recording.source,
        "variant": recording.variant,
        "period_s": recording.period_s,
        "lanes": [lane._asdict() for lane in recording.lanes],
        "spans": [span._asdict() for span in recording.spans if span.mini_batch in shown],
    }


def record(plan: Plan, begin: int, count: int) -> Recording:
    """A plan's run, without memory, up to `count` mini-batches from `begin` on, and some more that
    they don't notice its end. Raises UserError where they are too many."""
    refuse_too_many(plan, begin + count, "--timeline")
    until = min(begin + count + _settled(plan), _affordable(plan))
    return predicted(plan, until, memory_too=False)


def refuse_too_many(plan: Plan, mini_batches: int, option: str) -> None:
    """Raise UserError where so many mini-batches of a plan are too long to simulate."""
    fits = _affordable(plan)
    if mini_batches > fits:
        raise UserError(
            f"{option}: {mini_batches} mini-batches, counted from the run's first, have more "
            f"than {_MOST_OPERATIONS:,} operations; show some of the first {fits} with "
            "--from-mini-batch and --mini-batches"
        )


def _affordable(plan: Plan) -> int:
    """Mini-batches whose operations aren't too many."""
    workers = sum(len(stage.devices) for stage in plan.stages)
    each = max(workers, len(plan.stages) * plan.micro_batches) * 2 + len(plan.stages)
    return max(_MOST_OPERATIONS // each, 1)


def _settled(plan: Plan) -> int:
    """A mini-batch by which the pipeline has filled."""
    if plan.system.flushes or len(plan.stages) == 1:
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
    if plan.system.flushes or len(plan.stages) == 1:
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


def _lanes(recording: Recording, *, every: bool) -> list[int]:
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
    colours = has_colours(console)
    for kind in kinds:
        # With what follows a name where colours don't say the kind.
        text.append(kind if colours else kind + _FILL[kind], operation_style(console, kind, 0))
        text.append(f" {OPERATIONS[kind].label}  ")
    text.append("· idle")
    if plan.micro_batches > 1:
        text.append(f"  {FORWARD}3.1: micro-batch 1 of mini-batch 3")
    if _several(recording):
        text.append(f"  2{FORWARD}3: of stage 2")
    said = [text]
    period = format_seconds(plan.predicted.period_s)
    note = f"period {period} per mini-batch in the steady state; messages aren't drawn"
    if len(lanes) < len(recording.lanes):
        note += f"; {len(lanes)} of {len(recording.lanes)} lanes (-v: all)"
    elif any("." in lane_name(recording.lanes, k) for k in lanes):
        note += "; 1.0: replica 0 of stage 1" + "; 0,3.1: replica 1 of both" * _several(recording)
    said.append(Text(note, style="dim"))
    return Group(*said)
