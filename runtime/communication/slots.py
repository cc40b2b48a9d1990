"""Slots in shared memory between two processes: how many, how large, at which offset.

Messages of a route and kind have slots of their own, in a box. Where mini-batches differ in shape,
a message says its own in front; one that is larger than its slots, which are made for those that
were profiled, comes in several.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...planner.costs.stage_costs import RECEIVES_AHEAD
from ...planner.systems.operations import BACKWARD, FORWARD
from ..prepare.messages import MessageRoute

Key = tuple[int, str]
"""Number of a route, and the kind of message."""

SLOT_BYTES = 2**20
"""Memory of a route's slots, where those that stand for posted receives take less. It says how many
there are: each has room for a whole message, and one is cut into parts where shapes vary alone."""

MOST_SLOTS = 64
"""Of a route."""

MOST_RECORDS = 128
"""Slots between two workers, but for those that stand for posted receives: each that is filled is a
record in their socket, which holds 200 and more until the other one looks."""

_ALIGNED = 64
_SIZE = torch.int64.itemsize


@dataclass(frozen=True)
class Box:
    """The slots of one route's messages of a kind.

    Attributes:
        ahead: slots that stand for receives posted ahead, as between hosts.
        slots: in all.
        offset: of the first, in bytes.
        varying: messages have shapes of their own, of as many dimensions, and say them. One that is
            larger than a slot comes in several.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    ahead: int
    slots: int
    offset: int
    varying: bool = False

    @property
    def nbytes(self) -> int:
        """Of a message, with its shape where it says that."""
        return self.said_bytes + torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next box may begin."""
        return self.offset + self.slots * aligned(self.nbytes)

    def views(self, memory: mmap.mmap) -> list[Tensor]:
        """The slots as tensors; bytes, where messages say their shapes."""
        step = aligned(self.nbytes)
        shape, dtype = ((step,), torch.uint8) if self.varying else (self.shape, self.dtype)
        count = torch.Size(shape).numel()
        if not count:
            return [torch.empty(shape, dtype=dtype) for _ in range(self.slots)]
        starts = range(self.offset, self.offset + self.slots * step, step)
        return [
            torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
            for start in starts
        ]

    @property
    def said_bytes(self) -> int:
        """Of the shape that a message says."""
        return aligned(len(self.shape) * _SIZE) if self.varying else 0

    def parts(self, message: Tensor) -> list[Part]:
        """What goes into slots for a message, one after another."""
        if not self.varying:
            return [(message,)]
        said = torch.zeros(self.said_bytes // _SIZE, dtype=torch.int64)
        said[: message.dim()] = torch.tensor(message.shape, dtype=torch.int64)
        whole = message.detach().contiguous().resolve_conj()
        content = whole.reshape(-1).view(torch.uint8)
        step = aligned(self.nbytes)
        first = step - self.said_bytes
        rest = content[first:].split(step) if len(content) > first else ()
        return [(said.view(torch.uint8), content[:first]), *((each,) for each in rest)]

    def room(self, slot: Tensor) -> Tensor:
        """For the message whose shape a slot says."""
        shape = slot[: len(self.shape) * _SIZE].view(torch.int64)
        return torch.empty(shape.tolist(), dtype=self.dtype)


Part = tuple[Any, ...]
"""What goes into one slot: a whole message, or bytes; and what those slots know besides."""


class SlotsFrom(Protocol):
    """The receiver's end of one direction's slots. `k`: the box.

    Attributes:
        lent: the memory must stay until the sender is through.
    """

    lent: bool

    def take(self, k: int, slot: int) -> Tensor:
        """The message that fills a slot, copied out."""

    def bytes_of(self, k: int, slot: int) -> Tensor:
        """Where messages say their shapes: what is in a slot."""

    def close(self) -> None:
        """When the sender is through."""
        return


class SlotsTo(Protocol):
    """The sender's end."""

    def parts(self, k: int, message: Tensor) -> list[Part]:
        """What goes into slots for a message, one after another."""

    def put(self, k: int, slot: int, part: Part) -> None:
        """Copy it there."""

    def close(self) -> None:
        """When all is there."""


class HostSlots(SlotsFrom, SlotsTo):
    """Either end of slots in memory of the host, which goes with the last process that has it."""

    lent = False

    def __init__(self, memory: mmap.mmap, layout: Sequence[Box]) -> None:
        self._layout = layout
        self._views = [box.views(memory) for box in layout]

    def take(self, k: int, slot: int) -> Tensor:
        return self._views[k][slot].clone()

    def bytes_of(self, k: int, slot: int) -> Tensor:
        return self._views[k][slot]

    def parts(self, k: int, message: Tensor) -> list[Part]:
        return self._layout[k].parts(message)

    def put(self, k: int, slot: int, part: Part) -> None:
        write(self._views[k][slot], part)


def write(slot: Tensor, part: Part) -> None:
    """Copy it there."""
    if len(part) == 1 and part[0].shape == slot.shape:
        slot.copy_(part[0])
        return
    begin = 0
    for each in part:
        slot[begin : begin + len(each)] = each
        begin += len(each)


def aligned(nbytes: int) -> int:
    """A slot's size for so many bytes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def boxes(
    routes: Iterable[MessageRoute],
    source: int,
    target: int,
    *,
    varying: bool = False,
    slot_bytes: int = SLOT_BYTES,
) -> tuple[Box, ...]:
    """The layout of the memory from one worker to another, by rank; the same on both.

    Args:
        varying: messages have shapes of their own; slots are for those of the routes.
        slot_bytes: memory of a route's slots, where those that stand for posted receives take less.
    """
    messages = [
        (route, kind)
        for route in routes
        for kind in ((FORWARD, BACKWARD) if route.spec.needs_grad else (FORWARD,))
        if route.ends(kind) == (source, target)
    ]
    most = min(MOST_SLOTS, MOST_RECORDS // max(1, len(messages)))
    found: list[Box] = []
    for route, kind in messages:
        shape, dtype = route.shape(kind), route.spec.dtype
        size = max(1, torch.Size(shape).numel() * dtype.itemsize)
        ahead = RECEIVES_AHEAD[kind]
        slots = max(ahead, min(most, slot_bytes // size))
        offset = found[-1].end if found else 0
        found.append(Box((route.number, kind), shape, dtype, ahead, slots, offset, varying))
    return tuple(found)
