"""What wasn't said: recomputation, tied parameters, stages on each device. Each is what the best
answer has, and the plan says in a line what was chosen and how to have it otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from ...profiles.errors import InfeasibleError, PlanError
from ...profiles.profile import Profile
from ...profiles.units import format_seconds
from ..cluster.cluster import Cluster
from ..costs.layer_graph import held_together
from ..costs.tied_parameters import TIED, Tied, misplaced
from ..evaluate import Question, gap_between
from ..partition.problem import SAME
from ..plan import Plan, SolverReport
from ..systems.orders import Order
from ..systems.variants import Variant, variant_named
from .answer.diagnosis import Fitting
from .answer.recheck import question_of, signed
from .branching import SearchRequest, explore, read_asked
from .choices import Freedom, micro_batch_counts
from .relaxed.relaxation import Relaxation
from .solve import INTERRUPTED, LEAST_GAIN, solve

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
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    ask = _Ask(profile, cluster, system, order, recompute, end, asked)
    if tied != "auto":
        return _on_each_device(ask, ask.plan(tied))
    if len(cluster.devices) == 1 or held_together(profile, system, "together") is None:
        return _on_each_device(ask, ask.plan("together"))
    if system.flushes:
        return _split_or_not(ask)
    return _in_a_v_or_not(ask)


@dataclass(frozen=True)
class _Ask:
    """What was asked for.

    Attributes:
        end: by `time.monotonic`; None: there is no limit.
        asked: what else `solve` takes.
    """

    profile: Profile
    cluster: Cluster
    system: Variant
    order: Order | None
    recompute: str | None
    end: float | None
    asked: Mapping[str, Any]

    @property
    def leaves_placement(self) -> bool:
        """Whether nothing was said of how stages lie on devices."""
        said = self.order is not None or "stages_per_device" in self.asked
        said = said or self.asked.get("placement", "auto") != "auto"
        said = said or bool(self.asked.get("stages") or self.asked.get("pins"))
        return not said and self.system.placement == "any" and len(self.cluster.devices) > 1

    def plan(self, tied: Tied, share: float = 1.0, **others: Any) -> Plan:
        """The best plan with these settings.

        Args:
            share: of the time left.

        Raises as `solve`.
        """
        asked = {**self.asked, **others}
        if self.recompute is not None:
            return self._solved(tied, share, asked, self.recompute)
        fits = self._fits_without(tied, asked)
        if fits is not None:
            found = self._solved if fits else self._with_recompute
            return found(tied, share, asked)
        # Why nothing fits without is of no interest where something may with it.
        last = bool(self.system.recompute_refusal)
        try:
            return self._solved(tied, share / 2, {**asked, "explains": last})
        except InfeasibleError:
            if last:
                raise
            return self._with_recompute(tied, share, asked)

    def _with_recompute(self, tied: Tied, share: float, asked: Mapping[str, Any]) -> Plan:
        plan = self._solved(tied, share, asked, "auto")
        if not any(stage.recompute for stage in plan.stages):
            return plan
        return choosing(
            plan,
            "--recompute auto, as no plan was found that fits without; --recompute off asks for "
            "none",
        )

    def _solved(
        self, tied: Tied, share: float, asked: Mapping[str, Any], recompute: str = "off"
    ) -> Plan:
        left = None if self.end is None else max(self.end - time.monotonic(), 0.0) * share
        return solve(
            self.profile,
            self.cluster,
            self.system.name,
            tied=tied,
            order=self.order,
            recompute=recompute,
            time_limit_s=left,
            **asked,
        )

    def question(self, tied: Tied, asked: Mapping[str, Any]) -> tuple[Question, SearchRequest]:
        """What a search for it begins with. Raises as `solve`."""
        asked = {k: v for k, v in asked.items() if k not in ("progress", "seen")}
        return read_asked(self.profile, self.cluster, self.system.name, {**asked, "tied": tied})

    def _fits_without(self, tied: Tied, asked: Mapping[str, Any]) -> bool | None:
        """Whether a plan that computes nothing again is soon found; None where that isn't known
        before there was a search."""
        limited = any(device.memory_bytes is not None for device in self.cluster.devices)
        if not limited or self.system.recompute_refusal:
            return True
        if self.order is not None:
            return None
        question, request = self.question(tied, asked)
        search = explore(question, request, lambda *_: None)
        if not search.branches:
            return None
        found = Fitting(search, request.micro_batches).least(question, fits=True)
        return found is not None and search.counts(found)


def _split_or_not(ask: _Ask) -> Plan:
    """Layers that share parameters on several devices, or on one: what is faster."""
    split = _tried(ask, "split", _SPLIT_SHARE)
    if isinstance(split, Plan):
        split = _as_it_is(split, ask.profile)
        if split.tied == "together" and split.solver.optimal:
            return split
    together = _tried(ask, "together", 1.0, before=split)
    if not isinstance(together, Plan):
        # With copies more is possible.
        return _with_copies(_plan(split), "")
    if not isinstance(split, Plan):
        return together
    if together.predicted.period_s <= split.predicted.period_s * SAME:
        return _beside(together, split.solver, ask.profile)
    return _with_copies(split, f": {_period(split)}, where --tied together has {_period(together)}")


def _with_copies(plan: Plan, instead: str) -> Plan:
    if plan.tied == "together":
        return plan
    instead = instead or "; --tied together keeps them on one stage"
    return choosing(plan, f"--tied split, copies of shared parameters on several stages{instead}")


def _in_a_v_or_not(ask: _Ask) -> Plan:
    """Layers that share parameters on one stage, or on the first and the last one of a device."""
    if not ask.leaves_placement:
        return ask.plan("together")
    plan = _tried(ask, "together", _TOGETHER_SHARE)
    placed = _tried(ask, "together", 1.0, before=plan, stages_per_device=2, placement="v")
    if not isinstance(placed, Plan):
        return _plan(plan)
    words = "--placement v --stages-per-device 2, so that shared parameters stay on one device"
    if not isinstance(plan, Plan):
        return choosing(placed, words)
    if placed.predicted.period_s > plan.predicted.period_s * (1 - LEAST_GAIN):
        return plan
    placed = _beside(placed, plan.solver, ask.profile)
    return choosing(
        placed, f"{words}: {_period(placed)}, where --tied together has {_period(plan)}"
    )


def _on_each_device(ask: _Ask, plan: Plan) -> Plan:
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
    placed = _tried(quick, plan.tied, 1.0, before=plan, stages_per_device=2, effort=_EFFORT)
    if not isinstance(placed, Plan) or placed.predicted.period_s > most_s:
        return plan
    placed = _beside(placed, plan.solver, ask.profile)
    return choosing(
        placed,
        f"--stages-per-device 2: {_period(placed)}, where --stages-per-device 1 has "
        f"{_period(plan)}",
    )


_Tried = Plan | InfeasibleError | PlanError


def _tried(
    ask: _Ask, tied: Tied, share: float, *, before: _Tried | None = None, **others: Any
) -> _Tried:
    """A plan, or why there is none. Ctrl-C leaves the one that was found `before`."""
    if isinstance(before, Plan) and before.solver.stopped == INTERRUPTED:
        return PlanError(INTERRUPTED)
    try:
        # Of two errors the first one is raised.
        return ask.plan(tied, share, **{"explains": before is None, **others})
    except (InfeasibleError, PlanError) as error:
        return error
    except KeyboardInterrupt:
        if not isinstance(before, Plan):
            raise
        return PlanError(INTERRUPTED)


def _plan(found: _Tried) -> Plan:
    if isinstance(found, Plan):
        return found
    raise found


def _period(plan: Plan) -> str:
    return format_seconds(plan.predicted.period_s)


def choosing(plan: Plan, *lines: str) -> Plan:
    """The plan, which says so."""
    if not lines:
        return plan
    known = () if plan.solver.chosen is msgspec.UNSET else plan.solver.chosen
    report = msgspec.structs.replace(plan.solver, chosen=(*known, *lines))
    return msgspec.structs.replace(plan, solver=report)


def _as_it_is(plan: Plan, profile: Profile) -> Plan:
    """A plan with `tied` set to "together", if its cut takes no tied layers apart."""
    nodes, devices = zip(*((stage.nodes, stage.devices) for stage in plan.stages), strict=True)
    if misplaced(profile, nodes, devices, "together") is not None:
        return plan
    plan = msgspec.structs.replace(plan, tied="together")
    return signed(plan, question_of(plan, profile))


def _beside(plan: Plan, other: SolverReport, profile: Profile) -> Plan:
    """The plan with the lower bound, and the reason to stop, that hold for two searches at once."""
    solver = plan.solver
    bound_s = min(other.bound_s, solver.bound_s)
    optimal = solver.objective_s <= bound_s * SAME
    stopped = other.stopped if solver.stopped in (None, "effort") else solver.stopped
    report = msgspec.structs.replace(
        solver,
        bound_s=bound_s,
        gap=0.0 if optimal else gap_between(solver.objective_s, bound_s),
        optimal=optimal,
        stopped=None if optimal else stopped or solver.stopped,
    )
    return signed(msgspec.structs.replace(plan, solver=report), question_of(plan, profile))
