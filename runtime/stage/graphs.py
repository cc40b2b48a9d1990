"""A stage's passes as CUDA graphs: forward and backward of a micro-batch, captured once for each
micro-batch that is in flight, and replayed in the schedule's sequence with messages between them.

A graph computes on the addresses that it was captured with:

- Each *slot* has inputs, target, activations and gradients of one micro-batch. What comes in is
  copied there, and copies of what comes out go on. Its graphs share memory, as they are replayed
  one after the other; slots don't, since all of them may be in flight.
- Weights are the parameters, whose memory stays, or where a system's passes run on others than the
  latest, one more copy, into which these are written before a replay. So one graph will do for all
  versions, and a version costs no activations.
- Gradients are added up in memory that stays. It begins with −0, to which any number added is that
  number to the last bit.

A first replay is held against the pass that ran before the capture, and where it gives other
numbers there are no graphs. Passes that differ from those that were captured run as ever.
`Graphs.line` says which and why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...planner.systems.operations import BACKWARD, FORWARD, WEIGHT, Op
from ...profiles.autograd.boundary import Inlet, storage_bytes
from ...profiles.autograd.dropout import WithoutDropout
from ...profiles.measuring import capture
from ...profiles.tasks.hooks import task_unchanged
from ...profiles.tasks.task import Loss
from ...profiles.tracing.call import numbers_unchanged, unchanged
from ...profiles.tracing.pieces import fill, take_apart
from ...profiles.units import format_bytes
from ..prepare.data import MicroBatchPart
from ..prepare.prepared import Prepared
from ..prepare.workers import Replica
from ..weights.stash import WeightVersions, let_go, memory_for
from .micro_batch import MicroBatch, OutputGradients, PieceInputs
from .piece import Forwarded, piece_of

_ALIKE = 0.02
"""By how much a replay's numbers may differ from a pass's, as a share of their norm."""

_ROUNDING = 8
"""By how many steps of their precision gradients may be off, beside the largest of them."""

_GRADIENT = "gradient of"

_NORMS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What norms of such numbers are added up in."""

_LOSS = ""
"""What the loss is called beside the names of outputs."""

Leaf = int | str
"""A parameter's position in `WeightVersions.every`, or an inlet's name."""

Pass = tuple[MicroBatch, int]
"""A micro-batch in a backward, and its place among the micro-batches there."""


@dataclass
class Slot:
    """What one micro-batch in flight has: tensors at addresses that stay, and graphs.

    Attributes:
        values: the piece's inputs by name, without those that are the same in all micro-batches.
        target: its tensors.
        into: gradients of outputs and of the loss, by name.
        pool: memory of its graphs.
        micro: of the capture.
        outputs: by name.
        loss: its value; None: the stage has none.
        graphs: by kind of operation.
        inlets: names of inputs that other stages want gradients of.
        back: these gradients, where there are any.
        leads: per tensor in `into`, the parameters and inlets that its gradient reaches.
    """

    values: dict[str, Tensor]
    target: list[Tensor]
    into: dict[str, Tensor] = field(default_factory=dict)
    pool: Any = None
    micro: MicroBatch = field(default_factory=MicroBatch)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)
    inlets: tuple[str, ...] = ()
    back: dict[str, Tensor] = field(default_factory=dict)
    leads: dict[str, set[Leaf]] = field(default_factory=dict)

    def like(self, pool: Any) -> Slot:
        """Another one."""
        values, into = ({n: t.clone() for n, t in of.items()} for of in (self.values, self.into))
        return Slot(values, [t.clone() for t in self.target], into, pool)

    def roots(self) -> dict[str, GradientEdge]:
        """Where the captured forward's backward begins."""
        found = {n: edge for n, edge in self.micro.outlets.items() if n in self.into}
        if self.micro.loss is not None:
            found[_LOSS] = get_gradient_edge(self.micro.loss)
        return found


@dataclass
class MicroBatchInSlot(MicroBatch):
    """A micro-batch whose forward was replayed.

    Attributes:
        weight: of its loss in an update's gradient.
        found: what gradients came to.
    """

    slot: Slot = field(kw_only=True)
    weight: float = 1.0
    found: set[Leaf] = field(default_factory=set)


