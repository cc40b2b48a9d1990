"""SVG documents written element by element, and their fills. One unit is a point (1/72 inch)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from xml.sax.saxutils import escape, quoteattr

from ...errors import printable
from ...tables.palette import MEMORY, OPERATIONS, blended

POINTS_PER_MM = 72 / 25.4

FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

INK = "#1a1f27"
"""Of text and axes."""

_WIDTHS = {
    **dict.fromkeys("ijlI|'!", 0.32),
    **dict.fromkeys(".,:; ", 0.34),
    **dict.fromkeys("frt()[]-/", 0.42),
    **dict.fromkeys("mMwW%", 1.0),
    **dict.fromkeys("–…→↑", 1.0),
}
"""Of characters, in parts of the font size: the most that any of `FONTS` takes."""


def text_width(text: str, size: float) -> float:
    """Upper bound on the width of a text in any of `FONTS`, in points."""
    return size * sum(
        _WIDTHS.get(c, 0.8 if c.isupper() else 0.66 if c.isascii() else 0.75) for c in text
    )


def number(value: float) -> str:
    """``12.30`` → ``"12.3"``: to a hundredth of a point."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


class Drawing:
    """Elements one after another, from back to front, `width` points wide. Ids begin with the name,
    so that several figures can stand in one document."""

    def __init__(self, width: float, name: str) -> None:
        self.width = width
        self.name = name
        self._lines: list[str] = []
        self._defs: list[str] = []

    def define(self, element: str) -> None:
        """Add a pattern or the like that others name by its id. Each is written once."""
        if element not in self._defs:
            self._defs.append(element)

    @contextmanager
    def group(self, **attributes: str | float) -> Iterator[None]:
        """Draw a group in this block; one without elements goes."""
        self._lines.append(f"<g{_attributes(attributes)}>")
        yield
        if self._lines[-1].startswith("<g"):
            self._lines.pop()
        else:
            self._lines.append("</g>")

    def rect(self, x: float, y: float, width: float, height: float, **more: str | float) -> None:
        """Its upper left corner and its size."""
        box = {"x": x, "y": y, "width": width, "height": height}
        self._lines.append(f"<rect{_attributes({**box, **more})}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, **more: str | float) -> None:
        """From one point to another."""
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        self._lines.append(f"<line{_attributes({**ends, **more})}/>")

    def path(self, d: str, **more: str | float) -> None:
        """A path by its commands."""
        self._lines.append(f"<path{_attributes({'d': d, **more})}/>")

    def text(self, x: float, y: float, text: str, **more: str | float) -> None:
        """Text on a baseline; starts at x unless a text_anchor says otherwise."""
        self._lines.append(f"<text{_attributes({'x': x, 'y': y, **more})}>{_escaped(text)}</text>")

    def finished(self, height: float, title: str, facts: Iterable[str]) -> str:
        """The whole document, with a title and facts for readers of the file and for screen
        readers, which aren't drawn."""
        size = f"{number(self.width)} {number(height)}"
        millimetres = [f"{number(edge / POINTS_PER_MM)}mm" for edge in (self.width, height)]
        head = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{millimetres[0]}" '
            f'height="{millimetres[1]}" viewBox="0 0 {size}" role="img" '
            f"font-family={quoteattr(FONTS)}>",
            f"<title>{_escaped(title)}</title>",
            f"<desc>{_escaped(' '.join(facts))}</desc>",
        ]
        defs = ["<defs>", *self._defs, "</defs>"] if self._defs else []
        paper = [f'<rect width="{number(self.width)}" height="{number(height)}" fill="#ffffff"/>']
        return "\n".join([*head, *defs, *paper, *self._lines, "</svg>", ""])


def _escaped(text: str) -> str:
    """Text for the document, which can't hold control characters."""
    return escape(printable(text))


def _attributes(found: dict[str, str | float]) -> str:
    return "".join(
        f" {name.replace('_', '-')}="
        + quoteattr(value if isinstance(value, str) else number(value))
        for name, value in found.items()
    )


# Fills on paper: kinds differ in grey, too, by lightness or by a pattern --------------------------

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
