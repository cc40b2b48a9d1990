"""A training step of a model layer by layer, each layer in an autograd graph of its own.

All forwards come first and then all backwards, as in a real step: so caches and the allocator
are as they will be in training, and every layer gets the gradient it really gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from ..autograd.boundary import Inlet
from ..target import Target
from ..tasks.task import root_of
from ..tracing.pieces import Piece
from .capture import Capture

Phase = Literal["F", "B", "I", "W"]
"""Forward, backward, the part of a backward that gives the gradients of inputs alone, the rest."""


def roots_of(target: Target, result: Any, expected: Any) -> list[Tensor]:
    """Where a backward begins: at the loss of a result; without one, at each of the result's
    tensors that need a gradient."""
    if target.task is not None:
        return [root_of(target.task.loss(result, expected))]
    leaves = [v for v in tree_leaves(result) if isinstance(v, Tensor) and v.requires_grad]
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


@dataclass(frozen=True)
class PiecewiseStep:
    """What a step in pieces is made of.

    Attributes:
        pieces: one for each layer.
        result: the piece behind them that makes the model's result.
        inputs: names of the model's inputs.
        roots: where the backward of a result begins (`roots_of`); gradients of ones enter there.
        has_loss: they are a loss, which is a part of the step.
        forward_context: what forwards run under, such as autocast.
    """

    pieces: Sequence[Piece]
    result: Piece
    inputs: tuple[str, ...]
    roots: Callable[[Any], list[Tensor]]
    has_loss: bool
    forward_context: Callable[[], AbstractContextManager[Any]]

    def run(self, tensors: Sequence[Tensor], probe: Probe, partly: Partly | None = None) -> None:
        """Run it once; gradients of the parameters accumulate.

        Args:
            partly: runs a layer's backward to its inputs alone, instead of the whole of it.
        """
        walk = _Walk(self, dict(zip(self.inputs, (t.clone() for t in tensors), strict=False)))
        probe.keep(walk.values.values())
        with self.forward_context():
            for k in range(len(self.pieces)):
                walk.forward(k, probe)
            roots = walk.result(probe)
        walk.first_backward(roots, probe)
        for k in reversed(range(len(self.pieces))):
            walk.backward(k, probe, partly)


@dataclass
class _LayerBackward:
    """What a layer's backward needs: where gradients enter and where they leave."""

    edges: dict[str, GradientEdge] = field(default_factory=dict)
    inlets: dict[str, Inlet] = field(default_factory=dict)


class _Walk:
    def __init__(self, step: PiecewiseStep, inputs: dict[str, Any]) -> None:
        self.step = step
        self.values = inputs
        self.needs_grad = {n: t.requires_grad for n, t in inputs.items()}
        self.graphs: list[_LayerBackward] = []
        self.gradients: dict[str, list[Tensor]] = {}
        self.last_use: dict[str, int] = {}
        for k, piece in enumerate((*step.pieces, step.result)):
            self.last_use.update(dict.fromkeys(piece.inputs, k))

    def _admit(self, k: int, piece: Piece) -> tuple[_LayerBackward, list[Any]]:
        graph = _LayerBackward()
        arguments = []
        for name in piece.inputs:
            value = self.values[name]
            if self.last_use[name] == k:
                del self.values[name]
            if self.needs_grad.get(name):
                graph.inlets[name] = Inlet()
                value = graph.inlets[name].admit(value)
            arguments.append(value)
        return graph, arguments

    def forward(self, k: int, probe: Probe) -> None:
        piece = self.step.pieces[k]
        graph, arguments = self._admit(k, piece)
        probe.before(k, "F", ())
        out = piece.module(*arguments)
        probe.after(k, "F")
        for name, value in zip(piece.outputs, out, strict=True):
            if isinstance(value, Tensor):
                self.needs_grad[name] = value.requires_grad
                if value.requires_grad:
                    graph.edges[name] = get_gradient_edge(value)
                value = value.detach()
            if name in self.last_use:
                self.values[name] = value
        self.graphs.append(graph)

    def result(self, probe: Probe) -> list[Tensor]:
        end = len(self.step.pieces)
        graph, arguments = self._admit(end, self.step.result)
        self.graphs.append(graph)
        found = self.step.result.module(*arguments)[0]
        probe.keep([found])
        if not self.step.has_loss:
            return self.step.roots(found)
        probe.before(end, "F", ())
        roots = self.step.roots(found)
        probe.after(end, "F")
        return roots

    def first_backward(self, roots: list[Tensor], probe: Probe) -> None:
        timed = self.step.has_loss
        end = len(self.step.pieces)
        if timed:
            probe.before(end, "B", ())
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        if timed:
            probe.after(end, "B")
        roots.clear()
        self._collect(self.graphs.pop())

    def backward(self, k: int, probe: Probe, partly: Partly | None) -> None:
        graph = self.graphs.pop()
        found = [(e, self.gradients.pop(n)) for n, e in graph.edges.items() if n in self.gradients]
        if not found:
            return
        edges, arrived = [e for e, _ in found], [g for _, g in found]
        del found
        phase: Phase = "B" if partly is None else "I"
        inlets = list(graph.inlets.values())
        if partly is not None and not inlets:
            return
        probe.before(k, phase, [gradient for parts in arrived for gradient in parts])
        # Those of one tensor's consumers add up; whoever made the tensor pays for it.
        gradients = [functools.reduce(torch.add, parts) for parts in arrived]
        arrived.clear()
        if partly is None:
            torch.autograd.backward(edges, gradients)
        else:
            partly(k, edges, gradients, inlets)
        probe.after(k, phase)
        self._collect(graph)

    def _collect(self, graph: _LayerBackward) -> None:
        """Gradients for the layers before."""
        for name, inlet in graph.inlets.items():
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
