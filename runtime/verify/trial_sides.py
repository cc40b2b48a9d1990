"""Two trainings of the same two mini-batches: plainly, by the user's own loop, and in pieces.

The first is a loop over the model, loss, optimizer and scheduler as the user wrote them. Of the
second, each step begins with the weights and, for its update, the gradients of the first: so
differences are of that step, and nothing makes rounding errors larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...profiles.autograd.boundary import Inlet
from ...profiles.measuring.trial import TrialCase
from ...profiles.tasks.hooks import task_unchanged
from ...profiles.tasks.task import read_loss
from ...profiles.tracing.call import unchanged
from ...profiles.tracing.pieces import Piece, cut, map_items
from ...profiles.tracing.random_states import own_states, seed_all, set_own_states, state_of
from ...profiles.tracing.remembered import dense
from ..prepare.devices import forward_context, generators, set_generators
from ..settings import RunSettings
from ..stage.optimizer import make_optimizer, make_scheduler, step_optimizer
from ..training.plain_updates import mean_of, plain_optimizer, plain_scheduler, steps_by_epoch
from ..weights.stash import WeightVersions, give_own_memory

MINI_BATCHES = 2

Groups = tuple[tuple[int, ...], ...]
"""The layers' positions, piece by piece."""


@dataclass
class TrialStep:
    """What training on a mini-batch gave.

    Attributes:
        losses: of each micro-batch: its value, and its weight where it has one.
        gradients, buffers, weights, before: by name; weights after the update and before it.
    """

    losses: list[tuple[float, ...]]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    before: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Perturbed:
    """How the second training goes about it.

    Attributes:
        cuts: of each mini-batch.
        stages: that have an optimizer each.
        together: all forwards of a mini-batch come before its first loss, piece by piece.
        overwritten: parameters that are written into between a forward and its backward.
    """

    cuts: tuple[Groups, ...]
    stages: Groups
    together: bool
    overwritten: frozenset[str]


# What both go by --------------------------------------------------------------------------------

_FORWARD, _LOSS, _BACKWARD, _UPDATE = range(4)


class Randomness:
    """The same random numbers on both sides: by mini-batch, micro-batch and what draws them."""

    def __init__(self, case: TrialCase) -> None:
        self._own = own_states(case.model.modules())
        self._device = case.device

    def begin(self, b: int, i: int, what: int) -> None:
        """Seed for what a micro-batch does."""
        seed_all(1 + (b * 64 + i) * 4 + what)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(1 + (b * 64 + i) * 4 + what)
        set_own_states(self._own)

    def take(self) -> Any:
        """Where it is, to go on there."""
        return generators(self._device), [(own, state_of(own)) for own, _ in self._own]

    def give(self, state: Any) -> None:
        """Go on there."""
        set_generators(state[0], self._device)
        set_own_states(state[1])


