"""The timeline of a plan or a run: what each worker does when (a Gantt chart)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ....planner.recordings.recording import Recording
from ....profiles.units import format_seconds
from ...tables.palette import OPERATIONS
from .frame import (
    MOST_RULES,
    RIGHT,
    SIZE,
    SMALL,
    Entry,
    FigureSettings,
    Scale,
    TimeWindow,
    lane_names,
    left_margin,
    legend,
    rule_heights,
    rule_width,
    rules_of,
    time_axis,
    window_of,
)
from .marks import TINY, VERSION_SIZE, Label, Lettering, Mark, lettering, marks_of
from .svg import IDLE, INK, Drawing, has_pattern, operation_fill, shade, text_width

_TALLEST, _GAP, _WIDE_GAP, _MOST_HEIGHT = 14.0, 3.0, 9.0, 560.0
"""Of lanes, in points: the gap is wide where messages cross it; the last is for all of them."""

_MOST_MARKS = 4000
"""From here on, operations are drawn together."""

_OUTLINED = 1.2
"""Wider marks of one operation have an outline, in points."""


def timelines_svg(
    recordings: Sequence[tuple[str, Recording]], settings: FigureSettings | None = None
) -> str:
    """Timelines one above the other, on one scale, each below its words, as SVG text. The same
    recordings give the same text.

    All show the mini-batches that the first one shows, and begin where the first of these begins.
    Of a run, give what was measured first and what was predicted below it.
    """
    settings = settings or FigureSettings()
    shown = window_of(recordings[0][1], settings)
    settings = replace(settings, first=shown.first, mini_batches=shown.last - shown.first + 1)
    windows = [window_of(recording, settings) for _, recording in recordings]
    drawing = Drawing(settings.width, "timeline")
    left = left_margin(lane for _, recording in recordings for lane in recording.lanes)
    right = settings.width - RIGHT
    seconds = max(window.seconds for window in windows)
    rows = sum(len(recording.lanes) for _, recording in recordings)
    tallest = _TALLEST + (VERSION_SIZE if settings.versions else 0)
    gap = _WIDE_GAP if settings.messages else _GAP
    pitch = min(tallest + gap, _MOST_HEIGHT / max(1, rows))
    height = pitch - min(gap, pitch * gap / (_TALLEST + gap))

    kinds = {span.kind for _, recording in recordings for span in recording.spans}
    ruled = max(len(lane.stages) for _, recording in recordings for lane in recording.lanes)
    gaps = "idle or communicating" if any(r.activities for _, r in recordings) else "idle"
    entries = [*_entries(drawing, kinds, gaps, settings), *_stage_entries(ruled)]
    y = legend(drawing, entries, left, 1) + 5
    facts: list[str] = []
    told: list[Lettering] = []
    for (words, recording), window in zip(recordings, windows, strict=True):
        scale = Scale(left, right, window.begin_s, seconds)
        if words:
            drawing.text(left, y + 6, words, font_size=SIZE, fill=INK, font_weight="bold")
            y += 10
        y, letters, said = _lanes(drawing, recording, window, scale, y, (pitch, height), settings)
        facts += [*([f"{words}:"] if words else []), *said]
        told.append(letters)
    zero = windows[0].begin_s if len({w.begin_s for w in windows}) == 1 else 0.0
    y = time_axis(drawing, Scale(left, right, zero, seconds), y, _how_labelled(told))
    variants = ", ".join(dict.fromkeys(recording.variant for _, recording in recordings))
    return drawing.finished(y + 2, f"Timeline of {variants}", facts)


def _entries(
    drawing: Drawing, kinds: Iterable[str], gaps: str, settings: FigureSettings
) -> Iterable[Entry]:
    for kind, paint in OPERATIONS.items():
        if kind in kinds:
            fills = tuple(operation_fill(drawing, kind, b) for b in range(2))
            yield Entry(paint.label, fills)
    yield Entry(gaps, (IDLE,))
    if settings.messages:
        yield Entry("message", stroke=INK)
        yield Entry("message of gradients", stroke=INK, dashes="2 1")


def _stage_entries(most: int) -> Iterable[Entry]:
    """What rules say, where lanes have several stages. `most`: of any lane."""
    if most < 2:
        return
    looks = MOST_RULES + 1
    for k in range(min(most, looks)):
        # With the first of those that look the same.
        alike = [ordinal(n) for n in range(k + 1, min(most, k + 1 + 2 * looks) + 1, looks)]
        more = ", …" * (k + 1 + 3 * looks <= most)
        words = "stage of a device" if k == 0 else "stage"
        yield Entry(f"{', '.join(alike)}{more} {words}", ("#ffffff",), rules=k)


def ordinal(n: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th`` …"""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{n}{ends.get(n % 10, 'th') if n // 10 % 10 != 1 else 'th'}"


def _lanes(
    drawing: Drawing,
    recording: Recording,
    window: TimeWindow,
    scale: Scale,
    y: float,
    lane: tuple[float, float],
    settings: FigureSettings,
) -> tuple[float, Lettering, list[str]]:
    """Draw a recording's lanes, of a pitch and a height each, below y. Returns where they end, how
    they are labelled, and facts."""
    pitch, height = lane
    marks = marks_of(recording, window, scale, _MOST_MARKS)
    y = _period(drawing, recording, window, scale, y)
    tops = [y + pitch * k for k in range(len(recording.lanes))]
    end = scale(window.end_s)
    for top in tops:
        drawing.rect(scale.left, top, end - scale.left, height, fill=IDLE)
    _boxes(drawing, marks, tops, height)
    _rules(drawing, recording, marks, tops, height)
    if settings.messages:
        _messages(drawing, recording, window, scale, tops, height)
    letters = lettering(marks, height, settings.versions)
    above = [top + (height - letters.lifted) / 2 for top in tops]
    _write(drawing, letters.labels, letters.size, above, 0.36 * letters.size)
    versions = [label._replace(lines=(label.below,)) for label in letters.labels if label.below]
    _write(drawing, versions, VERSION_SIZE, [top + height - 3.5 for top in tops], 1.6)
    middles = [top + height / 2 for top in tops]
    lane_names(drawing, list(zip(recording.lanes, middles, strict=True)), pitch)
    _idle(drawing, recording, middles, pitch)
    operations = sum(mark.spans for mark in marks)
    facts = [
        f"{recording.source}, {recording.variant}, mini-batches {window.first} to {window.last},",
        f"{format_seconds(window.seconds)} from {format_seconds(window.begin_s)} on,",
        f"period {format_seconds(recording.period_s)};",
        f"{operations} operations"
        + (f" merged into {len(marks)} marks." if len(marks) < operations else "."),
    ]
    return tops[-1] + height + _GAP + 1 if tops else y, letters, facts


def _period(
    drawing: Drawing, recording: Recording, window: TimeWindow, scale: Scale, y: float
) -> float:
    """The last period that is shown, as a measure above the lanes."""
    begin = window.end_s - recording.period_s
    if recording.period_s <= 0 or begin < window.begin_s - 1e-9 * window.seconds:
        return y
    x1, x2 = scale(begin), scale(window.end_s)
    words = f"period {format_seconds(recording.period_s)}"
    middle, width = y + 3.5, text_width(words, SMALL)
    with drawing.group(stroke=INK, stroke_width=0.5):
        for x in (x1, x2):
            drawing.line(x, y, x, y + 7)
        inside = width + 8 <= x2 - x1
        if inside:
            drawing.line(x1, middle, (x1 + x2 - width) / 2 - 1, middle)
            drawing.line((x1 + x2 + width) / 2 + 1, middle, x2, middle)
        else:
            drawing.line(x1, middle, x2, middle)
    at, anchor = ((x1 + x2) / 2, "middle") if inside else (x1 - 2, "end")
    drawing.text(at, y + 5.6, words, font_size=SMALL, fill=INK, text_anchor=anchor)
    return y + 9.5


def _boxes(drawing: Drawing, marks: Sequence[Mark], tops: Sequence[float], height: float) -> None:
    for kind in OPERATIONS:
        for parity in range(2):
            same = [m for m in marks if m.kind == kind and m.mini_batch % 2 == parity]
            for outlined in (False, True):
                those = [m for m in same if (m.spans == 1 and m.width > _OUTLINED) == outlined]
                if not those:
                    continue
                look: dict[str, str | float] = {"class": kind}
                look["fill"] = operation_fill(drawing, kind, parity)
                if outlined:
                    look |= {"stroke": INK, "stroke_width": 0.25}
                with drawing.group(**look):
                    for mark in those:
                        drawing.rect(mark.x, tops[mark.lane], mark.width, height)


def _rules(
    drawing: Drawing,
    recording: Recording,
    marks: Sequence[Mark],
    tops: Sequence[float],
    height: float,
) -> None:
    """Draw what tells the stages of a lane apart."""
    for kind, paint in OPERATIONS.items():
        same = [m for m in marks if m.kind == kind and m.stage is not None and m.width >= TINY]
        with drawing.group(
            stroke=paint.light_ink, stroke_width=rule_width(height), **{"class": "stages"}
        ):
            for mark in same:
                rules = rules_of(recording.lanes[mark.lane], mark.stage or 0)
                for y in rule_heights(rules, tops[mark.lane], height):
                    drawing.line(mark.x, y, mark.x + mark.width, y)


def _write(
    drawing: Drawing, labels: Sequence[Label], size: float, middles: Sequence[float], sunk: float
) -> None:
    """Write labels on the lanes' `middles`, baselines `sunk` points below those of the lines."""
    for kind, paint in OPERATIONS.items():
        same = [label for label in labels if label.mark.kind == kind]
        grounds = [label for label in same if label.row > 1 or has_pattern(kind)]
        for label in grounds:
            width = max(text_width(line, size) for line in label.lines)
            high = size * len(label.lines)
            drawing.rect(
                label.x - width / 2,
                middles[label.mark.lane] - high / 2,
                width,
                high,
                fill=shade(kind, label.mark.mini_batch),
            )
        if not same:
            continue
        with drawing.group(fill=paint.light_ink, font_size=size, text_anchor="middle"):
            for label in same:
                middle = middles[label.mark.lane] + sunk
                for k, line in enumerate(label.lines):
                    shift = (k - (len(label.lines) - 1) / 2) * size
                    drawing.text(label.x, middle + shift, line)


def _messages(
    drawing: Drawing,
    recording: Recording,
    window: TimeWindow,
    scale: Scale,
    tops: Sequence[float],
    height: float,
) -> None:
    for backward in (False, True):
        dashes = {"stroke_dasharray": "1.4 .9"} if backward else {}
        with drawing.group(stroke=INK, stroke_width=0.4, **dashes):
            for m in recording.messages:
                if m.backward != backward or m.start_s < window.begin_s or m.end_s > window.end_s:
                    continue
                down = m.target > m.source
                y1 = tops[m.source] + (height if down else 0)
                y2 = tops[m.target] + (0 if down else height)
                drawing.line(scale(m.start_s), y1, scale(m.end_s), y2)


def _idle(drawing: Drawing, recording: Recording, middles: Sequence[float], pitch: float) -> None:
    if pitch < SMALL:
        return
    x = drawing.width - 1
    with drawing.group(font_size=SMALL, fill=INK, text_anchor="end"):
        for share, middle in zip(recording.idle_shares, middles, strict=False):
            if share is not None:
                drawing.text(x, middle + 2.2, f"{share:.0%} idle")


def _how_labelled(told: Sequence[Lettering]) -> list[str]:
    """What the numbers on the marks are."""
    forms = {letters.micro for letters in told if letters.labels}
    notes = [
        words
        for form, words in (
            ("", "number: mini-batch"),
            ("line", "3.1: mini-batch 3, micro-batch 1"),
            ("stack", "number: mini-batch, below it micro-batch"),
        )
        if form in forms
    ]
    staged = next((letters.stage for letters in told if letters.stage is not None), None)
    if staged is not None:
        notes.append(f"{staged}:3: stage {staged}, mini-batch 3")
    below = [label.below for letters in told for label in letters.labels if label.below]
    if below:
        notes.append("v: weight version")
    if any("→" in text for text in below):
        notes.append("v0→v1: that of the forward, that of the backward")
    return notes
