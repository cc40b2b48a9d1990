"""The stash: a stage's weight versions, the latest in the parameters, older ones while needed.

Autograd saves the weights that a backward needs inside its graph, and refuses to run when an
update has changed them in place. Saved-tensor hooks pack every saved tensor that shares memory
with a parameter as a reference (which parameter, size, stride, offset) and unpack it to the
version that the training system prescribes for the backward. So no graph holds weights.

So are copies of a whole parameter in another precision, as autocast makes them: only where they
came from is kept, and the backward makes its own.

Parameters that aren't trained are the same in all versions, and are kept once.

Other tensors computed from weights (weight norm) are saved as values: the part of a backward
that goes through them is at the forward's weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...planner.systems.hooks import NOTHING
from ...planner.systems.versions import SharedWalk, VersionWalk
from ...profiles.autograd.boundary import SavedTensor, bytes_held, storage_bytes, storage_key
from ...profiles.errors import TargetError


def give_own_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Take parameters that are views of one tensor out of its memory: what autograd saves is told
    by whose memory it has, and found again in copies that are laid out alike."""
    for p in parameters:
        if storage_bytes(p) != p.nbytes:
            p.data = p.data.clone()


def _refuse(module: nn.Module, given: object) -> None:
    raise TargetError(
        f"a {type(module).__name__} is called inside a backward, as by torch.utils.checkpoint, and "
        "this one runs on other weights than its forward: leave that out and plan with "
        "--recompute, or with a system that runs both on the same ones (gpipe, pipedream)"
    )


def _check_unchanged(saved: Tensor, version: int) -> None:
    if saved._version != version:
        raise TargetError(
            f"a tensor of shape {list(saved.shape)} is changed in place between the forward that "
            "takes it and its backward: of a buffer that forwards change, have them take a copy "
            "(self.mean.clone())"
        )


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
"""Types that no weights are copied to: indices, masks."""


class _Reference(NamedTuple):
    """A saved view of a parameter, or of its copy in another precision.

    Attributes:
        parameter: its position among what operations run on, or behind these, of a frozen one.
        dtype: of the view: complex numbers may be seen as pairs, and the other way round.
        lazy: whether its numbers are the memory's conjugates, and whether they are their negatives.
        version: of a frozen one, torch's count of its changes; else 0.
    """

    parameter: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    lazy: tuple[bool, bool]
    copied_to: torch.dtype | None = None
    version: int = 0


class Substitutes(Protocol):
    """What stands in autograd's graph for tensors that are computed again (`stage.recompute`)."""

    def packed(self, tensor: Tensor, key: int, *, weight: bool) -> Any:
        """For a tensor with this storage: an object with `filled()`, or None."""


