"""The Python interface: `profile`, `plan` and `run`, one for each command, and what else these do.

Each takes what its command takes, with the same defaults. Amounts are texts, as on a command line,
or numbers of bytes, bytes per second and seconds; a profile, plan or cluster may be a file's name.
`links` is `tp-profile --links`; `resume`, `check` and `dry_run` are options of `tp-run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from .planner.cluster.changes import clusters_after
from .planner.cluster.cluster import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    Cluster,
    read_cluster,
    uniform_cluster,
)
from .planner.cluster.contention import contention_on, with_contention
from .planner.cluster.headroom import parse_headroom
from .planner.plan import Plan
from .planner.schedules.given import read_order
from .planner.search.answer.recheck import question_of, signed
from .planner.search.defaults import TIED_ASKED, best_plan
from .planner.search.solve import MUON
from .planner.study.choose import StudyFigures, by_time_to_target
from .planner.study.front import staleness_front
from .planner.study.pareto import ParetoFront, pareto_point
from .planner.study.study import read_study
from .planner.systems.variants import VARIANTS, load_plugin, variant_named
from .profiles.errors import InfeasibleError, PlanError, UserError
from .profiles.files import MAX_FACTOR
from .profiles.imported.reader import import_profile, is_foreign
from .profiles.profile import Profile
from .profiles.tasks.objects import SESSION, check_not_importing, name_of
from .profiles.units import count_or_auto, number, parse_share, shown, texts, truth, whole, words
from .runtime.records.run import Run

if TYPE_CHECKING:
    from .planner.evaluate import Evaluation
    from .planner.exports.export import EngineName
    from .planner.search.defaults import TiedAsked
    from .runtime.records.callbacks import Callback
    from .runtime.verify.check import CheckReport
    from .runtime.verify.dry_run import DryRun

T = TypeVar("T", Profile, Cluster, Plan)


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
            a table of costs or a file that a plugin imports, with the batch sizes; or an object: a
            task, a model, a class or function that makes one.
        batch_size: samples in a mini-batch; by default those of a batch of the task's DataLoader,
            or the largest micro-batch size, or 64.
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
        FileError: a table of costs or a device spec can't be read.
    """
    check_not_importing("timeprest.profile")
    name = name_of(target)
    if is_foreign(name):
        return import_profile(
            name, batch_size=batch_size, micro_batch_sizes=micro_batch_sizes, edges=edges
        )
    if edges is not None:
        raise UserError("edges: goes with a table of costs (.csv)")
    from .profiles.measuring.measure import measure
    from .profiles.measuring.platforms import platform_of
    from .profiles.measuring.process_settings import settings_put_back
    from .profiles.target import parse_input, resolve
    from .runtime.verify.trial import try_in_pieces

    together = None if together is None else whole(together, "together", 2)
    if together is not None and device != "cpu":
        raise UserError('together: is for device="cpu"')
    if together is not None and name.startswith(SESSION):
        raise UserError(
            f"together: {name} is in no file, and other processes are to measure it too; put it in "
            "a file, or leave together out"
        )
    found = resolve(name, [parse_input(text) for text in inputs])
    with settings_put_back():
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
            trial=try_in_pieces,
        )
        if together is None:
            return measured
        from .runtime.calibration.overhead import with_processes

        return with_processes(measured, found, inputs, together, seconds=seconds / 2)


