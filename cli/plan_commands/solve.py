"""tp-plan solve: the best plan of one system, or of every system side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...planner.cluster.cluster import DEVICES
from ...planner.comparison.plans import (
    changed_clusters,
    fresher_plans,
    fresher_plans_of_systems,
    plans_of_systems,
    plans_on,
)
from ...planner.plan import Plan
from ...planner.search.request import (
    MEMORY,
    SEARCH,
    STAGES,
    STALENESS,
    SYSTEM,
    Planning,
    PlanRequest,
)
from ...profiles.errors import UserError
from ...profiles.files import Kind, check_output, write_file
from ...profiles.options import flags_of
from ...profiles.profile import Profile, made_of
from ..errors import errors_as_lines, output, print_json
from ..options import common_options, config_options, options_of, plugin_option
from ..options.command import command, group
from ..options.values import FileName
from ..progress import Bar
from ..tables.plan import assumed, few_stages, idle_devices, print_plan
from ..tables.plans import (
    comparison,
    front_table,
    pareto_table,
    periods_alone,
    what_if_table,
    why_none,
)

WHAT_IF, FRONT = "--what-if", "--front"


@command(
    "tp-plan solve profile.json --devices 4 --memory 16GiB -o plan.json",
    "tp-plan solve profile.json --variant all --cluster cluster.toml",
    "tp-plan solve profile.json --order order.txt --variant timeprest --devices 2",
)
@click.argument("profile_path", type=FileName(), metavar="PROFILE")
@click.option(
    "-o", "--output", "path", type=FileName(), default="plan.json", help="The plan to write."
)
@options_of(PlanRequest, SYSTEM, DEVICES, MEMORY, STAGES, STALENESS, SEARCH)
@group(
    SEARCH,
    click.option(
        "--front",
        "front",
        is_flag=True,
        help="Also plans with smaller delays, down to none, as far as they cost something; in "
        "files numbered from the least late on.",
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
    front: bool,
    what_if: Sequence[str],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **asked: Any,
) -> None:
    """Find the best plan for PROFILE and write a plan file.

    Ctrl-C or the time limit ends the search with the best plan found so far; the plan says how
    far from the best it can be at most. With several systems, each gets a plan file. By a study,
    the plan is the one with the least time to its target.
    """
    planning = PlanRequest(Profile.load(profile_path), **asked).read(flags_of(PlanRequest))
    several, study = len(planning.systems) > 1, planning.study
    option = WHAT_IF if what_if else FRONT
    if what_if and several:
        raise UserError(f"{WHAT_IF}: goes with one system; name it by --variant")
    if (what_if or front) and study is not None:
        raise UserError(f"{option}: compares periods; leave out --study")
    if what_if and front:
        raise UserError(f"{FRONT}: is of the cluster as it is; leave out {WHAT_IF}")
    names = list(planning.systems) if several else []
    if front:
        names = [f"{name}.1" for name in names] or ["1"]
    files: Sequence[str | Path] = [_beside(path, name) for name in names] or [path]
    for file in [*files, *[path] * (study is not None)]:
        check_output(file, Kind.PLAN)
    others = changed_clusters(planning, what_if, WHAT_IF)
    if front:
        _solve_front(planning, path, as_json=as_json, quiet=quiet)
        return
    if several:
        _solve_all(planning, path, as_json=as_json, quiet=quiet)
        return
    with Bar("planning", quiet=quiet) as bar:
        judged = None if study is None else plans_of_systems(planning, bar).judged
        plan = planning.best(bar) if judged is None else judged.chosen
        plans, failed = plans_on(planning, others, bar, plan)
    write_file(path, plan)
    if as_json:
        print_json({"plan": plan, "what_if": plans, "failed": failed} if what_if else plan)
    elif not quiet:
        print_plan(plan, 16 if verbose else 0, every=verbose)
        for note in () if judged is None else judged.notes():
            output().print(note)
        if what_if:
            output().print(what_if_table(plan, plans, failed, output().width))
        _print_notes(planning, [plan])
        output().print(f"wrote {path}; {_next(plan, path)}")


def _solve_front(planning: Planning, path: str, *, as_json: bool, quiet: bool) -> None:
    """Each system's plans with ever smaller delays, the least late first."""
    failed: Mapping[str, str] = {}
    with Bar("planning", quiet=quiet) as bar:
        if len(planning.systems) > 1:
            fronts, failed = fresher_plans_of_systems(planning, bar)
        else:
            fronts = {"": fresher_plans(planning, bar)}
    plans = [plan for front in fronts.values() for plan in front]
    names = [f"{name}.{k + 1}".lstrip(".") for name in fronts for k in range(len(fronts[name]))]
    paths = [str(_beside(path, name)) for name in names]
    for each, plan in zip(paths, plans, strict=True):
        write_file(each, plan)
    if as_json:
        print_json({"front": plans, "failed": failed} if failed else {"front": plans})
    elif not quiet:
        output().print(front_table(plans, paths, output().width))
        for line in why_none(failed):
            output().print(line)
        if len(plans) == 1 and not plans[0].predicted.delay:
            output().print("no plan of it is faster with a delay")
        _print_notes(planning, plans)
        following = _next(plans[-1], paths[-1])
        if len(fronts) > 1 and not made_of(plans[0].profile):
            following = f"next: tp-run study {_beside(path, '*')} --budget 2h"
        output().print(f"wrote {', '.join(paths)}; {following}")


def _print_notes(planning: Planning, plans: Sequence[Plan]) -> None:
    """Print what the plans assume, and what limits their stages or devices; each note once."""
    notes = [assumed(planning.profile, plan.variant) for plan in plans]
    if planning.asked["stages"] is None:
        notes += [few_stages(planning.profile, plan) for plan in plans]
    else:
        notes += map(idle_devices, plans)
    for note in dict.fromkeys(filter(None, notes)):
        output().print(note)


def _next(plan: Plan, path: str) -> str:
    if made_of(plan.profile):
        return "it can't be run: its profile was imported"
    return f"next: tp-run {shlex.quote(path)}"


def _solve_all(planning: Planning, path: str, *, as_json: bool, quiet: bool) -> None:
    """Each system's plan and the Pareto front of all, or those of the least time to a target."""
    with Bar("planning", quiet=quiet) as bar:
        found = plans_of_systems(planning, bar)
    plans, failed, judged = found.plans, found.failed, found.judged
    paths = {name: _beside(path, name) for name in plans}
    for name, plan in plans.items():
        write_file(paths[name], plan)
    if judged is not None:
        write_file(path, judged.chosen)
    if as_json:
        told = {"plans": plans, "failed": failed}
        print_json(told if judged is None else {**told, "by_study": judged.as_json()})
    elif not quiet:
        console = output()
        width, written = console.width, [str(each) for each in paths.values()]
        if judged is None:
            console.print(comparison(plans, failed, found.points, width))
            console.print(pareto_table(found.points, width))
            console.print(periods_alone(plans))
        else:
            for table in (*judged.tables(width), *why_none(failed)):
                console.print(table)
            written.insert(0, f"{path} (the best by {judged.by})")
        _print_notes(planning, list(plans.values()))
        console.print(f"wrote {', '.join(written)}")


def _beside(path: str, name: str) -> Path:
    """``plan.json`` → ``plan.gpipe.json``."""
    given = Path(path)
    return given.with_name(f"{given.stem}.{name}{given.suffix}")
