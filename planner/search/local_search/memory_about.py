"""Whether a plan may fit, from what a plan like it holds, before it is simulated.

A neighbour's stages mostly run what those of the plan run that it is a neighbour of. So what its
schedule has them hold, and when, is taken from there, and what that is of its own layers: exact
where limits, micro-batches and messages stay, an estimate elsewhere. And the cut that is most even
of those that may fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import msgspec
import numpy as np

from ...costs.memory import Moment, StageBytes, stepping_bytes
from ...costs.recomputation import Selection
from ...evaluate import LaidOut
from ...partition.problem import Vector
from ...question import Question
from ..choices import in_flight_under
from .first_cuts import even_within
from .neighbours import Neighbours, Point, Standing, speeds_of


def over_about(laid: LaidOut, point: Point, here: Standing, question: Question) -> float:
    """What its stages need beyond their devices' memory, as a share of it, summed.

    Args:
        laid: the point.
        here: what is known. Where it has other stages or micro-batches, nothing is: 0.
    """
    mine, predicted = here.point, here.found.prediction
    if (point.stages, point.micro_batches) != (mine.stages, mine.micro_batches):
        return 0.0
    needs = dict[tuple[int, ...], float]()
    for s, devices in enumerate(point.devices):
        held = predicted.stages[s].holds
        if held is None:
            return 0.0
        if devices not in needs:
            needs[devices] = predicted.device_of(s).memory_bytes
        if _as_it_is(s, point, mine):
            continue
        moments = here.found.moments[s]
        needs[devices] += _most_held(laid, s, point, here, question, held)
        needs[devices] -= max(map(held.total, moments))
    over = 0.0
    for devices, need in needs.items():
        smallest = question.cluster.tightest(devices)
        room = None if smallest is None else smallest.usable_bytes
        if room is not None:
            over += max(need / room - 1.0, 0.0)
    return over


def _as_it_is(s: int, point: Point, mine: Point) -> bool:
    """Whether a stage of a move has the layers, devices, recomputation and limits of the plan's."""
    return (
        point.downsets[s : s + 2] == mine.downsets[s : s + 2]
        and point.devices[s] == mine.devices[s]
        and point.recompute[s] == mine.recompute[s]
        and point.limits[s] == mine.limits[s]
        and point.limits[0] == mine.limits[0]
    )


def fitted(
    laid: LaidOut, point: Point, here: Standing, question: Question, least: Sequence[int]
) -> Point | None:
    """The point with fewer in flight where that fits the devices, about; None where it doesn't, or
    nothing is known. Of points with a device for each stage.

    Args:
        least: per stage, mini-batches in flight at the least.
    """
    limits = list(point.limits)
    while over_about(laid, point, here, question) > 0:
        over = [s for s in range(point.stages) if _is_over(laid, s, point, here, question)]
        # None before it has fewer in flight.
        fewer = next((s for s in reversed(over) if limits[s] > least[s]), None)
        if fewer is None:
            return None
        limits[fewer] -= 1
        limits[fewer + 1 :] = [min(limit, limits[fewer]) for limit in limits[fewer + 1 :]]
        point = replace(point, limits=tuple(limits))
    return point


def _is_over(laid: LaidOut, s: int, point: Point, here: Standing, question: Question) -> bool:
    held, devices = here.found.prediction.stages[s].holds, point.devices[s]
    smallest = question.cluster.tightest(devices)
    room = None if smallest is None else smallest.usable_bytes
    if held is None or room is None:
        return False
    need = here.found.prediction.device_of(s).memory_bytes
    need -= max(map(held.total, here.found.moments[s]))
    return need + _most_held(laid, s, point, here, question, held) > room


