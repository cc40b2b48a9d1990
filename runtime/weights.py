"""Weight versions of a stage: the latest in the parameters themselves, older ones while needed.

Autograd saves the weights that a backward needs inside its graph, and refuses to run when an
update has changed them in place. Saved-tensor hooks pack every saved tensor that shares memory
with a parameter as a reference (which parameter, size, stride, offset) and unpack it to the
version that the training system prescribes for the backward. So no graph holds weights.

Tensors computed from weights (weight norm, autocast copies) are saved as values: the part of a
backward that goes through them is at the forward's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..profiles.saved import storage_bytes, storage_key


class _Reference(NamedTuple):
    """A saved view of a parameter."""

    parameter: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class WeightVersions:
    """The versions of one stage's parameters.

    Attributes:
        latest: number of the version that the parameters hold.
        saved: bytes by storage that autograd saved in the last forward, parameters left out.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.latest = 0
        self.saved: dict[int, int] = {}
        self._older: dict[int, list[Tensor]] = {}
        self._index = {storage_key(p): k for k, p in enumerate(self.parameters) if p.numel()}
        self._unpack_from: list[Tensor] = []
        self._scratch: list[Tensor] = []

    # Keeping versions --------------------------------------------------------------------

    def keep_latest(self) -> None:
        """Copy the latest weights: an update is about to overwrite them, and they are needed."""
        copies = [p.detach().clone() for p in self.parameters]
        self._older[self.latest] = copies
        self._index.update({storage_key(t): k for k, t in enumerate(copies) if t.numel()})

    def advance(self, needed: set[int]) -> None:
        """The update is done: the parameters hold the next version; drop what isn't needed."""
        self.latest += 1
        self.drop(needed)

    def drop(self, needed: set[int]) -> None:
        """Let go of older versions that nobody needs any more."""
        for version in [v for v in self._older if v not in needed]:
            for tensor in self._older.pop(version):
                self._index.pop(storage_key(tensor), None)

    @property
    def held(self) -> int:
        """Versions held, the latest included."""
        return 1 + len(self._older)

    @property
    def older_bytes(self) -> int:
        """Bytes of the copies, the scratch copy among them."""
        copies = (*self._older.values(), self._scratch)
        return sum(storage_bytes(t) for tensors in copies for t in tensors)

    # Making others -----------------------------------------------------------------------

    def at(self, version: int) -> list[Tensor] | None:
        """The tensors of a version that is held; None: the parameters as they are."""
        return None if version == self.latest else self._older[version]

    def scratch(self) -> list[Tensor]:
        """Tensors to make other weights in: for one operation, then they may be overwritten."""
        if not self._scratch:
            self._scratch = [torch.empty_like(p, requires_grad=False) for p in self.parameters]
            keys = ((storage_key(t), k) for k, t in enumerate(self._scratch) if t.numel())
            self._index.update(keys)
        return self._scratch

    def drop_scratch(self) -> None:
        """Let go of that memory."""
        for tensor in self._scratch:
            self._index.pop(storage_key(tensor), None)
        self._scratch = []

    def between(self, version: int, share: float, *, reuse: bool) -> list[Tensor]:
        """Weights between the latest and an older version: latest + share · (older − latest).

        Args:
            reuse: nothing needs the older version after this: its memory is overwritten.
        """
        older = self._older[version]
        target = older if reuse else self.scratch()
        with torch.no_grad():
            for p, old, made in zip(self.parameters, older, target, strict=True):
                torch.lerp(p, old, share, out=made)
        return target

    # Using them --------------------------------------------------------------------------

    @contextmanager
    def forward(self, tensors: list[Tensor] | None) -> Iterator[None]:
        """Run a forward on these; None: the parameters as they are.

        What it saves of the weights are references.
        """
        live = None
        if tensors is not None:
            live = [p.data for p in self.parameters]
            for p, other in zip(self.parameters, tensors, strict=True):
                p.data = other
        counted: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor | _Reference:
            key = storage_key(tensor)
            k = self._index.get(key)
            if k is None:
                counted[key] = storage_bytes(tensor)
                # An operation that saves its own output would hold itself alive through it.
                return tensor.detach()
            return _Reference(k, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            if live is not None:
                for p, data in zip(self.parameters, live, strict=True):
                    p.data = data
            self.saved = counted

    @contextmanager
    def backward(self, tensors: list[Tensor] | None) -> Iterator[None]:
        """Run a backward on these, whatever its forward ran on; None: the parameters."""
        self._unpack_from = tensors or [p.detach() for p in self.parameters]
        try:
            yield
        finally:
            self._unpack_from = []

    def _unpack(self, kept: Tensor | _Reference) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        source = self._unpack_from[kept.parameter]
        return source.as_strided(kept.size, kept.stride, kept.offset)
