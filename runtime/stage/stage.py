"""One stage: forward, backward and update of its piece of the model. No messages here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...planner.systems.operations import Op
from ...planner.systems.prediction import Distances
from ...planner.systems.versions import VersionWalk
from ...profiles.autograd.boundary import Inlet, give_gradients_own_memory, storage_key
from ...profiles.autograd.optimizer_step import fuse
from ...profiles.autograd.split_backward import SplitBackward
from ...profiles.errors import RunError
from ...profiles.tasks.hooks import call_hook, check_depends
from ...profiles.tasks.task import Loss
from ...profiles.tracing.pieces import decode, encode
from ..prepare.data import DIVIDE, DROP, MicroBatchPart, real_part
from ..prepare.devices import CPU, dense_bytes, forward_context, move, put
from ..prepare.messages import check_agreed, missing_gradients
from ..prepare.prepare import Prepared
from ..prepare.tied_parameters import state_of
from ..prepare.workers import Replica
from ..weights.in_place import unchanged
from ..weights.policy import DECAYS, WeightPolicies, WeightPolicy
from ..weights.prediction import Predictor
from ..weights.staleness import Staleness, WeightDistances
from ..weights.stash import WeightVersions, give_own_memory
from ..weights.tied_weights import StageTies, TiedWeights
from .batch_norm import DeferredBatchNorm
from .compiled import forward_of
from .delays import Rescheduling, delay_of
from .handed_over import HandedOver
from .memory import MemoryAccount
from .micro_batch import InputShapes, MicroBatch, collect, input_shapes, shaped_as_profiled
from .optimizer import make_scheduler, optimizer_of, rules_of, step_optimizer, system_optimizer
from .recompute import Recomputation, Remade, SelectedLayers, running


class Stage:
    """A stage's piece, its weight versions, its optimizer, and what it has in flight.

    Attributes:
        names: for each name of a parameter, the first that the whole model has for it.
        compute: the piece's forward in training, which may be compiled.
        walk: which version each operation uses; the runtime follows it with real weights.
        account: what the stage holds, and its peak.
        staleness: what its backwards saw since the segment began.
        updated: the parameters that its updates step: of those that several stages of the worker
            use, the ones that this stage updates.
        ties: those of several stages.
        predictor: of systems that predict weights, where there is something to train.
        rules: of systems that correct weights, where updates come between forward and backward, and
            of those from outside.
        kept_outputs: outputs of the last forward whose memory is kept for the backward anyway.
        handed_over, evaluation_handed_over: inputs from other stages of the worker.
        lr: learning rate of the last update's first parameter group; None: nothing to train.
    """

    def __init__(self, prepared: Prepared, replica: Replica, device: torch.device = CPU) -> None:
        """
        Args:
            device: what everything of the stage is moved to.
        """
        plan, settings, model = prepared.plan, prepared.settings, prepared.model
        stage = model.stages[replica.stage]
        self.task = prepared.task
        self.variant = prepared.pipeline.variant
        self.micro_batches = plan.micro_batches
        self.share = prepared.distribution.shares[replica.number]
        planned = plan.stages[replica.stage]
        self.recomputes = bool(planned.recompute)
        self.names = model.names
        self.loss = model.loss
        self.autocast = model.autocast
        self.device = device
        self.piece = stage.piece
        self.specs = stage.specs
        self.varies = prepared.varies
        self._as_profiled = partial(shaped_as_profiled, prepared)
        self.module = stage.piece.module
        self.evaluated = stage.evaluation_piece
        # Before anything looks at the parameters, which moving may replace.
        move(stage.modules, device)
        self.modes = model.modes
        self.modes.set(self.module, training=True)
        self.number = s = replica.stage
        data = set(stage.piece.inputs) - stage.specs.keys()
        self._selected = (
            SelectedLayers(stage.piece, planned.recomputed, data, device)
            if planned.recomputed
            else None
        )
        compute = self._selected.module if self._selected else self.module
        self.compute = forward_of(prepared, s, compute)
        self._borrowed = model.owned_elsewhere(s)
        named = model.owned_by(s)
        self.updated = [p for _, p in named if p.requires_grad]
        if not self.variant.flushes:
            give_own_memory(self.updated)
        # Where losses have weights of their own, each mini-batch's gradients are divided by its.
        together = 1 if model.loss.weighted else plan.update_every
        owned = model.ties.owned_by(s)
        ties = [TiedWeights(one.stages, one.of(self.module), together) for one in owned]
        self.ties = StageTies(s, ties)
        tied = self.ties.parameters
        parameters = [p for p in self.updated if id(p) not in set(map(id, tied))]
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self.weights = WeightVersions(parameters, frozen)
        made = optimizer_of(prepared, s)
        self.optimizer = None if made is None else system_optimizer(prepared, s, made)
        self.scheduler = make_scheduler(self.task, settings, self.optimizer, prepared.length)
        self.lr: float | None = None
        self._fused = False
        self.rules = None if self.optimizer is None else rules_of(prepared, s, self.updated)
        more = None if self.rules is None else self.rules.rate
        self._rescheduling = Rescheduling(delay_of(plan, s), settings.lr_rescheduling, more)
        self.predictor = (
            Predictor(
                self.variant.prediction,
                self.optimizer,
                lambda: self._rescheduling.share(self.weights.latest),
            )
            if self.variant.prediction and self.optimizer is not None
            else None
        )
        self._decay = partial(DECAYS[settings.decay], settings.decay_rate)
        self.policy = WeightPolicies(
            WeightPolicy(self.variant, self.weights, self.predictor, self._decay, self.rules)
        )
        self._use(self.ties.updated, self)
        self.account = MemoryAccount(parameters, [*self.module.buffers(), *model.frozen_on(s)])
        self.staleness = Staleness()
        self.kept_outputs: set[str] = set()
        self.handed_over = HandedOver()
        self.evaluation_handed_over = HandedOver()
        self._buffers = {storage_key(buffer) for buffer in self.module.buffers()}
        self._distances = WeightDistances([*parameters, *tied]) if settings.distances else None
        whole = self.recomputes and self._selected is None
        self._recomputation = Recomputation(self.module, device) if whole else None
        self._batch_norm = DeferredBatchNorm(self.module) if settings.deferred_batch_norm else None
        self._flying: dict[tuple[int, int], MicroBatch] = {}
        # Per micro-batch whose weight part is still to come: that, and bytes saved for it.
        self._postponed: dict[tuple[int, int], tuple[SplitBackward, int]] = {}
        self._kept_bytes = 0
        # Where no update comes between a forward and its backward, autograd may keep the weights
        # themselves. Then hooks only count, once for each shape of a micro-batch.
        self._settled = self.variant.flushes and not self.recomputes and self.autocast is None
        self._saved_by_shape: dict[InputShapes, tuple[int, set[str]]] = {}

    def _use(self, ties: Sequence[TiedWeights], owner: Stage) -> None:
        """Run operations on these parameters too. `owner`: the stage that updates them."""
        for tied in ties:
            policy = WeightPolicy(
                self.variant, tied.versions, owner.predictor, self._decay, owner.rules
            )
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
            *(other.held_alone for other in others.values()),
            *(tied.held for stage in every for tied in stage.ties.updated),
        ]

    def begin(self, entries: Sequence[int], ahead: Callable[[Sequence[int]], Distances]) -> None:
        """Get ready for a segment.

        Args:
            entries: per micro-batch, the version of stage 0 that it uses (`VersionWalk`).
            ahead: what predictions look ahead, of parameters of these stages; none: of its own.
        """

        def walk(latest: int) -> VersionWalk:
            return VersionWalk(
                self.variant,
                self.micro_batches,
                entries,
                recompute=self.recomputes,
                latest=latest,
            )

        self.policy.own.walk = walk(self.weights.latest)
        self.policy.own.distances = ahead(())
        for tied in self.ties.used:
            tied.begin(self.number, walk(tied.versions.latest))
            tied.policies[self.number].distances = ahead(tied.stages)
        self.staleness = Staleness()

    @property
    def walk(self) -> VersionWalk:
        """The walk over the segment at hand."""
        return self.policy.own.walk

    # Operations --------------------------------------------------------------------------

    def forward(
        self,
        op: Op,
        values: Mapping[str, Tensor],
        target: Any,
        part: MicroBatchPart,
        boundary_bytes: int = 0,
    ) -> tuple[int, dict[str, Tensor], Loss | None]:
        """Forward of one micro-batch.

        Args:
            values: the piece's inputs by name: received tensors and the model's own inputs.
            target: for the loss, on the stage that makes the model's result.
            part: what the micro-batch has of its mini-batch; its loss counts by it.
            boundary_bytes: what the channels hold now.

        Returns:
            The version used; the outputs to send, by name; the loss of what is real, detached.
        """
        assert op.micro_batch is not None
        version, tensors = self.policy.forward(op)
        if self._distances is not None:
            self._distances.forward(self._together(op), version, self.walk.latest, tensors)
        values = self.handed_over.safe(values)
        shapes = input_shapes(self.piece.inputs, values, self.specs) if self._settled else ()
        known = self._saved_by_shape.get(shapes) if self._settled else None
        # One of padding alone counts nothing.
        with nullcontext() if part.real else unchanged(self.module):
            if self._recomputation is None:
                with self._statistics(op, part):
                    hooks = known is None
                    micro, outputs, loss = self._compute(values, target, part, tensors, hooks=hooks)
            else:
                received = values.keys() & self.specs.keys()
                received -= self.handed_over.kept_elsewhere(received)
                inputs = self._recomputation.keep(values, received, target, part)
                with torch.no_grad(), self._statistics(op, part):
                    _, outputs, loss = self._compute(values, target, part, tensors)
                self._recomputation.kept(inputs)
                micro = MicroBatch(inputs.nbytes, inputs=inputs)
        for name, tensor in outputs.items():
            like = partial(self._as_profiled, values)
            check_agreed(self.specs[name], tensor, varies=self.varies, inputs_alike=like)
            micro.shapes[name] = tensor.shape
        if known is None:
            saved = self.weights.saved
            kept = {n for n, tensor in outputs.items() if storage_key(tensor) in saved}
            known = micro.saved_bytes, kept
            if self._settled:
                self._saved_by_shape[shapes] = known
        micro.saved_bytes, self.kept_outputs = known
        self._kept_bytes += micro.saved_bytes
        self._flying[op.mini_batch, op.micro_batch] = micro
        self._note(boundary_bytes, gradients_changed=False)
        self._drop()
        return version, outputs, None if loss is None else loss._replace(value=loss.value.detach())

    def backward(
        self, op: Op, grads: Mapping[str, Tensor], boundary_bytes: int = 0
    ) -> tuple[int, int, dict[str, Tensor]]:
        """Backward of one micro-batch, or of this replica's of a mini-batch in one pass.

        In systems that split it, what gives the gradients of received inputs alone.

        Args:
            grads: for each output that needs one, the sum over the stages that use it,
                ``[micro-batches of this backward, ...]``; there may be none (`missing_gradients`).

        Returns:
            The version used, and the one the forward used, the oldest where micro-batches differ;
            for each received input that needs one its gradient, ``[micro-batches of this backward,
            ...]``.
        """
        version = self.policy.take_backward(op)
        forward_version = self.walk.forward_version(op)
        mine = self.share.of(op)
        self.ties.take_up(op)
        micros = {i: self._take_back(op, i) for i in mine}
        gone = {name: missing_gradients(message) for name, message in grads.items()}
        fresh = [p for p in self.weights.every if p.grad is None]
        distance = None
        for weights in self.policy.backwards(op, mine):
            roots: list[Tensor | GradientEdge] = []
            root_grads: list[Tensor | None] = []
            for i in weights.micro_batches:
                k, micro = mine.index(i), micros[i]
                if micro.loss is not None:
                    roots.append(micro.loss)
                    root_grads.append(None)
                for name, edge in micro.outlets.items():
                    if name in grads and not gone[name][k]:
                        roots.append(edge)
                        root_grads.append(grads[name][k])
            same = self.variant.backward_weights == "forward" or weights.version == forward_version
            with self.weights.backward(weights.tensors, same=same):
                if self.variant.split_backward:
                    self._postpone(op, micros[mine[0]], roots, root_grads)
                elif roots:
                    torch.autograd.backward(roots, root_grads)  # type: ignore[arg-type]
            if distance is None:
                # Of the first micro-batch; others may have run forward on later weights.
                distance = self._distance(op, weights.version, weights.tensors)
        back = {
            name: collect(self.specs[name], list(micros.values()), self.device)
            for name in micros[mine[0]].inlets
        }
        messages = (*grads.values(), *back.values())
        give_gradients_own_memory(fresh, messages)
        self._note(boundary_bytes + sum(g.nbytes for g in messages))
        if not self.variant.split_backward:
            self._kept_bytes -= sum(micro.saved_bytes for micro in micros.values())
        self.ties.put_aside(op)
        self.staleness.note(version - forward_version, distance or 0.0)
        self.policy.finish(op)
        self._drop()
        if not self.variant.keeps_scratch:
            self.policy.drop_scratch()
        return version, forward_version, back

    def backward_weight(self, op: Op, boundary_bytes: int = 0) -> int:
        """The weight part of a micro-batch's backward. Returns the version used."""
        assert op.micro_batch is not None
        half, kept_bytes = self._postponed.pop((op.mini_batch, op.micro_batch))
        version = self.walk.latest
        self.ties.take_up(op)
        with self.weights.backward(None):
            half.weights()
        self._note(boundary_bytes)
        self.ties.put_aside(op)
        self._kept_bytes -= kept_bytes
        return version

    def made_shape(self, op: Op, name: str) -> torch.Size:
        """Of an output that this replica made in the micro-batches of a backward to come."""
        return self._flying[op.mini_batch, self.share.of(op)[0]].shapes[name]

    def skip(self, op: Op) -> None:
        """Another replica runs this forward or backward: only versions go on here."""
        self.policy.skip(op)
        self._drop()

    def update(self, mini_batch: int, boundary_bytes: int = 0, *, steps: bool = True) -> int:
        """Optimizer step after a mini-batch's backward. The scheduler's comes then.

        Args:
            steps: the weights change; else the next version is the same as this one.

        Returns the new version; the old one is copied if it is needed.
        """
        if self._batch_norm is not None:
            self._batch_norm.settle(mini_batch)
        needed = self.walk.needed()
        if self._distances is not None:
            self._distances.before_update(self.walk.latest)
        if self.walk.latest in needed:
            self.weights.keep_latest()
        self.ties.before_update()
        if self.predictor is not None and steps:
            self.predictor.before_step()
        if self.rules is not None:
            self.rules.before_update()
        if self.optimizer is not None:
            with self._rescheduling.at(self.walk.latest, self.optimizer):
                lr = self.optimizer.param_groups[0].get("lr")
                self.lr = None if lr is None else float(lr)
                if steps:
                    self._fused = self._fused or fuse(self.optimizer)
                    step_optimizer(self.optimizer)
        if self.rules is not None:
            self.rules.after_update()
        self._note(boundary_bytes)
        for p in self.updated:
            # As `zero_grad` does, which takes its time to tell torch's profiler of it.
            p.grad = None
        self.account.gradients_gone()
        version = self.walk.update()
        self.weights.advance(needed)
        self.ties.after_update()
        return version

    def evaluate(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Forward without gradients in evaluation mode: outputs by name, and the result."""
        assert self.evaluated is not None
        values, module = self.evaluation_handed_over.safe(values), self.evaluated.module
        self.modes.set(module, training=False)
        try:
            with torch.no_grad(), forward_context(self.autocast, self.device.type):
                arguments = [
                    decode(values[name], self.specs[name].kind)
                    if name in self.specs
                    else values[name]
                    for name in self.piece.inputs
                ]
                self.evaluation_handed_over.watch(self.piece.inputs, arguments)
                out = module(*arguments)
                self.evaluation_handed_over.check()
        finally:
            self.modes.set(self.module, training=True)
        return self._outputs(out), out[-1] if self.piece.has_result else None

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the model's own names, tied ones under each.

        Without those that another stage of the worker updates, and has.
        """
        elsewhere = self.names_elsewhere
        state = {n: t for n, t in state_of(self.module).items() if n not in elsewhere}
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
        named = self.module.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in named if id(p) in self._borrowed)

    # Steps of an operation ---------------------------------------------------------------

    def _compute(
        self,
        values: Mapping[str, Tensor],
        target: Any,
        part: MicroBatchPart,
        tensors: list[Tensor] | None,
        *,
        hooks: bool = True,
    ) -> tuple[MicroBatch, dict[str, Tensor], Loss | None]:
        """The piece's forward on these weights: its graph, its outputs by name, the loss."""
        remade = Remade(self._selected, self.lasts) if self._selected else None
        micro = MicroBatch(remade=remade)
        precision = forward_context(self.autocast, self.device.type)
        weights = self.weights.forward(tensors, hooks=hooks, substitutes=remade)
        with weights, precision, running(remade):
            arguments = [self._admit(name, values, micro) for name in self.piece.inputs]
            watched = self.handed_over.watch(self.piece.inputs, arguments)
            out = self.compute(*arguments)
            del arguments
            loss = self._loss(out[-1], target, part) if self.piece.has_result else None
            if loss is not None:
                micro.loss = loss.value if self.loss.weighted else loss.value * part.weight
            outputs = self._outputs(out)
            for name, tensor in outputs.items():
                if tensor.requires_grad:
                    micro.outlets[name] = get_gradient_edge(tensor)
                # A parameter has these weights' memory here alone.
                outputs[name] = tensor.detach()
        self.handed_over.check()
        if remade is not None:
            remade.finish()
            self.weights.saved |= remade.kept_bytes
        # Buffers are there anyway.
        elsewhere = self.handed_over.storages_kept_elsewhere(watched) | self._buffers
        saved = self.weights.saved.items()
        micro.saved_bytes = sum(nbytes for key, nbytes in saved if key not in elsewhere)
        return micro, outputs, loss

    def _drop(self) -> None:
        """Let go of weight versions that no operation needs any more."""
        self.weights.drop(self.walk.needed())
        self.ties.drop()

    def _outputs(self, out: Sequence[Any]) -> dict[str, Tensor]:
        """What the piece gave, by name, as messages have it. Numbers become tensors."""
        made = zip(self.piece.outputs, out, strict=False)
        return {name: put(encode(value, name), self.device) for name, value in made}

    def _take_back(self, op: Op, micro_batch: int) -> MicroBatch:
        """A micro-batch ready for its backward: recomputed where it has to be."""
        micro = self._flying.pop((op.mini_batch, micro_batch))
        if not self.recomputes:
            return micro
        tensors = self.policy.recompute(op, micro_batch)
        if micro.remade is not None:
            precision = forward_context(self.autocast, self.device.type)
            norms = self._batch_norm
            statistics = nullcontext() if norms is None else norms.recomputation()
            weights = self.weights.forward(tensors, substitutes=micro.remade)
            with weights, precision, statistics:
                rebuilt_bytes = micro.remade.recompute()
            micro.saved_bytes += rebuilt_bytes
            self._kept_bytes += rebuilt_bytes
            return micro
        assert self._recomputation is not None
        assert micro.inputs is not None
        found = micro.inputs
        with self._recomputation.as_in_first_run(found):
            rebuilt, _, _ = self._compute(found.values, found.target, found.part, tensors)
        # What it was made from stays until the backward is done, and counts besides.
        rebuilt.saved_bytes += micro.saved_bytes
        self._kept_bytes += rebuilt.saved_bytes - micro.saved_bytes
        return rebuilt

    def _postpone(
        self,
        op: Op,
        micro: MicroBatch,
        roots: Sequence[Tensor | GradientEdge],
        root_grads: Sequence[Tensor | None],
    ) -> None:
        """Run the first part of a backward; the graph is kept for the second."""
        assert op.micro_batch is not None
        edges, grads = [], []
        for root, grad in zip(roots, root_grads, strict=True):
            if isinstance(root, Tensor):
                edges.append(get_gradient_edge(root))
                grads.append(torch.ones_like(root))
            elif grad is not None:
                edges.append(root)
                grads.append(grad)
        inlets = micro.inlets.values()
        half = SplitBackward(edges, grads, inlets, self.weights.every)
        half.inputs()
        self._kept_bytes += half.held_bytes
        kept_bytes = micro.saved_bytes + half.held_bytes
        self._postponed[op.mini_batch, op.micro_batch] = half, kept_bytes

    def _statistics(self, op: Op, part: MicroBatchPart) -> AbstractContextManager[None]:
        """The context of a forward's first run: batch norms note their statistics."""
        if self._batch_norm is None:
            return nullcontext()
        return self._batch_norm.forward(op.mini_batch, part.real, part.size)

    def _distance(self, op: Op, version: int, tensors: list[Tensor] | None) -> SupportsFloat:
        if self._distances is None:
            return 0.0
        # Those that were made for the operation, if they aren't any version's.
        made = tensors if version == self.walk.latest else None
        return self._distances.backward(self._together(op), version, made)

    def _together(self, op: Op) -> tuple[int, int | None]:
        """What has one backward, by its mini-batch, and its micro-batch where that has one."""
        by_micro_batch = self.variant.backward_unit == "micro"
        return op.mini_batch, op.micro_batch if by_micro_batch else None

    def _admit(self, name: str, values: Mapping[str, Tensor], micro: MicroBatch) -> Any:
        tensor = values[name]
        spec = self.specs.get(name)
        if spec is None:
            return tensor
        if spec.needs_grad and torch.is_grad_enabled():
            micro.inlets[name] = inlet = Inlet()
            micro.shapes[name] = tensor.shape
            return inlet.admit(tensor)
        return decode(tensor, spec.kind)

    def _loss(self, result: Any, target: Any, part: MicroBatchPart) -> Loss | None:
        if not part.real:
            return None
        if part.padded:
            result = real_part(result, part.real, part.size, f"{DROP}, or {DIVIDE}")
        loss = self.loss.read(call_hook("loss", self.task.loss, result, target, kind=RunError))
        check_depends(loss, result)
        return loss

    def lasts(self, output: Tensor) -> bool:
        """Whether an output is a parameter's or a buffer's memory, which is going to change."""
        return storage_key(output) in self._buffers or self.weights.has(output)

    def held_alone(self) -> tuple[int, ...]:
        """Bytes that this stage holds between two operations, messages left out, by kind."""
        return self.account.own(self._versions_bytes(), self._kept_bytes)

    def held(self, boundary_bytes: int) -> tuple[int, ...]:
        """Bytes that all stages of the worker hold between two operations, by kind
        (`recording.MEMORY_KINDS`).

        `boundary_bytes`: what the channels hold.
        """
        return self.account.since(self._versions_bytes(), self._kept_bytes, boundary_bytes)

    def _versions_bytes(self) -> int:
        kept = self.predictor.kept_bytes if self.predictor is not None else 0
        if self.rules is not None:
            kept += sum(dense_bytes(t) for by in self.rules.kept.values() for t in by.values())
        return self.weights.older_bytes + kept

    def _note(self, boundary_bytes: int, *, gradients_changed: bool = True) -> None:
        self.staleness.versions_held = max(self.staleness.versions_held, self.weights.held)
        self.account.note(
            versions_held=self.weights.held,
            versions_bytes=self._versions_bytes(),
            activations_bytes=self._kept_bytes,
            boundary_bytes=boundary_bytes,
            optimizer=self.optimizer,
            gradients_changed=gradients_changed,
        )
