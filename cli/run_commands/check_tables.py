"""What a check found, as people read it."""

from __future__ import annotations

from rich.table import Table

from ...runtime.verify.check import CheckReport
from ...runtime.verify.compare import Difference
from ..tables.layout import compact_table, counted


def check_table(report: CheckReport) -> Table:
    """One row per kind of figure and other training."""
    table = compact_table(
        f"{report.variant}, {report.mode}, "
        f"{counted(report.mini_batches, 'mini-batch', 'mini-batches')} of {report.dtype}: "
        "largest differences",
        ["from", "figure", "where"],
        ["absolute", "relative", "allowed", ""],
    )
    for against in report.against:
        label = against.what
        for difference in against.differences:
            counts = against.counts and difference.counts
            table.add_row(
                label,
                difference.what,
                _where(difference),
                f"{difference.absolute:.1e}",
                f"{difference.relative:.1e}",
                f"{difference.allowed:.1e}" if counts else "-",
                ("same" if difference.same else "differs") if counts else "-",
            )
            label = ""
    return table


def check_lines(report: CheckReport) -> list[str]:
    """Notes and verdict."""
    lines = [f"note: {note}" for note in report.notes]
    missing = sorted({n for a in report.against for d in a.differences for n in d.missing})
    if missing:
        shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        lines.append(f"gradients on one side only: {shown}")
    names = " and ".join(against.what for against in report.against if against.counts)
    how = "in one process, without a pipeline" if report.plain else "in one process"
    lines.append(
        f"{report.verdict}: {names} {how}; allowed for rounding in {report.dtype}: "
        f"{report.tolerance:g} of a tensor's largest number"
    )
    return lines


def _where(difference: Difference) -> str:
    parts = [difference.name] if difference.name else []
    if difference.mini_batch is not None:
        parts.append(f"mini-batch {difference.mini_batch}")
    return ", ".join(parts)
