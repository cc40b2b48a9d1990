"""tp-run study: which of several plans reaches a loss first, before a cluster is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ....cli.errors import Stopped, errors_as_lines, naming, output, print_json
from ....cli.options import (
    CONTEXT,
    choice,
    common_options,
    computing_options,
    config_options,
    optimizer_choice,
    optimizer_options,
    plugin_option,
    task_options,
)
from ....cli.options.command import GroupedCommand, examples, group, options
from ....cli.options.values import FileName, FolderName, Fraction, Number, Whole
from ....cli.progress import Bar
from ....planner.plan import Plan, read_plan
from ....profiles.errors import UserError
from ....profiles.files import MAX_FACTOR, Kind, check_outputs
from ....profiles.measuring.process_settings import folder_kept
from ...processes.locks import check_system
from ...settings import settings_of
from ..figures.results import results_of
from ..figures.study import RISES, Study, write_study
from .tables import level_table, study_lines, study_table

MOST_JOBS = 1024

_study_options = options(
    group(
        "Training",
        task_options,
        click.option("--epochs", type=Whole(), help="Until the target is set.  [default: 5]"),
        click.option("--steps", type=Whole(), help="Mini-batches instead of --epochs."),
        click.option(
            "--longer",
            type=Number(1, 1000),
            default=1.5,
            help="Every training is so many times as long, so that slower systems get there too.",
        ),
        click.option("--seeds", type=Whole(1, 100), default=3, help="Trainings of each system."),
        click.option(
            "--eval-every",
            type=Whole(0),
            help="Mini-batches between evaluations; 0: none.  [default: a fifteenth of all]",
        ),
        click.option(
            "--uniform-delay",
            is_flag=True,
            help="Also train with gradients that are S - 1 updates late in all layers.",
        ),
    ),
    group(
        "Target",
        click.option(
            "--target-loss",
            type=Number(),
            help="[default: what plain training reaches after the given steps]",
        ),
        click.option("--target-accuracy", type=Fraction(), help="From 0 to 1, on the test data."),
        choice(
            "--target",
            RISES,
            None,
            "The figure that is to reach what plain training does.  [default: loss, in training]",
        ),
    ),
    group(
        "Learning rates",
        click.option(
            "--tune",
            type=Whole(1, 1000),
            default=5,
            metavar="K",
            help="Trainings that each system has to find its learning rate; 1: takes --lr.",
        ),
        click.option(
            "--confirm",
            type=Whole(1, 100),
            default=2,
            help="Of the rates tried, the best so many train with all seeds.",
        ),
        click.option(
            "--tune-factor",
            type=Number(1, MAX_FACTOR, above=True),
            default=2.0,
            help="Between neighbours of the grid of rates around --lr.",
        ),
        click.option(
            "--tune-steps",
            type=Whole(),
            help="Mini-batches of these trainings.  [default: as long as the others]",
        ),
    ),
    optimizer_options,
    group(
        "Optimizer and learning rate",
        click.option(
            "--warmup",
            "warmups",
            metavar="UPDATES,…",
            help="Over which the learning rate rises; of several, each system's best.  "
            "[default: 0]",
        ),
    ),
    computing_options,
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


@click.command(
    cls=GroupedCommand,
    context_settings=CONTEXT,
    epilog=examples(
        "tp-run study plan.*.json -o study.json",
        "tp-run study plan.gpipe.json plan.timeprest.json --optimizer sgd --lr 0.1 -o study.html",
        "tp-run study plan.*.json --seeds 5 --target-accuracy 0.95",
    ),
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
    learning rate. Times to the target are predicted by the plans' periods. Stopped, the same
    command goes on where it was.
    """
    check_system()
    study_path, page_path = _outputs(path)
    folder = Path(trainings) if trainings else study_path.with_suffix(".trainings")
    wanted: list[tuple[str, Path, Kind]] = [("-o", study_path, Kind.STUDY)]
    if page_path is not None:
        wanted.append(("-o", page_path, Kind.PAGE))
    check_outputs(*wanted)
    plans = [read_plan(each) for each in plan_paths]
    if asked["epochs"] is not None and asked["steps"] is not None:
        raise UserError("--epochs, --steps: give one of them")
    chosen, settings = _chosen(plans[0], asked)
    with Bar("studying", quiet=quiet or as_json) as bar:
        # Torch takes its time; bad options and plans needn't wait for it.
        bar.doing("loading torch")
        from ...verify.dry_run import usable_cores
        from ..trainings.conduct import StudyChoices, conduct, prospect

        bar.doing("looking at the task")
        kept = folder.absolute()
        with folder_kept(), naming(plan_paths[0]):
            due = prospect(plans, plan_paths, settings, StudyChoices(**chosen))
        try:
            with folder_kept():
                found = conduct(due, kept, jobs or usable_cores(), bar, timeout_s)
        except KeyboardInterrupt:
            done = sum(1 for _ in folder.glob("*.json"))
            raise Stopped(
                f"{done} trainings are done, in {folder}: the same command goes on"
            ) from None
    write_study(study_path, found)
    if page_path is not None:
        from .page import study_page

        study_page(found, page_path)
    _show(found, as_json=as_json, quiet=quiet, verbose=verbose)
    if not (as_json or quiet):
        more = f" and {page_path}" if page_path is not None else ""
        output().print(f"wrote {study_path}{more}")


def _outputs(path: str) -> tuple[Path, Path | None]:
    """Where the study goes, and the page if there is to be one."""
    given = Path(path)
    if given.suffix.lower() in (".html", ".htm"):
        return given.with_suffix(".json"), given
    return given, None


def _chosen(first: Plan, asked: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What `StudyChoices` and the settings of the trainings are made of. Raises UserError."""
    loss, accuracy = asked.pop("target_loss"), asked.pop("target_accuracy")
    metric = asked.pop("target")
    if loss is not None and accuracy is not None:
        raise UserError("--target-loss, --target-accuracy: give one of them")
    if accuracy is not None:
        if metric not in (None, "accuracy"):
            raise UserError(f"--target-accuracy, --target {metric}: leave --target out")
        metric = "accuracy"
    if loss is not None and metric == "accuracy":
        raise UserError("--target-loss, --target accuracy: leave one of them out")
    chosen = {
        "metric": metric or "loss",
        "target": accuracy if loss is None else loss,
        "factor": asked.pop("tune_factor"),
        "warmups": _warmups(asked.pop("warmups")),
    }
    names = ("seeds", "longer", "tune", "confirm", "tune_steps", "eval_every", "uniform_delay")
    chosen |= {name: asked.pop(name) for name in names}
    asked["optimizer"] = optimizer_choice(asked)
    settings = settings_of(first, asked)
    # Whatever a plan says of its period: trainings are known by their settings.
    settings = msgspec.structs.replace(settings, timeout_s=60.0)
    return chosen, settings


def _warmups(text: str | None) -> tuple[int, ...] | None:
    """``"0,100"`` → (0, 100). Raises UserError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) <= 9 for part in parts):
        raise UserError(f"--warmup {text!r}: give whole numbers of updates, like 0,100")
    return tuple(map(int, parts))


def _show(found: Study, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    results = results_of(found)
    if as_json:
        print_json({"study": found, "results": results})
        return
    if quiet:
        return
    console = output()
    console.print(study_table(found, results, console.width))
    if len(found.arms) > 1:
        console.print(level_table(found, results, console.width))
    for line in study_lines(found, results, verbose=verbose):
        console.print(line)
