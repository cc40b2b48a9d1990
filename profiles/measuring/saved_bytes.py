"""What each layer keeps for the backward: one forward of the whole model, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..autograd.boundary import SavedBytes, storage_bytes, storage_key
from ..errors import TargetError
from ..target import Target
from ..tasks.hooks import call_hook
from ..tasks.task import root_of
from ..tracing.call import Call, mark_of
from ..tracing.graph import TracedModel, Value, is_frozen, values
from ..tracing.pieces import Piece, cut, encode
from ..tracing.shapes import ValueSpec, describe
from .platforms import Platform
from .step import CapturedStep, Phase


@dataclass(frozen=True)
class SavedByForward:
    """What one forward leaves behind.

    Attributes:
        by_layer: for each layer, and the result with its loss at the end, bytes by storage; the
            keys tell storages apart, named ones by their name.
        storages: bytes of the named storages: those of values that go between layers, or into the
            model.
        sent: these, by name.
        storage_of: the name of the memory behind each.
        in_place: (layer, value): the layer changes the value in place.
        of_state: named storages that are a parameter's or a buffer's.
        tensors: how many each of them saved, parameters too.
        rewritten: storages of frozen parameters that it changed.
        hooked: (layer, value): the layer puts a hook on the gradient of a value that it takes.
    """

    by_layer: tuple[dict[str | int, int], ...]
    storages: dict[str, int]
    sent: dict[str, ValueSpec]
    storage_of: dict[str, str]
    in_place: tuple[tuple[int, str], ...]
    tensors: tuple[int, ...]
    of_state: frozenset[str]
    rewritten: frozenset[int]
    hooked: tuple[tuple[int, str], ...]

    @property
    def total(self) -> int:
        """Bytes that autograd keeps for the whole model."""
        return sum({key: size for saved in self.by_layer for key, size in saved.items()}.values())

    def changed_by(self, layer: int) -> tuple[str, ...]:
        """Storages that a layer takes and changes in place."""
        return tuple(sorted({self.storage_of[name] for k, name in self.in_place if k == layer}))

    def bound(self, values: Sequence[Value], layers: int) -> set[tuple[int, ...]]:
        """Layers that must stay together for what some do with values that others take."""
        groups = {*self._bound_by_changes(values, layers), *self._bound_by_hooks(values, layers)}
        return {group for group in groups if len(group) > 1}

    def _bound_by_changes(self, values: Sequence[Value], layers: int) -> Iterator[tuple[int, ...]]:
        """Layers that must stay together because one changes in place what the others use.

        On different stages, they would see copies from before and after the change. On one stage
        they share one tensor, its own or one copy of it, unless they take it under several names,
        as a view and its base: each name is a message of its own, and the change would be in one.
        Then the layers that make the views are there, too; and those that hand on a buffer which is
        changed, since a change of a copy isn't one of it.
        """
        for k, name in self.in_place:
            same = [
                value
                for value in values
                if self.storage_of[value.node.name] == self.storage_of[name]
                and (value.producer is None or value.producer < k)
            ]
            makers = {value.producer for value in same if value.producer is not None}
            together = {c for value in same for c in value.consumers} - makers | {k}
            taken = [value for value in same if not together.isdisjoint(value.consumers)]
            if len(taken) > 1:
                # All but the first are made of it, in other layers or with it in one.
                together |= {value.producer for value in same[1:] if value.producer is not None}
            if self.storage_of[name] in self.of_state:
                together |= makers
            yield tuple(sorted(c for c in together if c < layers))

    def _bound_by_hooks(self, values: Sequence[Value], layers: int) -> Iterator[tuple[int, ...]]:
        """Layers that must stay together because one has a hook on the gradient of a value that
        others take, too: on another stage than these it would see its own part of it."""
        takers = {value.node.name: value.consumers for value in values}
        # What goes into the result as it is, the last stage takes.
        for layer, name in self.hooked:
            yield tuple(sorted({min(k, layers - 1) for k in (layer, *takers[name])}))


def pieces_of(traced: TracedModel) -> list[Piece]:
    """A graph in pieces, one for each layer, and one behind them that makes the result."""
    return cut(traced, [*([k] for k in range(len(traced.layers))), []])


class MicroBatchCase:
    """All that belongs to one micro-batch size: inputs at hand, and what was measured."""

    def __init__(
        self, size: int, call: Call, target: Any, traced: TracedModel, pieces: Sequence[Piece]
    ) -> None:
        """Args: `pieces`: of the graph (`pieces_of`)."""
        self.size = size
        self.inputs = call.tensors
        self.target = target
        self.traced = traced
        *self.pieces, self.result = pieces
        self.values = values(traced)
        self.saved: SavedByForward
        self.workspace: list[int] = []
        self.times: dict[Phase, list[list[float]]] = {"F": [], "B": [], "I": [], "W": []}
        """Seconds of each part, round by round; of backwards in two parts not in every round."""
        self.postponed: list[int] = []
        """Bytes of gradients that wait for the rest of these."""
        self.whole: list[tuple[float, float]] = []
        self.empty_s: dict[Phase, list[float]] = {"F": [], "B": [], "W": []}
        """Seconds of calling a piece without a layer in it, amid the others; of captured ones, of
        beginning a graph."""
        self.captured: tuple[CapturedStep, ...] | None = None
        """Its layers, these with backwards in two parts, and the whole model; None: they are run
        operation by operation."""

    def note_starts(self) -> None:
        """Note what it cost to begin a graph, by the last round: a stage is one, its layers here
        are many."""
        forward_s, backward_s = self.whole[-1]
        self.empty_s["F"].append(_start_s(self.times["F"][-1], forward_s))
        for phase in ("B", "W"):
            self.empty_s[phase].append(_start_s(self.times["B"][-1], backward_s))


def _start_s(layers: Sequence[float], whole_s: float) -> float:
    """What each of several graphs took besides what one graph of all took."""
    graphs = sum(map(bool, layers))
    return max(sum(layers) - whole_s, 0.0) / max(graphs - 1, 1)


def count_saved(
    case: MicroBatchCase, model: nn.Module, target: Target, platform: Platform
) -> SavedByForward:
    """Run the forward once, all layers in one graph, and note what autograd keeps.

    Raises TargetError when the loss isn't one number that depends on the parameters.
    """
    state = [*model.parameters(), *model.buffers()]
    frozen = [(p, mark_of(p)) for p in model.parameters() if is_frozen(p)]
    names = [node.name for node in case.traced.inputs]
    env: dict[str, Any] = dict(zip(names, (t.clone() for t in case.inputs), strict=False))
    saved_by: list[dict[int, int]] = []
    tensors: list[int] = []
    in_place: list[tuple[int, str]] = []
    hooked: list[tuple[int, str]] = []
    with platform.forward_context():
        for k, piece in enumerate(case.pieces):
            with SavedBytes(ignore=state) as saved:
                entries = {name: env[name] for name in piece.inputs}
                before = _versions_and_hooks(entries)
                out = piece.module(*entries.values())
            for name, (version, hooks) in sorted(_versions_and_hooks(entries).items()):
                if version != before[name][0]:
                    in_place.append((k, name))
                if hooks > before[name][1]:
                    hooked.append((k, name))
            env.update(zip(piece.outputs, out, strict=True))
            saved_by.append(saved.storages)
            tensors.append(saved.tensors)
        with SavedBytes(ignore=state) as saved:
            result = case.result.module(*[env[name] for name in case.result.inputs])[0]
            loss = None
            if target.task is not None:
                loss = root_of(call_hook("loss", target.task.loss, result, case.target))
        saved_by.append(saved.storages)
        tensors.append(saved.tensors)
    if target.task is not None:
        _check_loss(target, loss)
    # Names in place of addresses, which mean nothing once the tensors are gone.
    labels: dict[int, str] = {}
    storages: dict[str, int] = {}
    storage_of: dict[str, str] = {}
    for name, value in env.items():
        label = f"input:{name}" if name in names else name
        if isinstance(value, Tensor):
            label = labels.setdefault(storage_key(value), label)
        # Numbers and sizes between layers travel as int64 tensors.
        storages.setdefault(label, storage_bytes(encode(value, name)))
        storage_of[name] = label
    return SavedByForward(
        by_layer=tuple({labels.get(key, key): n for key, n in found.items()} for found in saved_by),
        storages=storages,
        sent={name: describe(name, value) for name, value in env.items()},
        storage_of=storage_of,
        in_place=tuple(in_place),
        tensors=tuple(tensors),
        of_state=frozenset(labels[key] for key in map(storage_key, state) if key in labels),
        rewritten=frozenset(storage_key(p) for p, mark in frozen if mark_of(p) != mark),
        hooked=tuple(hooked),
    )


def _check_loss(target: Target, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TargetError(
            f"{target.name}: loss must give one number that depends on the parameters "
            f"(a mean over the samples), not {type(loss).__name__} "
            f"{list(loss.shape) if isinstance(loss, Tensor) else ''}".rstrip()
        )


def _versions_and_hooks(entries: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """How often each tensor has been changed in place, and how many hooks are on its gradient."""
    return {
        name: (value._version, len(value._backward_hooks or ()))
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }
