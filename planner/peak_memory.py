"""Peak memory of plans: what stages hold as their schedules run, and devices with several stages.

A schedule that was simulated says which micro-batches and weight versions are held at each moment;
what there is to hold of each is costed for the stage's layers and messages (`costs.memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile

from .costs.device_memory import device_peaks, tie_bytes, walks_of
from .costs.layout import copies_beside, copies_from_outside
from .costs.memory import Holdings, StageBytes, boundary_buffers, holdings, stepping_bytes, together
from .costs.stage_costs import RECEIVES_AHEAD, StageCost, Transfer
from .costs.tied_parameters import DeviceTie
from .plan import DevicePrediction, PlanStage, StagePrediction, TiePrediction
from .question import Question
from .schedules.schedules import is_patterned
from .schedules.steady_state import Steady
from .simulator.clock import SimulatedClock
from .simulator.pipeline import Pipeline
from .simulator.timeline import most_waiting
from .systems.operations import FORWARD, FORWARDS, Op, numbered, numbered_schedule
from .systems.versions import entry_versions


def holdings_of(
    pipeline: Pipeline, steady: Steady, recompute: Sequence[bool]
) -> tuple[Holdings, ...]:
    """What each stage's schedule makes it hold. `recompute`: per stage."""
    variant, n, every = pipeline.variant, pipeline.micro_batches, pipeline.update_every
    entries = _entries(pipeline, steady)
    found = tuple(
        (_kept_holdings if len(kinds) <= MOST_KEPT else holdings)(
            variant,
            n,
            pipeline.replicas(s),
            _entered(kinds, len(entries)) if variant.synchronises else kinds,
            entries,
            recompute=recompute[s],
            update_every=every,
        )
        for s, kinds in enumerate(steady.kinds)
    )
    if _all_seen(pipeline, steady):
        return found
    # The simulation may have ended before all was in flight that may be.
    return tuple(
        held.filled(pipeline.limits[s] * pipeline.micro_batches_per_replica(s))
        for s, held in enumerate(found)
    )


def _entries(pipeline: Pipeline, steady: Steady) -> tuple[int, ...]:
    """The versions that micro-batches enter with, in systems with vertical synchronisation."""
    variant, n = pipeline.variant, pipeline.micro_batches
    if not variant.synchronises:
        return ()
    micro = variant.backward_unit == "micro"
    ops = numbered(steady.kinds[0], n, micro=micro, update_every=pipeline.update_every)
    return entry_versions(variant, n, ops)


def _all_seen(pipeline: Pipeline, steady: Steady) -> bool:
    """Whether all that may be in flight at once has been.

    Patterns are walked until then, whatever was simulated of them.
    """
    if steady.cycle or is_patterned(pipeline):
        return True
    return steady.mini_batches >= 2 * max(pipeline.limits)


def _entered(kinds: bytes, forwards: int) -> bytes:
    """What a stage runs until so many forwards, those that stage 0 has begun.

    It may be ahead of stage 0 where nothing comes to it from there.
    """
    position = -1
    for _ in range(forwards + 1):
        position = kinds.find(FORWARDS, position + 1)
        if position < 0:
            return kinds
    return kinds[:position]


MOST_KEPT = 4096
"""What longer schedules hold isn't kept for the next time."""

# Different cuts and limits often have the same schedules.
_kept_holdings = lru_cache(maxsize=4096)(holdings)


