"""When nothing fits: which stage lacks how much, and what would do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ....profiles.errors import InfeasibleError, PlanError
from ....profiles.units import format_bytes
from ...cluster.cluster import Cluster
from ...costs.layer_graph import held_together
from ...costs.tied_parameters import bound_groups
from ...evaluate import Evaluation
from ...question import Question
from ..branching import SearchRequest
from ..choices import Freedom, micro_batch_counts
from ..state import SearchState
from .fitting import SECONDS, Fitting, may_recompute, ways

Pins = Sequence[tuple[str, int]]
"""Layers' names and their stages."""


class Finder(Protocol):
    """Soon finds a plan that fits for another question, as the one that was asked for is placed."""

    def fitting(
        self, question: Question, freedom: Freedom, counts: Sequence[int]
    ) -> Evaluation | None:
        """`counts`: N to look at."""


def closest_plan(
    search: SearchState,
    stopped: str | None,
    request: SearchRequest,
    finder: Finder | None,
    *,
    apart: bool,
) -> Evaluation:
    """The plan that lacks least, should it fit after all. Raises InfeasibleError that says why none
    does.

    Args:
        stopped: what ended the search before it had looked at everything.
        finder: of plans as they were asked for, where devices may have several stages.
        apart: plans with a stage for each device alone were asked for.
    """
    if search.least_difference is not None:
        raise InfeasibleError(
            f"--max-difference {search.relaxation.most_late}: no plan that fits has less than "
            f"{search.least_difference}; give at least that"
        )
    asked, explains = (stopped, request.pins, request.micro_batches), request.explains
    found: Evaluation | InfeasibleError
    if apart:
        found = _diagnose(search, *asked, explains=explains)
    else:
        found = _lacking(search, *asked, finder if explains else None)
    if isinstance(found, InfeasibleError):
        raise found
    return found


def _diagnose(
    search: SearchState,
    stopped: str | None,
    pins: Pins = (),
    micro_batches: int | None = None,
    *,
    explains: bool = True,
) -> Evaluation | InfeasibleError:
    """Why nothing fits, with what would do: memory, devices, options of the planner.

    All of these were planned: they do. Should the closest plan fit after all, it is returned.

    Args:
        stopped: what ended the search before it had looked at everything.
        pins, micro_batches: that were asked for.
        explains: else memory alone is said; and where the time is over, nothing is looked for.
    """
    nothing = "no plan fits" if stopped is None else f"no plan that fits was found ({stopped})"
    if len(search.relaxation.recompute) > 1:
        nothing += ", with --recompute auto neither"
    if not explains and search.budget.is_late:
        # What follows needs the time more.
        return InfeasibleError(nothing)
    fitting, cluster = Fitting(search, micro_batches), search.question.cluster
    # What a search had no time for may fit, and without limits of memory it does.
    found = fitting.plan_at_hand() if search.budget.is_late else None
    if found is not None:
        return found
    smallest = fitting.smallest_memory()
    if smallest is None:
        if fitting.cut_short:
            return InfeasibleError(f"{nothing}, nor was what would do")
        return InfeasibleError(f"{nothing}: the graph can't be cut as asked{_pinned(pins)}")
    memory, closest = smallest
    over = closest.over_limit(cluster)
    if not over:
        return closest
    stage, missing = max(over, key=lambda item: item[1])
    names = closest.stages[stage].nodes
    layers = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    needed = closest.prediction.stages[stage].memory_bytes
    memory = max(device.memory_for(memory) for device in cluster.devices)
    would_do = [f"{memory} bytes ({format_bytes(memory)}) on every device"]
    ways = fitting.other_ways() if explains else ()
    others = [f"{words} ({format_bytes(plan.prediction.most_bytes)})" for words, plan in ways]
    count = fitting.fewest_devices() if explains else None
    would_do += [f"{count} such devices"] * (count is not None) + others
    no_help = "; more such devices alone would not" * fitting.more_devices_are_no_help
    return InfeasibleError(
        f"{nothing}: the closest ({_sizes(closest)}) lacks {missing} bytes "
        f"({format_bytes(missing)}) on stage {stage} ({layers}): it needs {format_bytes(needed)} "
        f"of {format_bytes(needed - missing)}{_free(closest, stage, cluster)}. "
        f"What would do: {', or '.join(would_do)}{no_help}{_tie(search)}",
        stage=stage,
        missing_bytes=missing,
    )


