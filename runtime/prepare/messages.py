"""Routes of messages between workers: which part of which tensor goes from whom to whom, in which
shape.

What one message holds of a tensor is a *part*: the whole of it where stages deal micro-batches,
some of its samples where replicas share every mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ...planner.costs.stage_costs import RECEIVES_AHEAD
from ...planner.systems.operations import BACKWARD, FORWARD
from ...profiles.errors import RunError
from ...profiles.tracing.shapes import ValueSpec
from .workers import Replica

# Missing gradients ------------------------------------------------------------------------------
# Optimizers leave a parameter without a gradient alone; with a gradient of 0 they still apply
# weight decay and momentum. So what the loss doesn't depend on must not get zeros because of a
# cut. Messages have fixed shapes: they tell it by a NaN that no computation makes, with bits of
# our own.

_MARKS = {
    torch.float64: (torch.int64, 0x7FFC_A5A5_A5A5_A5A5),
    torch.float32: (torch.int32, 0x7FE5_A5A5),
    torch.float16: (torch.int16, 0x7F5A),
    torch.bfloat16: (torch.int16, 0x7FE5),
}


def _real(tensor: Tensor) -> Tensor:
    """Its numbers; of complex ones both parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def mark_missing(slot: Tensor) -> None:
    """Mark slots of a gradient message as without gradient, by a NaN that no computation makes.
    Types that have no such mark get zeros."""
    slot = _real(slot)
    mark = _MARKS.get(slot.dtype)
    if mark is None:
        slot.zero_()
    else:
        slot.view(mark[0]).fill_(mark[1])


def missing_gradients(message: Tensor, *, in_parts: bool = True) -> list[bool]:
    """For each slot of a gradient message ``[micro-batches, ...]``, whether it has none.

    Where only some samples have none, theirs become zeros.

    Args:
        in_parts: they may have come from several senders; else a slot's first number tells.
    """
    slots = message.shape[0]
    numbers = _real(message.resolve_conj())
    mark = _MARKS.get(numbers.dtype)
    if mark is None or not message.numel():
        return [False] * slots
    if not in_parts:
        first = numbers.reshape(slots, -1).select(1, 0)
        return [number == mark[1] for number in first.view(mark[0]).tolist()]
    marked = numbers.view(mark[0]) == mark[1]
    if not marked.any():
        return [False] * slots
    gone: list[bool] = marked.reshape(slots, -1).all(1).tolist()
    numbers.masked_fill_(marked, 0.0)
    for slot, none in zip(message, gone, strict=True):
        if none:
            mark_missing(slot)
    return gone


def add_gradients(total: Tensor, more: Tensor) -> None:
    """Add a gradient message to another one, in place; what is missing in both stays so."""
    without, also_without = missing_gradients(total), missing_gradients(more)
    if not any(without) and not any(also_without):
        total.add_(more)
        return
    for mine, other, none, other_none in zip(total, more, without, also_without, strict=True):
        if none:
            mine.copy_(other)
        elif not other_none:
            mine.add_(other)


# Routes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Every so many-th sample of a tensor, along its sample dimension: one replica's."""

    dimension: int
    first: int
    step: int

    def of(self, tensor: Tensor, before: int = 0) -> Tensor:
        """A view of these samples. `before`: dimensions that stand in front of the tensor's."""
        index = [slice(None)] * (before + self.dimension)
        index.append(slice(self.first, None, self.step))
        return tensor[tuple(index)]


