"""A plan's part of the page's data."""

from __future__ import annotations

from typing import Any

import msgspec

from .... import __version__
from ....planner.plan import Plan
from ....planner.recording import predicted
from ...tables.core_use import core_use
from .page import write_page
from .recording_data import columns


def plan_part(plan: Plan, name: str, mini_batches: int | None = None) -> dict[str, Any]:
    """The plan as its file has it, with a recording of what it predicts.

    Args:
        name: what the page calls it: its file's name, say.
        mini_batches: how many to record; by default as many as become steady, fewer where
            they are too many to look at.

    Raises OrderError for a plan whose stages wait for each other.
    """
    recording = predicted(plan, mini_batches)
    shown = {span.mini_batch for span in recording.spans}
    return {
        "name": name,
        "plan": msgspec.to_builtins(plan),
        "cores": msgspec.to_builtins(core_use(plan)),
        "recording": columns(recording),
        "mini_batches_shown": len(shown),
    }


def plan_report(plan: Plan, name: str, path: str) -> None:
    """Write the page of one plan (`tp-plan show --html`). Raises FileError, OrderError."""
    write_page(
        path,
        {
            "title": f"{plan.profile.target}: {plan.variant}, {len(plan.stages)} stages",
            "made_by": {"timeprest": __version__},
            "plans": [plan_part(plan, name)],
            "runs": [],
        },
    )
