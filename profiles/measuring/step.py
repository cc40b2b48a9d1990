"""A training step of a model layer by layer, each layer in an autograd graph of its own.

All forwards come first and then all backwards, as in a real step: so caches and the allocator
are as they will be in training, and every layer gets the gradient it really gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..autograd.boundary import Inlet
from ..target import Target
from ..tasks.task import root_of
from ..tracing.pieces import Piece, tensors_in
from .capture import Capture

Phase = Literal["F", "B", "I", "W"]
"""Forward, backward, the part of a backward that gives the gradients of inputs alone, the rest."""


def roots_of(target: Target, result: Any, expected: Any) -> list[Tensor]:
    """Where a backward begins: at the loss of a result; without one, at each of the result's
    tensors that need a gradient."""
    if target.task is not None:
        return [root_of(target.task.loss(result, expected))]
    leaves = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


Partly = Callable[[int, Sequence[GradientEdge], Sequence[Tensor], Sequence[Inlet]], None]
"""Layer, where its gradients enter, those, and its inputs."""


class Probe:
    """Is told when a layer's forward or backward is about to run, and when it has run.

    Layers are counted from 0; the loss comes after the last.
    """

    def before(self, k: int, phase: Phase, arriving: Sequence[Tensor]) -> None:
        """`arriving`: for a backward, the gradients of the layer's outputs."""

    def after(self, k: int, phase: Phase) -> None:
        """It has run."""

    def keep(self, values: Iterable[Any]) -> None:
        """Layers are given these from outside of them."""