@contextmanager
def put_back(case: TrialCase) -> Iterator[None]:
    """Afterwards model and task are what they were: weights of any size, buffers, attributes,
    gradients."""
    parameters = list(case.model.parameters())
    before = [(p.data, p.detach().clone(), p.grad) for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        with unchanged(case.model), task_unchanged(case.task), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for p, (data, value, gradient) in zip(parameters, before, strict=True):
                p.data = data
                if not torch.equal(data, value):
                    data.copy_(value)
                p.grad = gradient


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = ((name, p.grad) for name, p in model.named_parameters())
    return {name: dense(g).detach() for name, g in found if g is not None}


def _own(value: Any) -> Any:
    """What a forward or a loss may change."""
    return value.clone() if isinstance(value, Tensor) else map_items(_own, value)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


# Plain training ---------------------------------------------------------------------------------


def train_plainly(
    case: TrialCase, settings: RunSettings, *, shaken: bool = False
) -> list[TrialStep]:
    """By the user's own model, loss, optimizer and scheduler, micro-batch by micro-batch.

    Args:
        shaken: from weights that are changed in their last digits.
    """
    task, model = case.task, case.model
    random = Randomness(case)
    found = []
    with put_back(case):
        if shaken:
            drawn = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in model.parameters():
                    if p.is_floating_point():
                        signs = torch.randn(p.shape, generator=drawn).sign().to(p)
                        p.mul_(1 + 8 * torch.finfo(p.dtype).eps * signs)
        before = _copies(model.named_parameters())
        optimizer = plain_optimizer(task, settings, model)
        scheduler = plain_scheduler(task, settings, optimizer, case.length)
        by_epoch = steps_by_epoch(task, settings)
        for b in range(MINI_BATCHES):
            losses: list[tuple[float, ...]] = []
            pairs = []
            for i, (call, expected) in enumerate(case.micro_batches):
                random.begin(b, i, _FORWARD)
                with forward_context(case.autocast, case.device.type):
                    output = call.of(model, [t.clone() for t in call.tensors])
                    random.begin(b, i, _LOSS)
                    loss = task.loss(output, _own(expected))
                del output
                random.begin(b, i, _BACKWARD)
                if isinstance(loss, tuple):
                    # A mini-batch's loss is the sum over its micro-batches by their weight.
                    pairs.append(loss)
                    losses.append((_number(loss[0]), _number(loss[1])))
                else:
                    losses.append((_number(loss),))
                    (loss / len(case.micro_batches)).backward()
                del loss
            if pairs:
                mean_of(pairs).backward()
            gradients = {n: g.clone() for n, g in _gradients(model).items()}
            buffers = _copies(model.named_buffers())
            random.begin(b, 0, _UPDATE)
            optimizer.step()
            if scheduler is not None and (b == MINI_BATCHES - 1 or not by_epoch):
                scheduler.step()
            model.zero_grad()
            after = _copies(model.named_parameters())
            found.append(TrialStep(losses, gradients, buffers, after, before))
            before = after
    return found


def remembers(case: TrialCase) -> bool:
    """Whether the loss is another one when the model is called again."""
    call, expected = case.micro_batches[0]
    random, found = Randomness(case), []
    with put_back(case), forward_context(case.autocast, case.device.type):
        for _ in range(2):
            random.begin(0, 0, _FORWARD)
            output = call.of(case.model, [t.clone() for t in call.tensors])
            random.begin(0, 0, _LOSS)
            found.append(_number(read_loss(case.task.loss(output, _own(expected))).mean))
    return not math.isclose(*found, rel_tol=1e-6)


# Training in pieces -----------------------------------------------------------------------------


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward.

    Attributes:
        values: what pieces take from each other; those of `learnt` have gradients.
        edges, inlets: of each piece, where gradients come in and go out.
    """

    values: dict[str, Any]
    random: Any
    learnt: set[str] = field(default_factory=set)
    edges: list[dict[str, GradientEdge]] = field(default_factory=list)
    inlets: list[dict[str, Inlet]] = field(default_factory=list)
    result: Any = None
    root: Tensor | None = None


class TrainingInPieces:
    """Trains in pieces, and holds every step against plain training."""

    def __init__(self, case: TrialCase, settings: RunSettings, how: Perturbed) -> None:
        self.case = case
        self.how = how
        self._settings = settings
        self._random = Randomness(case)
        self._parameters = dict(case.model.named_parameters())

    def steps(self, wanted: Sequence[TrialStep]) -> Iterator[TrialStep]:
        """What each mini-batch gives, beginning where plain training did: the tensors themselves,
        as long as nothing more is asked for."""
        case = self.case
        with put_back(case):
            trained = [p for p in self._parameters.values() if p.requires_grad]
            give_own_memory(trained)
            frozen = [p for p in self._parameters.values() if not p.requires_grad]
            self._versions = WeightVersions(trained, frozen)
            optimizers, schedulers = [], []
            # One after the other: a task may make both at once.
            for optimizer in self._optimizers():
                optimizers.append(optimizer)
                made = make_scheduler(case.task, self._settings, optimizer, case.length)
                schedulers += [made] if made else []
            for b, plain in enumerate(wanted):
                losses = self._mini_batch(b)
                gradients = _gradients(case.model)
                buffers = dict(case.model.named_buffers())
                self._set_gradients(plain.gradients)
                # What they draw one after another, one over all parameters draws.
                self._random.begin(b, 0, _UPDATE)
                for optimizer in optimizers:
                    step_optimizer(optimizer)
                self._versions.keep_memory()
                for scheduler in schedulers:
                    scheduler.after_update(ends_epoch=b == MINI_BATCHES - 1)
                weights = {name: p.detach() for name, p in self._parameters.items()}
                yield TrialStep(losses, gradients, buffers, weights)
                self._set_gradients({})
                with torch.no_grad():
                    for name, p in self._parameters.items():
                        p.copy_(plain.weights[name])
                    for name, buffer in case.model.named_buffers():
                        if not torch.equal(buffer, plain.buffers[name]):
                            buffer.copy_(plain.buffers[name])

    def _set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, p in self._parameters.items():
            p.grad = gradients[name].clone() if name in gradients else None

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """One for each stage, over what no earlier one has."""
        names = {id(p): name for name, p in self._parameters.items()}
        taken = set[int]()
        every = [(name, p) for name, p in self._parameters.items() if p.requires_grad]
        for s, piece in enumerate(cut(self.case.graph, self.how.stages)):
            mine = [p for p in piece.module.parameters() if id(p) not in taken and id(p) in names]
            taken.update(map(id, mine))
            named = [(names[id(p)], p) for p in mine]
            made = make_optimizer(self.case.task, self._settings, named, f"stage {s}", model=every)
            if made is not None:
                yield made

    def _mini_batch(self, b: int) -> list[tuple[float, ...]]:
        case, every = self.case, self.case.micro_batches
        pieces, names = cut(case.graph, self.how.cuts[b]), [n.name for n in case.graph.inputs]
        losses: list[tuple[float, ...]] = []
        batches = [range(len(every))] if self.how.together else [[i] for i in range(len(every))]
        for together in batches:
            flying: dict[int, _Flight] = {}
            for i in together:
                self._random.begin(b, i, _FORWARD)
                values = dict(zip(names, every[i][0].tensors, strict=False))
                flying[i] = _Flight(values, self._random.take())
            for piece in pieces:
                for micro in flying.values():
                    self._forward(piece, micro)
            for i, micro in flying.items():
                losses.append(self._loss(b, i, micro, every[i][1]))
            with self._overwritten() as version:
                for i, micro in flying.items():
                    self._random.begin(b, i, _BACKWARD)
                    for s in reversed(range(len(pieces))):
                        self._backward(s, micro, version)
        weights = [loss[1] for loss in losses if len(loss) > 1]
        if weights:
            scale = 1 / math.fsum(weights) if any(weights) else 0.0
            for p in self._parameters.values():
                if p.grad is not None:
                    p.grad *= scale
        return losses

    def _forward(self, piece: Piece, micro: _Flight) -> None:
        inlets: dict[str, Inlet] = {}
        arguments = []
        for name in piece.inputs:
            value = micro.values[name]
            if isinstance(value, Tensor):
                # As from another process.
                value = value.detach().clone()
                if name in micro.learnt:
                    inlets[name] = Inlet()
                    value = inlets[name].admit(value)
            arguments.append(value)
        self._random.give(micro.random)
        with self._forward_context():
            out = piece.module.forward(*arguments)
        micro.random = self._random.take()
        edges: dict[str, GradientEdge] = {}
        for name, value in zip(piece.outputs, out, strict=False):
            if isinstance(value, Tensor) and value.requires_grad:
                micro.learnt.add(name)
                edges[name] = get_gradient_edge(value)
            micro.values[name] = value.detach() if isinstance(value, Tensor) else value
        micro.edges.append(edges)
        micro.inlets.append(inlets)
        if piece.has_result:
            micro.result = out[-1]

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        precision = forward_context(self.case.autocast, self.case.device.type)
        counts = bool(self.how.overwritten)
        with self._versions.forward(None, counts=counts), precision:
            yield

    def _loss(self, b: int, i: int, micro: _Flight, expected: Any) -> tuple[float, ...]:
        self._random.begin(b, i, _LOSS)
        with self._forward_context():
            loss = read_loss(self.case.task.loss(micro.result, _own(expected)))
            micro.result = None
            weighted = loss.weight is not None
            count = len(self.case.micro_batches)
            micro.root = loss.value if weighted else loss.value / count
        found = (_number(loss.value),)
        return found if loss.weight is None else (*found, loss.weight)

    @contextmanager
    def _overwritten(self) -> Iterator[int]:
        """Other numbers in the parameters' memory, as an update leaves them; the version that the
        forwards ran on is kept. Yields its number."""
        versions = self._versions
        version = versions.latest
        written = [p for n, p in self._parameters.items() if n in self.how.overwritten]
        if not written:
            yield version
            return
        versions.keep_latest()
        with torch.no_grad():
            for p in written:
                p.mul_(1.5).add_(0.125)
        versions.advance({version})
        try:
            yield version
        finally:
            before = versions.at(version)
            assert before is not None
            with torch.no_grad():
                for p, value in zip(versions.parameters, before, strict=True):
                    p.copy_(value)
            versions.drop(set())

    def _backward(self, s: int, micro: _Flight, version: int) -> None:
        roots: list[Tensor | GradientEdge] = []
        gradients: list[Tensor | None] = []
        if micro.root is not None:
            roots.append(micro.root)
            gradients.append(None)
            micro.root = None
        for name, edge in micro.edges[s].items():
            parts = [
                part
                for inlets in micro.inlets
                if name in inlets and (part := inlets[name].grad) is not None
            ]
            if parts:
                roots.append(edge)
                gradients.append(reduce(torch.add, parts))
        if not roots:
            return
        with self._versions.backward(self._versions.at(version)):
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        micro.edges[s] = {}
