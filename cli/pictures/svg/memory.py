"""Memory over time: what each worker holds, by kind, against its device's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....planner.recordings.recording import MEMORY_KINDS, Recording
from ....profiles.units import format_bytes
from ...tables.palette import LIMIT, MEMORY
from .frame import (
    GRID,
    RIGHT,
    SMALL,
    Entry,
    FigureSettings,
    Scale,
    TimeWindow,
    lane_names,
    left_margin,
    legend,
    steps,
    tick_text,
    ticks,
    time_axis,
    window_of,
)
from .svg import INK, Drawing, memory_fill, number

_TALLEST, _LEAST, _GAP, _MOST_HEIGHT = 46.0, 9.0, 7.0, 560.0
"""Of panels, in points; the last of all of them together."""

_NEAR = 4
"""A limit is drawn where it is no more than so many times what is held at most."""

_FINE = 0.4
"""Steps nearer to each other, in points, are drawn as one, with the larger total; with more than
`_FEW` lanes, coarser ones."""

_FEW = 16


class MemoryStep(NamedTuple):
    """A lane's bytes by kind, from x on."""

    x: float
    nbytes: tuple[int, ...]


def memory_svg(
    recording: Recording, limits: Sequence[int | None], settings: FigureSettings | None = None
) -> str:
    """What each lane holds over time as SVG text, on the scale of the timeline of these settings,
    with its limit in bytes where it has one. The same recording gives the same text."""
    settings = settings or FigureSettings()
    window = window_of(recording, settings)
    drawing = Drawing(settings.width, "memory")
    left = left_margin(recording.lanes)
    scale = Scale(left, settings.width - RIGHT, window.begin_s, window.seconds)
    lanes = [list(_steps(recording, lane, window, scale)) for lane in range(len(recording.lanes))]
    held = max((sum(step.nbytes) for steps_ in lanes for step in steps_), default=0)
    near = [limit for limit in limits if limit is not None and limit <= _NEAR * held]
    top = max([held, *near, 1])
    y = legend(drawing, list(_entries(drawing, lanes, bool(near))), left, 1) + 6

    pitch = max(_LEAST + 2, min(_TALLEST + _GAP, _MOST_HEIGHT / max(1, len(lanes))))
    gap = min(_GAP, pitch / 5)
    peaks = _peaks(recording)
    middles = []
    for found, limit, peak in zip(lanes, limits, peaks, strict=True):
        panel = _Panel(y, pitch - gap, top)
        _frame(drawing, scale, panel)
        _areas(drawing, found, scale, panel)
        _words(drawing, peak, limit, panel)
        if limit in near and limit is not None:
            drawing.line(
                scale.left,
                panel(limit),
                scale.right,
                panel(limit),
                stroke=LIMIT.light,
                stroke_width=0.9,
                stroke_dasharray="4 1.5",
            )
        middles.append(y + panel.height / 2)
        y += pitch
    lane_names(drawing, list(zip(recording.lanes, middles, strict=True)), pitch)
    y = time_axis(drawing, scale, y - gap + 2)
    facts = [
        f"{recording.source}, {recording.variant}, mini-batches {window.first} to {window.last};",
        "peaks",
        ", ".join(
            f"{lane.name}: {format_bytes(peak)}"
            for lane, peak in zip(recording.lanes, peaks, strict=True)
        )
        + ".",
    ]
    return drawing.finished(y + 2, f"Memory of {recording.variant}", facts)


class _Panel(NamedTuple):
    """A lane's plot: its upper edge, its height, and the bytes that this height stands for."""

    y: float
    height: float
    top: int

    def __call__(self, nbytes: float) -> float:
        return self.y + self.height * (1 - nbytes / self.top)


def _entries(
    drawing: Drawing, lanes: Sequence[Sequence[MemoryStep]], limit: bool
) -> Iterator[Entry]:
    for k, kind in enumerate(MEMORY_KINDS):
        if any(step.nbytes[k] for found in lanes for step in found):
            yield Entry(MEMORY[kind].label, (memory_fill(drawing, kind),))
    if limit:
        yield Entry("limit of the device", stroke=LIMIT.light, dashes="3 1")


