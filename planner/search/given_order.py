"""Plans for an order that a user gives: it says stages, devices and micro-batches; the search cuts.

Cuts are tried from the lowest load of their busiest device on, as for devices with several stages
(`stages_per_device`), each by the order itself.

Index letters: S stages; D devices; N micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...profiles.errors import PlanError
from ..costs.layer_graph import held_together
from ..evaluate import Evaluation
from ..partition.solve import source_for
from ..question import Question
from ..schedules.given import in_rules_of
from ..systems.orders import Order
from .branching import SearchRequest, check_request, deadline_of, pins_of
from .choices import Branch, PlacedBranch, StagesAsked, micro_batch_counts
from .relaxed.relaxation import Relaxation
from .stages_per_device import PlacedSearch
from .state import Budget, Progress, SearchState


def under(question: Question, order: Order) -> Question:
    """The question with this order.

    Raises OrderError, naming file, line and operation, where the system's rules don't allow it.
    """
    in_rules_of(question.system, order)
    return replace(question, order=order.lines())


def check_asked(order: Order, devices: int, asked: SearchRequest) -> None:
    """Check that nothing else is asked for than the order has, and its search can.

    Args:
        devices: of the cluster.

    Raises PlanError.
    """
    where = order.where
    if len(order.rows) > devices:
        raise PlanError(
            f"{where}: has {len(order.rows)} lines, one for each device; the cluster has {devices} "
            f"(--devices {len(order.rows)})"
        )
    if asked.stages not in (None, order.stages):
        raise PlanError(f"--stages {asked.stages}: {where} has {order.stages} stages; leave it out")
    if asked.micro_batches not in (None, order.micro_batches):
        raise PlanError(
            f"--micro-batches {asked.micro_batches}: {where} has {order.micro_batches} in a "
            "mini-batch; leave it out"
        )
    if asked.stages_per_device not in (None, 1, max(len(row.stages) for row in order.rows)):
        raise PlanError(
            f"--stages-per-device {asked.stages_per_device}: {where} says which device runs which "
            "stages; leave it out"
        )
    if asked.placement != "auto":
        raise PlanError(
            f"--placement {asked.placement}: {where} says which device runs which stage; leave it "
            "out"
        )
    if asked.solver == "ilp":
        raise PlanError(f"--solver ilp: cuts of {where} are found by their loads; leave it out")


def search_of(
    question: Question,
    order: Order,
    request: SearchRequest,
    progress: Progress,
    seen: Callable[[Evaluation], None],
) -> tuple[SearchState, PlacedSearch]:
    """The search for the cut that suits an order, and its part for these devices.

    Args:
        question: with the order.

    Raises PlanError where something else is asked for, or the model can't be cut into so many
    stages.
    """
    check_request(question, request)
    check_asked(order, len(question.cluster.devices), request)
    budget = Budget(request.effort, deadline_of(request))
    (n,) = micro_batch_counts(question, order.micro_batches)
    relaxation = Relaxation(question, replace(request.freedom, replicas=False))
    several = relaxation.with_several_stages() if order.placement else relaxation
    most = several.graph.most_stages
    if order.stages > most:
        tie = held_together(question.profile, relaxation.variant, question.tied)
        count = "1 stage" if most == 1 else f"{most} stages"
        raise PlanError(
            f"{order.where}: has {order.stages} stages; the model can be cut into {count} at most "
            f"({len(question.profile.layers)} layers)" + (f": {tie}" if tie else "")
        )
    if not relaxation.allows(order.stages, n):
        least = relaxation.variant.least_micro_batches(order.stages)
        raise PlanError(
            f"{order.where}: has {n} micro-batches; {question.variant} needs one for each of the "
            f"{least} stages at least"
        )
    source = source_for(relaxation.problem(Branch(n)), request.solver, budget.deadline)
    search = SearchState(
        relaxation=relaxation,
        source=source,
        branches=[],
        most_stages=order.stages,
        budget=budget,
        progress=progress,
        seen=seen,
    )
    placement = order.placement or tuple(range(order.stages))
    branch = PlacedBranch(n, placement, tuple(row.device for row in order.rows))
    most = max(len(row.stages) for row in order.rows)
    asked = StagesAsked(False, False, (most,), (), False)
    pinned = pins_of(relaxation, request.pins, order.stages)
    return search, PlacedSearch(search, asked, [n], order.stages, pinned, [[branch]])
