"""tp-plan solve: the best plan of one system, or of every system side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ...planner.cluster.changes import clusters_after
from ...planner.cluster.cluster import Cluster
from ...planner.cluster.contention import contention_on, with_contention
from ...planner.cluster.headroom import parse_headroom
from ...planner.evaluate import Evaluation, gap_between, make_plan
from ...planner.partition.solve import SOLVERS
from ...planner.plan import Plan
from ...planner.schedules.given import read_order
from ...planner.schedules.schedules import RUN_AHEAD
from ...planner.search.answer.recheck import question_of, signed
from ...planner.search.choices import PLACEMENTS, RECOMPUTE
from ...planner.search.defaults import TIED_ASKED, best_plan
from ...planner.search.device_sequences import SEQUENCES
from ...planner.search.solve import INTERRUPTED, MUON
from ...planner.study.choose import StudyFigures, TargetPoint, by_time_to_target
from ...planner.study.front import staleness_front
from ...planner.study.pareto import ParetoFront, pareto_point
from ...planner.study.study import read_study
from ...planner.systems.variants import VARIANTS, variant_named
from ...profiles.errors import InfeasibleError, PlanError, UserError
from ...profiles.files import MAX_FACTOR, Kind, check_output, read_file, write_file
from ...profiles.profile import Profile, check_profile, made_of
from ...profiles.units import parse_share
from ..errors import errors_as_lines, output, print_json
from ..options import (
    choice,
    cluster_of,
    cluster_options,
    common_options,
    config_options,
    plugin_option,
    time_limit_option,
)
from ..options.command import GroupedCommand, examples, group
from ..options.values import FileName, SystemName, Whole
from ..progress import Bar
from ..tables.front import front_table
from ..tables.pareto import (
    comparison,
    pareto_table,
    target_lines,
    target_table,
    without_figure,
)
from ..tables.plan import assumed, few_stages, print_plan
from ..tables.what_if import what_if_table

WHAT_IF, FRONT = "--what-if", "--front"


def _count_or_auto(text: str, option: str) -> int | None:
    """``auto`` → None. Raises UserError for what is no count."""
    if text == "auto":
        return None
    if not text.isdecimal() or not text.isascii() or not int(text[:9]) >= 1 or len(text) > 9:
        raise UserError(f"{option} {text!r}: give auto or a whole number from 1")
    return int(text)


def _state(text: str | None) -> dict[str, float]:
    """Bytes of optimizer state. Raises UserError for what says none."""
    if text is None:
        return {}
    if text == "muon":
        return MUON
    try:
        factor = float(text)
        if not 0 <= factor <= MAX_FACTOR:
            raise ValueError
    except ValueError:
        raise UserError(
            f"--optimizer-state {text!r}: give muon or a number from 0, as 2 for Adam"
        ) from None
    return {"optimizer_state_factor": factor}


def _pin(text: str) -> tuple[str, int]:
    name, separator, stage = text.rpartition("=")
    if not separator or not name or not stage.isdecimal() or len(stage) > 9:
        raise UserError(f"--pin {text!r}: give NAME=STAGE, as in --pin layer3=1; 0 is the first")
    return name, int(stage)


def _pins(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Each once. Raises UserError for what is no pin, or for a layer on two stages."""
    found: dict[str, int] = {}
    for name, stage in map(_pin, texts):
        if found.setdefault(name, stage) != stage:
            raise UserError(
                f"--pin {name}={found[name]}, --pin {name}={stage}: a layer is on one stage; leave "
                "one out"
            )
    return tuple(found.items())