class WeightVersions:
    """The versions of one stage's trained parameters.

    Attributes:
        latest: number of the version that the parameters hold.
        held: versions, the latest included.
        saved: bytes by storage that autograd saved in the last forward, parameters left out.
        copies: whether some forward so far has copied weights to another precision.
        every: what operations run on: the parameters, and behind them those that were joined.
        corrected: of weights in the scratch copy that were corrected, the latest version then, and
            how far back they are.
        given: of a replica that doesn't lead, marks of frozen parameters as the run gave them, by
            name.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], frozen: Sequence[nn.Parameter] = ()
    ) -> None:
        """`frozen`: what operations also run on, and nobody trains."""
        self.parameters = list(parameters)
        self._frozen = list(frozen)
        self.given: dict[str, tuple[int, str]] = {}
        self._frozen_index = {storage_key(p): k for k, p in enumerate(frozen) if p.numel()}
        self.latest = 0
        self.saved: dict[int, int] = {}
        self.copies = False
        self._older: dict[int, list[Tensor]] = {}
        self.held = 1
        self._index = {storage_key(p): k for k, p in enumerate(self.parameters) if p.numel()}
        self._memory = [p.detach() for p in self.parameters]
        self._unpack_from: list[Tensor] = []
        # Micro-batches of a backward ask for the same ones. Copies in another precision are by
        # parameter and that.
        self._views: dict[_Reference | tuple[int, torch.dtype], Tensor] = {}
        self._scratch: list[Tensor] = []
        # By version; the scratch copy's stand at -1.
        self._bytes: dict[int, int] = {}
        self.corrected: tuple[int, int] | None = None
        self.join(())

    def join(self, others: Sequence[WeightVersions]) -> None:
        """Let operations run on the weights of these, too: their tensors come behind the own
        ones in the lists that `forward` and `backward` take."""
        self.every = list(self.parameters)
        # Where each begins.
        self._joined: list[tuple[int, WeightVersions]] = []
        for other in others:
            self._joined.append((len(self.every), other))
            self.every += other.parameters
        self._position = {id(p): k for k, p in enumerate(self.every)}
        dtypes = {p.dtype for p in self.every}
        # What has it isn't a copy in another precision.
        self._only_dtype = dtypes.pop() if len(dtypes) == 1 else None

    def keep_memory(self) -> None:
        """Put parameters whose memory was exchanged back into their own, with the numbers that they
        have now: what autograd saves of them is told by it."""
        for p, own in zip(self.parameters, self._memory, strict=True):
            if p.data_ptr() != own.data_ptr():
                p.data = own.copy_(p.detach())

    # Keeping versions --------------------------------------------------------------------

    def keep_latest(self) -> None:
        """Copy the latest weights: an update is about to overwrite them, and they are needed."""
        copies = [torch.empty_like(p, requires_grad=False) for p in self.parameters]
        if copies:
            # On a GPU one kernel copies many.
            torch._foreach_copy_(copies, [p.detach() for p in self.parameters])
        self._older[self.latest] = copies
        self.held = 1 + len(self._older)
        self._bytes[self.latest] = sum(map(storage_bytes, copies))
        self._index.update({storage_key(t): k for k, t in enumerate(copies) if t.numel()})

    def keep_needed(self, walk: VersionWalk | SharedWalk) -> None:
        """An update comes: copy the latest weights, if operations of the walk still need them."""
        if walk.latest in walk.needed():
            self.keep_latest()

    def update(self, walk: VersionWalk | SharedWalk) -> int:
        """It has come, and the parameters hold the next version. Returns its number."""
        needed, version = walk.needed(), walk.update()
        self.advance(needed)
        return version

    def advance(self, needed: set[int]) -> None:
        """The parameters hold the next version; drop what isn't needed."""
        self.keep_memory()
        self.latest += 1
        self.drop(needed)

    def drop(self, needed: set[int]) -> None:
        """Let go of older versions that nobody needs any more."""
        for version in [v for v in self._older if v not in needed]:
            del self._bytes[version]
            for tensor in self._older.pop(version):
                self._index.pop(storage_key(tensor), None)
        self.held = 1 + len(self._older)

    @property
    def older_bytes(self) -> int:
        """Bytes of the copies, the scratch copy among them."""
        return sum(self._bytes.values())

    def has(self, key: int) -> bool:
        """Whether memory with this key is a parameter's, or that of a version of one."""
        return key in self._index or self._beside(key) is not None

    def _beside(self, key: int) -> int | None:
        """The position of what has this memory and isn't one of the own parameters."""
        for begin, other in self._joined:
            k = other._index.get(key)
            if k is not None:
                return begin + k
        k = self._frozen_index.get(key)
        return None if k is None else len(self.every) + k

    # Making weights -----------------------------------------------------------------------

    def at(self, version: int) -> list[Tensor] | None:
        """The tensors of a version that is held; None: the parameters as they are."""
        return None if version == self.latest else self._older[version]

    def scratch(self) -> list[Tensor]:
        """Tensors to make other weights in: for one operation, then they may be overwritten."""
        self.corrected = None
        if not self._scratch:
            self._scratch = [torch.empty_like(p, requires_grad=False) for p in self.parameters]
            keys = ((storage_key(t), k) for k, t in enumerate(self._scratch) if t.numel())
            self._index.update(keys)
            self._bytes[-1] = sum(map(storage_bytes, self._scratch))
        return self._scratch

    def drop_scratch(self) -> None:
        """Let go of that memory."""
        for tensor in self._scratch:
            self._index.pop(storage_key(tensor), None)
        self._scratch = []
        self._bytes.pop(-1, None)

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

    # Using weights --------------------------------------------------------------------------

    def forward(
        self,
        tensors: list[Tensor] | None,
        *,
        counts: bool = True,
        substitutes: Substitutes | None = None,
    ) -> AbstractContextManager[None]:
        """Run a forward on these; None: the parameters as they are.

        What it saves of the weights are references.

        Args:
            counts: False: nobody asks what it saved, and its backward will run on the parameters,
                whatever updates have made of them by then. So where this runs on them, too,
                autograd keeps what it keeps.
            substitutes: asked for what is kept instead of a tensor.
        """
        self.saved = {}
        if tensors is None and not counts:
            return NOTHING
        return _packing(self, tensors, substitutes, counts=counts)

    def _copied_from(self, tensor: Tensor) -> int | None:
        """The parameter that this is a copy of in another precision, or a view of such a copy."""
        # Autograd passes what it saves with its history, outputs of the operation left out.
        copy = tensor._base if tensor._is_view() else tensor
        made_by = copy.grad_fn if copy is not None else None
        if copy is None or made_by is None or made_by.name() != "ToCopyBackward0":
            return None
        source = getattr(made_by.next_functions[0][0], "variable", None)
        k = None if source is None else self._position.get(id(source))
        # Only where a copy made later is laid out the same, from its storage's start.
        if source is None or copy.device != source.device or copy.storage_offset():
            return None
        return k if copy.stride() == source.stride() else None

    @contextmanager
    def backward(self, tensors: list[Tensor] | None, *, same: bool = True) -> Iterator[None]:
        """Run a backward on these, whatever its forward ran on; None: the parameters.

        Args:
            same: as the forward's. Layers that are called again inside a backward
                (torch.utils.checkpoint) run on these, and are refused where they aren't the same.
        """
        own = tensors or [p.detach() for p in self.every]
        self._unpack_from = [*own, *(p.detach() for p in self._frozen)]
        refusal = None if same else register_module_forward_pre_hook(_refuse)
        try:
            with _holding(self.every, tensors):
                yield
        finally:
            if refusal is not None:
                refusal.remove()
            self._unpack_from = []
            self._views = {}

    def _unpack(self, kept: Any) -> Tensor:
        if type(kept) is tuple:
            saved: Tensor = kept[0]
            if saved._version != kept[1]:
                _check_unchanged(saved, kept[1])
            return saved
        if not isinstance(kept, _Reference):
            filled: Tensor = kept.filled()
            return filled
        view = self._views.get(kept)
        if view is None:
            view = self._views[kept] = self._view(kept)
        return view

    def _view(self, kept: _Reference) -> Tensor:
        if not self._unpack_from:
            raise TargetError(
                "the forward or the loss takes gradients itself (torch.autograd.grad, backward): "
                "inside a stage's forward there are no weights to take them on"
            )
        source = self._unpack_from[kept.parameter]
        if kept.parameter >= len(self.every):
            _check_unchanged(source, kept.version)
        if kept.copied_to is not None:
            key = (kept.parameter, kept.copied_to)
            if key not in self._views:
                self._views[key] = source.to(kept.copied_to)
            source = self._views[key]
        view = torch.empty(0, dtype=kept.dtype, device=source.device)
        view.set_(source.untyped_storage(), kept.offset, kept.size, kept.stride)
        conjugate, negative = kept.lazy
        view = view.conj() if conjugate else view
        return torch._neg_view(view) if negative else view


