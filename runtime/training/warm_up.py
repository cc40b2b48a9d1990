"""Each stage computes once before the first message, alone, so that a GPU has loaded what it needs.

Kernels, libraries' handles and their workspaces come with the first call; what comes with it then
waits for all that the card has, messages of other workers among it. So every kind of operation runs
once on tensors of the shapes to come: forward, loss, backward, a second gradient added to a first,
the look whether gradients are finite, an update of small stand-ins, the forward of an evaluation.
What that changes is put back: weights, buffers, hooks, attributes of modules, random states.
A stage's hooks (`planner.systems.hooks`) take no part, so what they keep stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.schedules.schedules import make_schedule
from ...profiles.tasks.hooks import task_unchanged
from ...profiles.tracing.call import unchanged
from ...profiles.tracing.pieces import decode, encode
from ..prepare.devices import forward_context, put, random_kept
from ..prepare.messages import missing_gradients, tensor_of
from ..stage.gradients import finiteness
from ..stage.graphs import most_in_flight
from ..stage.optimizer import step_optimizer
from ..stage.runner import StageRunner
from ..stage.stage import Stage

_SETTLED = 64
"""Mini-batches by which a pipeline is in its steady state."""

_WIDEST = 64
"""Of a dimension of a stand-in for a parameter."""


def warm_up(runner: StageRunner) -> None:
    """Have a stage's device load what the run needs. What fails here fails in the run, if at all:
    there its message says at which operation."""
    stage = runner.stage
    # The user's model, on numbers that aren't the run's.
    with random_kept(runner.device), suppress(Exception), task_unchanged(stage.piece.task):
        values, target = _example(runner)
        train_once(stage, values, target)
        evaluate_once(stage, values)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    capture_graphs(runner)


def capture_graphs(runner: StageRunner) -> None:
    """Capture a stage's passes, where that is asked for and can be (`stage.graphs`). The stages of
    its worker know each other by then."""
    stage, prepared = runner.stage, runner.prepared
    if not stage.graphs.on:
        return
    # More mini-batches keep no more in flight.
    most = min(max(segment.mini_batches for segment in prepared.segments), _SETTLED)
    ops = make_schedule(prepared.pipeline, most)[runner.number]
    with random_kept(runner.device):
        try:
            given, target = _example(runner)
            values = {name: _value(stage, name, given) for name in stage.piece.inputs}
        except Exception as error:  # the user's data
            stage.graphs.leave(error)
            return
        target = target if runner.data.targets else None
        stage.graphs.record(values, target, most_in_flight(ops, stage.share.of))
        stage.account.activations_bytes += stage.graphs.nbytes


def _example(runner: StageRunner) -> tuple[dict[str, Tensor], Any]:
    """What a micro-batch has from the data or is known of it, by name, and its target."""
    prepared = runner.prepared
    call, target = prepared.example(runner.stage.share.samples)
    inputs = dict(zip(prepared.model.inputs, call.tensors, strict=False))
    own = {name: put(inputs[name], runner.device) for name in runner.data.inputs}
    return {**own, **prepared.distribution.known[runner.number]}, put(target, runner.device)


def _value(stage: Stage, name: str, values: Mapping[str, Tensor]) -> Tensor:
    """An input as messages have it: what isn't at hand is made up, by its spec."""
    spec, made = stage.piece.specs.get(name), values.get(name)
    if made is None:
        assert spec is not None
        made = tensor_of(spec)
    found: Tensor = put(made, stage.piece.device)
    return found


def _arguments(stage: Stage, inputs: Sequence[str], values: Mapping[str, Tensor]) -> list[Any]:
    found = []
    for name in inputs:
        spec = stage.piece.specs.get(name)
        made = _value(stage, name, values)
        found.append(made if spec is None else decode(made, spec.kind))
        if spec is not None and spec.needs_grad and torch.is_grad_enabled():
            found[-1] = found[-1].detach().requires_grad_()
    return found


def train_once(stage: Stage, values: Mapping[str, Tensor], target: Any) -> None:
    """What a mini-batch has computed, on inputs of which those that aren't given are made up."""
    piece = stage.piece
    with unchanged(piece.module):
        arguments = _arguments(stage, piece.inputs, values)
        with forward_context(piece.autocast, piece.device.type):
            out = piece.compute(*arguments)
            roots = [encode(value, name) for name, value in zip(piece.outputs, out, strict=False)]
            if piece.has_result:
                roots.append(piece.loss.read(piece.task.loss(out[-1], target)).value)
        roots = [root for root in roots if root.requires_grad]
        wanted = [p for p in stage.updated if p.requires_grad]
        sources = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        if not roots or not (wanted or sources):
            return
        given = [torch.ones_like(root) for root in roots]
        found = torch.autograd.grad(roots, [*sources, *wanted], given, allow_unused=True)
        gradients = [g for g in found if g is not None]
        for gradient in gradients:
            gradient.add_(gradient)
        for message in gradients[: len(sources)]:
            missing_gradients(message[None])
        finiteness(gradients)()
        _update_once(stage.updates.optimizer)


def _update_once(optimizer: Optimizer | None) -> None:
    """One step of a copy of the optimizer, of small parameters in place of its own."""
    if optimizer is None or optimizer.state:
        return
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            shape = [min(size, _WIDEST) for size in p.shape]
            small = nn.Parameter(torch.zeros(shape, dtype=p.dtype, device=p.device))
            small.grad = torch.zeros_like(small)
            memo[id(p)] = small
    copied = copy.deepcopy(optimizer, memo)
    # A scheduler has given the optimizer a step of its own, which steps that one's parameters.
    copied.__dict__.pop("step", None)
    step_optimizer(copied)


def evaluate_once(stage: Stage, values: Mapping[str, Tensor]) -> None:
    """A forward in evaluation mode, if there is one."""
    piece, evaluated = stage.piece, stage.piece.evaluated
    if evaluated is None:
        return
    precision = forward_context(piece.autocast, piece.device.type)
    with torch.no_grad(), unchanged(evaluated.module), piece.evaluating(), precision:
        evaluated.module(*_arguments(stage, evaluated.inputs, values))
