"""What a cut can cost at best, in our own systems: a `StageProblem` for a branch of the search.

Two readings of one question. As a *bound*, every load and every byte is at most what any plan
with that stage has, whatever its schedule, its limits and its neighbours: the problem's optimum
bounds the periods of all plans. As a *guess*, bytes are those of the limits at hand and wires
carry what they are likely to: its optimum is a cut worth trying.

Index letters: N micro-batches; r replicas.
"""

from __future__ import annotations

from ...costs.layer_graph import LayerGraph
from ...costs.recomputation import Selection
from ...costs.stage_costs import as_run_by
from ...partition.dp.identical_devices import IdenticalPlaces
from ...partition.problem import Option, StageProblem
from ...question import Question
from ..choices import Branch, Freedom
from . import messages
from .costs import LeastSeconds, Work
from .memory import LeastBytes
from .places import BOUND, Assumptions, PlaceMaker, Places, returning, sharing
from .scope import Reading, Scope


class Relaxation(Scope):
    """Makes the problems of one question, for any branch of its search.

    Attributes:
        seconds, kept: what they are made of.
    """

    def __init__(
        self, question: Question, freedom: Freedom, graph: LayerGraph | None = None
    ) -> None:
        """`graph`: the question's, where it was made before."""
        if graph is None:
            graph = LayerGraph(as_run_by(question.profile, question.system), question.tied)
        super().__init__(question, freedom, graph)
        self.seconds = LeastSeconds(question, freedom, graph)
        self.kept = LeastBytes(question, freedom, graph)

    @property
    def most_late(self) -> int | None:
        """What stages may be late, in updates; None: anything."""
        return self.freedom.staleness.late(self.variant)

    @property
    def recompute(self) -> tuple[Selection, ...]:
        """Ways of recomputation that may be chosen (`LeastBytes.recompute`)."""
        return self.kept.recompute

    def with_several_stages(self) -> Relaxation:
        """The same where devices have several stages, which may share parameters; itself where
        that makes no difference."""
        question = self.question
        if not question.profile.shared:
            return self
        profile = as_run_by(question.profile, self.variant)
        graph = LayerGraph(profile, question.tied, several=True)
        return Relaxation(question, self.freedom, graph)

    @property
    def views(self) -> tuple[str, ...]:
        """Ways to bound a period: no plan is below any of them.

        "cycle": a stage runs its work, its all-reduce and its update in each period. "drain",
        where systems flush: its work runs after the pipeline has filled up to it and before it
        has drained from it. "return", where they flush and run 1F1B: see `places.returning`.
        """
        if not self.variant.flushes:
            return ("cycle",)
        one_by_one = self.variant.schedule == "1f1b-flush"
        return ("drain", "return", "cycle") if one_by_one else ("drain", "cycle")

    def problem(self, branch: Branch, assumed: Assumptions = BOUND) -> StageProblem:
        """The problem for a branch of the search.

        Raises:
            PlanError: a micro-batch size outside what was measured.
        """
        graph, n = self.graph, branch.micro_batches
        read = self.reading(n, assumed)
        work = self.seconds.work(read)
        modes, options = self.kept.modes(read, work, self.seconds.forward_s(n))
        place = self._places(branch, read, work, options)
        serial_s, serial_fixed_s = (None, 0.0) if read.drains else self.seconds.serial(n, read.most)
        return StageProblem(
            names=graph.names,
            needs=graph.needs,
            tensors=tuple(messages.tensors(read, self.kept)),
            modes=modes,
            options=options,
            parameter_bytes=graph.parameter_bytes,
            devices=self._devices(read) // assumed.grain,
            place=place,
            together=graph.together,
            shared=self.kept.shared(read),
            serial_s=serial_s,
            serial_fixed_s=serial_fixed_s,
            workspace_bytes=read.costs[read.most].workspace_bytes if self.limited else None,
            before_s=work.before,
            after_s=work.after,
            overlap=self.question.cluster.overlap,
            stages=branch.stages,
            pins=branch.pins,
        )

    def _devices(self, read: Reading) -> int:
        """Those that stages may take."""
        count, assumed = len(self.question.cluster.devices), read.assumed
        guesses = (read.guess or assumed.unreplicated) and assumed.identical
        if guesses and self.variant.schedule == "1f1b-micro":
            # It never has more than N micro-batches in flight, each on one device at a time.
            return min(count, read.micro_batches)
        return count

    def _places(
        self, branch: Branch, read: Reading, work: Work, options: tuple[Option, ...]
    ) -> Places:
        question, n, devices = self.question, read.micro_batches, len(self.question.cluster.devices)
        place: Places = PlaceMaker(
            question,
            self.freedom,
            n,
            read.assumed,
            options,
            syncs=not read.drains,
            every_device=read.counts == (1,) and branch.stages == devices,
        ).places()
        if work.forward_share is not None:
            way = returning if read.returns else sharing
            place = way(place, options, n, devices, work.forward_share)
        known = not self.variant.flushes or read.most == 1 or question.update_every == 1
        if read.assumed.waits and known and isinstance(place, IdenticalPlaces):
            place = place.with_waits(messages.waits(self.seconds, read.costs[1], n))
        return place
