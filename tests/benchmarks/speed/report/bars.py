"""A plot as SVG: horizontal bars with a line for their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, WIDTH, ROW, TOP, RIGHT = 250, 400, 22, 48, 60
COLOURS = {True: "#0b7a75", False: "#9aa5b1"}
"""Of ours, and of the others."""


@dataclass(frozen=True)
class BarRow:
    """One bar. `ours`: in the other colour, told apart by a bold label too."""

    label: str
    value: float
    least: float
    most: float
    ours: bool


def bars(title: str, rows: Sequence[BarRow], unit: str = "×") -> str:
    """The plot, readable on light and dark pages."""
    most = max((row.most for row in rows), default=1.0)
    scale = WIDTH / (most * 1.02)
    height = TOP + ROW * len(rows) + 12
    width = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-weight="bold" fill="#1f2933">{escape(title)}</text>',
    ]
    step = 0.5 if most < 4 else most / 4
    marks = [k * step for k in range(int(most / step) + 1)]
    for mark in marks:
        x = LEFT + mark * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 8}" stroke="#e4e7eb"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{TOP - 8}" text-anchor="middle" font-size="10" '
            f'fill="#52606d">{mark:g}{unit}</text>'
        )
    for k, row in enumerate(rows):
        parts += _row(row, TOP + k * ROW, scale, unit)
    return "\n".join([*parts, "</svg>", ""])


def _row(row: BarRow, y: int, scale: float, unit: str) -> list[str]:
    middle = y + ROW // 2
    weight = "bold" if row.ours else "normal"
    a, b = LEFT + row.least * scale, LEFT + row.most * scale
    return [
        f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end" font-weight="{weight}" '
        f'fill="#1f2933">{escape(row.label)}</text>',
        f'<rect x="{LEFT}" y="{y + 3}" width="{row.value * scale:.1f}" height="{ROW - 6}" '
        f'fill="{COLOURS[row.ours]}"/>',
        f'<line x1="{a:.1f}" y1="{middle}" x2="{b:.1f}" y2="{middle}" stroke="#1f2933"/>',
        f'<text x="{b + 6:.1f}" y="{middle + 4}" fill="#1f2933">{row.value:.2f}{unit}</text>',
    ]
