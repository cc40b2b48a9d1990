"""Curves of runs as a figure: a row of panels for each quantity, a column for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...tables.names import names_by_system
from ...tables.palette import SERIES
from ..curves import AXES, CurveTarget, RunCurve, thinned
from .frame import GRID, SIZE, SMALL, Entry, legend, steps, tick_text, ticks, write_notes
from .svg import INK, Drawing, number

_HEIGHT, _GAP, _LEFT = 92.0, 18.0, 30.0
"""Of a panel, between two, and for the numbers of its vertical axis; in points."""

_MOST_DIGITS = 7
"""Of a number beside the vertical axis; longer ones have an exponent."""

_MOST_POINTS = 160
"""Of a curve; of more, means are drawn."""

DASHES = ("", "4.5 1.5", "1.2 1.2", "6 1.5 1.2 1.5", "2.5 1.2", "8 2")
"""Runs differ in grey, too."""


def curves_svg(
    curves: Sequence[RunCurve], axes: Sequence[str], width: float, target: CurveTarget | None = None
) -> str:
    """Curves over these of `AXES` as SVG text, `width` points wide. Losses have a logarithmic scale
    where all of them are positive."""
    drawing = Drawing(width, "curves")
    runs = {curve.run: curve.system for curve in curves}
    names = dict(zip(runs, names_by_system(list(runs.values()), list(runs)), strict=True))
    looks = {run: _look(k, name) for k, (run, name) in enumerate(names.items())}
    y = legend(drawing, list(looks.values()), 1, 1) + 11
    quantities = list(dict.fromkeys(curve.quantity for curve in curves))
    notes: dict[str, list[str]] = {}
    timed = [curve.run for curve in curves if curve.inline and "seconds" in axes]
    for run in dict.fromkeys(timed):
        words = "inline: all stages took turns, so its seconds aren't a pipeline's"
        notes.setdefault(words, []).append(names[run])
    pitch = (width - 1) / len(axes)
    for quantity in quantities:
        shown = []
        for curve in (curve for curve in curves if curve.quantity == quantity):
            lost = sum(not math.isfinite(point.value) for point in curve.points)
            if lost:
                words = f"{quantity}: {lost} of {len(curve.points)} aren't finite"
                notes.setdefault(words, []).append(names[curve.run])
            thin, count = thinned(curve, _MOST_POINTS)
            shown.append(thin)
            if count > 1:
                words = f"{quantity}: means of {count} mini-batches"
                notes.setdefault(words, []).append(names[curve.run])
        for k, axis in enumerate(axes):
            panel = _CurvePanel(pitch * k + _LEFT, pitch * (k + 1) - 6, y, shown, axis, target)
            panel.draw(drawing, looks, named=k == 0)
        y += _HEIGHT + _GAP + SIZE
    y = write_notes(drawing, _merged(notes, len(runs)), 1, y - 2) + (SMALL if notes else 0)
    facts = [f"{', '.join(quantities)} over {', '.join(axes)};"]
    if target:
        facts += [f"target {target.quantity} {target.value:g}:"]
        for run, point in target.reached(curves).items():
            after = "not reached" if point is None else f"after {point.mini_batches} mini-batches"
            facts.append(f"{names[run]} {after};")
    return drawing.finished(y, f"Curves of {', '.join(names.values())}", facts)


def _look(k: int, name: str) -> Entry:
    """Of run `k`: where colours begin again, they come with other dashes."""
    dashes = DASHES[(k + k // len(SERIES)) % len(DASHES)]
    return Entry(name, stroke=SERIES[k % len(SERIES)].light, dashes=dashes)


def _merged(notes: Mapping[str, Sequence[str]], runs: int) -> list[str]:
    """Notes with the runs that they are about, where that isn't all of them."""
    return [
        words if len(about) == runs > 1 else f"{', '.join(about)}: {words}"
        for words, about in notes.items()
    ]


