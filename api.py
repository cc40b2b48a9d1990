"""The Python interface: `profile`, `plan` and `run`, one for each command, and what else these do.

Each takes what its command takes, with the same defaults; amounts are texts, as on a command line.
`links` is `tp-profile --links`; `resume`, `check` and `dry_run` are options of `tp-run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .planner.cluster.changes import clusters_after
from .planner.cluster.cluster import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    Cluster,
    read_cluster,
    uniform_cluster,
)
from .planner.cluster.contention import with_contention
from .planner.plan import Plan
from .planner.schedules.given import read_order
from .planner.search.solve import MUON, solve
from .planner.study.choose import StudyFigures, by_time_to_target
from .planner.study.pareto import ParetoFront, pareto_point
from .planner.study.study import read_study
from .planner.systems.variants import VARIANTS, load_plugin, variant_named
from .profiles.errors import InfeasibleError, PlanError, UserError
from .profiles.profile import Profile
from .profiles.published.reader import import_profile, is_foreign
from .profiles.tasks.objects import SESSION, check_not_importing, name_of
from .runtime.records.run import Run

if TYPE_CHECKING:
    from .planner.costs.tied_parameters import Tied
    from .planner.evaluate import Evaluation
    from .planner.exports.export import EngineName
    from .runtime.records.callbacks import Callback
    from .runtime.verify.check import CheckReport
    from .runtime.verify.dry_run import DryRun


def profile(
    target: object,
    *,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    device: str = "cpu",
    spec: str | None = None,
    autocast: str | None = None,
    threads: int = 1,
    granularity: str = "layer",
    front_end: str | None = None,
    inputs: Sequence[str] = (),
    seconds: float = 15.0,
    relative_error: float = 0.05,
    batches: int | None = None,
    together: int | None = None,
    edges: str | Path | None = None,
) -> Profile:
    """Measure a target (`tp-profile`).

    Args:
        target: a built-in task or model, ``file.py:name``, ``pkg.module:name``, an ONNX file, or
            a profile that another planner published or a table of costs, which is imported with
            the batch sizes; or an object: a task, a model, a class or function that makes one.
        batch_size: samples in a mini-batch; by default the largest micro-batch size, or those
            of a batch of the task's DataLoader, or 64.
        micro_batch_sizes: sizes to measure, in samples.
        device: "cpu", "cuda", or "meta" to reckon with a device `spec` without running.
        autocast: dtype of torch.autocast, "bfloat16" or "float16"; None: off.
        granularity: "layer", "op", or name patterns of modules that are one layer each.
        front_end: how to find the graph, such as "fx" or "export"; None: the first that can.
        inputs: for a model that isn't a task, ``SHAPE:DTYPE`` of each of its inputs.
        seconds: to spend on timing at most.
        relative_error: stop when every layer with 1 % of the time is known so well.
        batches: mini-batches to look at, where a collate_fn or a batch_sampler may make them of
            different shapes; the largest is measured. None: 32, within 5 s.
        together: measure too what stages cost besides their layers, and how so many processes slow
            each other down.
        edges: with a table of costs (.csv) as target, the table of its edges.

    Raises:
        TargetError, TraceError: the model can't be imported, built or traced.
        FileError: a published profile or a device spec can't be read.
    """
    check_not_importing("timeprest.profile")
    name = name_of(target)
    if Path(name).is_file() and is_foreign(name):
        return import_profile(
            name, batch_size=batch_size, micro_batch_sizes=micro_batch_sizes, edges=edges
        )
    if edges is not None:
        raise UserError("edges: goes with a table of costs (.csv)")
    from .profiles.measuring.measure import measure
    from .profiles.measuring.platforms import platform_of
    from .profiles.measuring.process import freed_memory_kept
    from .profiles.target import parse_input, resolve

    if together is not None and device != "cpu":
        raise UserError('together: is for device="cpu"')
    if together is not None and name.startswith(SESSION):
        raise UserError(
            f"together: {name} is in no file, and other processes are to measure it too; put it in "
            "a file, or leave together out"
        )
    found = resolve(name, [parse_input(text) for text in inputs])
    if batch_size is None:
        batch_size = max(micro_batch_sizes) if micro_batch_sizes else found.batch_size
    with freed_memory_kept():
        measured = measure(
            found,
            batch_size=batch_size,
            micro_batch_sizes=micro_batch_sizes,
            platform=platform_of(device, spec, autocast),
            threads=threads,
            front_end=front_end,
            granularity=granularity,
            seconds=seconds,
            error=relative_error,
            batches=batches,
        )
    if together is None:
        return measured
    from .runtime.calibration.overhead import with_processes

    return with_processes(measured, found, inputs, together, seconds=seconds / 2)


def plan(
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    variant: str = "timeprest",
    order: str | Path | None = None,
    mini_batch: int | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    stages: int | Literal["auto"] | None = None,
    replicas: bool | Literal["auto", "off"] = True,
    stages_per_device: int | Literal["auto"] = 1,
    placement: str = "auto",
    sequence: Literal["best", "listed"] = "best",
    recompute: Literal["off", "on", "selective", "auto"] = "off",
    tied: Tied = "together",
    pins: Mapping[str, int] | None = None,
    solver: str = "auto",
    time_limit_s: float | None = 60.0,
    update_every: int = 1,
    optimizer_state: float | Literal["muon"] | None = None,
    devices: int = 2,
    memory: str | None = None,
    bandwidth: str = DEFAULT_BANDWIDTH,
    latency: str = DEFAULT_LATENCY,
    per_machine: int | None = None,
    between_bandwidth: str | None = None,
    between_latency: str | None = None,
    half_duplex: bool = False,
    overlap: bool = True,
    seen: Callable[[Evaluation], None] | None = None,
) -> Plan:
    """Find the best plan (`tp-plan solve`).

    Args:
        cluster: of devices and links; those described from `devices` on are left out then. By
            default there are so many equal ones.
        variant: the training system.
        order: a file of what each device runs, in the system's weight rules and in the place of
            its own order. It says stages, micro-batches and which device runs what.
        mini_batch: samples per update; the profile's batch size by default.
        micro_batches, stages: how many; "auto" or None: what is best.
        replicas: stages may take several devices.
        stages_per_device: "auto": more than 1 where that makes the period shorter.
        placement: which device runs which stage: "straight", "loop", "v" or "auto".
        sequence: devices of several kinds are used in the "best" sequence, or as "listed".
        recompute: stages compute activations again instead of keeping them: all, or those of some
            layers.
        tied: layers that share parameters are on one device "together", or "split" over several.
        pins: stage of each layer that is pinned, by the layer's name; 0 is the first.
        time_limit_s: the search ends then, with the best plan so far; None: no limit.
        update_every: mini-batches per update.
        optimizer_state: bytes of optimizer state per byte of parameters, or "muon": 1 of matrices
            of hidden layers and 2 of others; as profiled by default.
        devices: how many equal ones.
        memory: limit of each device, such as "16GiB"; None: there is none.
        bandwidth, latency: between devices, such as "12GB/s" and "10us".
        per_machine: devices in a machine, all by default; between_bandwidth and between_latency
            are of the links between machines then.
        half_duplex: a link carries one direction at a time.
        overlap: devices compute while they transfer.
        seen: is told of every plan that fits.

    Raises:
        PlanError, InfeasibleError: the settings contradict each other, or nothing fits.
        FileError, OrderError: the order's file is unreadable, or breaks a rule.
        UserError: an amount that can't be read, or a cluster beside what describes one.
    """
    described = {
        "devices": (devices, 2),
        "memory": (memory, None),
        "bandwidth": (bandwidth, DEFAULT_BANDWIDTH),
        "latency": (latency, DEFAULT_LATENCY),
        "per_machine": (per_machine, None),
        "between_bandwidth": (between_bandwidth, None),
        "between_latency": (between_latency, None),
        "half_duplex": (half_duplex, False),
        "overlap": (overlap, True),
    }
    given = {name: value for name, (value, default) in described.items() if value != default}
    if cluster is not None and given:
        raise UserError(f"cluster: leave out {', '.join(given)}; the cluster says it")
    if replicas not in (True, False, "auto", "off"):
        raise PlanError(f"replicas {replicas!r}: give True or False")
    if cluster is None:
        own: dict[str, Any] = {"devices": devices, **given}
        # A cluster of one's own says itself how fast its devices are.
        cluster = with_contention(uniform_cluster(**own), profile.together)
    state: dict[str, Any] = {"optimizer_state_factor": optimizer_state}
    if optimizer_state == "muon":
        state = MUON
    return solve(
        profile,
        cluster,
        variant,
        mini_batch=mini_batch,
        order=None if order is None else read_order(order),
        **state,
        update_every=update_every,
        tied=tied,
        micro_batches=_count_or_auto(micro_batches, "micro_batches"),
        stages=_count_or_auto(stages, "stages"),
        replicas=replicas not in (False, "off"),
        stages_per_device=_count_or_auto(stages_per_device, "stages_per_device"),
        placement=placement,
        sequence=sequence,
        recompute=recompute,
        pins=tuple((pins or {}).items()),
        solver=solver,
        time_limit_s=time_limit_s,
        seen=seen,
    )


def _count_or_auto(count: int | str | None, name: str) -> int | None:
    """``auto`` → None. Raises PlanError for other texts, which would be compared with numbers."""
    if isinstance(count, str):
        if count != "auto":
            raise PlanError(f"{name} {count!r}: give a whole number, or 'auto'")
        return None
    return count


def plugin(path: str | Path) -> tuple[str, ...]:
    """Add the training systems of a file of your own (`--plugin`).

    Processes that this one starts load it, too.

    Returns their names.

    Raises PluginError naming file and line: it isn't there, fails, or has a row that can't be.
    """
    return tuple(system.name for system in load_plugin(str(path)))


def plans(
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    variants: Sequence[str] | None = None,
    study: str | Path | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """Each system's best plan, by the system's name (`tp-plan solve --variant all`).

    Args:
        variants: the systems; None: all of them. Those that nothing fits are left out.
        study: a file of `tp-run study`: plans are judged by their time to its target. The best one
            by that comes first then, in the place of its system's.
        options: as of `plan`.

    Raises as `plan`; InfeasibleError where no system has a plan.
    """
    from .cli.plan_commands.solve import chosen_by_study

    figures = None if study is None else StudyFigures(read_study(str(study)))
    if figures is not None:
        mini_batch = options.get("mini_batch") or profile.batch_size
        figures.check(profile.fingerprint, mini_batch, str(study))
    found: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    fronts: list[ParetoFront] = []
    for name in VARIANTS if variants is None else variants:
        # By a study a plan may be best that another system's beats in all three prices.
        fronts.append(front := ParetoFront())
        system = variant_named(name)

        def keep(seen: Evaluation, front: ParetoFront = front, system: str = system.name) -> None:
            front.add(pareto_point(system, seen))

        try:
            found[name] = plan(profile, cluster, variant=name, seen=keep, **options)
        except (InfeasibleError, PlanError) as error:
            failed[name] = str(error)
    if not found:
        raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    if figures is None:
        return found
    points = [point for front in fronts for point in front.points]
    times = by_time_to_target(points, figures, options.get("update_every", 1))
    if not times:
        return found
    best = times[0].point.variant
    chosen = chosen_by_study(profile, found.pop(best), times[0])
    return {best: chosen, **found}


def what_if(
    profile: Profile,
    changes: Sequence[str],
    cluster: Cluster | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """The best plan after each change of devices or links, by the change (`tp-plan solve
    --what-if`).

    Args:
        changes: such as "bandwidth=2x,memory=24GiB", all of which holds at once then. Those after
            which nothing fits, or what was asked for can't be, are left out.
        cluster, options: as of `plan`.

    Raises as `plan`; InfeasibleError where nothing fits after any change.
    """
    own = cluster is None
    if cluster is None:
        of_cluster = inspect.signature(uniform_cluster).parameters
        described = {name: options.pop(name) for name in of_cluster if name in options}
        cluster = uniform_cluster(**{"devices": 2, **described})
    together = profile.together if own else None
    others = clusters_after(cluster, changes, together)
    found: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    for text, other in others.items():
        try:
            found[text] = plan(profile, other, **options)
        except (InfeasibleError, PlanError) as error:
            failed[text] = str(error)
    if failed and not found:
        raise InfeasibleError("; ".join(f"{text}: {why}" for text, why in failed.items()))
    return found


def run(
    plan: Plan,
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
        epochs: passes over the data; 5 by default.
        steps: mini-batches in all, instead of `epochs`.
        inline: all stages in this process.
        callbacks: are told how the run goes on, and may end it early.
        max_restarts: after failures, from the newest checkpoint.
        settings: other fields of `runtime.settings.RunSettings`, such as ragged="pad" or
            optimizer={"name": "adam", "lr": 1e-3}.

    Returns the run, which shows itself in a notebook; its `summary` is what tp-run prints.

    Raises:
        UserError: a setting that there isn't, or that can't be.
        TargetError, TraceError, PlanError, FileError: found before anything starts.
        RunError: training failed.
    """
    from .runtime.run import Trainer

    trainer = Trainer(
        plan,
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
    from .runtime.run import Trainer

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
    plan: Plan,
    run_dir: str | Path | None = None,
    *,
    task: object = None,
    inline: bool = False,
    **settings: Any,
) -> CheckReport:
    """Train a few mini-batches with and without the pipeline, and compare (`tp-run --check`).

    Args:
        run_dir: keeps the pipelined run; None: nothing is kept.
        settings: as of `run`; steps=3 by default.

    Raises as `run`. That something differs is in the report's verdict.
    """
    from .runtime.settings import settings_of
    from .runtime.verify.check import check as compare

    check_not_importing("timeprest.check")
    asked = {**settings, "task": None if task is None else name_of(task)}
    return compare(plan, settings_of(plan, asked), run_dir=run_dir, inline=inline)


