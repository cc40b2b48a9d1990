"""One stage's forward, backward and update, on the weight versions that its system prescribes. No
messages.

What a system or a setting adds to them are hooks (`planner.systems.hooks`), listed in `features`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, _engine_run_backward

from ...planner.systems.hooks import NOTHING, BackwardRun, ForwardRun
from ...planner.systems.operations import Op, Schedule
from ...profiles.autograd.boundary import give_gradients_own_memory
from ...profiles.tasks.task import Loss
from ..prepare.data import Segment
from ..prepare.devices import CPU, move
from ..prepare.prepared import Prepared
from ..prepare.workers import Replica
from ..weights.hooked import HookedStage
from ..weights.stage_weights import StagePolicies, weights_of
from .features import hooks_of
from .graphs import Graphs
from .memory import MemoryAccount
from .micro_batch import MicroBatch, OutputGradients, PieceInputs, collect
from .optimizer import StageUpdates


class Stage:
    """A stage's piece with its weight versions, optimizer and micro-batches in flight.

    Attributes:
        number: from 0, at the input side.
        piece: what its forwards compute.
        graphs: what of its passes is captured; where nothing is, they run operation by operation.
        weights: versions of its own parameters, and what operations run on.
        policy: which version each operation uses, of those and of shared ones.
        ties: parameters that several stages of the worker use.
        updated: the parameters that its updates step: of those that several stages of the worker
            use, the ones that this stage updates.
        updates: its optimizer and learning rate.
        hooks: what takes part in all of it.
        meter: of these, what measures its staleness.
        account: what the stage holds, and its peak.
        names: for each name of a parameter, the first that the whole model has for it.
    """

    def __init__(self, prepared: Prepared, replica: Replica, device: torch.device = CPU) -> None:
        """
        Args:
            device: what everything of the stage is moved to.
        """
        model = prepared.model
        self.number = s = replica.stage
        own, module = model.stages[s], model.stages[s].piece.module
        self.variant = prepared.pipeline.variant
        self.share = prepared.distribution.shares[replica.number]
        self.names = model.names
        # Before anything looks at the parameters, which moving may replace.
        move(own.modules, device)
        owned = [p for _, p in model.owned_by(s)]
        self.updated = [p for p in owned if p.requires_grad]
        self.weights, self.ties = weights_of(prepared, s)
        self.graphs = Graphs(prepared, replica, device, self.weights)
        self.piece = self.graphs.piece
        self.updates = StageUpdates(prepared, s)
        hooked = HookedStage(
            prepared,
            s,
            module,
            self.updated,
            self.weights,
            self.ties,
            self.updates.optimizer,
            rate=lambda: self.hooks.rate(self.weights.latest),
        )
        self.meter, self.hooks = hooks_of(hooked)
        self.policy = StagePolicies(prepared, s, self.weights, self.ties, self.hooks.making)
        alike = [*module.buffers(), *(p for p in owned if not p.requires_grad)]
        self.account = MemoryAccount(self.weights, alike, self.hooks, self.updates.optimizer)
        self._flying: dict[tuple[int, int], MicroBatch] = {}

    def stand_beside(self, others: Mapping[int, Stage]) -> None:
        """The worker has these stages, too, by number: what they hold counts, and the parameters
        that one of them updates may be used here."""
        for s in sorted(others):
            ties = [tied for tied in others[s].ties.updated if self.number in tied.stages]
            self.policy.use(ties, others[s].hooks.making)
        every = [self, *others.values()]
        self.account.beside = [
            *(other.account.own for other in others.values()),
            *(tied.held for stage in every for tied in stage.ties.updated),
        ]

    def begin(self, segment: Segment, schedule: Schedule) -> None:
        """Get ready for a segment. `schedule`: of all stages."""
        self.policy.begin(schedule, self.number)
        self.hooks.begin(segment.first, segment.mini_batches)

    # Operations --------------------------------------------------------------------------

    def forward(
        self, op: Op, given: PieceInputs, boundary_bytes: int = 0
    ) -> tuple[int, dict[str, Tensor], Loss | None]:
        """Forward of one micro-batch.

        Args:
            given: its weights are filled in.
            boundary_bytes: what the channels hold now.

        Returns:
            The version used; the outputs to send, by name; the loss of what is real, detached.
        """
        assert op.micro_batch is not None
        version, weights = self.policy.forward(op)
        part = given.part
        run = ForwardRun(op, version, self.policy.walk.latest, weights, part.real, part.size)
        given = PieceInputs(given.values, given.target, part, weights)
        context = self.hooks.forward(run)
        with context:
            replayed = self.graphs.forward(given, alone=context is NOTHING)
            micro, outputs, loss = replayed or self.piece.forward(given)
        self._flying[op.mini_batch, op.micro_batch] = micro
        self.account.activations_bytes += micro.saved_bytes
        self.account.note(boundary_bytes, gradients_changed=False)
        self._drop()
        return version, outputs, None if loss is None else Loss(loss.value.detach(), loss.weight)

    def backward(
        self, op: Op, grads: OutputGradients, boundary_bytes: int = 0
    ) -> tuple[int, int, dict[str, Tensor]]:
        """Backward of one micro-batch, or of this replica's of a mini-batch in one pass.

        In systems that split it, what gives the gradients of received inputs alone.

        Returns:
            The version used, and the one the forward used, the oldest where micro-batches differ;
            for each received input that needs one its gradient, ``[micro-batches of this backward,
            ...]``.
        """
        version = self.policy.take_backward(op)
        forward_version = self.policy.walk.forward_version(op)
        mine = self.share.of(op)
        micros = {i: self._ready(op, i) for i in mine}
        fresh = [p for p in self.weights.every if p.grad is None]
        first = True
        for weights in self.policy.backwards(op, mine):
            passes = [(micros[i], mine.index(i)) for i in weights.micro_batches]
            left = self.graphs.backward(passes, grads, weights.tensors)
            if left:
                roots = [root for micro, k in left for root in micro.roots(grads, k)]
                same = weights.version == forward_version
                self._run_backward(op, left[0][0], roots, weights.tensors, same=same)
            elif self.variant.split_backward:
                self._flying[op.mini_batch, mine[0]] = micros[mine[0]]
            difference = version - forward_version
            self.hooks.backward(
                BackwardRun(
                    op, difference, weights.version, self.policy.walk.latest, weights.tensors, first
                )
            )
            first = False
        back = {
            name: collect(self.piece.specs[name], list(micros.values()), self.piece.device)
            for name in micros[mine[0]].inlets
        }
        messages = (*grads.by_name.values(), *back.values())
        give_gradients_own_memory(fresh, messages)
        self.account.note(boundary_bytes + sum([g.nbytes for g in messages]))
        if not self.variant.split_backward:
            self.account.activations_bytes -= sum([m.saved_bytes for m in micros.values()])
        self.hooks.after_backward(op)
        self.policy.finish(op)
        self._drop()
        for policy in () if self.variant.keeps_scratch else self.policy.every:
            policy.weights.drop_scratch()
        return version, forward_version, back

    def backward_weight(self, op: Op, boundary_bytes: int = 0) -> int:
        """The weight part of a micro-batch's backward. Returns the version used."""
        assert op.micro_batch is not None
        micro = self._flying.pop((op.mini_batch, op.micro_batch))
        if not self.graphs.weights(micro):
            assert micro.half is not None
            with self.weights.backward(None):
                micro.half.weights()
        self.account.note(boundary_bytes)
        self.hooks.after_backward(op)
        self.account.activations_bytes -= micro.saved_bytes
        return self.policy.walk.latest

    def made_shape(self, op: Op, name: str) -> torch.Size:
        """Of an output that this replica made in the micro-batches of a backward to come."""
        return self._flying[op.mini_batch, self.share.of(op)[0]].shapes[name]

    def skip(self, op: Op) -> None:
        """Another replica runs this forward or backward: only versions go on here."""
        self.policy.skip(op)
        self._drop()

    def update(self, boundary_bytes: int = 0, *, steps: bool = True) -> int:
        """Optimizer step after a mini-batch's backward. The scheduler's comes then.

        Args:
            steps: the weights change; else the next version is the same as this one.

        Returns the new version; the old one is copied if it is needed.
        """
        self.weights.keep_needed(self.policy.walk)
        if not steps:
            self._let_gradients_go()
        # Graphs that hold the parameters are to run backward on what they are then.
        with _unsafe_preserve_version_counter(tuple(self.updated)):
            self.hooks.before_update()
            self.updates.step(self.hooks.rate(self.policy.walk.latest), steps=steps)
            self.account.note(boundary_bytes)
            self.hooks.after_update()
            self._let_gradients_go()
            return self.weights.update(self.policy.walk)

    # Steps of an operation ---------------------------------------------------------------

    def _ready(self, op: Op, micro_batch: int) -> MicroBatch:
        """A micro-batch ready for its backward: recomputed where it has to be."""
        kept = self._flying.pop((op.mini_batch, micro_batch))
        bytes_before = kept.saved_bytes
        if kept.inputs is None and kept.remade is None:
            return kept
        weights = self.policy.recompute(op, micro_batch)
        ready = self.piece.ready(kept, weights, self.hooks.recompute(op))
        self.account.activations_bytes += ready.saved_bytes - bytes_before
        return ready

    def _run_backward(
        self,
        op: Op,
        micro: MicroBatch,
        roots: Sequence[tuple[Tensor | GradientEdge, Tensor]],
        tensors: list[Tensor] | None,
        *,
        same: bool,
    ) -> None:
        """Run a backward, or the first part of one that is split: the graph is kept for the second.
        `micro`: its first micro-batch; `same`: its weights are those of the forwards."""
        same = same or self.variant.backward_weights == "forward"
        with self.weights.backward(tensors, same=same):
            if self.variant.split_backward:
                assert op.micro_batch is not None
                half = micro.split(roots, self.weights.every)
                self.account.activations_bytes += half.saved_bytes - micro.saved_bytes
                self._flying[op.mini_batch, op.micro_batch] = half
            elif roots:
                # As `torch.autograd.backward`, which takes its time to look at shapes that the
                # engine looks at again.
                _engine_run_backward(
                    *zip(*roots, strict=True),
                    *(False, False, ()),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )

    def _drop(self) -> None:
        """Let go of weight versions that no operation needs any more."""
        if self.weights.held > 1:
            self.weights.drop(self.policy.walk.needed())
        if self.ties.used:
            self.ties.drop()

    def _let_gradients_go(self) -> None:
        for p in self.updated:
            # As `zero_grad` does, which takes its time to tell torch's profiler of it.
            p.grad = None
        self.account.gradients_gone(self.graphs.sums_bytes)
