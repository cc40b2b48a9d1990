"""What plans are compared by: figures of the whole, of each stage, and layers that moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...planner.plan import Plan
from ...profiles.units import format_rate, format_seconds, short_bytes
from ..tables.names import device_range, first_to_last
from ..tables.plan import gap
from ..tables.stages import memory_limit


@dataclass(frozen=True)
class Figure:
    """A row of a comparison.

    Attributes:
        value: what is compared; None: the plan has none.
        text: how it is shown.
        better: -1 where the least is best, 1 where the most is; 0: neither.
        key: its name in JSON.
    """

    name: str
    key: str
    value: Callable[[Plan], Any]
    text: Callable[[Any], str] = str
    better: int = 0


def _most(field: str) -> Callable[[Plan], int]:
    return lambda plan: max(int(getattr(stage, field)) for stage in plan.predicted.stages)


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _recomputed(plan: Plan) -> tuple[int, ...]:
    return tuple(s for s, stage in enumerate(plan.stages) if stage.recompute)


def _limit(plan: Plan) -> float | None:
    """The largest share of its limit that a stage needs."""
    shares = [
        stage.memory_bytes / limit
        for s, stage in enumerate(plan.predicted.stages)
        if (limit := memory_limit(plan, s))
    ]
    return max(shares, default=None)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 100 else f"{share * 100:.3g}%"


FIGURES: tuple[Figure, ...] = (
    Figure("system", "variant", lambda p: p.variant),
    Figure("mini-batch", "mini_batch", lambda p: p.mini_batch),
    Figure("micro-batches", "micro_batches", lambda p: p.micro_batches),
    Figure("update every", "update_every", lambda p: p.update_every),
    Figure("stages", "stages", lambda p: len(p.stages)),
    Figure("devices", "devices", lambda p: sum(len(stage.devices) for stage in p.stages)),
    Figure("recomputed", "recomputed_stages", lambda p: len(_recomputed(p))),
    Figure("period", "period_s", lambda p: p.predicted.period_s, format_seconds, -1),
    Figure(
        "samples/s",
        "samples_per_s",
        lambda p: p.predicted.samples_per_s,
        lambda v: format_rate(v, "").partition(" ")[0] if v else "-",
        1,
    ),
    Figure("speed-up", "speedup", lambda p: p.predicted.speedup, lambda v: f"{v:.2f} ×", 1),
    Figure("most memory", "memory_bytes", _most("memory_bytes"), short_bytes, -1),
    Figure("of its limit", "memory_share", _limit, _percent, -1),
    Figure("most versions", "versions_held", _most("versions_held"), str, -1),
    Figure("most d", "version_difference", _most("version_difference"), str, -1),
    Figure("v", "sequence_distance", lambda p: p.predicted.sequence_distance, str, -1),
    Figure(
        "mean idle",
        "idle_share",
        lambda p: sum(s.idle_share for s in p.predicted.stages) / len(p.predicted.stages),
        _percent,
        -1,
    ),
    Figure("solver", "method", lambda p: p.solver.method),
    Figure(
        "bound", "bound_s", lambda p: p.solver.bound_s, lambda v: format_seconds(v) if v else "-"
    ),
    Figure("gap", "gap", lambda p: gap(p)),
    Figure("proven", "optimal", lambda p: p.solver.optimal, _yes),
)
"""Of a plan as a whole."""


def shown(figure: Figure, plan: Plan) -> str:
    """The figure as text; ``-`` where the plan has none."""
    value = figure.value(plan)
    return "-" if value is None else figure.text(value)


def best(figure: Figure, plans: Sequence[Plan]) -> set[int]:
    """Positions of the plans that are best in it; none where all are, or nothing is."""
    values = [figure.value(plan) for plan in plans]
    known = [value for value in values if value is not None]
    if not figure.better or len(known) < 2:
        return set()
    top = (max if figure.better > 0 else min)(known)
    # What reads the same is the same.
    found = {
        k for k, v in enumerate(values) if v is not None and figure.text(v) == figure.text(top)
    }
    return found if len(found) < len(values) else set()


STAGE_FIGURES: tuple[tuple[str, Callable[[Plan, int, int], str]], ...] = (
    ("layers", lambda p, s, width: first_to_last(p.stages[s].nodes, width)),
    (
        "devices",
        lambda p, s, _: device_range([p.cluster.devices[d].name for d in p.stages[s].devices]),
    ),
    ("forward", lambda p, s, _: format_seconds(p.predicted.stages[s].forward_s)),
    ("backward", lambda p, s, _: format_seconds(p.predicted.stages[s].backward_s)),
    ("transfer", lambda p, s, _: format_seconds(p.predicted.stages[s].transfer_s)),
    ("memory", lambda p, s, _: short_bytes(p.predicted.stages[s].memory_bytes)),
    ("idle", lambda p, s, _: f"{p.predicted.stages[s].idle_share:.0%}"),
    ("L", lambda p, s, _: str(p.stages[s].in_flight)),
    ("versions", lambda p, s, _: str(p.predicted.stages[s].versions_held)),
    ("d", lambda p, s, _: str(p.predicted.stages[s].version_difference)),
    ("recomputed", lambda p, s, _: _yes(p.stages[s].recompute)),
)
"""Name, and text of a plan's stage in so many columns."""


@dataclass(frozen=True)
class Move:
    """Layers that are on another stage in another plan.

    Attributes:
        source, target: stages in the one and in the other.
    """

    layers: tuple[str, ...]
    source: int
    target: int


def moves(plan: Plan, other: Plan) -> list[Move]:
    """Layers of both plans that are on another stage in the second, by their stages."""
    there = {name: t for t, stage in enumerate(other.stages) for name in stage.nodes}
    found: dict[tuple[int, int], list[str]] = {}
    for s, stage in enumerate(plan.stages):
        for name in stage.nodes:
            t = there.get(name, s)
            if t != s:
                found.setdefault((s, t), []).append(name)
    return [Move(tuple(names), s, t) for (s, t), names in found.items()]


def warnings(plans: Mapping[str, Plan]) -> list[str]:
    """Why figures mayn't say much beside each other."""
    names = list(plans)
    first = plans[names[0]]
    lines = []
    for name in names[1:]:
        plan = plans[name]
        one, two = first.profile, plan.profile
        if one.fingerprint != two.fingerprint:
            lines.append(
                f"{names[0]} and {name} are for different models: {one.target}, {two.target}"
            )
        elif (one.device, one.threads, one.dtype) != (two.device, two.threads, two.dtype):
            lines.append(f"{names[0]} and {name} were profiled on different devices or settings")
        if first.cluster != plan.cluster:
            lines.append(f"{names[0]} and {name} are for different clusters")
        if first.mini_batch != plan.mini_batch:
            lines.append(
                f"{names[0]} and {name} have mini-batches of {first.mini_batch} and "
                f"{plan.mini_batch}: compare their samples/s, not their periods"
            )
    return lines
