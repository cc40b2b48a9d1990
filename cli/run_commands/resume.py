"""tp-run --resume: which options go with it, and where a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...planner.plan import read_plan, same_plan
from ...profiles.errors import StoppedError, UserError
from ...runtime.settings import ADJUSTABLE
from ..errors import Stopped

if TYPE_CHECKING:
    from ...planner.plan import Plan
    from ...runtime.settings import RunSettings


def adjusted() -> dict[str, Any]:
    """The adjustable settings that the command line gives, by field."""
    context = click.get_current_context()
    return {name: context.params[name] for name in ADJUSTABLE if _given(context, name)}


def check_resumable(run_dir: str | None, asked: Mapping[str, Any]) -> None:
    """Raise UserError for options of `RunSettings` and of optimizers (`asked`) that a resumed run
    can't have."""
    if run_dir is None:
        raise UserError("--resume: name the run with --run-dir")
    if asked["start_from"] is not None:
        raise UserError("--resume, --from: give one of them")
    context = click.get_current_context()
    fixed = set(asked) - {*ADJUSTABLE, "epochs", "steps"}
    changed = [
        option.opts[0]
        for option in context.command.params
        if option.name in fixed and _changes(context, option)
    ]
    if changed:
        raise UserError(
            f"{', '.join(sorted(changed))}: a resumed run keeps its settings, and only --epochs or "
            "--steps may grow; "
            f"to start another run from its weights: tp-run PLAN --from {run_dir}"
        )


def _given(context: click.Context, name: str) -> bool:
    """On the command line, or in the file of --config."""
    source = context.get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def _changes(context: click.Context, option: click.Parameter) -> bool:
    """Whether it is given; in a file, which may have all, otherwise than by default."""
    name = str(option.name)
    if context.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
        return _given(context, name)
    value, default = context.params[name], option.default
    # Flags without a default are off.
    return bool(value) if isinstance(value, bool) and default is not True else value != default


def read_run(run_dir: str, plan_path: str | None) -> tuple[Plan, RunSettings]:
    """Plan and settings of the run to resume. Raises UserError when PLAN is another one."""
    from ...runtime.records.run_dir import RunDir

    plan, settings = RunDir(run_dir).read()
    if plan_path is not None and not same_plan(read_plan(plan_path), plan):
        raise UserError(
            f"{plan_path}: isn't the plan of {run_dir}; leave it out to resume that run, or start "
            f"another one from its weights: --from {run_dir}"
        )
    return plan, settings


def place_of(where: Path, at: int | None) -> str:
    """The mini-batch at which the run goes on, in words; `at`: the one asked for."""
    from ...runtime.records.run_dir import RunDir

    found = RunDir(where).checkpoints.newest()
    if found is None:
        return "its beginning: it has no checkpoint yet"
    return f"mini-batch {at or int(found.name)} on"


@contextmanager
def naming_checkpoint(where: Path) -> Iterator[None]:
    """What a signal ends in this block says how to go on. Raises Stopped on Ctrl-C, StoppedError on
    other signals."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(_how_to_go_on(where)) from None
    except StoppedError as error:
        raise StoppedError("; ".join(filter(None, (str(error), _how_to_go_on(where))))) from None


def _how_to_go_on(where: Path) -> str:
    """How to resume a run that was stopped, in words; empty without a checkpoint."""
    from ...runtime.records.run_dir import RunDir

    found = RunDir(where).checkpoints.newest()
    if found is None:
        return ""
    return f"its newest checkpoint is {found}; go on with tp-run --resume --run-dir {where}"