@click.command(
    cls=GroupedCommand,
    epilog=examples(
        "tp-plan solve profile.json --devices 4 --memory 16GiB -o plan.json",
        "tp-plan solve profile.json --variant all --cluster cluster.toml",
        "tp-plan solve profile.json --order order.txt --variant timeprest --devices 2",
    ),
)
@click.argument("profile_path", type=FileName(), metavar="PROFILE")
@click.option(
    "-o", "--output", "path", type=FileName(), default="plan.json", help="The plan to write."
)
@group(
    "Training system and mini-batch",
    click.option(
        "--variant",
        type=SystemName(),
        default="timeprest",
        help=f"Training system: {', '.join(VARIANTS)}; or all.",
    ),
    click.option(
        "--order",
        "order_path",
        type=FileName(),
        metavar="FILE",
        help="What each device runs, in the system's weight rules and instead of its own order.",
    ),
    click.option(
        "--mini-batch",
        type=Whole(),
        help="Samples per update.  [default: the profile's batch size]",
    ),
    click.option(
        "--micro-batches", default="auto", metavar="N", help="In a mini-batch; auto: the best."
    ),
    click.option(
        "--update-every",
        type=Whole(),
        default=1,
        metavar="K",
        help="Update the weights after every K mini-batches: smaller version differences.",
    ),
    click.option(
        "--optimizer-state",
        "optimizer_state",
        metavar="FACTOR",
        help="Bytes of optimizer state per byte of parameters: 0 plain SGD, 1 momentum, "
        "2 Adam; muon: 1 of matrices of hidden layers, 2 of others.  [default: as profiled]",
    ),
)
@cluster_options
@group(
    "Memory",
    click.option(
        "--headroom",
        metavar="SHARE|BYTES",
        help="Of each device's memory, kept free: 8% or 4GiB.  [default: 8% of GPUs that weren't "
        "measured, else 0]",
    ),
)
@group(
    "Stages",
    click.option("--stages", default="auto", metavar="N", help="How many; auto: the best."),
    choice("--replicas", ("auto", "off"), "auto", "Stages may take several devices, or not."),
    click.option(
        "--stages-per-device",
        type=str,
        metavar="V",
        help="1, 2, …: so many on each; auto: more than 1 where that gains 5 % or more.  "
        "[default: auto where that takes a second at most, else 1]",
    ),
    choice("--placement", PLACEMENTS, "auto", "Which device runs which stage."),
    choice(
        "--sequence",
        SEQUENCES,
        "best",
        "Devices of several kinds, or in machines of several sizes: in the best sequence, or as "
        "the cluster lists them.",
    ),
    choice(
        "--recompute",
        RECOMPUTE,
        None,
        "Stages compute activations again instead of keeping them.  [default: off; auto where "
        "nothing fits so]",
    ),
    choice(
        "--tied",
        TIED_ASKED,
        "auto",
        "Layers that share parameters: on one device, on several with copies, or what is faster.",
    ),
    click.option(
        "--pin", "pins", multiple=True, metavar="NAME=STAGE", help="Layer NAME is on stage STAGE."
    ),
)
@group(
    "Staleness",
    choice(
        "--run-ahead",
        RUN_AHEAD,
        "paper",
        "Without a flush: S - s mini-batches in flight on stage s, or as many as pay.",
    ),
    click.option(
        "--max-in-flight",
        type=Whole(),
        metavar="L",
        help="Mini-batches in flight on a stage at most.",
    ),
    click.option(
        "--max-difference",
        type=Whole(0),
        metavar="D",
        help="Updates between a mini-batch's forward and the weights of its backward at most.",
    ),
)
@group(
    "Search",
    choice("--solver", SOLVERS, "auto", "Dynamic programming, an integer program, or whichever."),
    click.option(
        "--tolerance",
        default="1%",
        metavar="SHARE",
        help="Of the shortest period: what may be given away for a smaller version difference, "
        "then for memory, then for even stages.",
    ),
    time_limit_option("Take the best plan found by then."),
    click.option(
        "--front",
        "front",
        is_flag=True,
        help="Also plans with smaller version differences, down to none, as far as they cost "
        "something; in files numbered from the least stale on.",
    ),
    click.option(
        "--study",
        "study_path",
        type=FileName(),
        help="With --variant all: judge plans by a study's time to target; -o gets the best.",
    ),
    click.option(
        "--what-if",
        "what_if",
        multiple=True,
        metavar="CHANGE",
        help="Say what other devices or links would bring: bandwidth=2x,memory=24GiB.",
    ),
)
@config_options
@plugin_option
@common_options
@errors_as_lines
def solve(
    profile_path: str,
    path: str,
    variant: str,
    order_path: str | None,
    study_path: str | None,
    front: bool,
    what_if: Sequence[str],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **asked: Any,
) -> None:
    """Find the best plan for PROFILE and write a plan file.

    Ctrl-C or the time limit ends the search with the best plan found so far; the plan says how
    far from the best it can be at most. With --variant all, every system gets a plan file.
    """
    if variant != "all":
        variant_named(variant)
        if study_path is not None:
            raise UserError("--study: goes with --variant all, whose systems it compares")
    elif what_if or front:
        option = WHAT_IF if what_if else FRONT
        raise UserError(f"{option}: goes with one system; name it by --variant")
    if what_if and front:
        raise UserError(f"{FRONT}: is of the cluster as it is; leave out {WHAT_IF}")
    names = ["1"] if front else VARIANTS if variant == "all" else []
    files: Sequence[str | Path] = [_beside(path, name) for name in names] or [path]
    for file in [*files, *[path] * (study_path is not None)]:
        check_output(file, Kind.PLAN)
    profile = check_profile(read_file(profile_path, Profile), profile_path)
    figures = None if study_path is None else StudyFigures(read_study(study_path))
    if figures is not None:
        mini_batch = asked["mini_batch"] or profile.batch_size
        figures.check(profile.fingerprint, mini_batch, str(study_path))
    described = cluster_of(asked)
    together = contention_on(described, profile.together)
    cluster = with_contention(described, together)
    others = clusters_after(described, what_if, together, WHAT_IF)
    if asked["stages_per_device"] is None:
        del asked["stages_per_device"]
    for name in {"micro_batches", "stages", "stages_per_device"} & asked.keys():
        asked[name] = _count_or_auto(asked[name], f"--{name.replace('_', '-')}")
    asked |= _state(asked.pop("optimizer_state"))
    asked["replicas"] = asked["replicas"] == "auto"
    asked["pins"] = _pins(asked["pins"])
    asked["tolerance"] = parse_share(asked["tolerance"], "--tolerance")
    headroom = asked["headroom"]
    asked["headroom"] = None if headroom is None else parse_headroom(headroom)
    asked["order"] = None if order_path is None else read_order(order_path)
    if front:
        _solve_front(profile, cluster, variant, asked, path, as_json=as_json, quiet=quiet)
        return
    if variant == "all":
        _solve_all(profile, cluster, asked, path, figures, as_json=as_json, quiet=quiet)
        return
    with Bar("planning", quiet=quiet) as bar:
        plan = best_plan(profile, cluster, variant, progress=bar, **asked)
        plans: dict[str, Plan] = {}
        failed: dict[str, str] = {}
        for text, other in others.items():
            if INTERRUPTED in (each.solver.stopped for each in (plan, *plans.values())):
                failed[text] = "not looked at: interrupted"
                continue
            try:
                plans[text] = best_plan(profile, other, variant, progress=bar, **asked)
            except (InfeasibleError, PlanError) as error:
                failed[text] = str(error)
    write_file(path, plan)
    if as_json:
        print_json({"plan": plan, "what_if": plans, "failed": failed} if what_if else plan)
    elif not quiet:
        print_plan(plan, 16 if verbose else 0, every=verbose)
        if what_if:
            output().print(what_if_table(plan, plans, failed, output().width))
        _print_notes(profile, [plan], asked)
        output().print(f"wrote {path}; {_next(plan, path)}")


