"""How a model is called: its inputs for one micro-batch; and a look that leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..errors import TargetError
from .fake import fake_mode, quiet
from .pieces import Built, Slot, fill
from .random_states import own_states, seed_all, set_own_states, set_states, states
from .remembered import OF_EVERY_MODULE, Remembered, dense, kept_in, places_of, summed

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

    def of_first(self) -> Call:
        """The same call with its first sample in the place of every one."""
        return self.with_tensors(
            [t[:1].expand_as(t).clone() if t.dim() else t for t in self.tensors]
        )

    def flat(self) -> Call:
        """The call of what takes these tensors alone, one after another: a graph."""
        return Call(self.tensors, (None,) * len(self.tensors))

    def labels(self, parameters: Sequence[str]) -> list[str]:
        """A name for each tensor: its argument's, of the forward's parameters where it goes by
        position, and behind it where in the argument it is."""
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

    A forward may give a buffer a new tensor, count in an attribute, hook or exchange a submodule,
    or write into a weight; what they were before they are again, and so are the random states.
    Weights of large models aren't kept a second time: what is written into those stays.
    """
    with numbers_unchanged(model):
        before = _Makeup(model)
        try:
            yield
        finally:
            before.put_back()


@contextmanager
def without_data(model: nn.Module) -> Iterator[FakeTensorMode]:
    """`unchanged`, on fake tensors: those that this mode makes of the inputs."""
    with unchanged(model), quiet(), fake_mode() as mode:
        yield mode


@contextmanager
def numbers_unchanged(model: nn.Module) -> Iterator[None]:
    """Put back the numbers of buffers and weights, and the random states."""
    modules, parameters, buffers = _parts(model)
    bound = [(m._buffers, dict(m._buffers)) for m in _of_python(modules)]
    before = [(buffer, buffer.clone(), buffer._version) for buffer in buffers]
    weights = [(p, p.data, p.data.clone(), p._version) for p in _small_weights(parameters)]
    drawn, own = states(), own_states(modules)
    cards = {t.device.index or 0 for t in [*parameters, *buffers] if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(cards)):
            yield
    finally:
        set_states(drawn)
        set_own_states(own)
        for now, then in bound:
            # Those that a forward makes where there was none are there for good.
            now.update({name: buffer for name, buffer in then.items() if buffer is not None})
        with torch.no_grad():
            for p, data, value, version in weights:
                if p.data_ptr() != data.data_ptr():
                    p.data = data
                if _differs(p, value, version):
                    data.copy_(value)
            for buffer, value, version in before:
                if _differs(buffer, value, version):
                    buffer.copy_(value)


class _Makeup:
    """What modules are besides numbers: class, attributes, submodules, hooks, what is trained."""

    def __init__(self, model: nn.Module) -> None:
        modules, parameters, _ = _parts(model)
        self._attributes = [(m, type(m), dict(vars(m))) for m in _of_python(modules)]
        tables = [then[name] for _, _, then in self._attributes for name in _TABLES if name in then]
        self._hooks = [
            (p, name, getattr(p, name))
            for p in parameters
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        tables += [hooks for _, _, hooks in self._hooks if hooks is not None]
        # Most of them are, of every module: of hooks that it has none of.
        self._empty = [table for table in tables if not table]
        # What a class or the scope around a hook has is looked at with the rest.
        self._inside = kept_in(places_of(model)) | {
            id(table): Remembered(table) for table in tables if table
        }
        self._learnt = [(p, p.requires_grad) for p in parameters]

    def put_back(self) -> None:
        for module, kind, then in self._attributes:
            now = vars(module)
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)
            if type(module) is not kind:
                module.__class__ = kind
        for table in self._empty:
            table.clear()
        for kept in self._inside.values():
            kept.put_back()
        for p, name, hooks in self._hooks:
            if getattr(p, name) is not hooks:
                setattr(p, name, hooks)
        for p, learns in self._learnt:
            if p.requires_grad != learns:
                p.requires_grad_(learns)

    def put_one_back(self, module: nn.Module, name: str) -> None:
        """Make one attribute what it was, of a module that there was."""
        now = vars(module)
        for known, _, then in self._attributes:
            if known is module and name not in then:
                del now[name]
            elif known is module:
                now[name] = then[name]
                if id(then[name]) in self._inside:
                    self._inside[id(then[name])].put_back()


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter], list[Tensor]]:
    """Its modules, parameters and buffers, each once: looks are many, and torch walks over all
    modules for each of the three."""
    modules = list(model.modules())
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
    return modules, [*parameters.values()], [*buffers.values()]


