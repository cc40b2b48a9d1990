"""Stages that look alike made one row, and a row's figures as a range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...planner.plan import Plan

MOST_ROWS = 16
"""A plan with more stages is folded where its stages are alike."""

_APART = (0.0, 0.02, 0.05, 0.1, 0.25)
"""How far apart figures of stages in one row may be, tried in this sequence."""


@dataclass(frozen=True)
class Folded:
    """Rows of stages, first to last.

    Attributes:
        apart: share by which times, memory and idle shares within a row differ at most; None:
            rows are of equal length, whatever is in them.
    """

    rows: tuple[range, ...]
    apart: float | None

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.rows[-1].stop

    @property
    def note(self) -> str:
        """What was done, for people; empty where nothing was."""
        if len(self.rows) == self.stages:
            return ""
        if self.apart is None:
            return f"{self.stages} stages in {len(self.rows)} rows; -v: each by itself"
        far = "" if not self.apart else f" to within {self.apart:.0%}"
        return f"neighbours that are alike{far} share a row; -v: each stage by itself"


def folded(plan: Plan, *, most: int = MOST_ROWS, every: bool = False) -> Folded:
    """The plan's stages in rows: `most` of them or fewer. `every`: each has its own."""
    stages = range(len(plan.stages))
    alone = [range(s, s + 1) for s in stages]
    if every or len(stages) <= most:
        return Folded(tuple(alone), 0.0)
    figures = [_figures(plan, s) for s in stages]
    for apart in _APART:
        rows = _alike(figures, apart)
        if len(rows) <= most:
            return Folded(tuple(rows), apart)
    borders = [round(k * len(stages) / most) for k in range(most + 1)]
    return Folded(tuple(range(a, b) for a, b in pairwise(borders)), None)


_Figures = tuple[tuple[int, ...], tuple[float, ...]]
"""What must be equal, and what must be near."""


def _figures(plan: Plan, s: int) -> _Figures:
    stage, predicted = plan.stages[s], plan.predicted.stages[s]
    times = predicted.forward_s, predicted.backward_s, predicted.transfer_s
    counts = len(stage.nodes), len(stage.devices), int(stage.recompute)
    # Idle shares are shares of a period already: 3 % and 4 % are near.
    return counts, (*times, float(predicted.memory_bytes), 1 + predicted.idle_share)


def _alike(figures: Sequence[_Figures], apart: float) -> list[range]:
    rows: list[range] = []
    lowest: list[float] = []
    highest: list[float] = []
    for s, (same, near) in enumerate(figures):
        low, high = list(map(min, near, lowest)), list(map(max, near, highest))
        if (
            rows
            and same == figures[rows[-1].start][0]
            and all(b <= a * (1 + apart) + 1e-30 for a, b in zip(low, high, strict=True))
        ):
            rows[-1] = range(rows[-1].start, s + 1)
            lowest, highest = low, high
        else:
            rows.append(range(s, s + 1))
            lowest = highest = list(near)
    return rows


def row_name(row: range) -> str:
    """``3``, or ``3–17``."""
    return str(row.start) if len(row) == 1 else f"{row.start}–{row.stop - 1}"


def ranged(values: Iterable[float], text: Callable[[float], str]) -> str:
    """``"3.2 GiB"``, ``"3.2–4.1 GiB"`` or ``"980.0 MiB–1.2 GiB"``: the least to the most."""
    found = list(values)
    least, most = text(min(found)), text(max(found))
    if least == most:
        return most
    number, _, unit = least.partition(" ")
    if unit and most.endswith(f" {unit}"):
        return f"{number}–{most}"
    if least.endswith("%"):
        return f"{least[:-1]}–{most}"
    return f"{least}–{most}"
