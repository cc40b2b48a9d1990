"""tp-run study: which of several plans reaches a loss first, before a cluster is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ....cli.errors import Stopped, errors_as_lines, naming
from ....cli.options import (
    common_options,
    computing_options,
    config_options,
    optimizer_choice,
    optimizer_options,
    options_of,
    plugin_option,
    task_options,
)
from ....cli.options.command import command, group, options
from ....cli.options.values import FileName, FolderName, Number, Whole
from ....cli.progress import Bar
from ....planner.plan import read_plan
from ....profiles.files import MAX_FACTOR
from ....profiles.measuring.process_settings import folder_kept
from ...processes.locks import check_system
from ...settings import settings_of
from ..choices import StudyChoices, choices_of
from .outputs import StudyOutputs

MOST_JOBS = 1024

_study_options = options(
    group(
        "Training",
        task_options,
        click.option("--epochs", type=Whole(), help="Until the target is set.  [default: 5]"),
        click.option("--steps", type=Whole(), help="Mini-batches instead of --epochs."),
    ),
    options_of(StudyChoices, without=("warmups", "cures")),
    optimizer_options,
    options_of(StudyChoices, only=("warmups",)),
    computing_options,
    options_of(StudyChoices, only=("cures",)),
    group(
        "Files and processes",
        click.option(
            "-o",
            "--output",
            "path",
            type=FileName(),
            default="study.json",
            help="The study; FILE.html writes a page, and the study to FILE.json.",
        ),
        click.option(
            "--trainings",
            type=FolderName(),
            help="Finished trainings, for going on.  [default: beside the study, .trainings]",
        ),
        click.option("--jobs", type=Whole(1, MOST_JOBS), help="Processes.  [default: the cores]"),
        click.option(
            "--timeout",
            "timeout_s",
            type=Number(0, MAX_FACTOR, above=True),
            default=600.0,
            help="Longest time that a process may say nothing, in seconds.",
        ),
    ),
)


@command(
    "tp-run study plan.*.json -o study.json",
    "tp-run study plan.gpipe.json plan.timeprest.json --optimizer sgd --lr 0.1 -o study.html",
    "tp-run study plan.*.json --seeds 5 --target-accuracy 0.95 --budget 2h",
)
@click.argument("plan_paths", type=FileName(), metavar="PLAN...", nargs=-1, required=True)
@_study_options
@config_options
@plugin_option
@common_options
@errors_as_lines
def study(
    plan_paths: tuple[str, ...],
    path: str,
    trainings: str | None,
    jobs: int | None,
    timeout_s: float,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **asked: Any,
) -> None:
    """Train by each PLAN inline, beside plain training, and say which reaches the target first.

    Plans are of one profile, such as all of tp-plan solve --variant all. All train on the same
    samples in the same sequence from the same weights, over several seeds, each with its own
    learning rate. Times to the target are predicted by the plans' periods. With --budget, plans
    that fall behind in short trainings are dropped, and what decides is trained next. Stopped,
    the same command goes on where it was.
    """
    check_system()
    outputs = StudyOutputs(path)
    folder = Path(trainings) if trainings else outputs.study.with_suffix(".trainings")
    plans = [read_plan(each) for each in plan_paths]
    choices = choices_of(asked)
    asked["optimizer"] = optimizer_choice(asked)
    # Whatever a plan says of its period: trainings are known by their settings.
    # Whichever has rates of its own: each takes them where none are given.
    first = next((plan for plan in plans if plan.system.rescheduled), plans[0])
    settings = msgspec.structs.replace(settings_of(first, asked), timeout_s=60.0)
    with Bar("studying", quiet=quiet or as_json) as bar:
        # Torch takes its time; bad options and plans needn't wait for it.
        bar.doing("loading torch")
        from ...prepare.devices import usable_cores
        from ..trainings.conduct import conduct, prospect

        bar.doing("looking at the task")
        kept = folder.absolute()
        with folder_kept(), naming(plan_paths[0]):
            due = prospect(plans, plan_paths, settings, choices)
        try:
            with folder_kept():
                found = conduct(due, kept, jobs or usable_cores(), bar, timeout_s, bar.note)
        except KeyboardInterrupt:
            done = sum(1 for _ in folder.glob("*.json"))
            raise Stopped(
                f"{done} trainings are done, in {folder}: the same command goes on"
            ) from None
    outputs.write(found)
    outputs.show(found, as_json=as_json, quiet=quiet, verbose=verbose)
