"""Buffers that a stage's forward changes and may read: a second run of it must find them again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...profiles.errors import RunError

BufferCopies = list[tuple[Tensor, Tensor]]
"""Buffers, each with a copy of it."""


class ChangedBuffers:
    """Those of a stage. Which they are shows in the first forward; until then all are copied, and
    only those after that."""

    def __init__(self, buffers: Iterable[Tensor], updated: Collection[int] = ()) -> None:
        """
        Args:
            buffers: the stage's.
            updated: ids of those that its forward changes and doesn't read; they aren't copied.
        """
        self._buffers = [b for b in buffers if id(b) not in updated]
        self._changed: frozenset[int] | None = None
        self._before: list[tuple[Tensor, int]] = []
        self._first: BufferCopies = []

    def begin(self) -> None:
        """The first run of a forward is about to begin."""
        self._before = [(b, b._version) for b in self._buffers]
        self._first = self.copies() if self._changed is None else []

    def copies(self, of: Iterable[Tensor] | None = None) -> BufferCopies:
        """What they are now. `of`: of these buffers alone."""
        among = None if of is None else {id(buffer) for buffer in of}
        return [
            (buffer, buffer.detach().clone())
            for buffer in self._buffers
            if (self._changed is None or id(buffer) in self._changed)
            and (among is None or id(buffer) in among)
        ]

    def end(self) -> None:
        """It is done. Raises RunError where it has changed others than the first forward did."""
        found = {id(b) for b, version in self._before if b._version != version}
        if self._changed is None:
            # What is written through `.data` counts no version.
            found |= {id(b) for b, before in self._first if not torch.equal(b, before)}
            self._changed = frozenset(found)
        elif found - self._changed:
            raise RunError(
                "a buffer that a stage's forward is computed again from is changed, and wasn't in "
                "the first one; change it in every forward, or plan without --recompute"
            )
        self._before, self._first = [], []

    def among(self, copies: BufferCopies) -> BufferCopies:
        """Of copies that the first forward made, those that are needed."""
        changed = self._changed
        return [(b, copy) for b, copy in copies if changed is None or id(b) in changed]


def put_back(copies: BufferCopies) -> None:
    """Have buffers be what they were when they were copied."""
    with torch.no_grad():
        for buffer, before in copies:
            buffer.copy_(before)


@contextmanager
def unchanged(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards, buffers are what they were before."""
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers]
    yield
    for buffer, before in copies:
        # Graphs of forwards before keep running statistics, and would take this for a change that
        # their backward mustn't follow. Batch norms' own updates they don't see, either.
        buffer.data.copy_(before)
