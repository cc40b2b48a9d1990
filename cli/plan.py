"""tp-plan: solve, show and check plans."""

from __future__ import annotations

import click
import msgspec

from ..planner.cluster import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    MAX_DEVICES,
    Cluster,
    read_cluster,
    uniform_cluster,
)
from ..planner.plan import Plan, read_plan
from ..planner.recheck import recheck
from ..planner.search import solve as solve_plan
from ..planner.variants import VARIANTS, variant_named
from ..profiles.errors import UserError
from ..profiles.files import read_file, write_file
from ..profiles.profile import IMPORTED, Profile, check_profile
from .common import Bar, common_options, errors_as_lines, output
from .plan_tables import legend, operations, stage_table, verdict


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Decide how to cut a profiled model into pipeline stages."""


def _count(text: str, option: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not text.isascii() or not int(text[:9]) >= 1 or len(text) > 9:
        raise UserError(f"{option} {text!r}: give auto or a whole number from 1")
    return int(text)


@main.command()
@click.argument("profile_path", metavar="PROFILE")
@click.option("-o", "--output", "path", default="plan.json", show_default=True)
@click.option("--cluster", "cluster_path", metavar="TOML", help="Devices and network from a file.")
@click.option(
    "--devices", type=click.IntRange(1, MAX_DEVICES), help="Number of equal devices.  [default: 2]"
)
@click.option("--memory", help="Limit of each device, like 16GiB.  [default: none]")
@click.option("--bandwidth", help=f"Between devices.  [default: {DEFAULT_BANDWIDTH}]")
@click.option("--latency", help=f"Of a message.  [default: {DEFAULT_LATENCY}]")
@click.option(
    "--variant",
    default="timeprest",
    show_default=True,
    help=f"Training system: {', '.join(VARIANTS)}.",
)
@click.option(
    "--mini-batch",
    type=click.IntRange(1),
    help="Samples per update.  [default: the profile's batch size]",
)
@click.option("--micro-batches", default="auto", show_default=True)
@click.option("--stages", default="auto", show_default=True)
@click.option(
    "--optimizer-state",
    type=click.FloatRange(0),
    metavar="FACTOR",
    help="Bytes of optimizer state per byte of parameters: 0 plain SGD, 1 momentum, "
    "2 Adam.  [default: as profiled]",
)
@common_options
@errors_as_lines
def solve(
    profile_path: str,
    path: str,
    cluster_path: str | None,
    devices: int | None,
    memory: str | None,
    bandwidth: str | None,
    latency: str | None,
    variant: str,
    mini_batch: int | None,
    micro_batches: str,
    stages: str,
    optimizer_state: float | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Find the best plan for PROFILE and write a plan file."""
    variant_named(variant)
    profile = check_profile(read_file(profile_path, Profile), profile_path)
    cluster = _cluster(cluster_path, devices, memory, bandwidth, latency)
    with Bar("planning", quiet=quiet) as bar:
        plan = solve_plan(
            profile,
            cluster,
            variant,
            mini_batch=mini_batch,
            micro_batches=_count(micro_batches, "--micro-batches"),
            stages=_count(stages, "--stages"),
            optimizer_state_factor=optimizer_state,
            progress=bar,
        )
    write_file(path, plan)
    if as_json:
        click.echo(msgspec.json.encode(plan))
    elif not quiet:
        _print(plan, 16 if verbose else 0)
        imported = plan.profile.front_end in IMPORTED
        then = "it can't be run: its profile was imported" if imported else f"next: tp-run {path}"
        output().print(f"wrote {path}; {then}")


def _cluster(
    path: str | None,
    devices: int | None,
    memory: str | None,
    bandwidth: str | None,
    latency: str | None,
) -> Cluster:
    if path is None:
        return uniform_cluster(
            devices or 2, memory, bandwidth or DEFAULT_BANDWIDTH, latency or DEFAULT_LATENCY
        )
    if (devices, memory, bandwidth, latency) != (None,) * 4:
        raise UserError(
            "--cluster: leave out --devices, --memory, --bandwidth and --latency; the file says it"
        )
    return read_cluster(path)


@main.command()
@click.argument("plan_path", metavar="PLAN")
@click.option(
    "--operations",
    "count",
    type=click.IntRange(0, 10_000),
    default=16,
    show_default=True,
    help="How many operations of each stage's order to print.",
)
@common_options
@errors_as_lines
def show(plan_path: str, count: int, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Show PLAN: its stages, what they should cost, and the order's first operations."""
    plan = read_plan(plan_path)
    if as_json:
        click.echo(msgspec.json.encode(plan))
    elif not quiet:
        _print(plan, count)


def _print(plan: Plan, count: int) -> None:
    console = output()
    console.print(stage_table(plan))
    console.print(legend())
    console.print(verdict(plan))
    if count:
        console.print(operations(plan, count), soft_wrap=False)


@main.command()
@click.argument("plan_path", metavar="PLAN")
@click.option("--profile", "profile_path", required=True, metavar="PROFILE")
@click.option("-o", "--output", "path", help="Write the plan with its predictions made anew.")
@common_options
@errors_as_lines
def check(
    plan_path: str,
    profile_path: str,
    path: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Recompute an edited PLAN's edges, period and memory from PROFILE; say what changed.

    Ends with code 2 when the plan breaks a rule or a memory limit.
    """
    plan = read_plan(plan_path)
    profile = check_profile(read_file(profile_path, Profile), profile_path)
    found = recheck(plan, profile, plan_path)
    if path:
        write_file(path, found.plan)
    if as_json:
        click.echo(msgspec.json.encode(found.plan))
    elif not quiet:
        _print(found.plan, 0)
        console = output()
        for line in found.changes:
            console.print(f"changed: {line}")
        if not found.changes:
            console.print("the plan is what its profile says")
        if path:
            console.print(f"wrote {path}")
    if found.over:
        raise UserError(f"{plan_path}: {found.over}")


if __name__ == "__main__":
    main()