def _lacking(
    search: SearchState,
    stopped: str | None,
    pins: Pins = (),
    micro_batches: int | None = None,
    finder: Finder | None = None,
) -> InfeasibleError:
    """Why no plan with several stages on each device fits: what the closest one lacks.

    Args:
        stopped, pins, micro_batches: as of `_diagnose`.
        finder: for what would do; None: it isn't looked for.
    """
    nothing = "no plan fits" if stopped is None else f"no plan that fits was found ({stopped})"
    closest, cluster = search.closest, search.question.cluster
    if closest is None and stopped is not None:
        return InfeasibleError(f"{nothing}: none was tried; give the search more time")
    if closest is None:
        bound = bound_groups(search.question.profile, search.question.tied)
        named = "; ".join(", ".join(map(repr, group)) for group in bound)
        why = f": layers that share parameters must be on one device ({named})" if bound else ""
        if search.question.system.horizon == "round-trip" and not bound:
            why = (
                f": {search.question.variant} needs gradients that come back to each stage from "
                "the later ones of its device"
            )
        return InfeasibleError(f"{nothing}: the graph can't be cut as asked{_pinned(pins) or why}")
    stage, missing = max(closest.over_limit(cluster), key=lambda item: item[1])
    device = cluster.devices[closest.stages[stage].devices[0]].name
    needed = closest.prediction.device_of(stage).memory_bytes
    return InfeasibleError(
        f"{nothing}: the closest ({_sizes(closest)}) lacks {missing} bytes "
        f"({format_bytes(missing)}) on device {device!r}: its stages need "
        f"{format_bytes(needed)} of {format_bytes(needed - missing)}"
        f"{_free(closest, stage, cluster)}"
        f"{_doing(search, closest, micro_batches, finder)}",
        stage=stage,
        missing_bytes=missing,
    )


def _doing(
    search: SearchState, closest: Evaluation, micro_batches: int | None, finder: Finder | None
) -> str:
    """What would do: memory, and each option by itself that a plan was found for."""
    if finder is None or search.question.order:
        return _help(search)
    question, most = search.question, closest.prediction.most_bytes
    memory = max(device.memory_for(most) for device in question.cluster.devices)
    found = [f"{memory} bytes ({format_bytes(memory)}) on every device"]
    until = time.monotonic() + SECONDS
    for words, other, allowed in ways(question, search.relaxation.freedom):
        if time.monotonic() > until:
            break
        with suppress(PlanError):
            plan = finder.fitting(other, allowed, micro_batch_counts(other, micro_batches))
            if plan is not None:
                found.append(f"{words} ({format_bytes(plan.prediction.most_bytes)})")
                if other is not question:
                    # The largest of mini-batches will do.
                    break
    return f". What would do: {', or '.join(found)}"


def _sizes(plan: Evaluation) -> str:
    stages, parts = len(plan.stages), plan.micro_batches
    return f"{stages} stage{'s' * (stages > 1)}, {parts} micro-batch{'es' * (parts > 1)}"


def _free(plan: Evaluation, stage: int, cluster: Cluster) -> str:
    """What of its device a stage has to leave free; nothing where it may take all."""
    device = cluster.tightest(plan.stages[stage].devices)
    if device is None or not device.free_bytes:
        return ""
    return f" that --headroom leaves of {format_bytes(device.memory_bytes or 0)}"


def _pinned(pins: Pins) -> str:
    """That pins are in the way, and what to do; nothing where there are none."""
    if not pins:
        return ""
    shown = ", ".join(f"--pin {name}={stage}" for name, stage in pins)
    return (
        f" with {shown}: no stage may be empty, and no layer on an earlier stage than what it "
        "needs; leave a pin out, or give it another stage or --stages another number"
    )


def _tie(search: SearchState) -> str:
    """What ties have to do with it."""
    question, graph = search.question, search.relaxation.graph
    if graph.most_stages >= len(question.cluster.devices):
        return ""
    tie = held_together(question.profile, search.relaxation.variant, question.tied)
    return f". {tie[0].upper()}{tie[1:]}" if tie else ""


def _help(search: SearchState) -> str:
    may = may_recompute(search.question, search.relaxation.freedom)
    return f"; {'--recompute auto or ' * may}a smaller --mini-batch may help"