class _CurvePanel:
    """A plot of one quantity over one axis."""

    def __init__(
        self,
        left: float,
        right: float,
        y: float,
        curves: Sequence[RunCurve],
        axis: str,
        target: CurveTarget | None,
    ) -> None:
        self.left, self.right, self.y = left, right, y
        self.curves, self.axis = curves, axis
        self.quantity = curves[0].quantity
        self.target = target if target is not None and target.quantity == self.quantity else None
        self.most = max((p.at(axis) for curve in curves for p in curve.points), default=0.0) or 1.0
        values = [p.value for curve in curves for p in curve.points if math.isfinite(p.value)]
        if self.target is not None:
            values.append(self.target.value)
        low, high = min(values, default=0.0), max(values, default=1.0)
        self.log = curves[0].falls and low > 0
        if self.log:
            low, high = math.log10(low), math.log10(high)
        margin = (high - low) * 0.04 or abs(high) * 0.05 or 0.5
        self.low, self.high = low - margin, high + margin
        if self.log:
            # Of a loss that blows up, what margins take may be more than a number can be.
            self.low, self.high = max(self.low, -307), min(self.high, 308)

    def x_of(self, far: float) -> float:
        return self.left + (self.right - self.left) * far / self.most

    def y_of(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        share = (at - self.low) / (self.high - self.low)
        return self.y + _HEIGHT * (1 - share)

    def draw(self, drawing: Drawing, looks: Mapping[str, Entry], *, named: bool) -> None:
        """Draw all of it. `named`: with the quantity above it."""
        if named:
            words = self.quantity + (" (logarithmic)" if self.log else "")
            drawing.text(self.left - 28, self.y - 3, words, font_size=SIZE, fill=INK)
        self._grid(drawing)
        for curve in self.curves:
            self._line(drawing, curve, looks[curve.run])
        if self.target is not None:
            self._target(drawing, self.target, looks)

    def _grid(self, drawing: Drawing) -> None:
        bottom = self.y + _HEIGHT
        step = steps(self.most, int((self.right - self.left) / 30))
        across = ticks(0, step, self.most)
        up = self._ticks()
        with drawing.group(stroke=GRID, stroke_width=0.4):
            for value, _ in up:
                drawing.line(self.left, self.y_of(value), self.right, self.y_of(value))
        with drawing.group(stroke=INK, stroke_width=0.5):
            drawing.line(self.left, self.y, self.left, bottom)
            drawing.line(self.left, bottom, self.right, bottom)
            for value in across:
                drawing.line(self.x_of(value), bottom, self.x_of(value), bottom + 2.5)
        with drawing.group(font_size=SMALL, fill=INK, text_anchor="middle"):
            for value in across:
                drawing.text(self.x_of(value), bottom + 9, tick_text(value, step))
        name = AXES[self.axis]
        drawing.text(self.right, bottom + 16.5, name, font_size=SMALL, fill=INK, text_anchor="end")
        with drawing.group(font_size=SMALL, fill=INK, text_anchor="end"):
            for value, words in up:
                drawing.text(self.left - 2.5, self.y_of(value) + 2.1, words)

    def _ticks(self) -> list[tuple[float, str]]:
        """Values with their texts, on the vertical axis."""
        if not self.log:
            return _linear_ticks(self.low, self.high)
        decades = range(math.floor(self.low), math.floor(self.high) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
            found = [d * 10.0**k for k in decades for d in digits]
            found = [v for v in found if self.low <= math.log10(v) <= self.high]
            if len(found) >= 3:
                return [(value, f"{value:.{_MOST_DIGITS}g}") for value in _apart(found, self.y_of)]
        # Less than a third of a decade: as far apart as on a linear scale.
        return _linear_ticks(10**self.low, 10**self.high)

    def _line(self, drawing: Drawing, curve: RunCurve, look: Entry) -> None:
        more = {"stroke_dasharray": look.dashes} if look.dashes else {}
        parts: list[list[tuple[float, float]]] = [[]]
        for point in curve.points:
            if math.isfinite(point.value):
                parts[-1].append((self.x_of(point.at(self.axis)), self.y_of(point.value)))
            elif parts[-1]:
                parts.append([])
        with drawing.group(fill="none", stroke=look.stroke, stroke_width=1.0, **more):
            for part in parts:
                if len(part) > 1:
                    drawing.path("M" + "L".join(f"{number(x)} {number(y)}" for x, y in part))
        # Evaluations are few: each is a dot.
        if len(curve.points) <= 30:
            for x, y in (place for part in parts for place in part):
                drawing.rect(x - 1.1, y - 1.1, 2.2, 2.2, fill=look.stroke)

    def _target(self, drawing: Drawing, target: CurveTarget, looks: Mapping[str, Entry]) -> None:
        y, bottom = self.y_of(target.value), self.y + _HEIGHT
        with drawing.group(stroke=INK, stroke_width=0.6, stroke_dasharray="2 1.5"):
            drawing.line(self.left, y, self.right, y)
        for curve in self.curves:
            point = curve.first(target.value)
            if point is not None:
                x = self.x_of(point.at(self.axis))
                drawing.line(x, y, x, bottom, stroke=looks[curve.run].stroke, stroke_width=0.6)


def _linear_ticks(low: float, high: float) -> list[tuple[float, str]]:
    # Two lie between them at the least: one number is no scale.
    step = steps(high - low, 5)
    values = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    texts = [tick_text(value, step) for value in values]
    if max(map(len, texts), default=0) > _MOST_DIGITS + 2:
        texts = [f"{value:g}" for value in values]
    return list(zip(values, texts, strict=True))


def _apart(values: Sequence[float], y_of: Callable[[float], float]) -> list[float]:
    """Those whose numbers don't touch, from the largest down."""
    kept = [values[-1]]
    for value in reversed(values[:-1]):
        if abs(y_of(value) - y_of(kept[-1])) >= SMALL + 1:
            kept.append(value)
    return kept[::-1]
