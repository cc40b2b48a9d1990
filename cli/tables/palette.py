"""Colours and patterns of every picture: on light and dark pages, terminals, and grey print.

Colours of neighbours differ in lightness as well as in hue, so that they stay apart for
colour-blind people and on a grey printer; where that isn't enough, a pattern does it.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.style import Style


class Paint(NamedTuple):
    """How one kind of thing is drawn.

    Attributes:
        label: what a legend calls it.
        light, dark: fill on a light and on a dark page, "#rrggbb".
        light_ink, dark_ink: text on that fill.
        rich: colour name for terminals of 16 colours: ``f"black on {rich}"``.
        pattern: "plain", "diagonal", "back" (the other diagonal), "dots" or "cross".
    """

    label: str
    light: str
    dark: str
    light_ink: str
    dark_ink: str
    rich: str
    pattern: str = "plain"


OPERATIONS: dict[str, Paint] = {
    "F": Paint("forward", "#74aaf0", "#7db6ff", "#0a2245", "#0a1d38", "bright_blue"),
    "B": Paint("backward", "#0d7a67", "#189b82", "#ffffff", "#02170f", "green"),
    "W": Paint("weight part", "#f3bd50", "#ffd071", "#3d2a00", "#332300", "yellow", "diagonal"),
    "U": Paint("update", "#5c5376", "#a397c4", "#ffffff", "#181128", "magenta", "cross"),
}
"""By `planner.systems.operations` kind. From light to dark on a light page: W, F, B, U."""

MEMORY: dict[str, Paint] = {
    "weights": Paint("weights", "#3c58a5", "#6583d8", "#ffffff", "#0b1430", "blue"),
    "versions": Paint(
        "weight versions", "#b58fd8", "#c7a3ea", "#26103c", "#26103c", "bright_magenta", "diagonal"
    ),
    "gradients": Paint("gradients", "#14806f", "#1b9c87", "#ffffff", "#02170f", "green"),
    "optimizer": Paint(
        "optimizer state", "#cbc2ab", "#d6cdb6", "#332d1c", "#332d1c", "white", "dots"
    ),
    "activations": Paint("activations", "#dd8a35", "#eb9c4b", "#331a00", "#331a00", "yellow"),
    "boundary": Paint("messages", "#a04256", "#c7657a", "#ffffff", "#2a0810", "red", "back"),
    "workspace": Paint("working set", "#c2c8d1", "#8d96a5", "#20252d", "#0e1116", "bright_black"),
    "engine": Paint("engine's own", "#5b6b1e", "#8da03a", "#ffffff", "#141a02", "cyan", "cross"),
}
"""By kind of memory, in the sequence in which they are stacked, from the bottom: dark and light
take turns."""

LIMIT = Paint("limit", "#c62828", "#ff6b6b", "#ffffff", "#2b0000", "bright_red")
"""What must not be passed: a device's memory."""

SERIES: tuple[Paint, ...] = (
    Paint("1", "#1f5fbf", "#7db6ff", "#ffffff", "#0a1d38", "bright_blue"),
    Paint("2", "#d9730d", "#ffa552", "#331a00", "#331a00", "yellow"),
    Paint("3", "#0d7a67", "#2dbf9f", "#ffffff", "#02170f", "green"),
    Paint("4", "#a23b72", "#e88bbd", "#ffffff", "#2a0818", "bright_magenta"),
    Paint("5", "#6b6f1d", "#c9cf5a", "#ffffff", "#1c1d04", "bright_yellow"),
    Paint("6", "#5c5376", "#a397c4", "#ffffff", "#181128", "magenta"),
)
"""Of curves and bars that stand for whole plans or runs; start over after the last."""


def blended(colour: str, other: str, share: float) -> str:
    """``colour`` with so much of ``other`` in it: ``blended("#000000", "#ffffff", 0.5)``."""
    mixed = (
        round(int(colour[k : k + 2], 16) * (1 - share) + int(other[k : k + 2], 16) * share)
        for k in (1, 3, 5)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


LIGHTENED = (0.0, 0.22, 0.4)
"""For mini-batches in turn, to tell them apart: the share of the page's background mixed into an
operation's fill."""


# On a terminal: styles by kind, and letters where there are no colours ----------------------------

LETTERS = dict(zip(MEMORY, "wvgoabse", strict=True))
"""Letters of the kinds of memory: s is for scratch memory, the working set."""


def has_colours(console: Console) -> bool:
    """Whether what is printed there is in colour."""
    return console.color_system is not None and not console.no_color


def operation_style(console: Console, kind: str, mini_batch: int) -> Style:
    """How an operation is filled; neighbouring mini-batches differ in lightness."""
    return _filled(console, OPERATIONS[kind], LIGHTENED[mini_batch % len(LIGHTENED)])


def memory_style(console: Console, kind: str) -> Style:
    """How a kind of memory is filled."""
    return _filled(console, MEMORY[kind], 0.0)


def _filled(console: Console, paint: Paint, lighter: float) -> Style:
    if not has_colours(console):
        return Style()
    if console.color_system in ("standard", "windows"):
        # Of sixteen colours none is a lighter one of another: bold letters instead.
        return Style(color="black", bgcolor=paint.rich, bold=lighter > 0)
    fill = blended(paint.light, "#ffffff", lighter)
    return Style(color=_ink(fill), bgcolor=fill)


def _ink(fill: str) -> str:
    """Black or white, whichever is read better on it."""
    red, green, blue = (int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5))
    # Relative luminance with a plain gamma of 2.2; at 0.18 both contrasts are the same.
    light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#000000" if light > 0.18 else "#ffffff"
