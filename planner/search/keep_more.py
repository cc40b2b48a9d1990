"""Having stages recompute fewer layers, where memory allows more to be kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite

import msgspec

from ..costs.memory import room_bytes
from ..costs.recomputation import fewest, of_stage
from ..costs.stage_costs import StageCost
from ..evaluate import Evaluation, evaluate
from ..partition.problem import SAME, Cut, Mode, StageProblem, Vector, stage_bytes
from ..plan import PlanStage
from ..question import Question
from .choices import Choice
from .effort import operations_of
from .state import SOON_S, SearchState

_WAITING = 0.25
"""Where replicas differ, of the micro-batches that the first stage has in flight, those whose
outputs wait to be sent: it runs ahead as far as it may."""

_REPAIRS = 3
"""Times that a plan whose stages keep more is tried, with fewer of them each time."""


def keep_more(search: SearchState) -> None:
    """Have the best plan's stages compute fewer layers again, as far as memory allows, and
    there is time. The sets that a search tries are few (`recomputation.selections`)."""
    best = search.best
    if search.relaxation.freedom.recompute not in ("auto", "selective"):
        return
    if best is None or best.pipeline.placement or _too_late(search):
        return
    stages = _keeping_more(search, best)
    # Where a stage ran ahead, it may then hold more.
    for _ in range(_REPAIRS):
        if stages == best.stages or _too_late(search):
            return
        found = evaluate(search.question, stages, best.micro_batches)
        over = {s for s, _ in found.over_limit(search.question.cluster)}
        if not over:
            if search.counts(found) and found.prediction.period_s <= search.period_s * SAME:
                search.best = found
            return
        stages = tuple(best.stages[s] if s in over else x for s, x in enumerate(stages))


def _keeping_more(search: SearchState, found: Evaluation) -> tuple[PlanStage, ...]:
    devices, stages = search.question.cluster.devices, list(found.stages)
    for s, stage in enumerate(found.stages):
        profile = search.question.profile
        limits = [room_bytes(devices[d], profile) for d in stage.devices]
        limit = min((m for m in limits if m is not None), default=None)
        if not stage.recompute or limit is None:
            continue
        mine = frozenset(stage.nodes)
        steps = [each & mine for each in search.relaxation.kept.steps if each & mine]
        known = sum(each <= stage.recomputed for each in steps)
        recomputed = fewest(
            steps,
            len(steps) + 1 if stage.recompute is True else known,
            partial(_fits, search.question, found, s, limit),
            search.relaxation.seconds.recompute_s(found.micro_batches),
        )
        if recomputed is not None:
            recompute = of_stage(recomputed, stage.nodes)
            stages[s] = msgspec.structs.replace(stage, recompute=recompute)
    return tuple(stages)


def _too_late(search: SearchState) -> bool:
    """Whether simulating the best plan anew takes longer than there is time."""
    deadline = search.budget.deadline
    if search.best is None or deadline is None:
        return False
    operations = operations_of(
        search.relaxation.variant, len(search.best.stages), search.best.micro_batches
    )
    return time.monotonic() + search.budget.expected_s(operations) > deadline + SOON_S


def _fits(
    question: Question, found: Evaluation, s: int, limit: int, recomputed: frozenset[str]
) -> bool:
    """Whether a stage, with its devices for itself, would keep to so many bytes if it computed
    these of its layers again, and ran what it runs now."""
    stage, holds = found.stages[s], found.prediction.stages[s].holds
    assert holds is not None
    share = len(stage.devices) if question.system.whole_mini_batches else 1
    size, last = -(-question.mini_batch // found.micro_batches), s == len(found.stages) - 1
    cost = question.costs.stage(stage.nodes, size // share, last, recomputed=recomputed)
    rebuilt = found.pipeline.micro_batches_per_share(s) * cost.rebuilt_bytes
    needs = msgspec.structs.replace(holds, kept=cost.kept_bytes, rebuilt=rebuilt)
    return all(needs.total(moment) <= limit for moment in found.moments[s])


# Before a cut is evaluated -----------------------------------------------------------------------


def likely_to_keep_more(
    search: SearchState, problem: StageProblem, cut: Cut, choice: Choice, micro_batches: int
) -> Choice:
    """The choice with as few layers computed again as its memory is likely to have room for."""
    question, relaxation, found, below = search.question, search.relaxation, [], 0
    size = -(-question.mini_batch // micro_batches)
    seconds, steps = relaxation.seconds.recompute_s(micro_batches), relaxation.kept.steps
    rest = _without_activations(problem, relaxation.graph.buffer_bytes)
    for s, (stage, nodes) in enumerate(zip(cut.stages, choice.nodes, strict=True)):
        recompute, mine = choice.recompute[s], frozenset(nodes)
        place = problem.place(stage.option, stage.k)
        limit = place.memory_bytes - stage_bytes(rest, below, stage.layers, stage.option, stage.k)
        if not s and len({problem.options[x.option].replicas for x in cut.stages}) > 1:
            limit -= _WAITING * place.units * _sent_bytes(problem, stage.layers)
        last = s == len(cut.stages) - 1
        cost = partial(question.costs.stage, nodes, size, last)
        fits = partial(_fit, cost, place.units, limit)
        below |= stage.layers
        if recompute and isfinite(limit):
            parts = [each & mine for each in steps if each & mine]
            fewer = fewest(parts, len(parts) + 1, fits, seconds)
            recompute = recompute if fewer is None else of_stage(fewer, nodes)
        found.append(recompute)
    return replace(choice, recompute=tuple(found))


def _sent_bytes(problem: StageProblem, layers: int) -> float:
    """What the first stage sends for each micro-batch."""
    across = (t for t in problem.tensors if t.ends & layers and t.ends & ~layers)
    return sum(tensor.kept_bytes for tensor in across)


def _fit(
    cost: Callable[..., StageCost],
    units: float,
    limit: float,
    recompute: frozenset[str],
) -> bool:
    """Whether a stage's activations fit, so many micro-batches in flight, if it computes these of
    its layers again."""
    found = cost(recomputed=recompute)
    return units * found.kept_bytes + found.rebuilt_bytes <= limit


def _without_activations(problem: StageProblem, buffer_bytes: Vector) -> StageProblem:
    """The problem whose stages hold only what they do whatever is computed again."""
    none = 0.0 * buffer_bytes
    modes = (
        Mode("none", m.compute_s, buffer_bytes, none, shared_in_flight=0.0) for m in problem.modes
    )
    return replace(problem, modes=tuple(modes))