class PiecewiseStep:
    """A step in pieces, to be run once."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        result: Piece,
        inputs: dict[str, Any],
        roots: Callable[[Any], list[Tensor]],
        has_loss: bool,
    ) -> None:
        """
        Args:
            pieces: one for each layer.
            result: the piece behind them that makes the model's result.
            inputs: of the model, by name; they are let go after their last use.
            roots: where the backward of a result begins (`roots_of`); gradients of ones enter
                there.
            has_loss: they are a loss, which is a part of the step.
        """
        self.pieces, self.result, self.roots, self.has_loss = pieces, result, roots, has_loss
        self.values = inputs
        self.needs_grad = {n: t.requires_grad for n, t in inputs.items()}
        self.graphs: list[tuple[dict[str, GradientEdge], dict[str, Inlet]]] = []
        """Of each layer, where gradients enter and where they leave."""
        self.gradients: dict[str, list[Tensor]] = {}
        self.last_use: dict[str, int] = {}
        for k, piece in enumerate((*pieces, result)):
            self.last_use.update(dict.fromkeys(piece.inputs, k))

    def run(
        self, context: AbstractContextManager[Any], probe: Probe, partly: Partly | None = None
    ) -> None:
        """Run it; gradients of the parameters accumulate.

        Args:
            context: what forwards run under, such as autocast.
            partly: runs a layer's backward to its inputs alone, instead of the whole of it.
        """
        probe.keep(self.values.values())
        with context:
            for k in range(len(self.pieces)):
                self._forward(k, probe)
            roots = self._result(probe)
        self._first_backward(roots, probe)
        for k in reversed(range(len(self.pieces))):
            self._backward(k, probe, partly)

    def _admit(self, k: int, piece: Piece) -> tuple[dict[str, Inlet], list[Any]]:
        inlets: dict[str, Inlet] = {}
        arguments = []
        for name in piece.inputs:
            value = self.values[name]
            if self.last_use[name] == k:
                del self.values[name]
            if self.needs_grad.get(name):
                inlets[name] = Inlet()
                value = inlets[name].admit(value)
            arguments.append(value)
        return inlets, arguments

    def _forward(self, k: int, probe: Probe) -> None:
        piece = self.pieces[k]
        inlets, arguments = self._admit(k, piece)
        edges: dict[str, GradientEdge] = {}
        probe.before(k, "F", ())
        out = piece.module(*arguments)
        probe.after(k, "F")
        for name, value in zip(piece.outputs, out, strict=True):
            if isinstance(value, Tensor):
                self.needs_grad[name] = value.requires_grad
                if value.requires_grad:
                    edges[name] = get_gradient_edge(value)
                value = value.detach()
            if name in self.last_use:
                self.values[name] = value
        self.graphs.append((edges, inlets))

    def _result(self, probe: Probe) -> list[Tensor]:
        end = len(self.pieces)
        inlets, arguments = self._admit(end, self.result)
        self.graphs.append(({}, inlets))
        found = self.result.module(*arguments)[0]
        probe.keep([found])
        if self.has_loss:
            probe.before(end, "F", ())
        roots = self.roots(found)
        if self.has_loss:
            probe.after(end, "F")
        return roots

    def _first_backward(self, roots: list[Tensor], probe: Probe) -> None:
        end = len(self.pieces)
        if self.has_loss:
            probe.before(end, "B", ())
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        if self.has_loss:
            probe.after(end, "B")
        roots.clear()
        self._collect(self.graphs.pop()[1])

    def _backward(self, k: int, probe: Probe, partly: Partly | None) -> None:
        ends, inlets = self.graphs.pop()
        found = [(e, self.gradients.pop(n)) for n, e in ends.items() if n in self.gradients]
        if not found:
            return
        edges, arrived = [e for e, _ in found], [g for _, g in found]
        del found
        phase: Phase = "B" if partly is None else "I"
        if partly is not None and not inlets:
            return
        probe.before(k, phase, [gradient for parts in arrived for gradient in parts])
        # Those of one tensor's consumers add up; whoever made the tensor pays for it.
        gradients = [functools.reduce(torch.add, parts) for parts in arrived]
        arrived.clear()
        if partly is None:
            torch.autograd.backward(edges, gradients)
        else:
            partly(k, edges, gradients, list(inlets.values()))
        probe.after(k, phase)
        self._collect(inlets)

    def _collect(self, inlets: dict[str, Inlet]) -> None:
        """Gradients for the layers before."""
        for name, inlet in inlets.items():
            if inlet.grad is not None:
                self.gradients.setdefault(name, []).append(inlet.grad)
                inlet.grad = None


class CapturedStep(Probe):
    """A step's layers as CUDA graphs, in its sequence; they share memory: what they take where a
    run replays them.

    Layer by layer, operation by operation, a GPU waits for the host wherever kernels are short; in
    a run's graphs (`--graphs` of tp-run) it doesn't.

    As in a run, gradients are added to those that there are: somebody keeps these.
    """

    def __init__(self, on: Capture, step: Callable[[Probe], object]) -> None:
        """Runs the step as ever, and captures it. Raises what can't be captured raises."""
        self._on, self._pool = on, on.pool()
        self._graphs: list[tuple[int, Phase, torch.cuda.CUDAGraph]] = []
        self._kept: list[Any] = []
        with on.trying():
            step(Probe())
        # What autograd makes between layers belongs to the stream that is captured, too: no
        # backward may wait for another one.
        with on.aside(), ExitStack() as self._open:
            step(self)

    def __len__(self) -> int:
        return len(self._graphs)

    def before(self, k: int, phase: Phase, arriving: Sequence[Tensor]) -> None:
        """Capture begins."""
        graph = self._open.enter_context(self._on.of(self._pool))
        self._graphs.append((k, phase, graph))

    def after(self, k: int, phase: Phase) -> None:
        """It ends."""
        self._open.pop_all().close()

    def keep(self, values: Iterable[Any]) -> None:
        """Graphs read them wherever they are."""
        self._kept += values

    def replay(self, probe: Probe) -> None:
        """Compute the step; the probe is told as by the step itself, but what arrives."""
        for k, phase, graph in self._graphs:
            probe.before(k, phase, ())
            graph.replay()
            probe.after(k, phase)