class Graphs:
    """A stage's graphs; without any, all passes run as ever.

    Attributes:
        piece: what its forwards compute.
        on: whether they are asked for and there is a device for them.
        why_not: why there are none, though they are asked for.
        nbytes: of memory that they hold: activations of micro-batches in flight, and weights.
        sums_bytes: of gradients, which are held from update to update too.
    """

    def __init__(
        self, prepared: Prepared, replica: Replica, device: torch.device, weights: WeightVersions
    ) -> None:
        s = replica.stage
        self.piece = piece_of(prepared, s, device, weights)
        self.on = prepared.settings.graphs != "off" and capture.capture_on(device) is not None
        self.why_not = why_not(prepared, s) if self.on else ""
        self.nbytes = self.sums_bytes = 0
        planned = prepared.plan.predicted.device_of(s).memory
        # Micro-batches that are filled up run beside the graphs, with activations of their own.
        padded = prepared.settings.ragged == "pad"
        self._to_come_bytes = (
            planned.optimizer_bytes
            + planned.versions_bytes
            + planned.boundary_bytes
            + planned.workspace_bytes
            + (planned.activations_bytes if padded else 0)
        )
        self._weights, self._variant = weights, prepared.pipeline.variant
        self._first, self._drops = s == 0, prepared.settings.dropout
        self._share = prepared.distribution.shares[replica.number]
        self._constant: Mapping[str, Tensor] = prepared.distribution.known[s]
        self._free: list[Slot] = []
        self._slots = self._replayed = 0
        self._missed = Counter[str]()
        self._structure: Any = None
        # What passes run on where it isn't the parameters.
        self._forward_on: list[Tensor] | None = None
        self._backward_on: list[Tensor] | None = None
        self._sums: list[Tensor] = []

    @property
    def line(self) -> str:
        """What isn't captured or replayed, and what the rest takes; empty: nothing is asked for."""
        if not self.on:
            return ""
        if self.why_not:
            return f"nothing is captured: {self.why_not}"
        held = f"{self._slots} micro-batches in flight, {format_bytes(self.nbytes)}"
        if not self._missed:
            return f"all passes are replayed ({held})"
        every = self._replayed + self._missed.total()
        why = ", ".join(sorted(self._missed))
        return f"of {every} forwards {self._replayed} were replayed ({held}); the others: {why}"

    @property
    def _tied(self) -> bool:
        """Whether other stages use some parameters too, which have versions of their own."""
        return len(self._weights.every) > len(self._weights.parameters)

    # Capture -----------------------------------------------------------------------------------

    def record(self, values: Mapping[str, Tensor], target: Any, slots: int) -> None:
        """Capture the stage's passes, where they can be. Before the first message: it waits for
        all that the device has.

        Args:
            values: of a micro-batch: all of the piece's inputs, by name.
            slots: so many are in flight.
        """
        on = capture.capture_on(self.piece.device) if self.on and not self.why_not else None
        if on is None:
            return
        before, every = on.held_bytes(), list[Slot]()
        try:
            every += self._captured(on, values, target, slots)
        except Exception as error:  # torch's, of whatever kind
            self.leave(error)
        for p in self._weights.every:
            p.grad = None
        held = on.held_bytes() - before
        if every and (refusal := _too_much(on, held, self._to_come_bytes)):
            every.clear()
            self.leave(refusal)
            held = on.held_bytes() - before
        self._free, self._slots = every, len(every)
        self.sums_bytes = sum(map(storage_bytes, self._sums))
        self.nbytes = max(held - self.sums_bytes, 0)

    def _captured(
        self, on: capture.Capture, values: Mapping[str, Tensor], target: Any, slots: int
    ) -> list[Slot]:
        module, modes = self.piece.module, nullcontext() if self._drops else WithoutDropout()
        leaves, self._structure = take_apart(target)
        task = self.piece.task
        hooks = [task.loss] if self.piece.has_result else []
        with modes, unchanged(module), task_unchanged(task):
            self._fix_memory()
            nothing_left = capture.nothing_left_on_host(module, hooks)
            with numbers_unchanged(module), nothing_left, on.trying():
                tried = self._try(values, leaves)
            every, wanted = [tried.like(on.pool()) for _ in range(slots)], self._numbers(tried)
            del tried
            # All forwards first: what a later one changes is refused by an earlier one's backward,
            # as it would be without graphs.
            before = on.held_bytes()
            for k, slot in enumerate(every):
                with on.of(slot.pool) as slot.graphs[FORWARD]:
                    self._run(slot)
                # Rather than find out in a capture, whose memory torch may keep for good.
                if k == 0:
                    one = on.held_bytes() - before
                    if refusal := _too_much(on, one, self._to_come_bytes, slots):
                        raise refusal
            for slot in every:
                self._capture_backward(on, slot)
            # A first replay loads a graph, which may wait for all that the device has: no message
            # is there yet.
            for slot in every:
                with numbers_unchanged(module):
                    self._check(slot, wanted)
        return every

    def _numbers(self, slot: Slot) -> dict[str, Tensor]:
        """What a slot's passes have computed: outputs, loss, and gradients."""
        inlets = slot.micro.inlets.items()
        back = slot.back or {n: inlet.grad for n, inlet in inlets if inlet.grad is not None}
        found = {f"output {name}": t for name, t in slot.outputs.items()}
        found |= {f"{_GRADIENT} {name}": t for name, t in back.items()}
        found |= {f"{_GRADIENT} parameter {k}": t for k, t in enumerate(self._sums)}
        if slot.loss is not None:
            found["loss"] = slot.loss
        return {name: t.detach().clone() for name, t in found.items()}

    def _check(self, slot: Slot, wanted: Mapping[str, Tensor]) -> None:
        """Replay a slot once. Raises CannotCaptureError where that gives other numbers than the
        pass that wasn't captured; kernels that add in another sequence each time may differ a
        little."""
        for p in self._weights.every:
            p.grad = None
        self._begin_sums(several=False)
        for kind in (FORWARD, BACKWARD, WEIGHT):
            if kind in slot.graphs:
                slot.graphs[kind].replay()
        # What rounding alone may make of a gradient: one that is 0, as that of a bias before a
        # batch norm, is what is left of large ones.
        gradients = [t for name, t in wanted.items() if name.startswith(_GRADIENT)]
        eps = [torch.finfo(self.piece.autocast or t.dtype).eps for t in gradients]
        sizes = [size for size in (float(_rms(t)) for t in gradients) if math.isfinite(size)]
        noise = _ROUNDING * max(eps, default=0.0) * max(sizes, default=0.0)
        found = self._numbers(slot)
        for name, tensor in wanted.items():
            apart = noise if name.startswith(_GRADIENT) else 0.0
            if name not in found or _is_other(found[name], tensor, apart):
                raise capture.CannotCaptureError(f"a replay gives another {name} than a pass")

    def leave(self, error: BaseException) -> None:
        """Have no graphs, for this reason."""
        self.why_not = capture.reason(error)
        let_go(self._weights, self._forward_on or self._backward_on or ())
        self._forward_on = self._backward_on = None
        self._sums = []

    def _fix_memory(self) -> None:
        """Memory for the gradients' sums, and for weights where passes run on others than the
        latest. To copy these is little beside a pass."""
        variant = self._variant
        enters = self._first and variant.forward_weights == "micro-batch-entry"
        forward = self._tied or not (enters or variant.forward_weights == "latest")
        backward = self._tied or variant.backward_weights != "latest"
        if not variant.flushes and (forward or backward):
            one = memory_for(self._weights)
            self._forward_on, self._backward_on = (
                one if forward else None,
                one if backward else None,
            )
            _put_weights(one, None, self._weights)
        self._sums = [torch.empty_like(p, requires_grad=False) for p in self._weights.every]

    def _try(self, values: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> Slot:
        own = {name: tensor for name, tensor in values.items() if name not in self._constant}
        slot = Slot(own, list(leaves))
        self._run(slot)
        specs, outlets = self.piece.specs, slot.micro.outlets
        roots = {n: t for n, t in slot.outputs.items() if n in outlets and specs[n].needs_grad}
        if slot.loss is not None:
            roots[_LOSS] = slot.loss
        for name, root in roots.items():
            slot.into[name] = torch.ones(root.shape, dtype=root.dtype, device=root.device)
        self._begin_sums(several=False)
        for part in self._backwards(slot):
            part()
        return slot

    def _run(self, slot: Slot) -> None:
        size = self._share.samples
        # The loss is weighted by the gradient that its backward begins with.
        part = MicroBatchPart(size, size, 1.0, 1.0)
        values = {**self._constant, **slot.values}
        given = PieceInputs(values, fill(self._structure, slot.target), part, self._forward_on)
        slot.micro, slot.outputs, loss = self.piece.run(given)
        slot.loss = None if loss is None else loss.value.detach()
        slot.inlets = tuple(slot.micro.inlets)

    def _backwards(self, slot: Slot) -> list[Callable[[], None]]:
        """The parts of a slot's backward, to be called one after the other."""
        roots, every = slot.roots(), self._weights.every
        edges, grads = list(roots.values()), [slot.into[name] for name in roots]
        # In one backward of several micro-batches autograd adds up the gradients of all uses of a
        # parameter in the sequence in which they come.
        by_use = self._variant.backward_unit == "mini" and len(self._share.micro_batches) > 1
        same = self._variant.flushes or self._variant.backward_weights == "forward"

        def whole() -> None:
            used = {id(p): own for p, own in zip(every, self._sums, strict=True)}
            with _added_by_use(edges, used) if by_use else nullcontext():
                torch.autograd.backward(edges, grads)

        def first() -> None:
            slot.micro = slot.micro.split(zip(edges, grads, strict=True), every)

        def second() -> None:
            assert slot.micro.half is not None
            slot.micro.half.weights()

        def on_weights(part: Callable[[], None]) -> None:
            for p, own in zip(every, self._sums, strict=True):
                p.grad = own
            with self._weights.backward(self._backward_on, same=same):
                part()

        parts = [first, second] if self._variant.split_backward else [whole]
        return [partial(on_weights, part) for part in parts] if roots else []

    def _capture_backward(self, on: capture.Capture, slot: Slot) -> None:
        inlets = slot.micro.inlets
        keys: dict[int, Leaf] = {id(p): k for k, p in enumerate(self._weights.every)}
        keys |= {id(inlet.anchor): name for name, inlet in inlets.items()}
        leads = {name: _leaves([edge], keys) for name, edge in slot.roots().items()}
        before = [own._version for own in self._sums]
        for kind, part in zip((BACKWARD, WEIGHT), self._backwards(slot), strict=False):
            with on.of(slot.pool) as slot.graphs[kind]:
                part()
        slot.back = {n: inlet.grad for n, inlet in inlets.items() if inlet.grad is not None}
        found = {k for k, own in enumerate(self._sums) if own._version != before[k]}
        slot.leads = {name: of & {*found, *slot.back} for name, of in leads.items()}
        # What autograd keeps is let go; the graphs have its memory.
        slot.micro = MicroBatch()

    # Replay ------------------------------------------------------------------------------------

    def forward(self, given: PieceInputs, *, alone: bool) -> Forwarded | None:
        """Replay a forward. Returns what `StagePiece.forward` does; None: that has to run.

        Args:
            alone: nothing else takes part in it (`StageHooks.forward`).
        """
        if not self._slots:
            return None
        leaves, structure = take_apart(given.target)
        why = (
            self._why_otherwise(given, leaves, structure) if alone else "a hook takes part in them"
        )
        if why:
            self._missed[why] += 1
            return None
        slot = self._free.pop()
        self._replayed += 1
        for name, tensor in slot.values.items():
            tensor.copy_(given.values[name])
        for tensor, leaf in zip(slot.target, leaves, strict=True):
            tensor.copy_(leaf)
        _put_weights(self._forward_on, given.weights, self._weights)
        slot.graphs[FORWARD].replay()
        outputs = {name: tensor.clone() for name, tensor in slot.outputs.items()}
        inlets = {name: Inlet() for name in slot.inlets}
        shapes = {name: t.shape for of in (slot.values, outputs) for name, t in of.items()}
        micro = MicroBatchInSlot(inlets=inlets, shapes=shapes, slot=slot, weight=given.part.weight)
        self.piece.kept_outputs = set()
        return micro, outputs, None if slot.loss is None else Loss(slot.loss.clone())

    def _why_otherwise(self, given: PieceInputs, leaves: Sequence[Tensor], structure: Any) -> str:
        if given.part.padded:
            return "micro-batches that are filled up"
        if given.weights is not None and self._forward_on is None:
            return "they run on other weights than the latest"
        if not self._free:
            return "more micro-batches are in flight than the schedule said"
        slot = self._free[-1]
        pairs = [(tensor, given.values[name]) for name, tensor in slot.values.items()]
        same = structure == self._structure and len(leaves) == len(slot.target)
        pairs += zip(slot.target, leaves, strict=same)
        if same and all(_layout(one) == _layout(other) for one, other in pairs):
            return ""
        return "inputs or targets are made, shaped or laid out otherwise"

    def backward(
        self, passes: Sequence[Pass], grads: OutputGradients, weights: list[Tensor] | None
    ) -> Sequence[Pass]:
        """Replay a backward of micro-batches, as far as their forwards were; of one that is split,
        the first part.

        Args:
            weights: that it runs on; None: the parameters.

        Returns the others.
        """
        mine = [(micro, k) for micro, k in passes if isinstance(micro, MicroBatchInSlot)]
        if not mine:
            return passes
        _put_weights(self._backward_on, weights, self._weights)
        before, found = self._begin_sums(several=len(passes) > 1), set[Leaf]()
        # In autograd's sequence: what was computed last comes first.
        for micro, k in reversed(mine):
            found |= self._replay_backward(micro, grads, k)
            if not self._variant.split_backward:
                self._free.append(micro.slot)
        self._end_sums(before, found)
        return [each for each in passes if not isinstance(each[0], MicroBatchInSlot)]

    def weights(self, micro: MicroBatch) -> bool:
        """Replay the weight part of a split backward. Returns whether its forward was replayed."""
        if not isinstance(micro, MicroBatchInSlot):
            return False
        if WEIGHT in micro.slot.graphs:
            # What other stages use too was put aside since.
            before = self._begin_sums(several=False) if self._tied else {}
            micro.slot.graphs[WEIGHT].replay()
            if self._tied:
                self._end_sums(before, micro.found)
        self._free.append(micro.slot)
        return True

    def _replay_backward(
        self, micro: MicroBatchInSlot, grads: OutputGradients, k: int
    ) -> set[Leaf]:
        """Replay a backward; returns the parameters and inlets that its gradients reach."""
        slot, found = micro.slot, set[Leaf]()
        for name, into in slot.into.items():
            if name == _LOSS:
                into.fill_(micro.weight)
            elif name in grads.by_name and not grads.gone[name][k]:
                into.copy_(grads.by_name[name][k])
            else:
                # What it alone leads to gets none.
                into.zero_()
                continue
            found |= slot.leads[name]
        if BACKWARD in slot.graphs:
            slot.graphs[BACKWARD].replay()
        for name in map(str, found & slot.back.keys()):
            micro.inlets[name].grad = slot.back[name].clone()
        micro.found = found
        return found

    # Gradients ---------------------------------------------------------------------------------

    def _begin_sums(self, *, several: bool) -> dict[int, Tensor]:
        """Set the captured sums to the parameters' gradients, to −0 where there are none. With
        `several` micro-batches all begin at −0, and those to add then are returned by position."""
        before, empty = dict[int, Tensor](), list[Tensor]()
        for k, (p, own) in enumerate(zip(self._weights.every, self._sums, strict=True)):
            if p.grad is None or several:
                empty.append(own)
                if p.grad is not None:
                    before[k] = p.grad.clone() if p.grad is own else p.grad
            elif p.grad is not own:
                own.copy_(p.grad)
        if empty:
            torch._foreach_zero_(empty)
            torch._foreach_neg_(empty)
        return before

    def _end_sums(self, before: Mapping[int, Tensor], found: set[Leaf]) -> None:
        """Give parameters that gradients reached their captured sums; others keep what they had."""
        own_parameters = len(self._weights.parameters)
        for k, (p, own) in enumerate(zip(self._weights.every, self._sums, strict=True)):
            if k in found:
                # Those that other stages use too are put aside, from update to update.
                p.grad = own.add_(before[k]) if k in before else own
                p.grad = own if k < own_parameters else own.clone()
            elif k in before:
                p.grad = before[k]


def why_not(prepared: Prepared, stage: int) -> str:
    """Why a stage's passes can't be captured, as plan and settings say; empty: they may be."""
    settings, planned = prepared.settings, prepared.plan.stages[stage]
    module = prepared.model.stages[stage].piece.module
    every: list[nn.Module | nn.Parameter] = [*module.modules(), *module.parameters()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    names = (*hooks, "_post_accumulate_grad_hooks")
    reasons = {
        "activations are recomputed": bool(planned.recompute),
        "forwards are compiled (--compile)": settings.compile,
        "batch norms are deferred (--deferred-batch-norm)": settings.deferred_batch_norm,
        "mini-batches differ in shape": prepared.varies,
        "the loss gives (sum, weight)": prepared.model.loss.weighted,
        "samples have the same random numbers in all stages, for a comparison": (
            prepared.random is not None and bool(prepared.random.calls)
        ),
        "modules or parameters have hooks": any(getattr(x, n, None) for x in every for n in names),
        "the model has compiled parts": any(
            x._compiled_call_impl is not None or "_orig_mod" in x._modules for x in module.modules()
        ),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def most_in_flight(ops: Iterable[Op], micro_batches: Callable[[Op], Sequence[int]]) -> int:
    """Micro-batches of a replica between the begin of their forward and their backward's end.

    Args:
        ops: of its stage.
        micro_batches: those that an operation works through here.
    """
    every = list(ops)
    last = WEIGHT if any(op.kind == WEIGHT for op in every) else BACKWARD
    now = most = 0
    for op in every:
        now += len(micro_batches(op)) * ((op.kind == FORWARD) - (op.kind == last))
        most = max(most, now)
    return most


def _too_much(
    on: capture.Capture, held: int, to_come: int, times: int = 1
) -> capture.CannotCaptureError | None:
    """What there is to say where a device hasn't the memory for graphs (so many `times` those that
    are held) and what comes later."""
    left = on.free_bytes() - (times - 1) * held
    if left >= to_come:
        return None
    return capture.CannotCaptureError(
        f"with graphs of {format_bytes(times * held)} the device would have "
        f"{format_bytes(max(left, 0))} left, and optimizer state, versions, messages and the like "
        f"are to take {format_bytes(to_come)}"
    )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=_NORMS.get(tensor.dtype))
    return norm.div(max(tensor.numel(), 1) ** 0.5)


def _is_other(found: Tensor, wanted: Tensor, noise: float) -> bool:
    """Whether numbers differ by more than a sequence of additions makes. `noise`: of each."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return not torch.equal(found, wanted)
    there = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(found), there):
        return True
    gone = ~there
    apart, size = (_rms(t.masked_fill(gone, 0)) for t in (found - wanted, wanted))
    return bool(apart > _ALIKE * size + noise)


def _put_weights(
    into: list[Tensor] | None, weights: list[Tensor] | None, versions: WeightVersions
) -> None:
    if into is None:
        assert weights is None
    elif into:
        torch._foreach_copy_(into, weights or [p.detach() for p in versions.every])


def _edges(roots: Iterable[GradientEdge]) -> Iterator[tuple[Any, int, Any]]:
    """All edges between nodes behind these: the node, the edge's number there, the other node."""
    waiting = [root.node for root in roots]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for k, (child, _) in enumerate(node.next_functions):
            if child is not None:
                yield node, k, child
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)


def _leaves(roots: Iterable[GradientEdge], keys: Mapping[int, Leaf]) -> set[Leaf]:
    """The keys of the leaves behind these edges, given by id."""
    found = (id(getattr(child, "variable", None)) for _, _, child in _edges(roots))
    return {keys[leaf] for leaf in found if leaf in keys}


@contextmanager
def _added_by_use(roots: Iterable[GradientEdge], sums: Mapping[int, Tensor]) -> Iterator[None]:
    """In the context's backward, gradients of parameters with several uses go to their sums (by
    id) use by use, and not when all of them are there."""
    uses: dict[int, list[tuple[Any, int]]] = {}
    for node, k, child in _edges(roots):
        leaf = id(getattr(child, "variable", None))
        if leaf in sums:
            uses.setdefault(leaf, []).append((node, k))
    handles = [
        node.register_hook(partial(_add, sums[leaf], k))
        for leaf, places in uses.items()
        if len(places) > 1
        for node, k in places
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(own: Tensor, k: int, found: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    grad = found[k]
    if grad is not None:
        own.add_(grad)
    return (*found[:k], None, *found[k + 1 :])
