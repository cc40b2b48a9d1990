"""Layout of a figure: its settings, the part in time that it shows, axes and legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....planner.recordings.recording import Lane, Recording
from .svg import INK, Drawing, text_width

SMALL, SIZE = 6.0, 7.0
"""Of text, in points: beside axes; of names."""

RIGHT = 37.0
"""Beside the plots, for figures in words. In points."""

GRID = "#c9ced6"


@dataclass(frozen=True)
class FigureSettings:
    """How a figure is drawn: `width` in points, from the mini-batch `first` on, so many of them
    whole (None: the filling and two more), with messages, and with the weight version that each
    operation had."""

    width: float = 178 * 72 / 25.4
    first: int = 0
    mini_batches: int | None = None
    messages: bool = False
    versions: bool = False


@dataclass(frozen=True)
class TimeWindow:
    """The part of a recording that is drawn, in the recording's time. Mini-batches from `first` to
    `last` lie in it whole; its end is that of the last one."""

    first: int
    last: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length; never 0."""
        return (self.end_s - self.begin_s) or 1e-9


def filling(recording: Recording) -> int:
    """Mini-batches that begin on the first lane before the first of them comes back to it."""
    begun: set[int] = set()
    for span in recording.spans:
        if span.lane:
            break
        if span.kind == "F":
            begun.add(span.mini_batch)
        elif span.kind == "B" and span.stage == recording.lanes[0].stages[0]:
            break
    return max(1, len(begun))


def window_of(recording: Recording, settings: FigureSettings) -> TimeWindow:
    """The mini-batches that are asked for, as far as they are recorded."""
    found = {span.mini_batch for span in recording.spans}
    first = max(settings.first, min(found, default=0))
    wanted = settings.mini_batches or filling(recording) + 2
    last = min(first + wanted - 1, max(found, default=0))
    first = min(first, last)
    inside = [span for span in recording.spans if first <= span.mini_batch <= last]
    begin = min((span.start_s for span in inside), default=0.0)
    end = max((span.end_s for span in inside), default=0.0)
    return TimeWindow(first, last, begin, end)


@dataclass(frozen=True)
class Scale:
    """Seconds to points: `left` is where the window begins."""

    left: float
    right: float
    begin_s: float
    seconds: float

    def __call__(self, at_s: float) -> float:
        """The x of a moment; of those outside, the nearer edge's."""
        share = (at_s - self.begin_s) / self.seconds
        return self.left + (self.right - self.left) * min(1.0, max(0.0, share))


def left_margin(lanes: Iterable[Lane]) -> float:
    """Room for the lanes' names, and for the numbers of a vertical axis."""
    widest = max((text_width(part, SIZE) for lane in lanes for part in name_lines(lane)), default=0)
    return widest + text_width("1000 MiB", SMALL) + 3


def name_lines(lane: Lane) -> list[str]:
    """A lane's name in one or two lines: replicas of several stages are told by their devices."""
    device, _, stages = lane.name.partition(": ")
    if stages:
        return [device, stages.partition(" replica")[0]]
    at = lane.name.find(" replica")
    return [lane.name] if at < 0 else [lane.name[:at], lane.name[at + 1 :]]


# Axes ---------------------------------------------------------------------------------------------


def steps(most: float, wanted: int) -> float:
    """A round distance between ticks, so that about so many lie below `most`."""
    least = most / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(power * m for m in (1, 2, 5, 10, 20) if power * m >= least * 0.999)


