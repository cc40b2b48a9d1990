"""Recomputation by default: none, unless nothing fits without, or memory makes that slow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...profiles.errors import InfeasibleError, PlanError
from ...profiles.profile import Profile
from ...profiles.units import format_seconds
from ..cluster.cluster import Cluster
from ..costs.tied_parameters import Tied
from ..plan import Plan
from ..question import Question
from ..systems.orders import Order
from ..systems.variants import Variant
from .answer.fitting import Fitting
from .answer.two_searches import beside
from .branching import SearchRequest, explore, read_asked
from .parts import INTERRUPTED, LEAST_GAIN, quick_effort
from .solve import solve

_QUICK_SHARE, _LIKE_SHARE = 1 / 8, 1 / 8
"""Of the time, for a plan without recomputation that is soon found, and for one like it with some
where memory is what that may be slow for, to see which is to be looked for."""

_HALF = 0.5
"""Of a device's memory: where no plan's stage needs more, twice as much could be in flight."""


@dataclass(frozen=True)
class Ask:
    """What was asked for.

    Attributes:
        end: by `time.monotonic`; None: there is no limit.
        asked: what else `solve` takes.
        plans_tried: how many plans each search tried.
    """

    profile: Profile
    cluster: Cluster
    system: Variant
    order: Order | None
    recompute: str | None
    end: float | None
    asked: Mapping[str, Any]
    plans_tried: list[int] = field(default_factory=list)

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
        if self.recompute is not None or self.system.recompute_refusal:
            return self._solved(tied, share, asked, self.recompute or "off")
        fits = self._fits_without(tied, asked)
        if fits is False:
            return self._with_recompute(tied, share, asked)
        return self._faster(tied, share, asked, known=bool(fits))

    def _with_recompute(self, tied: Tied, share: float, asked: Mapping[str, Any]) -> Plan:
        plan = self._solved(tied, share, asked, "auto")
        if not any(stage.recompute for stage in plan.stages):
            return plan
        return choosing(
            plan,
            "--recompute auto, as no plan was found that fits without; --recompute off asks for "
            "none",
        )

    def _faster(self, tied: Tied, share: float, asked: Mapping[str, Any], *, known: bool) -> Plan:
        """Without recomputation; or with it, where a plan that is soon found has a period that is
        shorter by `LEAST_GAIN`, as memory leaves too little in flight without.

        Args:
            known: plans fit without; else some do where one is soon found.
        """
        effort = quick_effort(*self.question(tied, asked))
        quick = {**asked, "effort": effort, "explains": False}
        plan = tried(replace(self, recompute="off"), tied, share * _QUICK_SHARE, **quick)
        if not isinstance(plan, Plan):
            search = self._solved if known else self._with_recompute
            return search(tied, share, asked)
        if plan.solver.stopped != INTERRUPTED and self._may_gain(plan, tied, asked):
            # Of as many stages and micro-batches: more in flight of what has nearly the same cut.
            like = {"stages": len(plan.stages), "micro_batches": plan.micro_batches}
            quick |= {**like, "incumbent": plan}
            auto = replace(self, recompute="auto")
            recomputing = tried(auto, tied, share * _LIKE_SHARE, before=plan, **quick)
            if isinstance(recomputing, Plan):
                # What is as good when the time is over may be better by more.
                least = LEAST_GAIN * (recomputing.solver.stopped != "time limit")
                if recomputing.predicted.period_s < plan.predicted.period_s * (1 - least):
                    return self._recomputing(recomputing, plan, tied, share, asked)
            stopped = (
                recomputing.solver.stopped if isinstance(recomputing, Plan) else str(recomputing)
            )
            if stopped == INTERRUPTED:
                return plan
        done = plan.solver.optimal or plan.solver.stopped == INTERRUPTED
        return plan if done else self._solved(tied, share, {**asked, "incumbent": plan})

    def _recomputing(
        self, recomputing: Plan, plan: Plan, tied: Tied, share: float, asked: Mapping[str, Any]
    ) -> Plan:
        """A plan that computes some layers again, or one that is as good and needn't."""
        asked = {**asked, "incumbent": recomputing}
        found = tried(replace(self, recompute="auto"), tied, share, before=recomputing, **asked)
        if not isinstance(found, Plan):
            # Ended by Ctrl-C: its bound is that of as many stages and micro-batches alone.
            least_s = self._least_s(tied, asked)
            of_all = msgspec.structs.replace(recomputing.solver, bound_s=least_s)
            found = beside(recomputing, of_all, self.profile)
        without = format_seconds(plan.predicted.period_s)
        why = f"as plans soon found have {without} without; --recompute off asks for none"
        return choosing(found, f"--recompute auto, {why}")

    def _may_gain(self, plan: Plan, tied: Tied, asked: Mapping[str, Any]) -> bool:
        """Whether memory is what a plan may be slow for."""
        if self.order is not None:
            return False
        needs = plan.predicted.needs(plan.stages, self.cluster)
        if not any(need > limit * _HALF for _, need, limit in needs):
            return False
        return self._least_s(tied, asked) <= plan.predicted.period_s * (1 - LEAST_GAIN)

    def _least_s(self, tied: Tied, asked: Mapping[str, Any]) -> float:
        """What devices that share all work evenly take."""
        search = explore(*self.question(tied, asked), lambda *_: None)
        shared_out_s = search.relaxation.seconds.shared_out_s
        return min((shared_out_s(b.micro_batches) for b in search.branches), default=0.0)

    def _solved(
        self, tied: Tied, share: float, asked: Mapping[str, Any], recompute: str = "off"
    ) -> Plan:
        left = None if self.end is None else max(self.end - time.monotonic(), 0.0) * share
        plan = solve(
            self.profile,
            self.cluster,
            self.system.name,
            tied=tied,
            order=self.order,
            recompute=recompute,
            time_limit_s=left,
            **asked,
        )
        self.plans_tried.append(plan.solver.plans_tried)
        return plan

    def question(self, tied: Tied, asked: Mapping[str, Any]) -> tuple[Question, SearchRequest]:
        """What a search for it begins with. Raises as `solve`."""
        asked = {k: v for k, v in asked.items() if k not in ("progress", "seen", "incumbent")}
        return read_asked(self.profile, self.cluster, self.system.name, {**asked, "tied": tied})

    def _fits_without(self, tied: Tied, asked: Mapping[str, Any]) -> bool | None:
        """Whether a plan that computes nothing again is soon found; None where that isn't known
        before there was a search."""
        limited = any(device.memory_bytes is not None for device in self.cluster.devices)
        if not limited:
            return True
        if self.order is not None:
            return None
        question, request = self.question(tied, asked)
        search = explore(question, request, lambda *_: None)
        if not search.branches:
            return None
        found = Fitting(search, request.micro_batches).least(question, fits=True)
        if found is not None and search.counts(found):
            return True
        # Several stages on each device may fit where one on each, or in all, doesn't.
        return None if self.system.placement != "any" or request.stages_per_device != 1 else False


Tried = Plan | InfeasibleError | PlanError


def tried(
    ask: Ask, tied: Tied, share: float, *, before: Tried | None = None, **others: Any
) -> Tried:
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


def choosing(plan: Plan, *lines: str) -> Plan:
    """The plan, which says so."""
    if not lines:
        return plan
    known = () if plan.solver.chosen is msgspec.UNSET else plan.solver.chosen
    report = msgspec.structs.replace(plan.solver, chosen=(*known, *lines))
    return msgspec.structs.replace(plan, solver=report)