def dry_run(
    plan: Plan, run_dir: str | Path = "runs/dry", *, task: object = None, **settings: Any
) -> DryRun:
    """Check all that a run needs, without training (`tp-run --dry-run`).

    Args:
        run_dir: where the run would write; nothing is written.
        settings: as of `run`.

    Raises as `run`, for what makes a run impossible, and TargetError where a hook or a stage fails;
    `problems` has the rest.
    """
    from .runtime.settings import settings_of
    from .runtime.verify.dry_run import dry_run as look

    check_not_importing("timeprest.dry_run")
    asked = {**settings, "task": None if task is None else name_of(task)}
    found = look(plan, settings_of(plan, asked), str(run_dir))
    assert found is not None
    return found


def export(plan: Plan, engine: EngineName, folder: str | Path) -> list[Path]:
    """Write a plan as another engine reads it (`tp-plan export`).

    Args:
        engine: "torch", "torchtitan", "megatron" or "deepspeed".
        folder: a new one.

    Returns the files.

    Raises:
        PlanError: the engine can't express the plan; the message says what and why.
        TargetError, TraceError: of "torch", which looks at the model: it can't be built or traced.
        FileError: something stands at the folder's place, or it can't be written.
    """
    from .cli.plan_commands.export import write_export

    written, _ = write_export(plan, engine, folder)
    return [Path(path) for path in written]


def links(path: str | Path = "cluster.toml", *, processes: int = 2, device: str = "cpu") -> Cluster:
    """Measure the links between processes of this machine (`tp-profile --links`).

    Args:
        path: of the cluster file to write.
        processes: how many.
        device: "cpu" or "cuda".

    Raises:
        UserError: a bad path, too few processes or GPUs.
        RunError: a process died, got stuck, or failed.
    """
    from .cli.links import links_command

    links_command(str(path), processes=processes, device=device, quiet=True, as_json=False)
    return read_cluster(str(path))
