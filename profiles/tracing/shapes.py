"""Shapes of the values that go from layer to layer, found without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..autograd.boundary import storage_key
from .call import mark_of, unchanged, without_data
from .graph import GraphBody, TracedModel, fetch_attribute, graph_of, is_frozen, values
from .pieces import encode, kind_of


@dataclass(frozen=True)
class ValueSpec:
    """What a value that crosses a cut looks like for one micro-batch size.

    Attributes:
        kind: "tensor", or what travels as an int64 tensor: "number", "size", "type", "device".
        shape: of the tensor that travels.
        needs_grad: whether a gradient comes back for it.
        numbers: of a number or a size, what it is for this micro-batch size.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    numbers: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that travels."""
        return prod(self.shape) * self.dtype.itemsize


class _NodeByNode(fx.Interpreter):
    """Runs a graph, tells `on_node` the name of each node before it runs, and keeps what those of
    some names make."""

    def __init__(
        self,
        module: GraphBody,
        wanted: Collection[str] = (),
        on_node: Callable[[str], None] = lambda node: None,
    ) -> None:
        super().__init__(module, graph=graph_of(module))
        self._wanted, self._on_node = wanted, on_node
        self._made: dict[str, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        return fetch_attribute(self.module, target)

    def run_node(self, n: fx.Node) -> Any:
        self._on_node(n.name)
        result = super().run_node(n)
        if n.name in self._wanted:
            self._made[n.name] = result
        return result

    @property
    def found(self) -> dict[str, ValueSpec]:
        """Specs after the run: what is written into a tensor gives it a gradient afterwards."""
        return {name: describe(name, value) for name, value in self._made.items()}


def run_node_by_node(
    traced: TracedModel, inputs: Sequence[Tensor], on_node: Callable[[str], None]
) -> None:
    """Run a graph; `on_node` is told the name of each node before it runs."""
    _NodeByNode(traced.module, on_node=on_node).run(*inputs)


def describe(name: str, value: Any) -> ValueSpec:
    """The spec of a value at hand. Raises TraceError when it can't cross a cut."""
    tensor = encode(value, name)
    kind = kind_of(value)
    numbers = tuple(value) if kind == "size" else (value,) if kind == "number" else ()
    return ValueSpec(
        name, kind, tuple(tensor.shape), tensor.dtype, bool(tensor.requires_grad), numbers
    )


def specs_and_result(
    traced: TracedModel, inputs: Sequence[Tensor], *, fake: bool = True
) -> tuple[dict[str, ValueSpec], Any]:
    """Specs of all values that layers take from each other, for inputs of this size; and the
    model's result. On fake tensors, which takes no memory but two seconds to set up, it is of such;
    where an operation has no fake form, the model runs for real all the same.
    """
    wanted = {value.node.name for value in values(traced)}
    if fake:
        try:
            with without_data(traced.module) as mode:
                recorder = _NodeByNode(traced.module, wanted)
                result = recorder.run(*[mode.from_tensor(tensor) for tensor in inputs])
                return recorder.found, result
        except Exception:  # an operation without a fake form, of whatever library
            pass
    with unchanged(traced.module):
        recorder = _NodeByNode(traced.module, wanted)
        result = recorder.run(*[tensor.clone() for tensor in inputs])
    return recorder.found, result


def rewritten_by(traced: TracedModel, inputs: Sequence[Tensor], *, fake: bool) -> frozenset[int]:
    """Storages of the parameters that aren't trained and that a forward changes. `fake`: as for
    `specs_and_result`; what is written through `.data` doesn't show then."""
    frozen = [p for p in traced.module.parameters() if is_frozen(p)]
    # Operations on fake tensors write nothing into real ones, and count as if they did.
    mark = (lambda p: p._version) if fake else mark_of
    before = [(p, mark(p)) for p in frozen]
    with unchanged(traced.module):
        if fake:
            specs_and_result(traced, inputs)
        else:
            traced.module(*[tensor.clone() for tensor in inputs])
        return frozenset(storage_key(p) for p, was in before if mark(p) != was)


def bound_by_values(traced: TracedModel, inputs: Sequence[Tensor]) -> set[tuple[int, ...]]:
    """Layers, by position, that must stay together because a tensor between them has a shape that
    depends on values, as one of rows chosen by a mask: what crosses a cut has one shape.

    Found by inputs that are far from those given; none where the model doesn't take such.
    """
    found: list[dict[str, ValueSpec]] = []
    # A GPU is lost to the process where an index made of such numbers is out of range.
    far = () if any(t.is_cuda for t in inputs) else (100, -100)
    for by in (1, 0, *far):
        # Numbers of words, and the like, have a range; 0 is in it.
        given = [
            t * by if t.is_floating_point() else t if by else torch.zeros_like(t) for t in inputs
        ]
        with suppress(Exception), torch.no_grad():  # the user's model
            found.append(specs_and_result(traced, given, fake=False)[0])
    groups = set()
    for value in values(traced):
        name = value.node.name
        shapes = {specs[name].shape for specs in found}
        if value.producer is not None and len(shapes) > 1:
            layers = {value.producer, *value.consumers} - {len(traced.layers)}
            groups.add(tuple(sorted(layers)))
    return {group for group in groups if len(group) > 1}