def _of_python(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]


# The first forward ------------------------------------------------------------------------------


def settle(model: nn.Module, call: Call, target: str, *, fake: bool = False) -> None:
    """Have a model do for good what it does at its first forward alone: hook modules, exchange
    them, freeze weights. Every look after it begins from there, as every mini-batch does.

    Where a forward does none of that, which may be seen on fake tensors, nothing stays of it. Else
    attributes stay, for one of them says that it is done; not the numbers of weights and buffers,
    random states, nor what the next forward makes others of: what is carried from mini-batch to
    mini-batch.

    Raises TargetError: the first forward makes parameters; and whatever the forward raises.
    """
    before = _Makeup(model)
    made = dict(model.named_parameters(remove_duplicate=False))
    if not (_changes(model, call, fake=fake) and (not fake or _changes(model, call))):
        return
    with numbers_unchanged(model), torch.no_grad():
        # Its submodules draw numbers that are thrown away, the same in each worker.
        seed_all(0)
        call.of(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        if made.get(name) is not p:
            raise TargetError(
                f"{target}: parameter {name!r} is made by the model's first forward, when "
                "optimizers are made already: call the model once where it is built"
            )
    held = _numbers_held(model)
    with unchanged(model), torch.no_grad():
        call.of(model)
        again = _numbers_held(model)
    for (module, name), numbers in held.items():
        # Of fake tensors there are no numbers, which might be the same.
        if again.get((module, name)) != numbers or "" in numbers:
            before.put_one_back(module, name)


def _changes(model: nn.Module, call: Call, *, fake: bool = False) -> bool:
    """Whether a forward changes what modules there are, their hooks, or what is trained."""
    before = _structure(model)
    with ExitStack() as stack:
        # It holds on to what there was: else something new might have an id that was free.
        mode = stack.enter_context(without_data(model) if fake else unchanged(model))
        stack.enter_context(torch.no_grad())
        given = [t.clone() if mode is None else mode.from_tensor(t) for t in call.tensors]
        try:
            call.of(model, given)
        except Exception:  # an operation without a fake form, of whatever library
            if not fake:
                raise
            return True
        return _structure(model) != before


def _structure(model: nn.Module) -> tuple[list[Any], list[Any]]:
    hooks = [table for table in _TABLES if "hooks" in table]
    modules = [
        (name, id(m), type(m), [list(vars(m).get(table, ())) for table in hooks])
        for name, m in model.named_modules(remove_duplicate=False)
    ]
    parameters = model.named_parameters(remove_duplicate=False)
    return modules, [(name, id(p), p.requires_grad) for name, p in parameters]


def _numbers_held(model: nn.Module) -> dict[tuple[nn.Module, str], list[str]]:
    """The numbers in attributes of modules, in whatever nest of containers."""
    return {
        (module, name): [
            mark_of(leaf)[1] if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in tree_leaves(value)
            if isinstance(leaf, (float, Tensor))
        ]
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE
    }


_TABLES = tuple(k for k, v in vars(nn.Module()).items() if isinstance(v, (dict, set)))
"""Attributes of every module: its parameters, buffers, submodules and hooks by name."""


def _small_weights(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    found = [p for p in parameters if type(p) is nn.Parameter and not p.is_meta]
    return found if sum(p.numel() * p.element_size() for p in found) <= _SMALL_BYTES else []


def _differs(buffer: Tensor, value: Tensor, version: int) -> bool:
    """Whether a buffer was written: one of one number expanded, or a sparse one, takes no copy."""
    if buffer._version != version:
        return True
    try:
        return not torch.equal(buffer, value)
    except (RuntimeError, NotImplementedError):
        return False


def mark_of(tensor: Tensor) -> tuple[int, str]:
    """What tells whether a tensor was written into since: torch counts no writes through `.data`;
    some have no numbers, as fake ones, or none that can be summed."""
    try:
        return tensor._version, summed(dense(tensor))
    except RuntimeError:
        return tensor._version, ""
