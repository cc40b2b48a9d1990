"""tp-run: train by a plan."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from ..planner.plan import read_plan
from ..profiles.errors import UserError
from ..profiles.measuring.process_settings import without_collections
from ..runtime.processes.locks import check_system
from ..runtime.processes.start import WORKER, load_ahead
from ..runtime.settings import settings_of
from .errors import errors_as_lines, naming
from .options import common_options, config_options, optimizer_choice, plugin_option, run_options
from .options.command import command, refuse
from .progress import Bar
from .run_commands.export import PlanOrCommand, WithOthers
from .run_commands.rank import check_launched, has_restarted, one_rank_reports, rendezvous_at_hand
from .run_commands.resume import adjusted, check_resumable, read_run


@command(
    "tp-run plan.json --dry-run",
    "tp-run plan.json --epochs 3 --optimizer adam --lr 1e-3 --run-dir runs/first",
    "tp-run --resume --run-dir runs/first --epochs 5",
    more="tp-run report RUN... shows what runs did beside what their plans predicted.  tp-run "
    "export RUN -o FILE writes a run's whole model, for plain PyTorch or Hugging Face.  tp-run "
    "study PLAN... says which of several plans reaches a loss first.",
    cls=WithOthers,
)
@click.argument("plan_path", type=PlanOrCommand(), metavar="PLAN", required=False)
@run_options
@config_options
@plugin_option
@common_options
@errors_as_lines
@one_rank_reports
def main(
    plan_path: str | None,
    inline: bool,
    checks: bool,
    dry_run: bool,
    run_dir: str | None,
    resume: bool,
    resume_at: int | None,
    max_restarts: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **asked: Any,
) -> None:
    """Train by PLAN: a process for each device, on this machine.

    Started by torchrun or srun, it is one of these processes, on one machine of many.
    """
    check_system()
    rendezvous = rendezvous_at_hand()
    resume = resume or resume_at is not None
    # Before anything acts on one of them.
    if dry_run and (resume or checks):
        raise UserError("--dry-run: goes with neither --resume nor --check")
    if dry_run and inline:
        raise UserError("--dry-run: looks at what workers' processes need; leave --inline out")
    if checks and (asked["start_from"] is not None or resume):
        raise UserError("--check: trains anew; leave --from and --resume out")
    if dry_run or checks:
        which = "dry run" if dry_run else "check"
        refuse(("max_restarts",), f"a {which} isn't started again; leave it out")
    if not resume and rendezvous is not None and has_restarted(rendezvous.launched, run_dir):
        # The launcher repeats the command with which the run was begun.
        resume, asked["epochs"], asked["steps"] = True, None, None
    elif resume:
        check_resumable(run_dir, asked)
    elif plan_path is None:
        raise click.UsageError("Missing argument 'PLAN'.")
    if asked["epochs"] is not None and asked["steps"] is not None:
        raise UserError("--epochs, --steps: give one of them")
    if checks and asked["epochs"] is not None:
        raise UserError("--check, --epochs: a check trains --steps mini-batches")
    asked["optimizer"] = optimizer_choice(asked)
    resumed: dict[str, Any] | None = None
    if resume:
        assert run_dir is not None
        plan, settings = read_run(run_dir, plan_path)
        changes = adjusted()
        settings = msgspec.structs.replace(settings, **changes)
        more = {"epochs": asked["epochs"], "steps": asked["steps"], "at": resume_at}
        resumed = {"changes": changes, **more}
    else:
        assert plan_path is not None
        plan = read_plan(plan_path)
        settings = settings_of(plan, asked)
    if rendezvous is not None:
        check_launched(rendezvous.launched, plan, inline, checks, max_restarts)
    with Bar(plan.variant, quiet=quiet or as_json or rendezvous is not None) as bar:
        # Torch takes its time; bad options and plans needn't wait for it.
        bar.doing("loading torch")
        if rendezvous is None and not inline and not dry_run:
            load_ahead(WORKER)
        with without_collections():
            from .run_commands.checks import show_check, show_dry_run
            from .run_commands.train import TrainingJob, train
    if checks:
        with naming(plan_path or str(run_dir)):
            show_check(plan, settings, run_dir, inline=inline, as_json=as_json, quiet=quiet)
        return
    # Another run of the system may begin within the same second.
    fresh = f"{plan.variant}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    named = run_dir or f"runs/{fresh}"
    if rendezvous is not None:
        # Each host may name its own.
        named = run_dir or rendezvous.share("run directory", named)
    with naming(plan_path or named):
        if dry_run:
            path = str(plan_path)
            show_dry_run(plan, path, settings, named, rendezvous, as_json=as_json, quiet=quiet)
            return
        job = TrainingJob(
            plan=plan,
            settings=settings,
            where=Path(named),
            rendezvous=rendezvous,
            inline=inline,
            resumed=resumed,
            max_restarts=max_restarts,
        )
        train(job, as_json=as_json, quiet=quiet, verbose=verbose)


if __name__ == "__main__":
    main()
