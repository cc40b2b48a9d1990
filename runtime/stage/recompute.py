"""Activation recomputation (checkpointing, 1604.06174): a second forward before the backward, with
the same result.

Kept until then are the piece's inputs, the states of the random generators, and what the first
forward found in those buffers that it changes and may read (a spectral norm's vectors). After the
second forward, buffers are what they were before it: changed once.

Selective recomputation: the piece runs as ever, and marks in a `Remade` which operations belong to
the recomputed layers. Saved tensors of these, and later ones of their results, are left empty in
autograd's graph. Before the backward these layers alone run a second time, and fill them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ...profiles.autograd.boundary import storage_key
from ...profiles.errors import RunError
from ...profiles.tracing.graph import GraphBody, fetch_attribute, graph_of
from ...profiles.tracing.pieces import LAYER, Piece
from ..prepare.data import MicroBatchPart
from ..prepare.devices import CPU, generators, random_kept, set_generators
from ..weights.in_place import BufferCopies, ChangedBuffers, ChangedInPlace, put_back
from .batch_norm import only_updated


@dataclass
class ForwardInputs:
    """Inputs, random state and buffers that a forward is recomputed from.

    Attributes:
        values: the piece's inputs by name.
        nbytes: of those that were received, and of the buffers; the model's own inputs count
            nothing, as everywhere.
        random: state of the random generators before the first run.
        buffers: what those that the forward changes were before it.
    """

    values: dict[str, Tensor]
    target: Any
    part: MicroBatchPart
    nbytes: int
    random: tuple[Any, ...]
    buffers: BufferCopies


class Recomputation:
    """Keeps the inputs, random states and buffers of a stage's forwards, and restores them for the
    second run.

    A forward may overwrite what it gets. Which inputs are overwritten shows in the first
    run; until then all are copied, and only those after that.
    """

    def __init__(self, module: GraphBody, device: torch.device = CPU) -> None:
        self._device = device
        self._buffers = list(module.buffers())
        self._changed = ChangedBuffers(module, only_updated(module))
        self._overwritten = ChangedInPlace[str](
            "{!r}, which a stage's forward is computed again from, is changed in place, and wasn't "
            "in the first run; make the operation one that isn't in place, or plan without "
            "--recompute"
        )
        self._given: Mapping[str, Tensor] = {}

    def keep(
        self,
        values: Mapping[str, Tensor],
        received: Collection[str],
        target: Any,
        part: MicroBatchPart,
    ) -> ForwardInputs:
        """Before a forward gets these values. Call `kept` after it."""
        copies = {n: v.clone() if n in self._overwritten else v for n, v in values.items()}
        self._given = values
        self._overwritten.begin(values.items())
        nbytes = sum(values[name].nbytes for name in received)
        self._changed.begin()
        buffers = self._changed.copies()
        return ForwardInputs(copies, target, part, nbytes, generators(self._device), buffers)

    def kept(self, found: ForwardInputs) -> None:
        """The forward is done: inputs and buffers that it left as they were need no copy.

        Raises RunError where it has changed others than the first one did.
        """
        self._changed.end()
        found.buffers = self._changed.changed_of(found.buffers)
        found.nbytes += sum(copy.nbytes for _, copy in found.buffers)
        self._overwritten.end()
        found.values |= {n: v for n, v in self._given.items() if n not in self._overwritten}
        self._given = {}

    @contextmanager
    def as_in_first_run(self, found: ForwardInputs) -> Iterator[None]:
        """Random numbers and buffers are those of the first run; these are put back afterwards."""
        with _left_as_they_were(self._buffers, self._device):
            set_generators(found.random, self._device)
            put_back(found.buffers)
            yield


@contextmanager
def _left_as_they_were(buffers: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    kept = [(b, b.detach().clone(), b._version) for b in buffers]
    try:
        with random_kept(device):
            yield
    finally:
        for buffer, before, version in kept:
            if buffer._version == version:
                # As in `unchanged`: a batch norm's own update its graph doesn't see.
                buffer.data.copy_(before)
            elif not torch.equal(buffer, before):
                put_back([(buffer, before)])


# Some of a stage's layers ------------------------------------------------------------------------


class Empty:
    """A placeholder in autograd's graph for a saved tensor, until its layer is recomputed."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def filled(self) -> Tensor:
        """The tensor."""
        assert self.tensor is not None
        return self.tensor


