"""Tables that fit 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


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


def counted(number: int, one: str, many: str) -> str:
    """``counted(2, "stage", "stages")`` → ``"2 stages"``."""
    return f"{number} {one if number == 1 else many}"
