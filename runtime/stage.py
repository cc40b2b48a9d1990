"""One stage: forward, backward and update of its piece of the model. No messages here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..planner.operations import Op
from ..planner.variants import Variant
from ..planner.versions import VersionWalk
from ..profiles.boundary import Inlet
from ..profiles.errors import RunError
from ..profiles.saved import storage_key
from ..profiles.task import Task
from ..profiles.tracing.pieces import Piece, decode, encode
from ..profiles.tracing.shapes import ValueSpec
from .accounting import MemoryAccount
from .batch_norm import DeferredBatchNorm
from .clipping import Clipping
from .data import Part
from .optimizers import make_optimizer
from .padding import real_part
from .precision import forward_context
from .schedules import make_scheduler
from .settings import RunSettings
from .weights import WeightVersions


@dataclass
class _MicroBatch:
    """A micro-batch between its forward and its backward."""

    saved_bytes: int
    inlets: dict[str, Inlet] = field(default_factory=dict)
    outlets: dict[str, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None


class Stage:
    """A stage's piece, its weight versions, its optimizer, and what it has in flight.

    Attributes:
        walk: which version each operation uses; the runtime follows it with real weights.
        account: what the stage holds, and its peak.
        differences: how often each version difference was seen.
        kept_outputs: outputs of the last forward whose memory is kept for the backward anyway.
        clipping: what clips gradients before an update; None: nothing does.
        lr: learning rate of the last update's first parameter group; None: nothing to train.
    """

    def __init__(
        self,
        piece: Piece,
        evaluation_module: nn.Module,
        specs: Mapping[str, ValueSpec],
        variant: Variant,
        micro_batches: int,
        task: Task,
        settings: RunSettings,
        updates: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            updates: optimizer steps in the whole run.
            autocast: dtype of torch.autocast for the forwards; None: off.
        """
        self.autocast = autocast
        self.piece = piece
        self.specs = specs
        self.micro_batches = micro_batches
        self.task = task
        self.module = piece.module
        # Shares its parameters and leaf modules with `module`, traced in evaluation mode.
        self.evaluation_module = evaluation_module
        self.module.train()
        parameters = list(self.module.parameters())
        self.weights = WeightVersions(parameters)
        self.walk = VersionWalk(variant, micro_batches)
        self.optimizer = make_optimizer(task, settings, self.module.named_parameters())
        self.batch_norm = DeferredBatchNorm(self.module) if settings.deferred_batch_norm else None
        self.scheduler = make_scheduler(task, settings, self.optimizer, updates)
        self.clipping: Clipping | None = None
        self.lr: float | None = None
        self.account = MemoryAccount(parameters, list(self.module.buffers()))
        self.differences: dict[int, int] = {}
        self.kept_outputs: set[str] = set()
        self._flying: dict[tuple[int, int], _MicroBatch] = {}
        self._kept_bytes = 0

    # Operations --------------------------------------------------------------------------

    def forward(
        self,
        op: Op,
        values: Mapping[str, Tensor],
        target: Any,
        part: Part,
        boundary_bytes: int = 0,
    ) -> tuple[int, dict[str, Tensor], Tensor | None]:
        """Forward of one micro-batch.

        Args:
            values: the piece's inputs by name: received tensors and the model's own inputs.
            target: for the loss, on the stage that makes the model's result.
            part: what the micro-batch has of its mini-batch.
            boundary_bytes: what the channels hold now.

        Returns:
            The version used; the outputs to send, by name; the loss (mean over the
            micro-batch's own samples, detached) on the last stage, where there are any.
        """
        assert op.micro_batch is not None
        version = self.walk.forward(op)
        micro = _MicroBatch(0)
        with (
            self.weights.forward(version),
            forward_context(self.autocast),
            self._statistics(op.mini_batch, part),
        ):
            out = self.module(*[self._admit(name, values, micro) for name in self.piece.inputs])
            loss = self._loss(out[-1], target, part) if self.piece.has_result else None
        if loss is not None:
            micro.loss = loss * part.share
        outputs = {}
        self.kept_outputs = set()
        for name, value in zip(self.piece.outputs, out, strict=False):
            tensor = encode(value, name)
            self._check_spec(name, tensor)
            if storage_key(tensor) in self.weights.saved:
                self.kept_outputs.add(name)
            if tensor.requires_grad:
                micro.outlets[name] = get_gradient_edge(tensor)
            outputs[name] = tensor.detach()
        micro.saved_bytes = sum(self.weights.saved.values())
        self._kept_bytes += micro.saved_bytes
        self._flying[op.mini_batch, op.micro_batch] = micro
        self.weights.drop(self.walk.needed())
        self._note(boundary_bytes, gradients_changed=False)
        return version, outputs, None if loss is None else loss.detach()

    def backward(
        self, op: Op, grads: Mapping[str, Tensor], boundary_bytes: int = 0
    ) -> tuple[int, int, dict[str, Tensor]]:
        """Backward of one micro-batch, or of a mini-batch's micro-batches in one pass.

        Args:
            grads: for each output that needs one, the gradients summed over the stages that
                use it, ``[micro-batches of this backward, ...]``.

        Returns:
            The version used; the one the forward used; for each received input that needs
            one its gradient, ``[micro-batches of this backward, ...]``.
        """
        version = self.walk.backward(op)
        forward_version = self.walk.forward_version(op)
        numbers = range(self.micro_batches) if op.micro_batch is None else [op.micro_batch]
        micros = [self._flying.pop((op.mini_batch, i)) for i in numbers]
        roots: list[Tensor | GradientEdge] = []
        root_grads: list[Tensor | None] = []
        for k, micro in enumerate(micros):
            if micro.loss is not None:
                roots.append(micro.loss)
                root_grads.append(None)
            for name, edge in micro.outlets.items():
                if name in grads:
                    roots.append(edge)
                    root_grads.append(grads[name][k])
        if roots:
            with self.weights.backward(version):
                torch.autograd.backward(roots, root_grads)  # type: ignore[arg-type]
        back = {
            name: self._collect(name, [micro.inlets[name] for micro in micros])
            for name in micros[0].inlets
        }
        messages = (*grads.values(), *back.values())
        self._note(boundary_bytes + sum(g.numel() * g.element_size() for g in messages))
        self._kept_bytes -= sum(micro.saved_bytes for micro in micros)
        self.walk.finish(op)
        self.weights.drop(self.walk.needed())
        difference = version - forward_version
        self.differences[difference] = self.differences.get(difference, 0) + 1
        return version, forward_version, back

    def update(self, mini_batch: int, boundary_bytes: int = 0) -> int:
        """Optimizer step after a mini-batch's backward.

        Returns the new version; the old one is copied if it is needed.
        """
        if self.batch_norm is not None:
            self.batch_norm.settle(mini_batch)
        if self.clipping is not None:
            self.clipping()
        needed = self.walk.needed()
        if self.walk.latest in needed:
            self.weights.keep_latest()
        if self.optimizer is not None:
            self.lr = float(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._note(boundary_bytes)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.account.gradients_gone()
        version = self.walk.update()
        self.weights.advance(needed)
        return version

    def evaluate(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Forward without gradients in evaluation mode: outputs by name, and the result."""
        self.evaluation_module.eval()
        try:
            with torch.no_grad(), forward_context(self.autocast):
                arguments = [
                    decode(values[name], self.specs[name].kind)
                    if name in self.specs
                    else values[name]
                    for name in self.piece.inputs
                ]
                out = self.evaluation_module(*arguments)
        finally:
            self.module.train()
        outputs = {
            name: encode(value, name) for name, value in zip(self.piece.outputs, out, strict=False)
        }
        return outputs, out[-1] if self.piece.has_result else None

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the model's own names."""
        return dict(self.module.state_dict())

    # Parts -------------------------------------------------------------------------------

    def _statistics(self, mini_batch: int, part: Part) -> AbstractContextManager[None]:
        if self.batch_norm is None:
            return nullcontext()
        return self.batch_norm.forward(mini_batch, part.real, part.size)

    def _admit(self, name: str, values: Mapping[str, Tensor], micro: _MicroBatch) -> Any:
        tensor = values[name]
        spec = self.specs.get(name)
        if spec is None:
            return tensor
        if spec.needs_grad:
            micro.inlets[name] = inlet = Inlet()
            return inlet.admit(tensor)
        return decode(tensor, spec.kind)

    def _loss(self, result: Any, target: Any, part: Part) -> Tensor | None:
        if not part.real:
            return None
        if part.padded:
            result = real_part(result, part.real, part.size, "leave it out: --ragged drop")
        loss = self.task.loss(result, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise RunError("the task's loss must give one number: a mean over the samples")
        return loss.reshape(())

    def _check_spec(self, name: str, tensor: Tensor) -> None:
        spec = self.specs[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise RunError(
                f"{name!r} has shape {list(tensor.shape)} of {tensor.dtype}; agreed was "
                f"{list(spec.shape)} of {spec.dtype}. Shapes must not change during a run"
            )

    def _collect(self, name: str, inlets: Sequence[Inlet]) -> Tensor:
        spec = self.specs[name]
        if len(inlets) == 1 and inlets[0].grad is not None:
            return inlets[0].grad.unsqueeze(0)
        gathered = torch.zeros((len(inlets), *spec.shape), dtype=spec.dtype)
        for slot, inlet in zip(gathered, inlets, strict=True):
            # A tensor that the loss doesn't depend on has no gradient: zero.
            if inlet.grad is not None:
                slot.copy_(inlet.grad)
        return gathered

    def _note(self, boundary_bytes: int, *, gradients_changed: bool = True) -> None:
        self.account.note(
            versions_held=self.weights.held,
            versions_bytes=self.weights.older_bytes,
            activations_bytes=self._kept_bytes,
            boundary_bytes=boundary_bytes,
            optimizer=self.optimizer,
            gradients_changed=gradients_changed,
        )
