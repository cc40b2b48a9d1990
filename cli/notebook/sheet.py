"""`Sheet`: a table with a figure, as a notebook and as a terminal shows it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..errors import output, printable
from ..tables.layout import fitted, fixed, words

_MOST_ROWS = 24


@dataclass(frozen=True)
class Sheet:
    """A table, and a figure below it.

    Attributes:
        words: how many columns from the left are words; the others are figures.
        facts: lines between title and table.
        figure: SVG text; empty: there is none.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    facts: tuple[str, ...] = ()
    figure: str = ""

    def _repr_html_(self) -> str:
        """For a notebook: light, whatever theme it has, as the figure is."""
        rows = [*self.rows[:_MOST_ROWS]]
        if len(self.rows) > _MOST_ROWS:
            more = f"… {len(self.rows) - _MOST_ROWS} more"
            rows.append((more, *[""] * (len(self.head) - 1)))
        lines = [
            f'<div style="{_BOX}">',
            f"<b>{_text(self.title)}</b>",
            *(f"<div>{_text(fact)}</div>" for fact in self.facts),
            f'<table style="{_TABLE}"><thead><tr>',
            *(self._cell("th", k, name) for k, name in enumerate(self.head)),
            "</tr></thead><tbody>",
            *(
                f"<tr>{''.join(self._cell('td', k, cell) for k, cell in enumerate(row))}</tr>"
                for row in rows
            ),
            "</tbody></table>",
        ]
        if self.figure:
            # The declaration of a document of its own doesn't stand within another.
            lines.append(self.figure[self.figure.index("<svg") :])
        return "\n".join([*lines, "</div>"])

    def _cell(self, tag: str, column: int, text: str) -> str:
        side = "left" if column < self.words else "right"
        wrap = "; white-space: nowrap" * (tag == "td")
        return f'<{tag} style="text-align: {side}; {_CELL}{wrap}">{_text(text)}</{tag}>'

    def show(self) -> None:
        """Print it on the terminal, without the figure."""
        found = list(zip(self.head, *self.rows, strict=True))
        key, *columns = (
            words(name, cells, 12) if k < self.words else fixed(name, cells)
            for k, (name, *cells) in enumerate(found)
        )
        output().print(fitted(self.title, key, columns, output().width))
        for fact in self.facts:
            output().print(fact)


_BOX = (
    "background: #ffffff; color: #1a1f27; padding: 0.6em 0.8em; max-width: 178mm; "
    "overflow-x: auto; font: 13px sans-serif"
)
_TABLE = "border-collapse: collapse; margin: 0.5em 0; font-size: 12px"
_CELL = "padding: 1px 6px; background: #ffffff; color: #1a1f27; vertical-align: bottom"


def _text(text: str) -> str:
    return escape(printable(text))