@contextmanager
def _packing(
    versions: WeightVersions,
    tensors: list[Tensor] | None,
    substitutes: Substitutes | None,
    *,
    counts: bool,
) -> Iterator[None]:
    """`WeightVersions.forward` with hooks."""
    counted: list[SavedTensor] = []
    index, only, beside = (
        versions._index,
        versions._only_dtype,
        bool(versions._joined or versions._frozen),
    )
    versioned = len(versions.every)

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        copied_to = None
        k = index.get(key)
        if k is None and beside:
            k = versions._beside(key)
        if k is None and tensor.dtype != only and tensor.dtype not in _WHOLE:
            k, copied_to = versions._copied_from(tensor), tensor.dtype
            versions.copies |= k is not None
        if substitutes is not None:
            found = substitutes.packed(tensor, key, weight=k is not None)
            if found is not None:
                return found
        if k is None:
            # An operation that saves its own output would hold itself alive through it. Where
            # there are hooks, torch doesn't look at versions itself.
            kept = tensor.detach()
            if counts:
                counted.append((weakref.ref(kept), key, storage.nbytes()))
            return kept, tensor._version
        offset = int(tensor.storage_offset())
        version = 0 if k < versioned else versions._frozen[k - versioned]._version
        lazy = tensor.is_conj(), tensor.is_neg()
        layout = tensor.size(), tensor.stride(), offset
        return _Reference(k, *layout, tensor.dtype, lazy, copied_to, version)

    try:
        hooked = torch.autograd.graph.saved_tensors_hooks(pack, versions._unpack)
        with _holding(versions.every, tensors), hooked:
            yield
    finally:
        versions.saved = bytes_held(counted)


def _holding(
    parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor] | None
) -> AbstractContextManager[None]:
    """The parameters hold these; None: what they hold."""
    return NOTHING if tensors is None else _exchanged(parameters, tensors)


@contextmanager
def _exchanged(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> Iterator[None]:
    live = [p.data for p in parameters]
    for p, other in zip(parameters, tensors, strict=True):
        p.data = other
    try:
        yield
    finally:
        for p, data in zip(parameters, live, strict=True):
            p.data = data


def memory_for(versions: WeightVersions) -> list[Tensor]:
    """A tensor for each that operations run on, which they may run on instead; it stays."""
    made = [torch.empty_like(p, requires_grad=False) for p in versions.every]
    for begin, owner in ((0, versions), *versions._joined):
        keys = [storage_key(t) for t in made[begin : begin + len(owner.parameters)]]
        owner._index.update({key: k for k, key in enumerate(keys) if made[begin + k].numel()})
    return made


def let_go(versions: WeightVersions, made: Sequence[Tensor]) -> None:
    """Nothing runs on such tensors any more: their memory may become another tensor's."""
    for owner in (versions, *(other for _, other in versions._joined)):
        for tensor in made:
            owner._index.pop(storage_key(tensor), None)
