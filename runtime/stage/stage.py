"""One stage's forward, backward and update, on the weight versions that its system prescribes. No
messages.

What a system or a setting adds to them are hooks (`planner.systems.hooks`), listed in `features`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, _engine_run_backward

from ...planner.schedules.prediction import Distances
from ...planner.systems.hooks import NOTHING, BackwardRun, ForwardRun, HookChain
from ...planner.systems.operations import Op
from ...planner.systems.versions import VersionWalk
from ...profiles.autograd.boundary import give_gradients_own_memory
from ...profiles.tasks.task import Loss
from ..prepare.data import Segment
from ..prepare.devices import CPU, move
from ..prepare.prepared import Prepared
from ..prepare.tied_parameters import state_of
from ..prepare.workers import Replica
from ..weights.hooked import HookedStage
from ..weights.policy import WeightPolicies, WeightPolicy
from ..weights.staleness import meter_of
from ..weights.stash import WeightVersions, advance, give_own_memory, keep_needed
from ..weights.tied_weights import StageTies, TiedWeights
from . import features
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
        plan, model = prepared.plan, prepared.model
        self.number = s = replica.stage
        own, module = model.stages[s], model.stages[s].piece.module
        self.variant = variant = prepared.pipeline.variant
        self.share = prepared.distribution.shares[replica.number]
        self.names = model.names
        # Before anything looks at the parameters, which moving may replace.
        move(own.modules, device)
        self._borrowed = model.owned_elsewhere(s)
        owned = [p for _, p in model.owned_by(s)]
        self.updated = [p for p in owned if p.requires_grad]
        if not variant.flushes:
            give_own_memory(self.updated)
        # Where losses have weights of their own, each mini-batch's gradients are divided by its.
        together = 1 if model.loss.weighted else plan.update_every
        shared = [one for one in model.ties.shared if one.owner == s]
        ties = [TiedWeights(one.stages, one.of(s, module), together) for one in shared]
        self.ties = StageTies(s, ties)
        tied = set(map(id, self.ties.parameters))
        frozen = [p for p in module.parameters() if not p.requires_grad]
        self.weights = WeightVersions([p for p in self.updated if id(p) not in tied], frozen)
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
        self.meter = meter_of(hooked)
        made = [make(hooked) for make in features.FEATURES]
        self.hooks = HookChain([self.meter, self.ties, *(h for h in made if h is not None)])
        self._policy_of = partial(
            WeightPolicy,
            variant,
            settings=prepared.settings,
            micro_batches=plan.micro_batches,
            recompute=bool(plan.stages[s].recompute),
        )
        self.policy = WeightPolicies(self._policy_of(self.weights, self.hooks.making))
        self._use(self.ties.updated, self)
        alike = [*module.buffers(), *(p for p in owned if not p.requires_grad)]
        self.account = MemoryAccount(self.weights, alike, self.hooks, self.updates.optimizer)
        self._flying: dict[tuple[int, int], MicroBatch] = {}

    def _use(self, ties: Sequence[TiedWeights], owner: Stage) -> None:
        """Run operations on these parameters too. `owner`: the stage that updates them."""
        for tied in ties:
            policy = self._policy_of(tied.versions, owner.hooks.making, stages=tied.stages)
            self.ties.use(tied, policy)
            self.policy.shared.append(policy)
        self.weights.join([tied.versions for tied in self.ties.used])

    def stand_beside(self, others: Mapping[int, Stage]) -> None:
        """The worker has these stages, too, by number: what they hold counts, and the parameters
        that one of them updates may be used here."""
        for s in sorted(others):
            ties = [tied for tied in others[s].ties.updated if self.number in tied.stages]
            self._use(ties, others[s])
        every = [self, *others.values()]
        self.account.beside = [
            *(other.account.own for other in others.values()),
            *(tied.held for stage in every for tied in stage.ties.updated),
        ]

    def begin(
        self,
        segment: Segment,
        entries: Sequence[int],
        ahead: Callable[[Sequence[int]], Distances],
    ) -> None:
        """Get ready for a segment (`WeightPolicies.begin`)."""
        self.policy.begin(entries, ahead)
        self.hooks.begin(segment.first, segment.mini_batches)

    @property
    def walk(self) -> VersionWalk:
        """The walk over the segment at hand."""
        return self.policy.own.walk

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
        run = ForwardRun(op, version, self.walk.latest, weights, part.real, part.size)
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
        forward_version = self.walk.forward_version(op)
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
                    op, difference, weights.version, self.walk.latest, weights.tensors, first
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
        return self.walk.latest

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
        keep_needed(self.weights, self.walk)
        if not steps:
            self._let_gradients_go()
        # Graphs that hold the parameters are to run backward on what they are then.
        with _unsafe_preserve_version_counter(tuple(self.updated)):
            self.hooks.before_update()
            self.updates.step(self.hooks.rate(self.walk.latest), steps=steps)
            self.account.note(boundary_bytes)
            self.hooks.after_update()
            self._let_gradients_go()
            return advance(self.weights, self.walk)

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
            self.weights.drop(self.walk.needed())
        if self.ties.used:
            self.ties.drop()

    def _let_gradients_go(self) -> None:
        for p in self.updated:
            # As `zero_grad` does, which takes its time to tell torch's profiler of it.
            p.grad = None
        self.account.gradients_gone(self.graphs.sums_bytes)

    # Its state ---------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the model's own names, tied ones under each.

        Without those that another stage of the worker updates, and has.
        """
        elsewhere = self.names_elsewhere
        state = {n: t for n, t in state_of(self.piece.module).items() if n not in elsewhere}
        first = {self.names.get(name, name): tensor for name, tensor in state.items()}
        for name, known_as in self.names.items():
            if known_as in first:
                state.setdefault(name, first[known_as])
        return state

    @property
    def names_elsewhere(self) -> frozenset[str]:
        """Of parameters that another stage of the worker owns, as the piece calls them."""
        if not self._borrowed:
            return frozenset()
        named = self.piece.module.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in named if id(p) in self._borrowed)
