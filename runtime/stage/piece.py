"""A stage's piece of the model on its device: its forward in training, with what autograd keeps of
it, and in evaluation. Which weights it runs on is said from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...planner.systems.hooks import NOTHING
from ...profiles.autograd.boundary import Inlet, storage_key
from ...profiles.errors import RunError
from ...profiles.tasks.hooks import call_hook, check_depends
from ...profiles.tasks.task import Loss
from ...profiles.tracing.pieces import decode, encode
from ..prepare.data import DIVIDE, DROP, MicroBatchPart, real_part
from ..prepare.devices import forward_context, put
from ..prepare.messages import check_agreed
from ..prepare.prepared import Prepared
from ..weights.stash import WeightVersions
from .compiled import forward_of
from .messages import HandedOver
from .micro_batch import InputShapes, MicroBatch, PieceInputs, input_shapes, shaped_as_first
from .recompute import Recomputation, Remade, SelectedLayers, running

Forwarded = tuple[MicroBatch, dict[str, Tensor], Loss | None]
"""What a forward leaves for its backward, its outputs by name, detached, and its loss."""


class StagePiece:
    """A stage's piece of the model with its activations kept from forward to backward.

    Attributes:
        inputs, outputs: their names, in the sequence of the module's.
        has_result: its last output is the model's result, which the loss is of.
        specs: of tensors that go between stages, by name.
        module: in training mode, but while `evaluate` runs.
        compute: the module's forward in training, which may be compiled.
        evaluated: the piece of evaluations; None: the stage takes no part in them.
        handed_over, evaluation_handed_over: inputs from other stages of the worker.
        kept_outputs: outputs of the last forward whose memory is kept for the backward anyway.
    """

    def __init__(
        self, prepared: Prepared, s: int, device: torch.device, weights: WeightVersions
    ) -> None:
        """
        Args:
            device: where the modules of the stage are.
            weights: what forwards run on versions of.
        """
        own, model, variant = prepared.model.stages[s], prepared.model, prepared.pipeline.variant
        self.task, self.loss, self.autocast, self.device = (
            *(prepared.task, model.loss, model.autocast),
            device,
        )
        self.inputs, self.outputs = own.piece.inputs, own.piece.outputs
        self.has_result, self.specs = own.piece.has_result, own.specs
        self.module, self.evaluated = own.piece.module, own.evaluation_piece
        self.modes = model.modes
        self.modes.set(self.module, training=True)
        self.weights = weights
        self.compute = forward_of(prepared, s, self.module)
        self.handed_over, self.evaluation_handed_over = HandedOver(), HandedOver()
        self.kept_outputs: set[str] = set()
        self._check = partial(check_agreed, varies=prepared.varies)
        self._as_profiled = partial(shaped_as_first, prepared)
        self._buffers = {storage_key(buffer) for buffer in self.module.buffers()}
        # Where a backward runs on the parameters as they are, whether the forward's or later ones,
        # autograd may keep the parameters themselves. Then it is only counted what it keeps, once
        # for each shape of a micro-batch.
        recomputes = bool(prepared.plan.stages[s].recompute)
        in_place = variant.flushes or variant.backward_weights == "latest"
        counts_once = in_place and not recomputes and self.autocast is None
        self._saved: dict[InputShapes, tuple[int, set[str]]] | None = {} if counts_once else None

    def forward(self, given: PieceInputs) -> Forwarded:
        """Forward of one micro-batch in training."""
        values = self.handed_over.safe(given.values)
        if values is not given.values:
            given = given._replace(values=values)
        shapes: InputShapes = ()
        known = None
        if self._saved is not None:
            shapes = input_shapes(self.inputs, values, self.specs)
            known = self._saved.get(shapes)
        micro, outputs, loss = self._first(given, counts=known is None)
        for name, tensor in outputs.items():
            spec, micro.shapes[name] = self.specs[name], tensor.shape
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
                self._check(spec, tensor, inputs_alike=partial(self._as_profiled, values))
        if known is None:
            saved = self.weights.saved
            kept = {n for n, tensor in outputs.items() if storage_key(tensor) in saved}
            known = micro.saved_bytes, kept
            if self.weights.copies:
                self._saved = None
            elif self._saved is not None:
                self._saved[shapes] = known
        micro.saved_bytes, self.kept_outputs = known
        return micro, outputs, loss

    def ready(
        self,
        micro: MicroBatch,
        tensors: list[Tensor] | None,
        context: AbstractContextManager[Any],
    ) -> MicroBatch:
        """A micro-batch with all that its backward takes.

        Args:
            tensors: the weights that its forward ran on, for a second one.
            context: to run that in.
        """
        return micro

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In evaluation mode, if there is one."""
        if self.evaluated is not None:
            self.modes.set(self.evaluated.module, training=False)
        try:
            yield
        finally:
            self.modes.set(self.module, training=True)

    def evaluate(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Forward without gradients while `evaluating`: outputs by name, and the result."""
        assert self.evaluated is not None
        values = self.evaluation_handed_over.safe(values)
        with torch.no_grad(), forward_context(self.autocast, self.device.type):
            arguments = [self._admit(name, values, MicroBatch()) for name in self.inputs]
            self.evaluation_handed_over.watch(self.inputs, arguments)
            out = self.evaluated.module(*arguments)
            self.evaluation_handed_over.check()
        return self._named(out), out[-1] if self.has_result else None

    def lasts(self, output: Tensor) -> bool:
        """Whether an output is a parameter's or a buffer's memory, which is going to change."""
        key = storage_key(output)
        return key in self._buffers or self.weights.has(key)

    # Steps of a forward ----------------------------------------------------------------------

    def _first(self, given: PieceInputs, *, counts: bool) -> Forwarded:
        """The forward before the messages. `counts`: what it saves isn't known."""
        return self.run(given, counts=counts)

    def run(
        self, given: PieceInputs, *, counts: bool = True, remade: Remade | None = None
    ) -> Forwarded:
        """What a forward computes, and what autograd keeps of it.

        Args:
            counts: what it saves isn't known.
            remade: what some of its layers are computed again from.
        """
        values, target, part, tensors = given
        micro = MicroBatch(remade=remade)
        weights = self.weights.forward(tensors, counts=counts, substitutes=remade)
        selected = NOTHING if remade is None else running(remade)
        with weights, forward_context(self.autocast, self.device.type), selected:
            arguments = [self._admit(name, values, micro) for name in self.inputs]
            watched = self.handed_over.watch(self.inputs, arguments)
            out = self.compute(*arguments)
            del arguments
            loss = self._loss(out[-1], target, part) if self.has_result else None
            if loss is not None:
                micro.loss, micro.weight = loss.value, 1.0 if self.loss.weighted else part.weight
            outputs = self._named(out)
            for name, tensor in outputs.items():
                if tensor.requires_grad:
                    micro.outlets[name] = get_gradient_edge(tensor)
                # A parameter has these weights' memory here alone.
                outputs[name] = tensor.detach()
        self.handed_over.check()
        if remade is not None:
            remade.finish()
            self.weights.saved |= remade.kept_bytes
        if counts:
            # Buffers are there anyway.
            elsewhere = self.handed_over.storages_kept_elsewhere(watched) | self._buffers
            saved = self.weights.saved.items()
            micro.saved_bytes = sum([nbytes for key, nbytes in saved if key not in elsewhere])
        return micro, outputs, loss

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

    def _named(self, out: Sequence[Any]) -> dict[str, Tensor]:
        """What the piece gave, by name, as messages have it. Numbers become tensors."""
        made = zip(self.outputs, out, strict=False)
        return {name: put(encode(value, name), self.device) for name, value in made}


class RecomputedPiece(StagePiece):
    """A piece of which inputs alone are kept: its forward runs a second time before the
    backward."""

    def __init__(
        self, prepared: Prepared, s: int, device: torch.device, weights: WeightVersions
    ) -> None:
        super().__init__(prepared, s, device, weights)
        self._recomputation = Recomputation(self.module, device)

    def _first(self, given: PieceInputs, *, counts: bool) -> Forwarded:
        received = given.values.keys() & self.specs.keys()
        received -= self.handed_over.kept_elsewhere(received)
        inputs = self._recomputation.keep(given.values, received, given.target, given.part)
        with torch.no_grad():
            _, outputs, loss = self.run(given)
        self._recomputation.kept(inputs)
        return MicroBatch(inputs.nbytes, inputs=inputs), outputs, loss

    def ready(
        self,
        micro: MicroBatch,
        tensors: list[Tensor] | None,
        context: AbstractContextManager[Any],
    ) -> MicroBatch:
        """The micro-batch's second forward."""
        found = micro.inputs
        assert found is not None
        again = PieceInputs(found.values, found.target, found.part, tensors)
        with context, self._recomputation.as_in_first_run(found):
            rebuilt, _, _ = self.run(again)
        # What it was made from stays until the backward is done, and counts besides.
        rebuilt.saved_bytes += micro.saved_bytes
        return rebuilt


class PartlyRecomputedPiece(StagePiece):
    """A piece of which some layers run a second time before the backward."""

    def __init__(
        self, prepared: Prepared, s: int, device: torch.device, weights: WeightVersions
    ) -> None:
        super().__init__(prepared, s, device, weights)
        own, layers = prepared.model.stages[s], prepared.plan.stages[s].recomputed
        data = set(self.inputs) - self.specs.keys()
        self._selected = SelectedLayers(own.piece, layers, data, device)
        self.compute = forward_of(prepared, s, self._selected.module)

    def _first(self, given: PieceInputs, *, counts: bool) -> Forwarded:
        return self.run(given, remade=Remade(self._selected, self.lasts))

    def ready(
        self,
        micro: MicroBatch,
        tensors: list[Tensor] | None,
        context: AbstractContextManager[Any],
    ) -> MicroBatch:
        """The micro-batch with what those layers saved."""
        assert micro.remade is not None
        weights = self.weights.forward(tensors, substitutes=micro.remade)
        with weights, forward_context(self.autocast, self.device.type), context:
            micro.saved_bytes += micro.remade.recompute()
        return micro


def piece_of(
    prepared: Prepared, s: int, device: torch.device, weights: WeightVersions
) -> StagePiece:
    """A stage's piece, with recomputation as its plan says."""
    planned = prepared.plan.stages[s]
    kind = PartlyRecomputedPiece if planned.recomputed else StagePiece
    if planned.recompute and not planned.recomputed:
        kind = RecomputedPiece
    return kind(prepared, s, device, weights)
