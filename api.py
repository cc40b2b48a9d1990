"""The Python interface: `profile`, `plan` and `run`, one for each command, and what else these do.

Each takes what its command takes, with the same defaults. Amounts are texts, as on a command line,
or numbers of bytes, bytes per second and seconds; a profile, plan or cluster may be a file's name.
`links` is `tp-profile --links`; `resume`, `check` and `dry_run` are options of `tp-run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .planner.cluster.cluster import Cluster, read_cluster
from .planner.comparison.plans import (
    best_plan_of,
    changed_clusters,
    fresher_plans,
    plans_of_systems,
    plans_on,
)
from .planner.plan import Plan
from .planner.search.request import PlanRequest, loaded
from .planner.systems.variants import load_plugin
from .profiles.errors import InfeasibleError, UserError
from .profiles.files import Kind, check_output
from .profiles.imported.reader import import_profile, is_foreign
from .profiles.measuring.request import OF_FILES, ProfileRequest
from .profiles.options import record_of, taking, taking_more
from .profiles.profile import Profile
from .profiles.tasks.objects import SESSION, check_not_importing, name_of
from .profiles.units import texts, truth
from .runtime.records.run import Run
from .runtime.settings import RunSettings, settings_of

if TYPE_CHECKING:
    from .runtime.records.callbacks import Callback
    from .runtime.verify.check import CheckReport
    from .runtime.verify.findings import DryRun


@taking(ProfileRequest)
def profile(request: ProfileRequest, **of_file: Any) -> Profile:
    """Measure a target (`tp-profile`).

    Args:
        target: a built-in task or model, ``file.py:name``, ``pkg.module:name``, an ONNX file, or
            a table of costs or a file that a plugin imports, with the batch sizes; or an object: a
            task, a model, a class or function that makes one.
        of_file: options of a file that is imported, like model="OPT-350", gpu="GH-96", tp=4.

    Raises:
        TargetError, TraceError: the model can't be imported, built or traced.
        FileError: a table of costs or a device spec can't be read.
    """
    check_not_importing("timeprest.profile")
    name = name_of(request.target)
    asked = request.read()
    if is_foreign(name):
        return import_profile(name, **{n: asked[n] for n in OF_FILES}, **of_file)
    for option in of_file:
        raise UserError(f"{option}: goes with a file that is imported; {name} is none")
    if asked["edges"] is not None:
        raise UserError("edges: goes with a table of costs (.csv)")
    if asked["together"] is not None and name.startswith(SESSION):
        raise UserError(
            f"together: {name} is in no file, and other processes are to measure it too; put it in "
            "a file, or leave together out"
        )
    from .profiles.measuring.process_settings import settings_put_back
    from .runtime.profile import measured

    with settings_put_back():
        return measured(name, asked)


@taking(PlanRequest)
def plan(request: PlanRequest) -> Plan:
    """Find the best plan (`tp-plan solve`).

    Args:
        profile: or the name of its file; so may the cluster be.
        seen: is told of every plan that fits.

    Raises:
        PlanError, InfeasibleError: the settings contradict each other, or nothing fits.
        FileError, OrderError: the order's file is unreadable, or breaks a rule.
        UserError: an argument that can't be, or a cluster beside what describes one.
    """
    return best_plan_of(request.read())


def plugin(path: str | Path) -> tuple[str, ...]:
    """Add the training systems of a file of your own (`--plugin`).

    Processes that this one starts load it, too.

    Returns their names.

    Raises PluginError naming file and line: it isn't there, fails, or has a row that can't be.
    """
    return tuple(system.name for system in load_plugin(str(path)))


def plans(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    variants: str | Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """Each system's best plan, by the system's name (`tp-plan solve --variant all`).

    Args:
        variants: the systems, or one; None: all of them. Those that nothing fits are left out.
        options: as of `plan`. By a study, the plan with the least time to its target comes first.

    Raises as `plan`; InfeasibleError where no system has a plan.
    """
    if "variant" in options:
        raise UserError("variant: timeprest.plans takes the systems as variants=")
    if "seen" in options:
        raise UserError("seen: is for timeprest.plan, of one system")
    names = "all" if variants is None else variants
    request = record_of(PlanRequest, profile, cluster, variant=names, **options)
    planning = request.read(lambda name: "variants" if name == "variant" else name)
    return dict(plans_of_systems(planning).plans)


def front(
    profile: Profile | str | Path, cluster: Cluster | str | Path | None = None, **options: Any
) -> list[Plan]:
    """Plans of one system with ever smaller delays, down to none, that no other plan beats in
    period and delay; the least late first (`tp-plan solve --front`).

    Args:
        cluster, options: as of `plan`; the first plan is the one that it gives.

    Raises as `plan`.
    """
    planning = record_of(PlanRequest, profile, cluster, **options).read()
    return fresher_plans(planning)


def what_if(
    profile: Profile | str | Path,
    changes: str | Sequence[str],
    cluster: Cluster | str | Path | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """The best plan after each change of devices or links, by the change (`tp-plan solve
    --what-if`).

    Args:
        changes: one or more such as "bandwidth=2x,memory=24GiB", all of which holds at once then.
            Those after which nothing fits, or what was asked for can't be, are left out.
        cluster, options: as of `plan`.

    Raises as `plan`; InfeasibleError where nothing fits after any change.
    """
    planning = record_of(PlanRequest, profile, cluster, **options).read()
    changes = texts(changes, "changes", "bandwidth=2x,memory=24GiB")
    found, failed = plans_on(planning, changed_clusters(planning, changes))
    if failed and not found:
        raise InfeasibleError("; ".join(f"{text}: {why}" for text, why in failed.items()))
    return found


@taking_more(RunSettings)
def run(
    plan: Plan | str | Path,
    run_dir: str | Path,
    *,
    task: object = None,
    epochs: int | None = None,
    steps: int | None = None,
    inline: bool = False,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    max_restarts: int = 0,
    **settings: Any,
) -> Run:
    """Train by a plan (`tp-run`).

    Args:
        run_dir: a new directory for metrics, weights and the summary.
        task: its name, or an object; by default the target that the plan's profile was made of.
        epochs, steps, seed: as of `tp-run`.
        inline: all stages in this process.
        callbacks: are told how the run goes on, and may end it early.
        max_restarts: after failures, from the newest checkpoint.
        settings: optimizer={"name": "adam", "lr": 1e-3} instead of the task's own, and:

    Returns the run, which shows itself in a notebook; its `summary` is what tp-run prints.

    Raises:
        UserError: a setting that there isn't, or that can't be.
        TargetError, TraceError, PlanError, FileError: found before anything starts.
        RunError: training failed.
    """
    from .runtime.trainer import Trainer

    trainer = Trainer(
        loaded(plan, Plan, "plan"),
        run_dir,
        callbacks=callbacks,
        inline=inline,
        max_restarts=max_restarts,
        task=task,
        epochs=epochs,
        steps=steps,
        seed=seed,
        **settings,
    )
    trainer.run()
    return Run(run_dir)


def resume(
    run_dir: str | Path,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    at: int | None = None,
    task: object = None,
    inline: bool = False,
    callbacks: Sequence[Callback] = (),
    max_restarts: int = 0,
    **changes: Any,
) -> Run:
    """Go on with a run from its newest checkpoint (`tp-run --resume`).

    Args:
        epochs, steps: in all, where there are to be more than before.
        at: mini-batches done at another of its checkpoints.
        task: of a run whose task is in no file, that task again.
        inline, callbacks, max_restarts: as of `run`.
        changes: settings that don't change what is trained, such as device="cuda".

    Raises as `run`, and UserError where the run has ended or its settings were changed.
    """
    from .runtime.trainer import Trainer

    trainer = Trainer(
        None,
        run_dir,
        callbacks=callbacks,
        inline=inline,
        max_restarts=max_restarts,
        task=task,
    )
    trainer.resume(changes, epochs=epochs, steps=steps, at=at)
    return Run(run_dir)


def check(
    plan: Plan | str | Path,
    run_dir: str | Path | None = None,
    *,
    task: object = None,
    inline: bool = False,
    **settings: Any,
) -> CheckReport:
    """Train a few mini-batches with and without the pipeline, and compare (`tp-run --check`).

    Args:
        run_dir: keeps the pipelined run; None: nothing is kept.
        settings: as of `run`, without epochs; steps=3 by default.

    Raises as `run`. That something differs is in the report's verdict.
    """
    from .profiles.measuring.process_settings import settings_put_back
    from .runtime.verify.check import check as compare

    check_not_importing("timeprest.check")
    if settings.get("epochs") is not None:
        raise UserError("epochs: a check trains steps mini-batches")
    plan = loaded(plan, Plan, "plan")
    inline = truth(inline, "inline")
    asked = {**settings, "task": None if task is None else name_of(task)}
    with settings_put_back():
        return compare(plan, settings_of(plan, asked), run_dir=run_dir, inline=inline)


def dry_run(
    plan: Plan | str | Path,
    run_dir: str | Path = "runs/dry",
    *,
    task: object = None,
    **settings: Any,
) -> DryRun:
    """Check all that a run needs, without training (`tp-run --dry-run`).

    Args:
        run_dir: where the run would write; nothing is written.
        settings: as of `run`.

    Raises as `run`, for what makes a run impossible, and TargetError where a hook or a stage fails;
    `problems` has the rest.
    """
    from .profiles.measuring.process_settings import one_at_a_time, settings_put_back
    from .runtime.verify.dry_run import dry_run as look

    check_not_importing("timeprest.dry_run")
    plan = loaded(plan, Plan, "plan")
    asked = {**settings, "task": None if task is None else name_of(task)}
    with settings_put_back():
        found = one_at_a_time(look)(plan, settings_of(plan, asked), str(run_dir))
    assert found is not None
    return found


def links(
    path: str | Path = "cluster.toml",
    *,
    processes: int = 2,
    device: str = "cpu",
    target: str | Path | None = None,
    machines: str | None = None,
) -> Cluster:
    """Measure the links between processes of this machine (`tp-profile --links`), or take those
    of machines whose bandwidths others publish.

    Args:
        path: of the cluster file to write.
        processes: how many.
        device: "cpu" or "cuda".
        target: a file of Sailor's bandwidths, to measure nothing.
        machines: which of its machines, as ``GH-96:4x2``.

    Raises:
        UserError: a bad path, too few processes or GPUs, machines that aren't there.
        FileError: the file of bandwidths is broken.
        RunError: a process died, got stuck, or failed.
    """
    from .runtime.calibration.link_report import write_links, write_published_links
    from .runtime.calibration.links import measure_links

    if (target is None) != (machines is None):
        raise UserError("machines: goes with a target, a file of bandwidths, and a target with it")
    if target is not None and machines is not None:
        return write_published_links(str(target), machines, str(path))
    check_output(path, Kind.CLUSTER)
    write_links(measure_links(processes, device, progress=lambda *_: None), str(path))
    return read_cluster(str(path))
