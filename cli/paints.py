"""The palette on a terminal: styles by kind, and what stands for colours where there are none."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style

from .palette import LIGHTENED, MEMORY, OPERATIONS, Paint, blended, lightness_step

LETTERS = dict(zip(MEMORY, "wvgoabs", strict=True))
"""Letters of the kinds of memory: s is for scratch memory, the working set."""


def has_colours(console: Console) -> bool:
    """Whether what is printed there is in colour."""
    return console.color_system is not None and not console.no_color


def operation_style(console: Console, kind: str, mini_batch: int) -> Style:
    """How an operation is filled; neighbouring mini-batches differ in lightness."""
    return _filled(console, OPERATIONS[kind], LIGHTENED[lightness_step(mini_batch)])


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
