"""Names as people can read them in little room: of layers, of devices, and rows of either."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len, set_cell_size

_NUMBERED = re.compile(r"(.*?)(\d{1,9})")
_NUMBER = re.compile(r"\d+")
_CUT = "…"


def printable(name: str) -> str:
    """The name; what would move the cursor or can't be encoded is shown by its code."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


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
    """``device3``, ``device0, device2``, ``device8–15 (8)`` or ``a … z (9)``."""
    found = [printable(name) for name in names]
    if len(found) == 1:
        return found[0]
    parts = [_NUMBERED.fullmatch(name) for name in found]
    if all(parts):
        pairs = [(part[1], int(part[2])) for part in parts if part]
        if all(a[0] == b[0] and a[1] + 1 == b[1] for a, b in pairwise(pairs)):
            return f"{found[0]}–{pairs[-1][1]} ({len(found)})"
    if len(found) == 2:
        return ", ".join(found)
    return f"{found[0]} … {found[-1]} ({len(found)})"
