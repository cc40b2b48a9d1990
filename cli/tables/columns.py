"""Tables that fit: columns that give way, and that go on below where the width isn't enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich import box
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .names import printable, shortened

Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column that knows how little room it can do with.

    Attributes:
        natural: columns of text that it would have.
        least: that it needs.
        fit: its cells in a given width between the two.
        left: words stand left, numbers right.
    """

    name: str
    natural: int
    least: int
    fit: Callable[[int], Sequence[Cell]]
    left: bool = False

    @property
    def room(self) -> int:
        """What it and its head need."""
        return max(self.least, cell_len(self.name))


def fixed(name: str, cells: Iterable[Cell], *, left: bool = False) -> Column:
    """A column that stays as it is."""
    texts = list(cells)
    width = max((cell_len(str(text)) for text in texts), default=0)
    return Column(name, width, width, lambda _: texts, left)


def words(name: str, cells: Iterable[str], least: int = 8) -> Column:
    """A column of names, cut short in the middle where they must be."""
    return yielding(name, [printable(cell) for cell in cells], shortened, least)


def yielding(
    name: str, cells: Iterable[str], shorten: Callable[[str, int], str], least: int
) -> Column:
    """A column of words, left, that `shorten` makes as narrow as need be."""
    texts = list(cells)
    natural = max((cell_len(text) for text in texts), default=0)
    return Column(
        name,
        natural,
        min(natural, least),
        lambda width: [text if cell_len(text) <= width else shorten(text, width) for text in texts],
        left=True,
    )


def fitted(title: str, key: Column, columns: Sequence[Column], width: int) -> Group:
    """A table of `columns` beside `key`; as many blocks below each other as the width demands.

    Each block begins with the key again. Where there are several, numbers go on below before words
    above are cut short.
    """
    blocks: list[list[Column]] = []
    left = 0
    for column in columns:
        need = 1 + column.room
        if not blocks or (need > left and blocks[-1]):
            blocks.append([])
            left = width - key.room
        blocks[-1].append(column)
        left -= need
    for above, below in reversed(list(pairwise(blocks))):
        while (
            len(above) > 1
            and _taken([key, *above], whole=True) > width
            and _taken([key, above[-1], *below]) <= width
        ):
            below.insert(0, above.pop())
    tables = [_table([key, *block], width) for block in blocks or [[]]]
    return Group(Text(printable(title), style="bold"), *tables)


def _taken(columns: Sequence[Column], *, whole: bool = False) -> int:
    """The width that a block takes at least, or with nothing cut short."""
    each = (max(column.natural, column.room) if whole else column.room for column in columns)
    return sum(each) + len(columns) - 1


def _table(columns: Sequence[Column], width: int) -> Table:
    """One block. What the width leaves goes to the columns that give way, from the left."""
    spare = width - _taken(columns)
    wanted = _taken(columns, whole=True) - _taken(columns)
    air = spare >= wanted + len(columns) - 1
    spare -= (len(columns) - 1) * air
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        # The box puts a blank between two columns; another where there is room.
        padding=(0, int(air), 0, 0),
        pad_edge=False,
    )
    cells: list[Sequence[Cell]] = []
    for column in columns:
        more = min(max(column.natural - column.room, 0), max(spare, 0))
        spare -= more
        table.add_column(
            column.name,
            justify="left" if column.left else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=column.room + more,
        )
        cells.append(column.fit(column.room + more))
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def labelled(pairs: Iterable[tuple[str, Cell]]) -> Table:
    """Lines of a word and what it stands for, which wraps beside it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, what in pairs:
        table.add_row(name, what)
    return table
