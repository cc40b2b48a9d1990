"""Where to cut, for one stage count and micro-batch count: bounds and candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .chain_program import (
    FlushTerms,
    flush_bound,
    flush_time,
    smallest_bottleneck,
    smallest_flush_time,
)
from .cut_tables import CutTables, Matrix, cut_tables
from .downsets import Lattice
from .evaluate import Question
from .operations import BACKWARD, FORWARD
from .orders import make_order
from .pipeline import Link, Pipeline
from .simulate import warm_mini_batches
from .stage_costs import RECEIVES_AHEAD
from .variants import variant_named
from .versions import version_use

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class InFlight:
    """What a stage holds at its order's peak, as far as it is known before the cut."""

    micro_batches: int
    versions: int


class CutFinder:
    """Runs the dynamic programs over the downsets of one question's graph."""

    def __init__(self, question: Question, lattice: Lattice) -> None:
        self.question = question
        self.variant = variant_named(question.variant)
        self.lattice = lattice
        self._tables: dict[int, CutTables] = {}

    def tables(self, micro_batches: int) -> CutTables:
        """Stage costs for this micro-batch count; made once."""
        size = self.question.mini_batch // micro_batches
        if size not in self._tables:
            self._tables[size] = cut_tables(self.question.profile, self.lattice, size)
        return self._tables[size]

    # Bounds ----------------------------------------------------------------------------------

    def bound(self, stages: int, micro_batches: int) -> float:
        """No order of any cut into so many stages has a shorter period."""
        if not self.lattice.complete:
            return self._share(stages, micro_batches)
        if self.variant.flushes and self.lattice.ordered:
            return flush_bound(self._least_terms(stages, micro_batches), micro_batches)
        allowed = self._allowed(stages, micro_batches, self._least_held(stages, micro_batches))
        loads = self._loads(stages, micro_batches, allowed, wires=self._pure_chain)
        found = smallest_bottleneck(loads)
        return found[0] if found else np.inf

    def slow_bound(self, stages: int, micro_batches: int) -> float:
        """A sharper bound where one is known; made only for what the quick one can't exclude."""
        if not (self.variant.flushes and self.lattice.ordered and self.lattice.complete):
            return 0.0
        terms = self._least_terms(stages, micro_batches)
        found = _best_flush_cut(terms, micro_batches)
        return found[0] if found else np.inf

    def _least_terms(self, stages: int, micro_batches: int) -> list[FlushTerms]:
        held = self._least_held(stages, micro_batches)
        allowed = self._allowed(stages, micro_batches, held)
        # Where tensors skip layers, links share the load in ways the program doesn't see:
        # transfers are then left out of the bound.
        return self._flush_terms(stages, micro_batches, allowed, wires=self._pure_chain)

    def _share(self, stages: int, micro_batches: int) -> float:
        """All the work spread evenly over the devices: a bound for cuts that aren't listed."""
        t = self.tables(micro_batches)
        speed = sum(device.speed for device in self.question.cluster.devices[:stages])
        return float(micro_batches * (t.forward_s[0, -1] + t.backward_s[0, -1])) / speed

    # Cuts ------------------------------------------------------------------------------------

    def cuts(
        self, stages: int, micro_batches: int, limits: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        """Candidates, each as the downsets after its stages; the last guess is the careful one."""
        seen = set()
        for held in self._held(stages, micro_batches, limits):
            cut = self._cut(stages, micro_batches, held)
            if cut is not None and cut not in seen:
                seen.add(cut)
                yield cut

    def closest_cut(self, stages: int, micro_batches: int) -> tuple[int, ...] | None:
        """The cut whose worst stage is least over its device's memory; None for no cut at all."""
        least = self._least_held(stages, micro_batches)[0]
        valid = self.tables(micro_batches).valid
        memory = self.memory(micro_batches, least)
        over = []
        for s in range(stages):
            limit = self.question.cluster.devices[s].memory_bytes
            excess = np.maximum(memory - limit, 0) if limit is not None else memory * 0
            over.append(np.where(valid, excess, np.inf))
        found = smallest_bottleneck(over)
        return tuple(found[1]) if found else None

    def names(self, cut: Sequence[int]) -> list[list[str]]:
        """Layer names of each stage of a cut."""
        names = [layer.name for layer in self.question.profile.layers]
        member = self.lattice.member
        stages, below = [], np.zeros(len(names), dtype=np.bool_)
        for downset in cut:
            inside = member[downset] & ~below
            stages.append([names[k] for k in np.flatnonzero(inside)])
            below = member[downset]
        return stages

    def _cut(
        self, stages: int, micro_batches: int, held: Sequence[InFlight]
    ) -> tuple[int, ...] | None:
        allowed = self._allowed(stages, micro_batches, held)
        if self.variant.flushes:
            terms = self._flush_terms(stages, micro_batches, allowed, wires=True)
            found = _best_flush_cut(terms, micro_batches)
        else:
            loads = self._loads(stages, micro_batches, allowed, wires=True)
            tables = self.tables(micro_batches)
            crossing = tables.in_bytes + tables.in_grad_bytes
            found = smallest_bottleneck(loads, [crossing] * stages)
        return tuple(found[1]) if found else None

    def _least_held(self, stages: int, micro_batches: int) -> list[InFlight]:
        """What any order of any system has at its peak: a mini-batch, when its backward begins."""
        return [InFlight(micro_batches, 1)] * stages

    def _held(
        self, stages: int, micro_batches: int, limits: tuple[int, ...]
    ) -> Iterator[list[InFlight]]:
        """Guesses of what is in flight at each stage's peak, before its order is known.

        At the least; as in an order with equal stages; and at the most.
        """
        yield self._least_held(stages, micro_batches)
        if self.variant.flushes:
            return
        yield self._held_by_equal_stages(stages, micro_batches, limits)
        stashes = self.variant.backward_weights == "forward"
        yield [
            InFlight(limit * micro_batches, limit if stashes else min(limit, 2)) for limit in limits
        ]

    def _held_by_equal_stages(
        self, stages: int, micro_batches: int, limits: tuple[int, ...]
    ) -> list[InFlight]:
        equal = Pipeline(
            variant=self.variant,
            micro_batches=micro_batches,
            forward_s=(1.0,) * stages,
            backward_s=(2.0,) * stages,
            update_s=(0.0,) * stages,
            links=tuple(Link(s, s + 1, 0.0, 0.0, 0.0) for s in range(stages - 1)),
            limits=limits,
        )
        held = []
        for ops in make_order(equal, warm_mini_batches(stages)):
            kept = most = 0
            for op in ops:
                if op.kind == FORWARD:
                    kept += 1
                elif op.kind == BACKWARD:
                    kept -= micro_batches if op.micro_batch is None else 1
                most = max(most, kept)
            use = version_use(self.variant, micro_batches, ops)
            held.append(InFlight(most, use.most_held))
        return held

    # Matrices ------------------------------------------------------------------------------

    @property
    def _pure_chain(self) -> bool:
        """Every tensor goes to the next layer alone, so that a cut has one link."""
        names = [layer.name for layer in self.question.profile.layers]
        following = dict(zip(names, [*names[1:], "output"], strict=True))
        return all(e.consumer == following[e.producer] for e in self.question.profile.edges)

    def memory(self, micro_batches: int, held: InFlight) -> Matrix:
        """Peak bytes of every possible stage with this much in flight."""
        t = self.tables(micro_batches)
        unit = micro_batches if self.variant.backward_unit == "mini" else 1
        copies = 1 + held.versions + self.question.optimizer_state_factor
        incoming = RECEIVES_AHEAD[FORWARD] * t.in_bytes + 2 * unit * t.in_grad_bytes
        # Activations awaiting their sending often are kept anyway; the walk counts the rest.
        outgoing = (RECEIVES_AHEAD[BACKWARD] + 1) * unit * t.out_grad_bytes
        return (
            copies * t.parameter_bytes
            + t.buffer_bytes
            + held.micro_batches * t.kept_bytes
            + t.workspace_bytes
            + incoming
            + outgoing
        )

    def _allowed(self, stages: int, micro_batches: int, held: Sequence[InFlight]) -> list[Mask]:
        valid = self.tables(micro_batches).valid
        allowed = []
        for s in range(stages):
            limit = self.question.cluster.devices[s].memory_bytes
            fits = (
                valid if limit is None else valid & (self.memory(micro_batches, held[s]) <= limit)
            )
            allowed.append(fits)
        return allowed

    def _loads(
        self,
        stages: int,
        micro_batches: int,
        allowed: Sequence[Mask],
        *,
        wires: bool,
    ) -> list[Matrix]:
        """Per stage, busy time per mini-batch of the device, or of the wire below it."""
        t = self.tables(micro_batches)
        network = self.question.cluster.network
        loads = []
        for s in range(stages):
            speed = self.question.cluster.devices[s].speed
            work = micro_batches * (t.forward_s + t.backward_s) + t.update_s
            load = work / speed
            if wires and s:
                for crossing in (t.in_bytes, t.in_grad_bytes):
                    wire = micro_batches * crossing / network.bandwidth_bytes_per_s
                    load = np.maximum(load, wire)
            loads.append(np.where(allowed[s], load, np.inf))
        return loads

    def _flush_terms(
        self,
        stages: int,
        micro_batches: int,
        allowed: Sequence[Mask],
        *,
        wires: bool,
    ) -> list[FlushTerms]:
        t = self.tables(micro_batches)
        network = self.question.cluster.network
        terms = []
        for s in range(stages):
            speed = self.question.cluster.devices[s].speed
            forward, backward = t.forward_s / speed, t.backward_s / speed
            total = forward + backward
            if wires and s:
                wire = t.in_bytes / network.bandwidth_bytes_per_s
                wire_back = t.in_grad_bytes / network.bandwidth_bytes_per_s
                total = total + wire + wire_back + 2 * network.latency_s
                forward, backward = np.maximum(forward, wire), np.maximum(backward, wire_back)
            if s == 0:
                # Stage 0's backwards end last; the others update while it still works.
                total = total + t.update_s / speed
            terms.append(FlushTerms(np.where(allowed[s], total, np.inf), forward, backward))
        return terms


def _best_flush_cut(
    terms: Sequence[FlushTerms], micro_batches: int
) -> tuple[float, list[int]] | None:
    """The exact program, below what a cut with balanced stages reaches."""
    loads = [
        np.where(np.isfinite(term.total_s), term.forward_s + term.backward_s, np.inf)
        for term in terms
    ]
    balanced = smallest_bottleneck(loads, [term.total_s for term in terms])
    if balanced is None:
        return None
    ceiling = flush_time(terms, micro_batches, balanced[1])
    return smallest_flush_time(terms, micro_batches, ceiling)