def _steps(
    recording: Recording, lane: int, window: TimeWindow, scale: Scale
) -> Iterator[MemoryStep]:
    """The lane's steps in the window; of those too near to each other, the one with most."""
    fine = _FINE * max(1.0, len(recording.lanes) / _FEW)
    before: MemoryStep | None = None
    for point in recording.memory:
        if point.lane != lane or point.at_s > window.end_s:
            continue
        step = MemoryStep(scale(point.at_s), point.nbytes)
        if point.at_s <= window.begin_s:
            # What is held when the window begins.
            before = step
        elif before is None or step.x - before.x >= fine:
            if before is not None:
                yield before
            before = step
        elif sum(step.nbytes) > sum(before.nbytes):
            before = before._replace(nbytes=step.nbytes)
    if before is not None:
        yield before


def _frame(drawing: Drawing, scale: Scale, panel: _Panel) -> None:
    factor, unit = _unit(panel.top)
    step = steps(panel.top / factor, 2 if panel.height > 20 else 1)
    values = ticks(0, step, panel.top / factor)
    drawing.rect(scale.left, panel.y, scale.right - scale.left, panel.height, fill="#ffffff")
    for value in values[1:]:
        y = panel(value * factor)
        drawing.line(scale.left, y, scale.right, y, stroke=GRID, stroke_width=0.4)
    drawing.line(scale.left, panel.y, scale.left, panel(0), stroke=INK, stroke_width=0.5)
    drawing.line(scale.left, panel(0), scale.right, panel(0), stroke=INK, stroke_width=0.5)
    if panel.height < 2 * SMALL:
        return
    with drawing.group(font_size=SMALL, fill=INK, text_anchor="end"):
        for value in values:
            words = tick_text(value, step) + (f" {unit}" if value == values[-1] else "")
            drawing.text(scale.left - 2.5, panel(value * factor) + 2.1, words)


def _areas(drawing: Drawing, found: Sequence[MemoryStep], scale: Scale, panel: _Panel) -> None:
    """Draw the stacked kinds, from the topmost down, each over the one before."""
    if not found:
        return
    for k in range(len(MEMORY_KINDS) - 1, -1, -1):
        if not any(step.nbytes[k] for step in found):
            continue
        heights = [number(panel(sum(step.nbytes[: k + 1]))) for step in found]
        d = f"M{number(found[0].x)} {number(panel(0))}V{heights[0]}"
        last = heights[0]
        for step, height in zip(found[1:], heights[1:], strict=True):
            if height != last:
                d += f"H{number(step.x)}V{height}"
                last = height
        d += f"H{number(scale.right)}V{number(panel(0))}Z"
        drawing.path(
            d,
            fill=memory_fill(drawing, MEMORY_KINDS[k]),
            stroke=INK,
            stroke_width=0.2,
            **{"class": MEMORY_KINDS[k]},
        )


def _peaks(recording: Recording) -> list[int]:
    """The most that each lane holds, in the window or not."""
    peaks = [0] * len(recording.lanes)
    for point in recording.memory:
        peaks[point.lane] = max(peaks[point.lane], sum(point.nbytes))
    return peaks


def _words(drawing: Drawing, peak: int, limit: int | None, panel: _Panel) -> None:
    x = drawing.width - RIGHT + 3
    lines = []
    if peak and panel.height >= SMALL:
        lines += ["peak", format_bytes(peak)]
    if limit is not None and panel.height >= 5 * SMALL:
        lines += ["limit", format_bytes(limit)]
    if panel.height < 2.2 * SMALL:
        lines = lines[1:2]
    middle = panel.y + panel.height / 2
    with drawing.group(font_size=SMALL, fill=INK):
        for k, line in enumerate(lines):
            drawing.text(x, middle + (k - len(lines) / 2 + 0.8) * (SMALL + 1), line)


def _unit(most: int) -> tuple[int, str]:
    """The largest binary unit of which there are two."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 2 * 1024**power:
            return 1024**power, name
    return 1, "B"