def stage_bytes(
    question: Question,
    pipeline: Pipeline,
    clock: SimulatedClock,
    s: int,
    stages: Sequence[PlanStage],
    costs: Sequence[StageCost],
    transfers: Sequence[Transfer],
) -> StageBytes:
    """What there is to hold on a replica. `transfers`: tensors, as large as its part of them."""
    unit = pipeline.micro_batches_per_share(s)
    stage, cost = stages[s], costs[s]
    beside = [t for t in pipeline.beside(s) if t != s]
    # What is computed again isn't kept; what is received is, whether a layer keeps it or not.
    whole = stage.recompute is True
    kept_storages = frozenset[str]() if whole else cost.kept_storages
    wait = {c.target for c in transfers if c.source == s and c.storage not in kept_storages}
    waiting = {
        link.target: most_waiting(
            clock, link, 0 if link.target in beside else RECEIVES_AHEAD[FORWARD]
        )
        for link in pipeline.links
        if link.source == s and link.target in wait
    }
    messages, gradients = boundary_buffers(s, transfers, unit, kept_storages, waiting, beside)
    received = sum(c.nbytes for c in transfers if c.target == s)
    kept = received if whole else cost.kept_bytes
    if beside:
        kept -= _kept_by_makers(s, stages, costs, transfers, beside)
    return StageBytes(
        parameters=cost.parameter_bytes,
        buffers=cost.buffer_bytes,
        optimizer=question.state_bytes(cost),
        stepping=stepping_bytes(question.profile, cost.parameter_bytes),
        scratch=cost.parameter_bytes * copies_beside(pipeline, s),
        kept=kept,
        rebuilt=unit * (cost.kept_bytes if whole else cost.rebuilt_bytes),
        messages=messages,
        gradients=gradients,
        workspace=cost.workspace_bytes,
        postponed=_postponed_bytes(s, cost, transfers) if pipeline.weight_s else 0,
    )


def _kept_by_makers(
    s: int,
    stages: Sequence[PlanStage],
    costs: Sequence[StageCost],
    transfers: Sequence[Transfer],
    beside: Collection[int],
) -> int:
    """Of what a stage keeps of each micro-batch, bytes that it was handed over without a copy, and
    that their maker on the same device keeps for longer."""
    handed = {
        c.storage: c.nbytes
        for c in transfers
        if c.target == s and c.source in beside and stages[c.source].recompute is not True
        if c.storage in costs[c.source].kept_storages
    }
    whole = stages[s].recompute is True
    mine = handed.keys() if whole else costs[s].kept_storages & handed.keys()
    return sum(handed[storage] for storage in mine)


def _postponed_bytes(s: int, cost: StageCost, transfers: Sequence[Transfer]) -> int:
    """Gradients that wait with a micro-batch for its weight part."""
    if any(c.target == s and c.needs_grad for c in transfers):
        return cost.postponed_bytes
    # Nothing goes back, so all of the backward waits, with the gradients that came, one a tensor.
    return sum({c.tensor: c.nbytes for c in transfers if c.source == s and c.needs_grad}.values())


def predict_devices(
    pipeline: Pipeline,
    needs: Sequence[StageBytes],
    held: Sequence[Holdings],
    predicted: Sequence[StagePrediction],
    steady: Steady,
    recompute: Sequence[bool],
    ties: Sequence[DeviceTie],
) -> Iterator[DevicePrediction]:
    """Of devices with several stages; none where there are no such."""
    if not pipeline.placement:
        return
    variant, n, every = pipeline.variant, pipeline.micro_batches, pipeline.update_every
    entries = _entries(pipeline, steady)
    micro = variant.backward_unit == "micro"
    schedule = numbered_schedule(steady.kinds, steady.turns, n, micro=micro, update_every=every)

    def entered(at: tuple[int, Op]) -> bool:
        """Whether it isn't ahead of the forwards that stage 0 has begun."""
        _, (kind, b, i) = at
        return kind != FORWARD or b * n + (i or 0) < len(entries)

    for stages, ops in zip(pipeline.stages_of, schedule.on_devices(), strict=True):
        tied = [
            (tie.stages, tie_bytes(variant, tie, copies_from_outside(pipeline, tie.owner)))
            for tie in ties
            if tie.owner in stages
        ]
        walks, of_ties = walks_of(pipeline, stages, tied, entries, recompute)
        known = list(takewhile(entered, ops)) if variant.synchronises else ops
        memory, accounted = device_peaks(walks, {s: needs[s] for s in stages}, known, of_ties)
        if not _all_seen(pipeline, steady):
            # More may be in flight at once than was seen.
            memory = together([*(needs[s].peak(held[s]) for s in stages), *of_ties.most()])
            accounted = together(
                [*(needs[s].accounted_peak(held[s]) for s in stages), *of_ties.most()]
            )
        yield DevicePrediction(
            stages=stages,
            memory_bytes=memory.total,
            memory=memory,
            accounted=accounted,
            idle_share=predicted[stages[0]].idle_share,
            ties=tuple(TiePrediction(stages=of, holds=nbytes) for of, nbytes in tied),
        )
