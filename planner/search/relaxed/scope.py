"""What the parts of a relaxed problem have in common: the question, and how plans are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...costs.layer_graph import LayerGraph, LayerVectors
from ...question import Question
from ...schedules.check import deadlocks
from ...schedules.schedules import Ranges, has_pattern, has_row, limit_ranges
from ...systems.variants import Variant
from ..choices import Freedom
from .places import Assumptions


@dataclass(frozen=True)
class Reading:
    """How a problem reads the plans of a branch.

    Attributes:
        micro_batches: N.
        drains: work is what runs after the pipeline has filled up to a stage and before it has
            drained from it; else what a stage runs in each period.
        returns: the way to the end and back is waited for besides (`places.returning`).
        counts: replicas that stages may have; there may be none that are multiples of the grain.
        costs: of layers in each stage's micro-batches, by replicas.
    """

    micro_batches: int
    assumed: Assumptions
    drains: bool
    returns: bool
    counts: tuple[int, ...]
    costs: Mapping[int, LayerVectors]

    @property
    def guess(self) -> bool:
        """Whether it is a guess, not a bound."""
        return self.assumed.guess

    @property
    def most(self) -> int:
        """Replicas."""
        return max(self.counts, default=1)

    @property
    def bounds_drained(self) -> bool:
        """Whether other work for sure comes on top of a stage's own."""
        return self.drains and not self.guess

    @property
    def bounds_replicas(self) -> bool:
        """Whether stages may have replicas, which no bound may forget."""
        return self.most > 1 and not self.guess


class Scope:
    """One question, with what may be chosen, and its layer graph."""

    def __init__(self, question: Question, freedom: Freedom, graph: LayerGraph) -> None:
        self.question, self.freedom, self.graph = question, freedom, graph
        self.variant: Variant = question.system

    @cached_property
    def limited(self) -> bool:
        """Whether any device's memory is limited."""
        return any(d.memory_bytes is not None for d in self.question.cluster.devices)

    def limit_ranges(self, stages: int, *, several: bool = False) -> Ranges:
        """The in-flight limits to choose from (`schedules.limit_ranges`)."""
        within, every = self.freedom.staleness, self.question.update_every
        return limit_ranges(
            self.variant, stages, several=several, within=within, update_every=every
        )

    @property
    def in_sequence(self) -> bool:
        """Whether a device with several stages runs its operations in a given sequence, whatever
        they take: then their critical paths are known."""
        return has_row(self.variant)

    @property
    def list_scheduled(self) -> bool:
        """Whether times decide in what sequence a device with one stage runs its operations."""
        return not has_pattern(self.variant)

    def allows(self, stages: int, micro_batches: int, placement: tuple[int, ...] = ()) -> bool:
        """Whether the system runs so many stages with so many micro-batches; in a placement, if
        that is known."""
        if placement and self.in_sequence:
            return not deadlocks(self.variant, placement, micro_batches)
        return micro_batches >= self.variant.least_micro_batches(stages)

    def replica_counts(self, micro_batches: int) -> list[int]:
        """Replicas that share a mini-batch's work evenly, and that the profile has costs for."""
        devices, batch = len(self.question.cluster.devices), self.question.mini_batch
        if not self.freedom.replicas:
            return [1]
        if not self.variant.whole_mini_batches:
            return [r for r in range(1, min(devices, micro_batches) + 1) if micro_batches % r == 0]
        sizes = self.question.profile.micro_batch_sizes
        within = range(1, min(devices, batch) + 1)
        return [r for r in within if batch % r == 0 and sizes[0] <= batch // r <= sizes[-1]]

    def size(self, micro_batches: int, replicas: int) -> int:
        """Samples in a stage's micro-batch; uneven ones count as the largest."""
        share = replicas if self.variant.whole_mini_batches else 1
        return -(-self.question.mini_batch // (micro_batches * share))

    def reading(self, micro_batches: int, assumed: Assumptions) -> Reading:
        """How plans with so many micro-batches are read. Raises PlanError for a micro-batch size
        outside what was measured."""
        view = assumed.view or ("drain" if self.variant.flushes else "cycle")
        counts = [1] if assumed.unreplicated else self.replica_counts(micro_batches)
        chosen, grain = assumed.replicas or counts, assumed.grain
        counts = [r for r in counts if r % grain == 0 and r in chosen]
        drains = view != "cycle"
        looked = {*counts, max(counts, default=1), *((1,) if drains or assumed.waits else ())}
        costs = {r: self.graph.costs(self.size(micro_batches, r)) for r in looked}
        return Reading(micro_batches, assumed, drains, view == "return", tuple(counts), costs)
