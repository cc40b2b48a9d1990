"""What the page needs of a cell's plans besides its study: bytes by stage, and slower links."""

from __future__ import annotations

from pathlib import Path

import msgspec
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.plan import Plan, read_plan
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.search.solve import solve
from timeprest.profiles.files import read_file, write_bytes
from timeprest.profiles.profile import Profile

from .studies import BANDWIDTH, Cell, planned, profiled, solved

BANDWIDTHS = ("100Mbit/s", "1Gbit/s", BANDWIDTH)
SWEPT = ("timeprest", "pipedream", "pipedream-2bw", "pipedream-flush", "zb-h1")


class SystemPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One system's plan in a cell; bytes and figures are by stage."""

    memory_bytes: tuple[int, ...]
    """At the peak."""
    weight_bytes: tuple[int, ...]
    """All versions together."""
    versions: tuple[int, ...]
    differences: tuple[int, ...]
    distance: int | None
    """v: mini-batches from one to the next of the same sequence of updates."""
    message_bytes: int
    """Of a mini-batch, in both directions."""
    periods_s: dict[str, float]
    """By bandwidth of the links, where it was planned for that."""


class CellPlans(msgspec.Struct, frozen=True, kw_only=True):
    """All of a cell's."""

    systems: dict[str, SystemPlan]
    parallel_periods_s: dict[str, float]
    """Of data parallelism over as many devices, by bandwidth."""
    parallel_bytes: int
    """That it sends in a mini-batch: a ring all-reduce of all gradients, all devices together."""


def record(cell: Cell, work: Path, jobs: int) -> CellPlans:
    """Read a cell's plans, and plan for slower links."""
    profile = read_file(profiled(cell.task, work), Profile)
    plans = {plan.variant: plan for plan in map(read_plan, planned(cell, work, jobs))}
    swept = [(name, bandwidth) for name in SWEPT for bandwidth in BANDWIDTHS[:-1]]
    slower = solved([(cell, *one) for one in swept], work, jobs)
    periods = {name: {BANDWIDTH: plan.predicted.period_s} for name, plan in plans.items()}
    for (name, bandwidth), path in zip(swept, slower, strict=True):
        periods[name][bandwidth] = read_plan(path).predicted.period_s
    parallel = {b: _data_parallel(profile, cell.devices, b) for b in BANDWIDTHS}
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    return CellPlans(
        systems={name: _system(plan, periods[name]) for name, plan in plans.items()},
        parallel_periods_s={b: plan.predicted.period_s for b, plan in parallel.items()},
        parallel_bytes=2 * (cell.devices - 1) * parameters,
    )


def _system(plan: Plan, periods: dict[str, float]) -> SystemPlan:
    stages = plan.predicted.stages
    edges = sum(e.bytes_per_micro_batch * (2 if e.needs_grad else 1) for e in plan.edges)
    return SystemPlan(
        memory_bytes=tuple(stage.memory_bytes for stage in stages),
        weight_bytes=tuple(s.memory.weights_bytes + s.memory.versions_bytes for s in stages),
        versions=tuple(stage.versions_held for stage in stages),
        differences=tuple(stage.version_difference for stage in stages),
        distance=plan.predicted.sequence_distance,
        message_bytes=edges * plan.micro_batches,
        periods_s=periods,
    )


def _data_parallel(profile: Profile, devices: int, bandwidth: str) -> Plan:
    """One stage on all devices, each with a part of every mini-batch."""
    cluster = uniform_cluster(devices, bandwidth=bandwidth)
    plan = solve(profile, cluster, "pipedream", stages=1, micro_batches=1)
    stage = msgspec.structs.replace(plan.stages[0], devices=tuple(range(devices)))
    return recheck(msgspec.structs.replace(plan, stages=(stage,)), profile).plan


def plans_path(cell: Cell, studies: Path) -> Path:
    """Where they are kept."""
    return studies / f"{cell.name}.plans.json"


def write_plans(path: Path, plans: CellPlans) -> None:
    """As indented JSON. Raises FileError."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(plans), indent=1) + b"\n")


def read_plans(path: Path) -> CellPlans:
    """What `write_plans` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=CellPlans)