def plan(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    variant: str = "timeprest",
    order: str | Path | None = None,
    mini_batch: int | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    stages: int | Literal["auto"] | None = None,
    replicas: bool | Literal["auto", "off"] = True,
    stages_per_device: int | Literal["auto"] | None = None,
    placement: str = "auto",
    sequence: Literal["best", "listed"] = "best",
    recompute: Literal["off", "on", "selective", "auto"] | None = None,
    tied: TiedAsked = "auto",
    run_ahead: Literal["paper", "auto"] = "paper",
    max_in_flight: int | None = None,
    max_difference: int | None = None,
    pins: Mapping[str, int] | None = None,
    solver: str = "auto",
    tolerance: str | float = "1%",
    time_limit_s: float | None = 60.0,
    update_every: int = 1,
    optimizer_state: float | Literal["muon"] | None = None,
    devices: int = 2,
    memory: str | float | None = None,
    headroom: str | float | None = None,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = DEFAULT_LATENCY,
    per_machine: int | None = None,
    between_bandwidth: str | float | None = None,
    between_latency: str | float | None = None,
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
        stages_per_device: "auto": more than 1 where that makes the period shorter; None: the same
            where that takes a second at most, else 1.
        placement: which device runs which stage: "straight", "loop", "v" or "auto".
        sequence: devices of several kinds, or in machines of several sizes, are used in the "best"
            sequence, or as "listed".
        recompute: stages compute activations again instead of keeping them: all, or those of some
            layers; None: "off", and "auto" where nothing fits so.
        tied: layers that share parameters are on one device "together", or "split" over several;
            "auto": what is faster, in systems that don't flush on two stages of one device.
        run_ahead: in systems without a flush, stage s of S has S - s mini-batches in flight at
            most, as in the "paper", or as many as pay ("auto").
        max_in_flight, max_difference: mini-batches in flight and version difference of any stage
            at most; None: there is no such bound.
        pins: stage of each layer that is pinned, by the layer's name; 0 is the first.
        tolerance: share of the shortest period, such as "1%" or 0.01, that may be given away for a
            smaller version difference, then for memory, then for even stages.
        time_limit_s: the search ends then, with the best plan so far; None: no limit.
        update_every: mini-batches per update.
        optimizer_state: bytes of optimizer state per byte of parameters, or "muon": 1 of matrices
            of hidden layers and 2 of others; as profiled by default.
        devices: how many equal ones.
        memory: limit of each device, such as "16GiB"; None: there is none.
        headroom: what plans leave free of each device's memory, such as "8%" or "4GiB"; None: 8 %
            of GPUs that weren't measured, else nothing. Devices of a cluster file may say it.
        bandwidth, latency: between devices, such as "12GB/s" and "10us".
        per_machine: devices in a machine, all by default; between_bandwidth and between_latency
            are of the links between machines then.
        half_duplex: a link carries one direction at a time.
        overlap: devices compute while they transfer.
        seen: is told of every plan that fits.

    Raises:
        PlanError, InfeasibleError: the settings contradict each other, or nothing fits.
        FileError, OrderError: the order's file is unreadable, or breaks a rule.
        UserError: an argument that can't be, or a cluster beside what describes one.
    """
    profile = _loaded(profile, Profile, "profile")
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
    given = {
        name: value for name, (value, default) in described.items() if not _same(value, default)
    }
    if cluster is not None and given:
        raise UserError(f"cluster: leave out {', '.join(given)}; the cluster says it")
    variant = _one_system(variant)
    chosen: dict[str, Any] = words(
        tied=tied, placement=placement, sequence=sequence, run_ahead=run_ahead, solver=solver
    )
    chosen |= {} if recompute is None else words(recompute=recompute)
    if seen is not None and not callable(seen):
        raise UserError(f"seen: give a function of a plan, not {shown(seen)}")
    if order is not None and not isinstance(order, (str, Path)):
        raise UserError(f"order: give the name of a file, not {type(order).__name__}")
    if tied not in TIED_ASKED:
        raise UserError(f"tied {tied!r}: give one of {', '.join(TIED_ASKED)}")
    if cluster is None:
        own: dict[str, Any] = {name: value for name, (value, _) in described.items()}
        cluster = uniform_cluster(**own)
    cluster = _loaded(cluster, Cluster, "cluster")
    state: dict[str, Any] = MUON
    if not _same(optimizer_state, "muon"):
        factor = number(optimizer_state, "optimizer_state", MAX_FACTOR, ", or 'muon'")
        state = {"optimizer_state_factor": factor}
    if stages_per_device is not None:
        chosen["stages_per_device"] = count_or_auto(stages_per_device, "stages_per_device")
    return best_plan(
        profile,
        with_contention(cluster, contention_on(cluster, profile.together)),
        variant,
        mini_batch=None if mini_batch is None else whole(mini_batch, "mini_batch"),
        order=None if order is None else read_order(order),
        headroom=None if headroom is None else parse_headroom(headroom, "headroom"),
        **state,
        update_every=whole(update_every, "update_every"),
        **chosen,
        micro_batches=count_or_auto(micro_batches, "micro_batches"),
        stages=count_or_auto(stages, "stages"),
        replicas=_with_replicas(replicas),
        max_in_flight=None if max_in_flight is None else whole(max_in_flight, "max_in_flight"),
        max_difference=(
            None if max_difference is None else whole(max_difference, "max_difference", 0)
        ),
        pins=_stages_of_layers(pins),
        tolerance=parse_share(tolerance, "tolerance"),
        time_limit_s=number(time_limit_s, "time_limit_s"),
        seen=seen,
    )


# What is wrong with an argument is said in its own name. PlanErrors would count as a system's.


def _loaded(given: T | str | Path, kind: type[T], name: str) -> T:
    """What was given, or is in the file of that name. Raises UserError, or as `load`."""
    if isinstance(given, (str, Path)):
        return kind.load(given)
    if not isinstance(given, kind):
        what = f"give a {kind.__name__}, or the name of its file"
        raise UserError(f"{name}: {what}, not {type(given).__name__}")
    return given


def _with_replicas(value: object) -> bool:
    """Also of the command's words for it."""
    if isinstance(value, str) and value in ("auto", "off"):
        return value == "auto"
    return truth(value, "replicas")


def _one_system(variant: object) -> str:
    """Raises UserError for what names no system, or several."""
    if not isinstance(variant, str) or variant == "all":
        raise UserError(
            f"variant: give one system's name, not {shown(variant)}; timeprest.plans takes several"
        )
    return str(variant)


def _same(value: object, default: object) -> bool:
    """Whether they are equal; never so of what can't be compared, such as an array."""
    try:
        return bool(value == default)
    except (TypeError, ValueError):
        return False


def _stages_of_layers(pins: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Raises UserError for what are no stages."""
    if pins is not None and not isinstance(pins, Mapping):
        raise UserError("pins: give each layer's stage by its name, as in {'layer3': 1}")
    return tuple((name, whole(s, f"pins[{name!r}]", 0)) for name, s in (pins or {}).items())


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
    study: str | Path | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """Each system's best plan, by the system's name (`tp-plan solve --variant all`).

    Args:
        variants: the systems, or one; None: all of them. Those that nothing fits are left out.
        study: a file of `tp-run study`: plans are judged by their time to its target. The best one
            by that comes first then, in the place of its system's.
        options: as of `plan`.

    Raises as `plan`; InfeasibleError where no system has a plan.
    """
    from .cli.plan_commands.solve import chosen_by_study

    profile = _loaded(profile, Profile, "profile")
    cluster = None if cluster is None else _loaded(cluster, Cluster, "cluster")
    if "variant" in options:
        raise UserError("variant: timeprest.plans takes the systems as variants=")
    if "seen" in options:
        raise UserError("seen: is for timeprest.plan, of one system")
    names = list(VARIANTS) if variants is None else texts(variants, "variants", "gpipe")
    if not names:
        raise UserError("variants: name one system or more; None: all of them")
    figures = None if study is None else StudyFigures(read_study(str(study)))
    if figures is not None:
        mini_batch = options.get("mini_batch") or profile.batch_size
        figures.check(profile.fingerprint, mini_batch, str(study))
    found: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    fronts: list[ParetoFront] = []
    for name in names:
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


def front(
    profile: Profile | str | Path, cluster: Cluster | str | Path | None = None, **options: Any
) -> list[Plan]:
    """Plans with ever smaller version differences, down to none, that no other plan beats in
    period and difference; the least stale first (`tp-plan solve --front`).

    Args:
        cluster, options: as of `plan`; the first plan is the one that it gives.

    Raises as `plan`.
    """
    profile = _loaded(profile, Profile, "profile")
    cluster = None if cluster is None else _loaded(cluster, Cluster, "cluster")
    first = options.pop("max_difference", None)

    def within(most: int | None) -> Plan:
        return plan(profile, cluster, max_difference=most, **options)

    return staleness_front(within, first)


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
    profile = _loaded(profile, Profile, "profile")
    if cluster is None:
        of_cluster = inspect.signature(uniform_cluster).parameters
        described = {name: options.pop(name) for name in of_cluster if name in options}
        cluster = uniform_cluster(**{"devices": 2, **described})
    cluster = _loaded(cluster, Cluster, "cluster")
    changes = texts(changes, "changes", "bandwidth=2x,memory=24GiB")
    others = clusters_after(cluster, changes, contention_on(cluster, profile.together))
    # Once is enough.
    alone = msgspec.structs.replace(profile, together=None)
    found: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    for text, other in others.items():
        try:
            after = plan(alone, other, **options)
            found[text] = signed(after, question_of(after, profile))
        except (InfeasibleError, PlanError) as error:
            failed[text] = str(error)
    if failed and not found:
        raise InfeasibleError("; ".join(f"{text}: {why}" for text, why in failed.items()))
    return found


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
        _loaded(plan, Plan, "plan"),
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
    from .runtime.settings import settings_of
    from .runtime.verify.check import check as compare

    check_not_importing("timeprest.check")
    if settings.get("epochs") is not None:
        raise UserError("epochs: a check trains steps mini-batches")
    plan = _loaded(plan, Plan, "plan")
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
    from .profiles.measuring.process_settings import settings_put_back
    from .runtime.settings import settings_of
    from .runtime.verify.dry_run import dry_run as look

    check_not_importing("timeprest.dry_run")
    plan = _loaded(plan, Plan, "plan")
    asked = {**settings, "task": None if task is None else name_of(task)}
    with settings_put_back():
        found = look(plan, settings_of(plan, asked), str(run_dir))
    assert found is not None
    return found


def export(plan: Plan | str | Path, engine: EngineName, folder: str | Path) -> list[Path]:
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

    written, _ = write_export(_loaded(plan, Plan, "plan"), engine, folder)
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
