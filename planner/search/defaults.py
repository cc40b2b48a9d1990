"""What wasn't said: recomputation, tied parameters, stages on each device. Each is what the best
answer has, and the plan says in a line what was chosen and how to have it otherwise."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal

import msgspec

from ...profiles.errors import PlanError
from ...profiles.profile import Profile
from ...profiles.units import format_seconds
from ..cluster.cluster import Cluster
from ..costs.layer_graph import held_together
from ..costs.tied_parameters import TIED
from ..partition.problem import SAME
from ..plan import Plan
from ..systems.orders import Order
from ..systems.variants import variant_named
from .answer.two_searches import as_it_is, beside
from .choices import Freedom, micro_batch_counts
from .default_recompute import Ask, Tried, choosing, tried
from .parts import INTERRUPTED, LEAST_GAIN
from .relaxed.relaxation import Relaxation

TiedAsked = Literal["auto", "together", "split"]

TIED_ASKED: tuple[TiedAsked, ...] = ("auto", *TIED)
"""Layers that share parameters: on one device, on several, or whatever is best."""

_SPLIT_SHARE = 3 / 4
"""Of the time, for plans with copies; such plans may have none, too."""

_TOGETHER_SHARE = 1 / 2
"""Of the time, for plans that keep such layers on one stage, where others have them on two of one
device."""

_SMALL, _EFFORT = 500, 10_000
"""Layers × devices × micro-batch counts up to which several stages on each device are looked at,
and what that may take: less than a second, wherever it ends the same."""


def best_plan(
    profile: Profile,
    cluster: Cluster,
    variant: str = "timeprest",
    *,
    tied: TiedAsked = "auto",
    recompute: str | None = None,
    time_limit_s: float | None = 60.0,
    order: Order | None = None,
    **asked: Any,
) -> Plan:
    """As `solve`, with the best of what wasn't said.

    Args:
        tied: "auto": in systems that flush, layers that share parameters are split where that is
            faster; in others they are on two stages of one device, placed in a V, where that gains
            `LEAST_GAIN`.
        recompute: as `SearchRequest` has it; None: "off", and "auto" where nothing fits so.
        time_limit_s: for all that is tried.
        asked: what else `solve` takes. Without `stages_per_device` that is 1, or 2 where it is soon
            found that these gain `LEAST_GAIN`; bound and gap are of plans with 1 where that is
            kept.

    Raises as `solve`.
    """
    system = variant_named(variant)
    one_each = asked.get("stages_per_device") == 1 and asked.get("stages") != 1
    if one_each and system.placement != "any" and len(cluster.devices) > 1:
        raise PlanError(
            f"--stages-per-device 1: {system.name} runs several stages on each device; leave it out"
        )
    begin = time.monotonic()
    end = None if time_limit_s is None else begin + time_limit_s
    ask = Ask(profile, cluster, system, order, recompute, end, asked)
    plan = _best_of(ask, tied)
    # Of all searches, whichever the plan is from.
    plans, seconds = sum(ask.plans_tried), round(time.monotonic() - begin, 3)
    report = msgspec.structs.replace(plan.solver, plans_tried=plans, seconds=seconds)
    return msgspec.structs.replace(plan, solver=report)


def _best_of(ask: Ask, tied: TiedAsked) -> Plan:
    """With what is best of what the request leaves open."""
    if tied != "auto":
        return _on_each_device(ask, ask.plan(tied))
    tie = held_together(ask.profile, ask.system, "together")
    if len(ask.cluster.devices) == 1 or tie is None:
        return _on_each_device(ask, ask.plan("together"))
    if ask.system.flushes:
        return _split_or_not(ask)
    return _in_a_v_or_not(ask)


def _split_or_not(ask: Ask) -> Plan:
    """Layers that share parameters on several devices, or on one: what is faster."""
    split = tried(ask, "split", _SPLIT_SHARE)
    if isinstance(split, Plan):
        split = as_it_is(split, ask.profile)
        if split.tied == "together" and split.solver.optimal:
            return split
    together = tried(ask, "together", 1.0, before=split)
    if not isinstance(together, Plan):
        # With copies more is possible.
        return _with_copies(_plan(split), "")
    if not isinstance(split, Plan):
        return together
    if together.predicted.period_s <= split.predicted.period_s * SAME:
        return beside(together, split.solver, ask.profile)
    return _with_copies(split, f": {_period(split)}, where --tied together has {_period(together)}")


def _with_copies(plan: Plan, instead: str) -> Plan:
    if plan.tied == "together":
        return plan
    instead = instead or "; --tied together keeps them on one stage"
    return choosing(plan, f"--tied split, copies of shared parameters on several stages{instead}")


def _in_a_v_or_not(ask: Ask) -> Plan:
    """Layers that share parameters on one stage, or on the first and the last one of a device."""
    if not ask.leaves_placement:
        return ask.plan("together")
    plan = tried(ask, "together", _TOGETHER_SHARE)
    placed = tried(ask, "together", 1.0, before=plan, stages_per_device=2, placement="v")
    if not isinstance(placed, Plan):
        return _plan(plan)
    words = "--placement v --stages-per-device 2, so that shared parameters stay on one device"
    if not isinstance(plan, Plan):
        return choosing(placed, words)
    if placed.predicted.period_s > plan.predicted.period_s * (1 - LEAST_GAIN):
        return plan
    placed = beside(placed, plan.solver, ask.profile)
    return choosing(
        placed, f"{words}: {_period(placed)}, where --tied together has {_period(plan)}"
    )


def _on_each_device(ask: Ask, plan: Plan) -> Plan:
    """Two stages on each device in the place of one, where that is soon found to be worth it."""
    if not ask.leaves_placement or plan.solver.stopped == INTERRUPTED:
        return plan
    question, request = ask.question(plan.tied, ask.asked)
    counts = micro_batch_counts(question, request.micro_batches)
    devices, most_s = len(ask.cluster.devices), plan.predicted.period_s * (1 - LEAST_GAIN)
    if len(ask.profile.layers) * devices * len(counts) > _SMALL:
        return plan
    least = Relaxation(question, Freedom()).seconds
    if min(map(least.shared_out_s, counts)) > most_s:
        return plan
    recompute = "auto" if any(stage.recompute for stage in plan.stages) else "off"
    quick = replace(ask, recompute=ask.recompute or recompute)
    placed = tried(quick, plan.tied, 1.0, before=plan, stages_per_device=2, effort=_EFFORT)
    if not isinstance(placed, Plan) or placed.predicted.period_s > most_s:
        return plan
    placed = beside(placed, plan.solver, ask.profile)
    return choosing(
        placed,
        f"--stages-per-device 2: {_period(placed)}, where --stages-per-device 1 has "
        f"{_period(plan)}",
    )


def _plan(found: Tried) -> Plan:
    if isinstance(found, Plan):
        return found
    raise found


def _period(plan: Plan) -> str:
    return format_seconds(plan.predicted.period_s)