def cut_that_fits(
    near: Neighbours,
    micro_batches: int,
    devices: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    recompute: Selection,
    share: float,
) -> tuple[int, ...] | None:
    """Downsets of the cut whose busiest stage has the least to do of those that fit, about, in
    such a share of the devices' memory (`first_cuts.even_within`); None where none does.

    Args:
        limits: as `usual_limits` has them.
        recompute: which layers stages recompute.
    """
    question, graph, variant = near.question, near.relaxation.graph, near.question.system
    flight = in_flight_under(variant, len(devices), limits[0])
    always, parameters, kept = near.relaxation.kept.of_layers(micro_batches)
    kept = kept * [
        recompute is False or (recompute is not True and x not in recompute) for x in graph.names
    ]
    held, rooms = list[Vector](), list[float]()
    for s, mine in enumerate(devices):
        each, smallest, behind = len(mine), question.cluster.tightest(mine), len(devices) - 1 - s
        units = limits[s] * micro_batches / each
        if variant.backward_unit == "micro":
            units = min(flight.micro_batches(behind), micro_batches / each)
        versions = limits[s] if variant.stashes else flight.versions(behind)
        held.append(always + versions * parameters + units * kept)
        room = None if smallest is None else smallest.usable_bytes
        rooms.append(inf if room is None else share * room)
    work_s, speeds = near.layers.work_s(micro_batches), speeds_of(question.cluster, devices)
    of_groups = np.array([np.bincount(near.layers.number_of, each) for each in held])
    ends = even_within(work_s, speeds, of_groups, rooms)
    return None if ends is None else near.layers.downsets(ends)


def _most_held(
    laid: LaidOut, s: int, point: Point, here: Standing, question: Question, held: StageBytes
) -> int:
    """What a stage of the point holds at its fullest moment, in bytes."""
    holds, mine = _holds(laid, s, held, question, point.recompute[s]), here.point.limits
    scale, more = point.limits[s] / mine[s], None
    if question.system.synchronises and question.system.backward_weights == "latest":
        # Versions that stage 0 still enters with.
        more = (point.limits[0] - mine[0]) - (point.limits[s] - mine[s])
    moments = (_scaled(moment, scale, more) for moment in here.found.moments[s])
    return max(map(holds.total, moments))


def share_about(laid: LaidOut, point: Point, question: Question) -> float:
    """Of its devices' memory, what the fullest needs, about, with as much in flight as it may have:
    parameters and activations alone, where their backwards take mini-batches, else of a mini-batch
    in flight for each stage behind."""
    variant, n = question.system, point.micro_batches
    needs = dict[tuple[int, ...], float]()
    for s, (devices, cost) in enumerate(zip(point.devices, laid.costs, strict=True)):
        kept = cost.kept_bytes
        if point.recompute[s] is True:
            kept = sum(c.nbytes for c in laid.transfers if c.target == s)
        units = min(point.stages - s, n) if not variant.forwards_first else n
        if variant.backward_unit == "mini":
            units = point.limits[s] * laid.pipeline.micro_batches_per_share(s)
        # Gradients are as large as parameters.
        held = 2 * cost.parameter_bytes + question.state_bytes(cost) + cost.buffer_bytes
        needs[devices] = needs.get(devices, 0.0) + held + units * kept
    shares = [0.0]
    for devices, need in needs.items():
        smallest = question.cluster.tightest(devices)
        room = None if smallest is None else smallest.usable_bytes
        shares.append(0.0 if room is None else need / room)
    return max(shares)


def _scaled(moment: Moment, scale: float, more: int | None) -> Moment:
    """A moment with `scale` times what is kept, and `more` versions; None: `scale` times those."""
    if scale == 1.0 and not more:
        return moment
    versions = 1 + round((moment.versions - 1) * scale)
    if more is not None:
        versions = max(moment.versions + more, 1)
    return moment._replace(versions=versions, kept=round(moment.kept * scale))


def _holds(
    laid: LaidOut, s: int, held: StageBytes, question: Question, recompute: Selection
) -> StageBytes:
    """What a stage of these layers has to hold; messages as those of the stage in its place."""
    cost, unit = laid.costs[s], laid.pipeline.micro_batches_per_share(s)
    received = sum(c.nbytes for c in laid.transfers if c.target == s)
    kept, rebuilt = cost.kept_bytes, unit * cost.rebuilt_bytes
    if recompute is True:
        kept, rebuilt = received, unit * cost.kept_bytes
    copies = held.scratch / held.parameters if held.parameters else 0.0
    return msgspec.structs.replace(
        held,
        parameters=cost.parameter_bytes,
        buffers=cost.buffer_bytes,
        optimizer=question.state_bytes(cost),
        stepping=stepping_bytes(question.profile, cost.parameter_bytes),
        scratch=round(copies * cost.parameter_bytes),
        kept=kept,
        rebuilt=rebuilt,
        workspace=cost.workspace_bytes,
    )
