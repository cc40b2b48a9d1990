"""The palette as it goes on paper: kinds differ in grey, too, by lightness or by a pattern."""

from __future__ import annotations

from ...palette import MEMORY, OPERATIONS, blended
from .svg import Drawing

SHADES = {
    "F": ((0.22, "#ffffff"), (0.55, "#ffffff")),
    "B": ((0.0, "#ffffff"), (0.2, "#ffffff")),
    "W": ((0.0, "#ffffff"), (0.45, "#ffffff")),
    "U": ((0.7, "#000000"), (0.45, "#000000")),
}
"""Per kind, for mini-batches in turn: how much of what is mixed into the palette's colour. In grey,
from light to dark: F, B, U; W has a pattern."""

MEMORY_SHADES = {
    "weights": (0.3, "#000000"),
    "gradients": (0.15, "#ffffff"),
    "activations": (0.15, "#ffffff"),
}
"""The same for kinds of memory; others stay as they are. Those without a pattern differ in grey."""

IDLE = "#f0f1f3"
"""Nothing runs."""


def shade(kind: str, mini_batch: int) -> str:
    """Fill of an operation, without its pattern."""
    share, other = SHADES[kind][mini_batch % 2]
    return blended(OPERATIONS[kind].light, other, share)


def operation_fill(drawing: Drawing, kind: str, mini_batch: int) -> str:
    """Fill of an operation: a colour, or a pattern that the drawing then has."""
    name = f"{kind}{mini_batch % 2}"
    return _fill(drawing, name, shade(kind, mini_batch), _pattern(kind))


def memory_fill(drawing: Drawing, kind: str) -> str:
    """Fill of a kind of memory."""
    return _fill(drawing, kind, memory_shade(kind), MEMORY[kind].pattern)


def memory_shade(kind: str) -> str:
    """The same without its pattern."""
    share, other = MEMORY_SHADES.get(kind, (0.0, "#ffffff"))
    return blended(MEMORY[kind].light, other, share)


def has_pattern(kind: str) -> bool:
    """Whether text on this kind of operation needs a plain ground."""
    return _pattern(kind) != "plain"


def _pattern(kind: str) -> str:
    # An update is too narrow for one, and the darkest of all.
    return OPERATIONS[kind].pattern if kind != "U" else "plain"


_STROKES = {
    "diagonal": "M-.5 .5l1 -1M0 3l3 -3M2.5 3.5l1 -1",
    "back": "M-.5 2.5l1 1M0 0l3 3M2.5 -.5l1 1",
    "cross": "M0 0l3 3M0 3l3 -3",
    "dots": "M1.1 1.5h.8",
}
"""In a square of 3 points."""


def _fill(drawing: Drawing, name: str, colour: str, pattern: str) -> str:
    if pattern == "plain":
        return colour
    key = f"{drawing.name}-{name}"
    width = ".8" if pattern == "dots" else ".55"
    drawing.define(
        f'<pattern id="{key}" width="3" height="3" patternUnits="userSpaceOnUse">'
        f'<rect width="3" height="3" fill="{colour}"/>'
        f'<path d="{_STROKES[pattern]}" stroke="{blended(colour, "#000000", 0.6)}" '
        f'stroke-width="{width}"/></pattern>'
    )
    return f"url(#{key})"