class EmptyView:
    """A placeholder for a saved view of a tensor that a recomputed layer makes."""

    def __init__(self, remade: Remade, number: int, saved: Tensor) -> None:
        self._remade, self._number = remade, number
        self._layout = saved.size(), saved.stride(), int(saved.storage_offset())

    def filled(self) -> Tensor:
        """The tensor."""
        return self._remade.view(self._number, self._layout)


@dataclass
class _Kept:
    """A value that layers take which are computed again.

    Attributes:
        value: itself, or a copy where it may be overwritten.
        original, version: the tensor, until the forward is done, and its version when it was kept.
        expected: its version after the last run of these layers.
        copied: this is a copy.
    """

    value: Any
    needs_grad: bool = False
    original: Tensor | None = None
    version: int = 0
    expected: int = 0
    copied: bool = False


class Remade:
    """A micro-batch's recomputation of selected layers: what it takes, and what it makes.

    Attributes:
        kept_bytes: of what is kept for it, by storage.
    """

    def __init__(self, layers: SelectedLayers, has_weights: Callable[[Tensor], bool]) -> None:
        """`has_weights`: whether a tensor has the memory of a weight or buffer, which changes."""
        self._layers, self._has_weights = layers, has_weights
        self.kept_bytes: dict[int, int] = {}
        self._inside = self._again = False
        self._values: list[_Kept] = []
        self._own: set[int] = set()
        # By storage, the value that it was last copied for.
        self._copied: dict[int, _Kept] = {}
        # Values of the run at hand with the memory of a tensor that these layers make.
        self._beside_made: list[tuple[Tensor, int]] = []
        # Before each run of these layers.
        self._random: list[tuple[Any, ...]] = []
        self._buffers: list[BufferCopies] = []
        # Of what these layers save, in their sequence; None: it is kept.
        self._empty: list[Empty | None] = []
        self._filled = 0
        # Tensors that they make and others take: version and type in the first run; those that
        # something is saved of; and what they are once they are made again.
        self._versions: list[tuple[int, torch.dtype]] = []
        self._views: set[int] = set()
        self._made: dict[int, Tensor] = {}
        self._count = 0
        # While the forward runs: which of them has a storage. No other storage is taken for it
        # while this one is known of.
        self._storages: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []
        layers.changed.begin()

    def view(self, number: int, layout: tuple[torch.Size, tuple[int, ...], int]) -> Tensor:
        """Of a tensor that was made again."""
        return self._made[number].as_strided(*layout)

    # Both runs ---------------------------------------------------------------------------------

    def begin(
        self, run: int, taken: Iterable[Any], reused: Iterable[int], own: Iterable[Any]
    ) -> None:
        """A run of these layers is about to be computed.

        Args:
            taken: values of other layers that no run before took.
            reused: numbers of those that it takes too.
            own: tensors that runs before have made.

        Raises RunError where others have changed any of the last two in place.
        """
        self._inside = True
        if self._again:
            set_generators(self._random[run], self._layers.device)
            # Other layers, which don't run now, may have changed them before it.
            put_back(self._buffers[run])
            return
        self._random.append(generators(self._layers.device))
        self._buffers.append(self._layers.changed.copies(self._layers.buffers_of[run]))
        kept = [self._values[number] for number in reused]
        changed = any(k.original is not None and k.original._version != k.expected for k in kept)
        made = set()
        for tensor in _tensors(own):
            number = self._storages.get(key := storage_key(tensor))
            if number is not None:
                made.add(key)
                changed |= self._versions[number][0] != tensor._version
        _refuse(changed)
        for value in taken:
            kept.append(self._keep(value))
            self._values.append(kept[-1])
        self._beside_made = [
            (k.original, k.original._version)
            for k in kept
            if k.original is not None and storage_key(k.original) in made
        ]

    def _keep(self, value: Any) -> _Kept:
        if not isinstance(value, Tensor):
            return _Kept(value)
        key, tensor, version = storage_key(value), value.detach(), value._version
        number = len(self._values)
        copied = number in self._layers.overwritten or self._has_weights(value)
        if not self._layers.is_data(number):
            self._own.add(key)
        kept = _Kept(tensor, value.requires_grad, tensor, version, version, copied)
        if copied:
            kept.value = self._copy(kept, key)
        return kept

    def _copy(self, kept: _Kept, key: int) -> Tensor:
        """A copy of a value; of a view and its base, of which a change of one is one of both, such
        ones of a copy of their memory."""
        tensor: Tensor = kept.value
        if self._has_weights(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor.clone()
        like = self._copied.get(key)
        if like is None or (like.expected, like.value.dtype) != (kept.version, tensor.dtype):
            self._copied[key] = kept
            return _view(tensor.untyped_storage().clone(), tensor)
        return _view(like.value.untyped_storage(), tensor)

    def end(self, values: Iterable[Any]) -> None:
        """It is done, and has made these, which others take."""
        self._inside = False
        # Made again, it isn't the memory that was kept.
        _refuse(any(tensor._version != before for tensor, before in self._beside_made))
        for kept in self._values:
            if kept.original is not None:
                kept.expected = kept.original._version
        for tensor in _tensors(values):
            number, self._count = self._count, self._count + 1
            if self._again:
                if number in self._views:
                    self._made[number] = tensor.detach()
                continue
            self._versions.append((tensor._version, tensor.dtype))
            key = storage_key(tensor)
            if key in self._own or self._has_weights(tensor):
                continue
            if key not in self._storages:
                self._alive.append(StorageWeakRef(tensor.untyped_storage()))
            # The last of several that share it: they may have changed it.
            self._storages[key] = number

    def packed(self, tensor: Tensor, key: int, *, weight: bool) -> Empty | EmptyView | None:
        """What stands for a tensor that autograd saves; None: itself.

        Args:
            weight: it is a reference to a weight.
        """
        if self._again:
            empty = self._empty[self._filled] if self._filled < len(self._empty) else None
            self._filled += 1
            if empty is not None:
                empty.tensor = tensor.detach()
            return None
        if self._inside:
            # What these layers are made from is kept in any case.
            empty = None if weight or key in self._own else Empty()
            self._empty.append(empty)
            return empty
        number = None if tensor.is_conj() or tensor.is_neg() else self._storages.get(key)
        if weight or number is None or self._versions[number] != (tensor._version, tensor.dtype):
            return None
        self._views.add(number)
        return EmptyView(self, number, tensor)

    def finish(self) -> None:
        """The first run is done.

        Raises RunError where it has changed others than the first one did.
        """
        self._layers.changed.end()
        self._buffers = [self._layers.changed.changed_of(copies) for copies in self._buffers]
        for _, copy in (pair for copies in self._buffers for pair in copies):
            self.kept_bytes[storage_key(copy)] = copy.nbytes
        self._storages.clear()
        self._alive.clear()
        self._copied.clear()
        self._beside_made.clear()
        self._count = 0
        changed = set()
        for number, kept in enumerate(self._values):
            tensor, kept.original = kept.original, None
            if tensor is None:
                continue
            if tensor._version != kept.version:
                changed.add(number)
            elif kept.copied and not self._has_weights(tensor):
                kept.value, kept.copied = tensor, False
            if not self._layers.is_data(number):
                self.kept_bytes[storage_key(kept.value)] = kept.value.untyped_storage().nbytes()
        self._layers.overwritten.note(changed)

    def recompute(self) -> int:
        """Compute the layers again. Returns the bytes that there are now and weren't kept.

        Raises RunError where they save other tensors than in the first run.
        """
        self._again = True
        given = self._given()
        with running(self), _left_as_they_were(self._layers.buffers, self._layers.device):
            self._layers.alone(*given)
        if self._filled != len(self._empty) or self._count != len(self._versions):
            raise RunError(
                "layers that are computed again saved other tensors than in their first run; plan "
                "with --recompute on, or take them out of their stage's recompute"
            )
        tensors = [e.tensor for e in self._empty if e is not None and e.tensor is not None]
        sizes = {
            storage_key(t): t.untyped_storage().nbytes()
            for t in (*tensors, *self._made.values())
            if not self._has_weights(t)
        }
        taken = {storage_key(k.value) for k in self._values if isinstance(k.value, Tensor)}
        return sum(nbytes for key, nbytes in sizes.items() if key not in taken)

    def _given(self) -> list[Any]:
        copies: dict[int, list[_Kept]] = {}
        for kept in self._values:
            if kept.copied:
                copies.setdefault(storage_key(kept.value), []).append(kept)
        memories: dict[int, Tensor] = {}
        given: list[Any] = []
        for kept in self._values:
            value = kept.value
            if isinstance(value, Tensor):
                value = value.detach().requires_grad_(kept.needs_grad)
            if kept.copied:
                key = storage_key(value)
                # An operation in place wants what was computed.
                if len(copies[key]) == 1:
                    value = value.clone()
                else:
                    if key not in memories:
                        memory = _view(value.untyped_storage(), value, whole=True)
                        needs_grad = any(other.needs_grad for other in copies[key])
                        memories[key] = memory.requires_grad_(needs_grad).clone()
                    layout = value.size(), value.stride(), value.storage_offset()
                    value = memories[key].as_strided(*layout)
                    value = value if kept.needs_grad else value.detach()
            given.append(value)
        return given


def _view(storage: torch.UntypedStorage, like: Tensor, *, whole: bool = False) -> Tensor:
    """A tensor in this memory, laid out as another one; `whole`: all of it in a row."""
    found = torch.empty(0, dtype=like.dtype, device=like.device)
    if whole:
        return found.set_(storage, 0, (storage.nbytes() // like.element_size(),), (1,))
    return found.set_(storage, like.storage_offset(), like.size(), like.stride())


def _refuse(changed: bool) -> None:
    if changed:
        raise RunError(
            "a tensor is changed in place between two layers that take it and are computed "
            "again; make the operation one that isn't in place, or plan with --recompute on"
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those in values, which may be containers of some."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


_running: ContextVar[Remade | None] = ContextVar("_running", default=None)


@contextmanager
def running(remade: Remade) -> Iterator[None]:
    """The context in which a stage runs its piece for this micro-batch."""
    token = _running.set(remade)
    try:
        yield
    finally:
        _running.reset(token)


def begin_run(run: int, taken: Any, reused: Any, own: Any) -> None:
    """In a piece's graph, before a run of layers that are computed again (`Remade.begin`)."""
    remade = _running.get()
    if remade is not None:
        remade.begin(run, taken, reused, own)


def end_run(values: Any) -> None:
    """In a piece's graph, behind one (`Remade.end`)."""
    remade = _running.get()
    if remade is not None:
        remade.end(values)


class SelectedLayers:
    """The layers of a stage that are recomputed before its backward, in runs of neighbours.

    Attributes:
        module: the stage's, which says when it runs them.
        alone: them alone, as a module; it gives nothing.
        buffers: those that they may change.
        buffers_of: per run of them, those that it may read or change.
        changed: those of `buffers` that the stage's forward changes.
        overwritten: of the values that they take, which the forward changes in place.
    """

    def __init__(
        self,
        piece: Piece,
        names: Collection[str],
        data: Collection[str],
        device: torch.device = CPU,
    ) -> None:
        """
        Args:
            piece: with each node's layer in its `meta` (`pieces.LAYER`).
            data: of its inputs, those that are the model's own.
        """
        self.device = device
        self.overwritten = ChangedInPlace[int](
            "a tensor that layers are computed again from is changed in place, and wasn't in the "
            "first run; make the operation one that isn't in place, or plan with --recompute on"
        )
        graph = graph_of(piece.module)
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        own = {node for node, name in zip(holders, piece.inputs, strict=True) if name in data}
        runs = _runs(graph, {node for node in graph.nodes if node.meta.get(LAYER) in names})
        self._data = [value in own for run in runs for value in run.takes]
        marked, alone = _graphs(graph, runs)
        self.module = GraphBody(piece.module, marked)
        self.alone = GraphBody(piece.module, alone)
        self.buffers = list(self.alone.buffers())
        self.buffers_of = [_buffers_of(self.module, run) for run in runs]
        self.changed = ChangedBuffers(self.alone, only_updated(self.module))

    def is_data(self, number: int) -> bool:
        """Whether a value is an input of the model, which is there anyway."""
        return self._data[number]


@dataclass
class _Run:
    """Layers in a row that are computed again.

    Attributes:
        nodes: of the stage's graph.
        takes: values of other layers that no run before takes.
        takes_reused: numbers of those that it takes, too.
        own: what runs before have made, and this one takes.
        gives: what it makes and others take.
    """

    nodes: list[fx.Node]
    takes: list[fx.Node]
    takes_reused: list[int]
    own: list[fx.Node]
    gives: list[fx.Node]


def _runs(graph: fx.Graph, chosen: set[fx.Node]) -> list[_Run]:
    rows: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node in chosen:
            rows[-1].append(node)
        elif node.op != "get_attr" and rows[-1]:
            rows.append([])
    found, numbers = [], dict[fx.Node, int]()
    for row in rows:
        mine = set(row)
        sources = dict.fromkeys(source for node in row for source in node.all_input_nodes)
        others = [s for s in sources if s not in chosen and s.op != "get_attr"]
        new = [source for source in others if source not in numbers]
        reused = [numbers[source] for source in others if source in numbers]
        numbers |= {source: len(numbers) + k for k, source in enumerate(new)}
        own = [source for source in sources if source in chosen and source not in mine]
        gives = [node for node in row if not mine.issuperset(node.users)]
        if row:
            found.append(_Run(row, new, reused, own, gives))
    return found


def _buffers_of(module: GraphBody, run: _Run) -> list[Tensor]:
    fetched = [n for node in run.nodes for n in node.all_input_nodes if n.op == "get_attr"]
    found: list[Tensor] = []
    for node in (*run.nodes, *fetched):
        if node.op == "call_module":
            found += fetch_attribute(module, str(node.target)).buffers()
        elif node.op == "get_attr":
            found.append(fetch_attribute(module, str(node.target)))
    return found


def _graphs(graph: fx.Graph, runs: list[_Run]) -> tuple[fx.Graph, fx.Graph]:
    """The stage's graph with a mark before and behind each run, and that of the runs alone."""
    marked, alone = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    remade = {value: alone.placeholder(value.name) for run in runs for value in run.takes}
    first = {run.nodes[0]: number for number, run in enumerate(runs)}
    last = {run.nodes[-1]: run for run in runs}
    chosen = {node for run in runs for node in run.nodes}
    for node in graph.nodes:
        if node in first:
            run = runs[first[node]]
            values = [copies[value] for value in run.takes], run.takes_reused
            own = [copies[value] for value in run.own]
            marked.call_function(begin_run, (first[node], *values, own))
            alone.call_function(begin_run, (first[node], [], [], []))
        copies[node] = marked.node_copy(node, copies.__getitem__)
        if node in chosen or (node.op == "get_attr" and not chosen.isdisjoint(node.users)):
            remade[node] = alone.node_copy(node, remade.__getitem__)
        if node in last:
            gives = last[node].gives
            marked.call_function(end_run, ([copies[value] for value in gives],))
            alone.call_function(end_run, ([remade[value] for value in gives],))
    alone.output(None)
    return marked, alone
