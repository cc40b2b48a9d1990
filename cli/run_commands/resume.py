"""Going on with a run: what may be asked of it, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...planner.plan import read_plan
from ...profiles.errors import UserError

if TYPE_CHECKING:
    from ...planner.plan import Plan
    from ...runtime.settings import RunSettings

_RESUMABLE = {
    *("plan_path", "run_dir", "resume", "resume_at", "epochs", "steps", "checks", "start_from"),
    *("on_nan", "max_restarts"),
    *(
        "inline",
        "timeout",
        "keep_checkpoints",
        "log_operations",
        "device",
        "record",
        "as_json",
        "quiet",
        "verbose",
    ),
}
"""Options that may be given to a run that is resumed, or are refused elsewhere."""


def given(name: str) -> Any:
    """An option's value where it is on the command line; else None."""
    context = click.get_current_context()
    there = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    return context.params[name] if there else None


def check_resumable(run_dir: str | None, start_from: str | None) -> None:
    """Refuse options that would make another run of it."""
    if run_dir is None:
        raise UserError("--resume: name the run with --run-dir")
    if start_from is not None:
        raise UserError("--resume, --from: give one of them")
    options = click.get_current_context().command.params
    changed = [
        option.opts[0]
        for option in options
        if option.name not in _RESUMABLE and given(option.name or "") is not None
    ]
    if changed:
        raise UserError(
            f"{', '.join(changed)}: a resumed run keeps its settings, and only --epochs or "
            "--steps may grow; "
            f"to start another run from its weights: tp-run PLAN --from {run_dir}"
        )


def read_run(run_dir: str, plan_path: str | None) -> tuple[Plan, RunSettings]:
    """A run that is resumed. Raises UserError when PLAN is given and is another."""
    from ...runtime.records.run_dir import RunDir

    plan, settings = RunDir(run_dir).read()
    if plan_path is not None and read_plan(plan_path) != plan:
        raise UserError(
            f"{plan_path}: isn't the plan of {run_dir}; leave it out to resume that run, or start "
            f"another one from its weights: --from {run_dir}"
        )
    return plan, settings


def place_of(where: Path, at: int | None) -> str:
    """Where a run is resumed."""
    from ...runtime.checkpoint.start import newest_checkpoint

    found = newest_checkpoint(where)
    if found is None:
        return "its beginning: it has no checkpoint yet"
    return f"mini-batch {at or int(found.name)} on"


def how_to_go_on(where: Path) -> str:
    """After a run was stopped."""
    from ...runtime.checkpoint.start import newest_checkpoint

    found = newest_checkpoint(where)
    if found is None:
        return ""
    return f"its newest checkpoint is {found}; go on with tp-run --resume --run-dir {where}"
