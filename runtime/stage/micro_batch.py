"""A micro-batch of a stage between its forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...profiles.autograd.boundary import Inlet
from ...profiles.autograd.split_backward import SplitBackward
from ...profiles.errors import RunError, TimeprestError
from ...profiles.tasks.hooks import describe_error
from ...profiles.tasks.samples import first_batch, may_vary, read_batch, some_samples
from ...profiles.tracing.shapes import ValueSpec
from ..prepare.data import MicroBatchPart
from ..prepare.messages import BY_VALUES, PROFILE_AGAIN, mark_missing
from ..prepare.prepared import Prepared
from .recompute import ForwardInputs, Remade

InputShapes = tuple[tuple[str, torch.Size, tuple[int, ...]], ...]
"""Of what goes into a piece, by name; of a size or a number its value too, which others depend
on."""


class PieceInputs(NamedTuple):
    """What a stage's forward of one micro-batch takes: values, target, and what part of it is real.

    Attributes:
        values: the piece's inputs by name: received tensors and the model's own inputs.
        target: for the loss, on the stage that makes the model's result.
        part: what the micro-batch has of its mini-batch; its loss counts by it.
        weights: that it runs on (`WeightVersions.forward`); None: the parameters as they are.
    """

    values: Mapping[str, Tensor]
    target: Any
    part: MicroBatchPart
    weights: list[Tensor] | None


class OutputGradients(NamedTuple):
    """What a backward receives.

    Attributes:
        by_name: of outputs, ``[micro-batches of this backward, ...]``, the sum over the stages that
            use them.
        gone: of which of these micro-batches there is none (`missing_gradients`).
    """

    by_name: Mapping[str, Tensor]
    gone: Mapping[str, Sequence[bool]]


@dataclass(slots=True)
class MicroBatch:
    """What a stage keeps of a micro-batch until its backward: autograd's graph, inputs, outputs.

    Attributes:
        saved_bytes: in all.
        inlets: by name, where its graph takes tensors of other stages that need a gradient.
        outlets: by name, where it gives tensors that have one.
        shapes: of what it has from other stages and has made for others.
        loss, weight: its own, and the gradient that its backward begins with there.
        inputs: what its forward is recomputed from before the backward; None: it isn't.
        remade: what some of its layers are computed again from; None: none are.
        half: the weight part of its backward, where the other part has run.
    """

    saved_bytes: int = 0
    inlets: dict[str, Inlet] = field(default_factory=dict)
    outlets: dict[str, GradientEdge] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    loss: Tensor | None = None
    weight: float = 1.0
    inputs: ForwardInputs | None = None
    remade: Remade | None = None
    half: SplitBackward | None = None

    def roots(
        self, grads: OutputGradients, k: int
    ) -> Iterator[tuple[Tensor | GradientEdge, Tensor]]:
        """Where its backward begins, with the gradients there.

        Args:
            k: its place among the micro-batches of this backward.
        """
        if self.loss is not None:
            yield self.loss, torch.full_like(self.loss, self.weight)
        for name, edge in self.outlets.items():
            if name in grads.by_name and not grads.gone[name][k]:
                yield edge, grads.by_name[name][k]

    def split(
        self,
        roots: Iterable[tuple[Tensor | GradientEdge, Tensor]],
        parameters: Iterable[nn.Parameter],
    ) -> MicroBatch:
        """Run the first part of its backward. Returns what is kept for the second."""
        edges, grads = [], []
        for root, grad in roots:
            edges.append(get_gradient_edge(root) if isinstance(root, Tensor) else root)
            grads.append(grad)
        half = SplitBackward(edges, grads, self.inlets.values(), parameters)
        half.inputs()
        return MicroBatch(self.saved_bytes + half.held_bytes, half=half)


def input_shapes(
    names: Sequence[str], values: Mapping[str, Tensor], specs: Mapping[str, ValueSpec]
) -> InputShapes:
    """The inputs' shapes, and values of numbers, that decide how many bytes a forward keeps."""
    return tuple(
        [
            (
                name,
                values[name].shape,
                ()
                if name not in specs or specs[name].kind == "tensor"
                else tuple(values[name].reshape(-1).tolist()),
            )
            for name in names
        ]
    )


def shaped_as_first(
    prepared: Prepared, values: Mapping[str, Tensor], *, batch: bool = False
) -> bool:
    """Whether a stage's inputs from the data have the shapes of the first sample, or it has none.

    For an error's text: what can't be had now isn't as profiled.

    Args:
        batch: those of the first mini-batch, or they can't have others; nor if it can't be had.
    """
    inputs, names = prepared.model.inputs, prepared.model.arguments
    if not values.keys() & set(inputs):
        return True
    try:
        data = prepared.task.data("train")
        if batch and not may_vary(data):
            return True
        if batch:
            call, _ = read_batch(first_batch(data, "train", prepared.plan.mini_batch), names)
        else:
            call, _ = some_samples(data, "train", 1, names)
    except Exception:  # the user's data set
        return batch
    first = dict(zip(inputs, call.tensors, strict=False))
    return all(values[n].shape[1:] == first[n].shape[1:] for n in first.keys() & values.keys())


def advise(prepared: Prepared, values: Mapping[str, Tensor], error: Exception) -> None:
    """Raise RunError for an error of a forward whose inputs have other shapes than were profiled.

    Graphs may hold lengths, and then fail in words of torch's own before anything is compared.
    Those that take the shape as well go on.
    """
    if isinstance(error, TimeprestError) or prepared.varies:
        return
    if not shaped_as_first(prepared, values, batch=True):
        shapes = " and ".join(
            f"{list(value.shape[1:])} of {name!r}"
            for name, value in values.items()
            if name in prepared.model.inputs
        )
        raise RunError(
            f"{describe_error(error)}; samples have shapes {shapes}, others than those of the "
            f"first mini-batch. {PROFILE_AGAIN}"
        ) from error


def collect(spec: ValueSpec, micros: Sequence[MicroBatch], device: torch.device) -> Tensor:
    """The gradients of a received input, ``[micro-batches, ...]``, marked where there is none.

    Raises RunError where the micro-batches of a mini-batch differ in shape.
    """
    name = spec.name
    inlets, shapes = [m.inlets[name] for m in micros], [m.shapes[name] for m in micros]
    if len(inlets) == 1 and inlets[0].grad is not None:
        grad = inlets[0].grad
        # The graph, and the inlet with it, may stay.
        inlets[0].grad = None
        return grad.unsqueeze(0)
    if len(set(shapes)) > 1:
        raise RunError(
            f"{name!r} has shapes {' and '.join(sorted({str(list(s)) for s in shapes}))} in "
            f"micro-batches of one mini-batch, whose samples are shaped alike, so {BY_VALUES}"
        )
    gathered = torch.empty((len(inlets), *shapes[0]), dtype=spec.dtype, device=device)
    grads = [inlet.grad for inlet in inlets if inlet.grad is not None]
    if len(grads) == len(inlets):
        return torch.stack(grads, out=gathered)
    for slot, inlet in zip(gathered, inlets, strict=True):
        if inlet.grad is not None:
            slot.copy_(inlet.grad)
        else:
            # The loss doesn't depend on it.
            mark_missing(slot)
    return gathered