@dataclass(frozen=True)
class MessageRoute:
    """A tensor's messages from a replica to one of a later stage: shape, dtype, which samples.

    Attributes:
        number: its position among all routes; the same on every worker.
        spec: of the part that a message holds, for one micro-batch.
        micro_batches: those of each mini-batch that they are for, ascending.
        gradient_micro_batches: how many of them one gradient message holds.
        taken, placed: which samples of the sender's, and of the receiver's tensor the part is;
            None: all.
    """

    number: int
    spec: ValueSpec
    source: Replica
    target: Replica
    micro_batches: tuple[int, ...]
    gradient_micro_batches: int
    taken: Rows | None = None
    placed: Rows | None = None

    def shape(self, kind: str) -> tuple[int, ...]:
        """Shape of a message: gradients of several micro-batches come stacked."""
        if kind == FORWARD:
            return self.spec.shape
        return (self.gradient_micro_batches, *self.spec.shape)

    def nbytes(self, kind: str) -> int:
        """Of a message."""
        return self._nbytes[kind]

    @cached_property
    def _nbytes(self) -> Mapping[str, int]:
        size = self.spec.dtype.itemsize
        return {kind: prod(self.shape(kind)) * size for kind in (FORWARD, BACKWARD)}

    def between(self, kind: str) -> tuple[Replica, Replica]:
        """The sender and the receiver of a message of this kind."""
        if kind == FORWARD:
            return self.source, self.target
        return self.target, self.source

    def ends(self, kind: str) -> tuple[int, int]:
        """The ranks of their workers."""
        sender, receiver = self.between(kind)
        return sender.rank, receiver.rank

    @property
    def handed_over(self) -> bool:
        """Whether both are of one worker: then there is no message."""
        return self.source.rank == self.target.rank

    def gradient_part(self, gradient: Tensor, micro_batches: Sequence[int]) -> Tensor:
        """What a gradient message holds of ``[micro_batches, ...]``, the receiver's gradient."""
        slots = self._slots(micro_batches)
        mine = gradient if slots is None else gradient[slots]
        return mine if self.placed is None else self.placed.of(mine, 1)

    def add_gradient(
        self,
        total: Tensor | None,
        message: Tensor,
        micro_batches: Sequence[int],
        shape: Sequence[int],
    ) -> Tensor:
        """The sender's gradient ``[micro_batches, *shape]`` with what a message holds added.

        Args:
            total: what has come before; None: nothing yet.
        """
        slots = self._slots(micro_batches)
        if slots is None and self.taken is None:
            if total is None:
                return message
            add_gradients(total, message)
            return total
        if total is None:
            total = torch.empty(
                (len(micro_batches), *shape), dtype=message.dtype, device=message.device
            )
            mark_missing(total)
        mine = total if slots is None else total[slots]
        add_gradients(mine if self.taken is None else self.taken.of(mine, 1), message)
        return total

    def _slots(self, micro_batches: Sequence[int]) -> slice | None:
        """The slice of `micro_batches` that the route is for; None: all of them."""
        here = [k for k, i in enumerate(micro_batches) if i in self.micro_batches]
        if len(here) == len(micro_batches):
            return None
        step = here[1] - here[0] if len(here) > 1 else 1
        return slice(here[0], here[-1] + 1, step)


PROFILE_AGAIN = (
    "Shapes may change from mini-batch to mini-batch where the plan's profile has seen them do so: "
    "profile again, with more --batches if need be, and solve again"
)

BY_VALUES = (
    "this shape depends on values, as after indexing by a mask: have a module of its own do that, "
    "kept whole by tp-profile --granularity NAME, or write it without, by torch.where "
    "(docs/tracing.md)"
)


def check_agreed(
    spec: ValueSpec,
    tensor: Tensor,
    *,
    varies: bool = False,
    inputs_alike: Callable[[], bool] = lambda: False,
) -> None:
    """Check what a stage made against what the others expect. Raises RunError.

    Args:
        varies: mini-batches differ in shape: messages say theirs, of as many dimensions.
        inputs_alike: whether the stage's inputs have the shapes that were profiled, so that it is
            their values which make the difference.
    """
    shape = tuple(tensor.shape)
    agreed = len(shape) == len(spec.shape) if varies else shape == spec.shape
    if agreed and tensor.dtype == spec.dtype:
        return
    if varies:
        advice = "The number of dimensions must not change during a run"
    elif shape != spec.shape and inputs_alike():
        advice = f"The inputs are shaped as when it was profiled, so {BY_VALUES}"
    else:
        advice = PROFILE_AGAIN
    raise RunError(
        f"{spec.name!r} has shape {list(shape)} of {tensor.dtype}; agreed was "
        f"{list(spec.shape)} of {spec.dtype}. {advice}"
    )


def join(parts: Sequence[tuple[MessageRoute, Tensor]]) -> Tensor:
    """A received tensor, joined from the parts of several replicas."""
    route, message = parts[0]
    if route.placed is None:
        return message
    shape = list(message.shape)
    shape[route.placed.dimension] *= route.placed.step
    whole = torch.empty(shape, dtype=message.dtype, device=message.device)
    for route, message in parts:
        assert route.placed is not None
        route.placed.of(whole).copy_(message)
    return whole


@dataclass(frozen=True)
class MessageSeries:
    """Messages of one tensor and kind to one worker, in the sequence in which it receives them.

    Attributes:
        routes: of one mini-batch's messages; they repeat in the next.
        ahead: how many receives are posted ahead.
        count: messages in all.
    """

    kind: str
    routes: tuple[MessageRoute, ...]
    ahead: int
    count: int


def message_series(
    kind: str, steps: Iterable[Sequence[MessageRoute]], rounds: int
) -> MessageSeries:
    """A series over `rounds` mini-batches. The messages of one of their `steps` are received
    together; each has as many."""
    found = [tuple(step) for step in steps]
    routes = tuple(route for step in found for route in step)
    ahead = RECEIVES_AHEAD[kind] * len(found[0])
    return MessageSeries(kind, routes, ahead, len(routes) * rounds)


def tensor_of(spec: ValueSpec) -> Tensor:
    """What travels, as far as it is known: a number or a size itself, else zeros."""
    if spec.numbers:
        return torch.tensor(spec.numbers, dtype=spec.dtype).reshape(spec.shape)
    return torch.zeros(spec.shape, dtype=spec.dtype)


def by_name(routes: Iterable[MessageRoute]) -> dict[str, list[MessageRoute]]:
    """Routes by the name of their tensor."""
    found: dict[str, list[MessageRoute]] = {}
    for route in routes:
        found.setdefault(route.spec.name, []).append(route)
    return found