def ticks(begin: float, step: float, most: float) -> list[float]:
    """Multiples of the step from `begin` to `most`."""
    first, last = math.ceil(begin / step - 1e-9), math.floor(most / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's number, with as many decimals as the ticks need."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


def time_unit(seconds: float) -> tuple[float, str]:
    """How many of a unit a second has, and its name; for times up to `seconds`."""
    for least, factor, name in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if seconds >= 2 * least:
            return factor, name
    return 1e6, "µs"


def time_axis(drawing: Drawing, scale: Scale, y: float, notes: Sequence[str] = ()) -> float:
    """Draw the time axis, notes below it. Returns the y of its lower edge."""
    factor, unit = time_unit(scale.begin_s + scale.seconds)
    begin, most = scale.begin_s * factor, (scale.begin_s + scale.seconds) * factor
    step = steps(most - begin, int((scale.right - scale.left) / 27))
    name = f"time ({unit})"
    with drawing.group(stroke=INK, stroke_width=0.5):
        drawing.line(scale.left, y, scale.right, y)
        values = ticks(begin, step, most)
        for value in values:
            x = scale(value / factor)
            drawing.line(x, y, x, y + 2.5)
    with drawing.group(font_size=SMALL, fill=INK, text_anchor="middle"):
        for value in values:
            drawing.text(scale(value / factor), y + 9, tick_text(value, step))
        drawing.text(scale.right, y + 17.5, name, font_size=SIZE, text_anchor="end")
    words, left = text_width("; ".join(notes), SMALL), scale.left
    if notes and words + text_width(name, SIZE) + 6 > scale.right - left:
        y, left = y + 8, min(left, max(1, drawing.width - 1 - words))
    return write_notes(drawing, notes, left, y + 17.5) + 2.5


def write_notes(drawing: Drawing, notes: Sequence[str], left: float, y: float) -> float:
    """Write notes in as many lines as they take. Returns the y of the last one's baseline."""
    with drawing.group(font_size=SMALL, fill=INK):
        line = ""
        for note in notes:
            if line and left + text_width(f"{line}; {note}", SMALL) > drawing.width - 1:
                drawing.text(left, y, f"{line};")
                line, y = note, y + SMALL + 2
            else:
                line = f"{line}; {note}" if line else note
        if line:
            drawing.text(left, y, line)
    return y


def lane_names(drawing: Drawing, lanes: Sequence[tuple[Lane, float]], pitch: float) -> None:
    """Names beside the lanes, at the heights of their middles, which are a pitch apart; where that
    is narrow, of some alone."""
    tallest = max((len(name_lines(lane)) for lane, _ in lanes), default=1)
    every = max(1, math.ceil(tallest * SIZE / pitch)) if pitch > 0 else 1
    with drawing.group(font_size=SIZE, fill=INK):
        for lane, middle in lanes[::every]:
            lines = name_lines(lane)
            y = middle + 2.5 - (len(lines) - 1) * SIZE / 2
            for k, line in enumerate(lines):
                drawing.text(0.5, y + k * SIZE, line)


# Stages of a lane ---------------------------------------------------------------------------------
# A rule along the upper edge of what its second stage runs, two for the third's, and so on: they
# are to be seen in grey, and on every fill and pattern.

MOST_RULES = 3
"""Where a lane has more stages, it begins anew."""


def rules_of(lane: Lane, stage: int) -> int:
    """How many rules mark a stage of a lane."""
    return lane.stages.index(stage) % (MOST_RULES + 1)


def rule_heights(rules: int, top: float, height: float) -> list[float]:
    """Where they are in a box."""
    return [top + height * (0.09 + 0.17 * k) for k in range(rules)]


def rule_width(height: float) -> float:
    """How thick they are in a box of this height."""
    return max(0.45, 0.1 * height)


# Legends ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One line of a legend: a box with one or two fills side by side, and `rules`, lines at its
    top; or a line with this stroke and dashes."""

    label: str
    fills: tuple[str, ...] = ()
    stroke: str = ""
    dashes: str = ""
    rules: int = 0


def legend(drawing: Drawing, entries: Sequence[Entry], left: float, y: float) -> float:
    """Draw a legend in as many rows as it takes. Returns the y of its lower edge."""
    x, row, high = left, y, 6.5
    for entry in entries:
        boxes = 9.0 * max(1, len(entry.fills))
        width = boxes + 3 + text_width(entry.label, SMALL)
        if x > left and x + width > drawing.width - 1:
            x, row = left, row + 10
        for k, fill in enumerate(entry.fills):
            drawing.rect(x + 9 * k, row, 9, high, fill=fill, stroke=INK, stroke_width=0.25)
        for y_rule in rule_heights(entry.rules, row, high):
            drawing.line(x, y_rule, x + 9, y_rule, stroke=INK, stroke_width=rule_width(high))
        if entry.stroke:
            middle = row + high / 2
            more = {"stroke_dasharray": entry.dashes} if entry.dashes else {}
            drawing.line(x, middle, x + 9, middle, stroke=entry.stroke, stroke_width=0.8, **more)
        drawing.text(x + boxes + 3, row + 5.4, entry.label, font_size=SMALL, fill=INK)
        x += width + 9
    return row + high
