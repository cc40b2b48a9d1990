"""How a model is called: its inputs for one micro-batch; and a look that leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .pieces import Built, Slot, fill
from .random_states import own_states, set_own_states, set_states, states

_SMALL_BYTES = 256 << 20
"""Of weights that are kept a second time during a look."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model.

    Attributes:
        tensors: each of shape ``[samples, ...]``.
        names: for each argument the name that the forward has for it, or None where it goes by
            position. Those by position come first.
        nests: for each argument how it is made of tensors, with a `Slot` for each; None: every
            argument is a tensor.
        varying: for each tensor the dimensions, besides the first, that differ from mini-batch to
            mini-batch; None: none does.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str | None, ...]
    nests: tuple[Any, ...] | None = None
    varying: tuple[tuple[int, ...], ...] | None = None

    def of(self, model: nn.Module, tensors: Sequence[Any] | None = None) -> Any:
        """Call `model` with these tensors, or with others in their places."""
        positional, named = self.arguments(self.tensors if tensors is None else tensors)
        return model(*positional, **named)

    def arguments(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments by position and those by name, made of these tensors."""
        given = tensors if self.nests is None else [fill(nest, tensors) for nest in self.nests]
        pairs = list(zip(given, self.names, strict=True))
        positional = [value for value, name in pairs if name is None]
        return positional, {name: value for value, name in pairs if name is not None}

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call of other tensors."""
        return replace(self, tensors=tuple(tensors))

    def flat(self) -> Call:
        """The call of what takes these tensors alone, one after another: a graph."""
        return Call(self.tensors, (None,) * len(self.tensors))

    def labels(self, parameters: Sequence[str]) -> list[str]:
        """A name for each tensor: its argument's, and behind it where in the argument it is.

        Args:
            parameters: of the forward, by position.
        """
        own = [
            name or (parameters[k] if k < len(parameters) else f"input_{k}")
            for k, name in enumerate(self.names)
        ]
        if self.nests is None:
            return own
        found = [""] * len(self.tensors)
        for label, nest in zip(own, self.nests, strict=True):
            for slot, where in _slots(nest):
                found[slot] = "_".join([label, *where])
        for k, label in enumerate(found):
            while label in found[:k]:
                label = f"{label}_{k}"
            found[k] = label
        return found


def _slots(nest: Any) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The slots of a structure, each with the keys and positions that lead to it."""
    if isinstance(nest, Slot):
        yield nest.index, ()
        return
    inside: Mapping[Any, Any] = {}
    if isinstance(nest, Built):
        inside = {**dict(enumerate(nest.args)), **nest.kwargs}
        # A mapping of some class is made of one dict.
        if len(inside) == 1 and isinstance(inside.get(0), dict):
            inside = inside[0]
    elif isinstance(nest, dict):
        inside = nest
    elif isinstance(nest, (list, tuple)):
        inside = dict(enumerate(nest))
    for key, item in inside.items():
        text = "".join(c if c.isalnum() and c.isascii() else "_" for c in str(key))
        for slot, where in _slots(item):
            yield slot, (text, *where)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put everything back that a forward may change: a look must not count as a training step.

    A forward may give a buffer a new tensor, count in an attribute, or write into a weight; what
    they were before they are again, and so are the random states. Weights of large models aren't
    kept a second time: what is written into those stays.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    attributes = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in modules]
    inside = [(kept, copy(kept)) for now, _, _ in attributes for kept in collections_in(now)]
    before = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]
    weights = [(p, p.data, p.data.clone(), p._version) for p in _small_weights(model)]
    drawn, own = states(), own_states(model)
    try:
        with torch.random.fork_rng(devices=_devices(model)):
            yield
    finally:
        set_states(drawn)
        set_own_states(own)
        for now, then, buffers in attributes:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)
            now["_buffers"].update(buffers)
        for kept, then in inside:
            kept.clear()
            kept.update(then) if isinstance(kept, dict) else kept.extend(then)
        with torch.no_grad():
            for p, data, value, version in weights:
                if p.data_ptr() != data.data_ptr():
                    p.data = data
                if _differs(p, value, version):
                    data.copy_(value)
            for buffer, value, version in before:
                if _differs(buffer, value, version):
                    buffer.copy_(value)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def collections_in(attributes: Mapping[str, Any]) -> list[Any]:
    """Lists and dicts that a module has as attributes of its own."""
    return [
        value
        for name, value in attributes.items()
        if type(value) in (list, dict) and name not in _OF_EVERY_MODULE
    ]


def _small_weights(model: nn.Module) -> list[nn.Parameter]:
    found = [p for p in model.parameters() if type(p) is nn.Parameter and not p.is_meta]
    return found if sum(p.numel() * p.element_size() for p in found) <= _SMALL_BYTES else []


def _differs(buffer: Tensor, value: Tensor, version: int) -> bool:
    """Whether a buffer was written: one of one number expanded, or a sparse one, takes no copy."""
    if buffer._version != version:
        return True
    try:
        return not torch.equal(buffer, value)
    except (RuntimeError, NotImplementedError):
        return False


def dense(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor laid out as most are."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def summed(tensor: Tensor) -> str:
    """The sum of a tensor's numbers, by which another one is told from it. As text: what is no
    number equals itself then."""
    whole = tensor.detach().resolve_conj()
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    return repr(float(whole.sum(dtype=torch.float64)))


def mark_of(tensor: Tensor) -> tuple[int, str]:
    """What tells whether a tensor was written into since: torch counts no writes through `.data`;
    some have no numbers, as fake ones, or none that can be summed."""
    try:
        return tensor._version, summed(dense(tensor))
    except RuntimeError:
        return tensor._version, ""


def _devices(model: nn.Module) -> list[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