def _solve_front(
    profile: Profile,
    cluster: Cluster,
    variant: str,
    asked: dict[str, Any],
    path: str,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Plans of one system with ever smaller version differences, the least stale first."""
    with Bar("planning", quiet=quiet) as bar:

        def within(most: int | None) -> Plan:
            return best_plan(
                profile, cluster, variant, progress=bar, **{**asked, "max_difference": most}
            )

        plans = staleness_front(within, asked["max_difference"])
    paths = [str(_beside(path, str(k))) for k in range(1, len(plans) + 1)]
    for each, plan in zip(paths, plans, strict=True):
        write_file(each, plan)
    if as_json:
        print_json({"front": plans})
    elif not quiet:
        output().print(front_table(plans, paths, output().width))
        if len(plans) == 1 and not plans[0].predicted.version_difference:
            output().print("no plan of it is faster with a version difference")
        _print_notes(profile, plans, asked)
        output().print(f"wrote {', '.join(paths)}; {_next(plans[-1], paths[-1])}")


def _print_notes(profile: Profile, plans: Sequence[Plan], asked: dict[str, Any]) -> None:
    """Print what the plans assume, and where ties limit their stages; each note once."""
    notes = [assumed(profile, plan.variant) for plan in plans]
    if asked["stages"] is None:
        notes += [few_stages(profile, plan) for plan in plans]
    for note in dict.fromkeys(filter(None, notes)):
        output().print(note)


def _next(plan: Plan, path: str) -> str:
    if made_of(plan.profile):
        return "it can't be run: its profile was imported"
    return f"next: tp-run {path}"


def _solve_all(
    profile: Profile,
    cluster: Cluster,
    asked: dict[str, Any],
    path: str,
    figures: StudyFigures | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """A plan for every system that fits, side by side, and the Pareto front of all plans seen."""
    pareto = ParetoFront()
    by_system: dict[str, ParetoFront] = {}
    plans: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    with Bar("planning", quiet=quiet) as bar:
        for name in VARIANTS:
            # By a study a plan may be best that another system's beats in all three prices.
            own = by_system.setdefault(name, ParetoFront()) if figures else pareto
            try:
                plans[name] = _solve_one(profile, cluster, name, asked, bar, (pareto, own))
            except (InfeasibleError, PlanError) as error:
                failed[name] = str(error)
                continue
            if plans[name].solver.stopped == INTERRUPTED:
                # Ctrl-C is meant for all of them.
                left = [other for other in VARIANTS if other not in (*plans, *failed)]
                failed |= dict.fromkeys(left, "not looked at: interrupted")
                break
    if not plans:
        raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    paths = {name: _beside(path, name) for name in plans}
    for name, plan in plans.items():
        write_file(paths[name], plan)
    times: list[TargetPoint] = []
    if figures is not None:
        points = [point for front in by_system.values() for point in front.points]
        times = by_time_to_target(points, figures, asked["update_every"])
        if times:
            write_file(path, chosen_by_study(profile, plans[times[0].point.variant], times[0]))
    if as_json:
        told = {"plans": plans, "failed": failed}
        print_json(told if figures is None else {**told, "by_study": _told(times, plans, figures)})
    elif not quiet:
        console = output()
        console.print(comparison(plans, failed, pareto.points, console.width))
        if figures is None:
            console.print(pareto_table(pareto.points, console.width))
        else:
            console.print(target_table(times, console.width))
            for line in target_lines(times, plans, figures):
                console.print(line)
        _print_notes(profile, list(plans.values()), asked)
        written = [str(each) for each in paths.values()]
        if times:
            written.insert(0, f"{path} (the best by time to target)")
        console.print(f"wrote {', '.join(written)}")


def chosen_by_study(profile: Profile, own: Plan, best: TargetPoint) -> Plan:
    """The plan file of the best by a study. `own`: the best of its system, by period."""
    found = best.point.evaluation
    if found.stages == own.stages and found.micro_batches == own.micro_batches:
        return own
    question = question_of(own, profile)
    report = msgspec.structs.replace(
        own.solver,
        fastest=msgspec.UNSET,
        objective_s=found.prediction.period_s,
        gap=gap_between(found.prediction.period_s, own.solver.bound_s),
        optimal=False,
    )
    return signed(make_plan(question, found, report), question)


def _told(
    times: Sequence[TargetPoint], plans: Mapping[str, Plan], figures: StudyFigures
) -> dict[str, Any]:
    """What --json says of a study's times."""
    return {
        "target": figures.target,
        "points": [
            {
                "variant": each.point.variant,
                "stages": len(each.point.evaluation.stages),
                "micro_batches": each.point.evaluation.micro_batches,
                "time_s": each.foretold.time_s,
                "overhead": each.foretold.overhead,
                "exact": each.foretold.exact,
                "period_s": each.point.period_s,
                "memory_bytes": each.point.memory_bytes,
                "on_front": each.on_front,
            }
            for each in times
        ],
        "without_figure": without_figure(times, plans),
    }


def _solve_one(
    profile: Profile,
    cluster: Cluster,
    name: str,
    asked: dict[str, Any],
    bar: Bar,
    fronts: Sequence[ParetoFront],
) -> Plan:
    def tell(what: str, done: float, total: float) -> None:
        bar(f"{name}: {what}", done, total)

    def keep(found: Evaluation) -> None:
        point = pareto_point(name, found)
        for front in dict.fromkeys(fronts):
            front.add(point)

    return best_plan(profile, cluster, name, progress=tell, seen=keep, **asked)


def _beside(path: str, name: str) -> Path:
    """``plan.json`` → ``plan.gpipe.json``."""
    given = Path(path)
    return given.with_name(f"{given.stem}.{name}{given.suffix}")
