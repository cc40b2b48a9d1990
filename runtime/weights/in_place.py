"""Buffers that a stage's forward changes in place: kept, and restored for its recomputation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ...planner.systems.hooks import ForwardRun, StageHooks
from ...profiles.errors import RunError
from ...profiles.tracing.call import mark_of
from .hooked import HookedStage

_Key = TypeVar("_Key", int, str)


class ChangedInPlace(Generic[_Key]):
    """Which of its tensors a forward changes shows in the first run. Until then all are taken for
    such; another one that a later run changes is an error, since nobody has a copy of it.

    Attributes:
        known: keys of those that are changed; None: it hasn't run yet.
    """

    def __init__(self, error: str) -> None:
        """`error`: what to say of such another one; ``{!r}`` there is its key."""
        self._error = error
        self.known: Set[_Key] | None = None
        self._before: list[tuple[_Key, Tensor, int]] = []

    def __contains__(self, key: _Key) -> bool:
        return self.known is None or key in self.known

    def begin(self, tensors: Iterable[tuple[_Key, Tensor]]) -> None:
        """A run gets these."""
        self._before = [(key, tensor, tensor._version) for key, tensor in tensors]

    def end(self, also: Set[_Key] = frozenset()) -> None:
        """It is done. Raises as `note`. `also`: changed without a new version."""
        before, self._before = self._before, []
        self.note({key for key, tensor, version in before if tensor._version != version} | also)

    def note(self, changed: Set[_Key]) -> None:
        """A run has changed these. Raises RunError where the first one left one of them alone."""
        if self.known is None:
            self.known = changed
        elif changed - self.known:
            raise RunError(self._error.format(min(changed - self.known)))


BufferCopies = list[tuple[Tensor, Tensor]]
"""Buffers, each with a copy of it."""

Marks = list[tuple[nn.Parameter, Callable[[Tensor], object], object]]
"""Parameters, each with what makes a mark of it, and the mark it had."""


class ChangedBuffers:
    """Those of a stage. Which they are shows in the first forward; until then all are copied, and
    only those after that."""

    def __init__(self, module: nn.Module, updated: Collection[int] = ()) -> None:
        """
        Args:
            module: that has them.
            updated: ids of buffers that its forward changes and doesn't read; they aren't copied.
        """
        self._module = module
        self._buffers = [b for b in module.buffers() if id(b) not in updated]
        self._changed = ChangedInPlace[int](
            "a buffer that a stage's forward is computed again from is changed, and wasn't in "
            "the first one; change it in every forward, or plan without --recompute"
        )
        self._first: BufferCopies = []
        self._frozen: Marks = []

    def begin(self) -> None:
        """The first run of a forward is about to begin."""
        # Of gigabytes, sums take their time.
        mark = mark_of if self._changed.known is None else attrgetter("_version")
        self._frozen = _marks(self._module, mark)
        self._changed.begin((id(buffer), buffer) for buffer in self._buffers)
        self._first = self.copies() if self._changed.known is None else []

    def copies(self, of: Iterable[Tensor] | None = None) -> BufferCopies:
        """What they are now. `of`: of these buffers alone."""
        wanted = None if of is None else {id(buffer) for buffer in of}
        return [
            (buffer, buffer.detach().clone())
            for buffer in self._buffers
            if id(buffer) in self._changed and (wanted is None or id(buffer) in wanted)
        ]

    def end(self) -> None:
        """It is done. Raises RunError where it has changed others than the first forward did, put
        another tensor in a buffer's place, or changed a frozen parameter."""
        _check_frozen(self._frozen, "plan without --recompute")
        there = set(map(id, self._module.buffers()))
        if any(id(buffer) not in there for buffer in self._buffers):
            raise RunError(
                "a buffer of what is computed again is given a new tensor in its forward "
                "(self.mean = …): write into the one it has (self.mean.copy_(…)), or plan without "
                "--recompute"
            )
        # What is written through `.data` counts no version.
        self._changed.end({id(b) for b, before in self._first if not torch.equal(b, before)})
        self._first = []

    def changed_of(self, copies: BufferCopies) -> BufferCopies:
        """Of copies that the first forward made, those that are needed."""
        return [(buffer, copy) for buffer, copy in copies if id(buffer) in self._changed]


def _marks(module: nn.Module, mark: Callable[[Tensor], object]) -> Marks:
    """Parameters that aren't trained, with what tells whether they are changed."""
    return [(p, mark, mark(p)) for p in module.parameters() if not p.requires_grad]


def _check_frozen(before: Marks, instead: str) -> None:
    """Raise RunError where one was changed since. There may be gigabytes of them: nobody has a
    copy."""
    for p, mark, was in before:
        if mark(p) != was:
            raise RunError(
                f"a frozen parameter of shape {list(p.shape)} is changed by a forward that mustn't "
                f"leave anything changed: make it a buffer (register_buffer), or {instead}"
            )


def put_back(copies: BufferCopies) -> None:
    """Have buffers be what they were when they were copied."""
    with torch.no_grad():
        for buffer, before in copies:
            buffer.copy_(before)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards, its buffers are what they were before. Raises RunError where a frozen parameter
    isn't."""
    frozen = _marks(module, mark_of)
    copies = [
        (inner._buffers, name, buffer, buffer.detach().clone())
        for inner in module.modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None
    ]
    yield
    _check_frozen(frozen, "run with --ragged drop")
    for buffers, name, buffer, before in copies:
        # A forward may have put another tensor in its place.
        buffers[name] = buffer
        # Graphs of forwards before keep running statistics, and would take this for a change that
        # their backward mustn't follow. Batch norms' own updates they don't see, either.
        buffer.data.copy_(before)


class PaddingAlone(StageHooks):
    """Forwards of micro-batches of padding alone leave everything as it was: they count nothing."""

    def __init__(self, stage: HookedStage) -> None:
        self._module = stage.module

    def forward(self, run: ForwardRun) -> AbstractContextManager[None] | None:
        return None if run.real else unchanged(self._module)
