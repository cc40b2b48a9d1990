"""Layout of tables: short names, and columns that give way to fit the terminal's width."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...planner.plan import Plan
from ..errors import printable

# Short names of layers and devices, and of rows of them -------------------------------------------

_NUMBERED = re.compile(r"(.*?)(\d{1,9})")
_NUMBER = re.compile(r"\d+")
_CUT = "…"

_MOST_ROWS = 4
"""Of neighbours among numbered devices, that are written out."""


def shortened(name: str, width: int) -> str:
    """The name in at most `width` columns: leading words to their first letters, then the middle.

    ``shortened("transformer.h.0.attn.c_attn", 16)`` → ``"t.h.0.a.c_attn"``.
    """
    name = printable(name)
    words = name.split(".")
    for k in range(len(words) - 1):
        if cell_len(name) <= width:
            return name
        if not words[k].isdecimal():
            words[k] = words[k][:1]
        name = ".".join(words)
    if cell_len(name) <= width:
        return name
    if width < 3:
        return set_cell_size(name, max(width, 0))
    # Numbers say most: they stay, as far as they stand in front.
    ahead = (width - 1) // 2
    number = max((m.end() for m in _NUMBER.finditer(name)), default=0)
    if ahead < number <= width - 3:
        ahead = number
    back = ""
    for c in reversed(name):
        if cell_len(c + back) > width - 1 - ahead:
            break
        back = c + back
    return set_cell_size(name, ahead).rstrip() + _CUT + back


def first_to_last(names: Sequence[str], width: int | None = None) -> str:
    """``conv1 … relu2 (4)``; each name shortened as far as `width` demands."""
    if len(names) == 1:
        return printable(names[0]) if width is None else shortened(names[0], width)
    first, last = names[0], names[-1]
    rest = f" ({len(names)})"
    whole = f"{printable(first)} … {printable(last)}{rest}"
    if width is None or cell_len(whole) <= width:
        return whole
    room = width - cell_len(rest) - 3
    if room < 6:
        return shortened(f"{len(names)} layers", width)
    # What one name leaves of its half, the other has.
    one, two = cell_len(printable(first)), cell_len(printable(last))
    half = room // 2
    ahead = min(one, max(half, room - two))
    return f"{shortened(first, ahead)} … {shortened(last, room - ahead)}{rest}"


def device_range(names: Sequence[str]) -> str:
    """``device3``, ``device8–15 (8)``, ``device0,6,1,7``, ``a, b`` or ``a … z (9)``."""
    found = [printable(name) for name in names]
    if len(found) == 1:
        return found[0]
    parts = [part for name in found if (part := _NUMBERED.fullmatch(name))]
    if len(parts) == len(found) and len({part[1] for part in parts}) == 1:
        ends = [k for k, (a, b) in enumerate(pairwise(parts), 1) if int(a[2]) + 1 != int(b[2])]
        rows = [parts[a:b] for a, b in pairwise([0, *ends, len(parts)])]
        if len(rows) <= _MOST_ROWS:
            shown = ",".join(f"{r[0][2]}–{r[-1][2]}" if len(r) > 1 else r[0][2] for r in rows)
            return f"{parts[0][1]}{shown}" + f" ({len(found)})" * (len(rows) < len(found))
    if len(found) == 2:
        return ", ".join(found)
    return f"{found[0]} … {found[-1]} ({len(found)})"


def devices_text(plan: Plan, stages: Iterable[int]) -> str:
    """The names of the stages' devices, as `device_range`."""
    return device_range(
        [plan.cluster.devices[d].name for s in stages for d in plan.stages[s].devices]
    )


# Tables of few columns ----------------------------------------------------------------------------


def compact_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table with little air: columns of words first, then columns of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def counted(number: int, one: str, many: str | None = None) -> str:
    """``counted(2, "stage")`` → ``"2 stages"``."""
    many = many or one + ("es" if one.endswith("batch") else "s")
    return f"{number} {one if number == 1 else many}"


# Tables of many columns, which give way and go on below where the width isn't enough --------------

Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column of a table: as wide as its text would have it (`natural`), or narrower, as far as it
    can be (`least`); `fit` gives its cells in such a width. Words stand left, numbers right."""

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


def beside_predicted(name: str, cells: Iterable[str], predicted: Iterable[str]) -> Column:
    """Measured figures with the predicted ones, which stay beside them."""
    pairs = [(name, "(pred.)"), *zip(cells, predicted, strict=True)]
    one, two = (max(map(cell_len, side)) for side in zip(*pairs, strict=True))
    head, *texts = [f"{a:>{one}}  {b:>{two}}" for a, b in pairs]
    return fixed(head, texts)


def words(name: str, cells: Iterable[str], least: int = 8) -> Column:
    """A column of names, cut short in the middle where they must be."""
    texts = [printable(cell) for cell in cells]
    natural = max((cell_len(text) for text in texts), default=0)
    return Column(
        name,
        natural,
        min(natural, least),
        lambda width: [shortened(text, width) for text in texts],
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
