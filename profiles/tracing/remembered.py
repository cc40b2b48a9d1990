"""State that a forward keeps in Python attributes: found by comparison, and restored.

A forward may keep numbers and tensors in attributes of its modules, and in whatever these hold:
lists, dicts, tuples, objects of the user's classes. A loss and an optimizer may likewise.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from numbers import Number
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .random_states import COLLECTED, GENERATORS, PLAIN, state_of

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has, its mode among them."""

_LOOKED_INTO = 64
"""Entries of a collection whose values are looked at; of longer ones, besides, how many there
are."""

_MOST = 4096
"""Values that are looked at in one attribute, at any depth."""

_SUMMED = 2**20
"""Numbers of a tensor; larger ones, such as a task's data, are told by who writes into them."""

_OF_LIBRARIES = {"torch", "numpy", "timeprest", *sys.stdlib_module_names}
"""Whose objects aren't looked into: locks, loggers, files."""


def slots_of(value: object) -> dict[str, Any]:
    """What an object has in `__slots__`, by name."""
    names = [
        name
        for kind in type(value).__mro__
        for name, slot in vars(kind).items()
        if isinstance(slot, MemberDescriptorType)
    ]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def vars_of(value: object) -> dict[str, Any]:
    """What an object has in attributes."""
    return {**getattr(value, "__dict__", {}), **slots_of(value)}


def is_users_object(value: object) -> bool:
    """Whether it is an object of a class of the user's, or a namespace; what has a state_dict of
    its own isn't."""
    if isinstance(value, (type, nn.Module, torch.optim.Optimizer, Tensor)) or inspect.isroutine(
        value
    ):
        return False
    library = type(value).__module__.partition(".")[0] in _OF_LIBRARIES
    return isinstance(value, SimpleNamespace) or not library


def entries(value: Any) -> tuple[int, Iterable[tuple[Any, Any]]] | None:
    """How much is in a collection or an object of the user's, and that, with keys, positions or
    names; None of what is neither."""
    if isinstance(value, dict):
        # What it has itself: a subclass may load or compute more where it is asked.
        return dict.__len__(value), dict.items(value)
    if isinstance(value, Mapping):
        return len(value), value.items()
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return len(value), enumerate(value)
    if is_users_object(value):
        found = vars_of(value)
        return len(found), found.items()
    return None


# Told from what it was ---------------------------------------------------------------------------


def mark(value: Any, own: Collection[int] = (), *, gradients: bool = True) -> Any:
    """What tells a number, text, a tensor or a generator's state from others, and collections and
    objects by those in them; None of anything else, of tensors that are left out by id, and,
    without `gradients`, of those that need some."""
    budget = [_MOST]

    def of(value: Any, inside: frozenset[int]) -> Any:
        budget[0] -= 1
        if isinstance(value, Tensor):
            left_out = id(value) in own or (value.requires_grad and not gradients)
            return None if left_out else mark_of_tensor(value)
        if isinstance(value, GENERATORS):
            return state_of(value)
        # Of an integer of thousands of digits Python makes no text.
        if isinstance(value, (int, str, bytes)):
            return value
        if isinstance(value, Number):
            return repr(value)
        if id(value) in inside or budget[0] <= 0:
            return None
        found = entries(value)
        if found is None:
            return None
        within = inside | {id(value)}
        return found[0], [
            # A tensor's text has its numbers.
            (str(id(key) if isinstance(key, Tensor) else key), of(item, within))
            for key, item in islice(found[1], _LOOKED_INTO)
        ]

    return of(value, frozenset())


def mark_of_tensor(tensor: Tensor) -> Any:
    """What tells a tensor from others: its shape and sum, where numbers can be had."""
    shape = tuple(tensor.shape)
    if tensor.numel() > _SUMMED and not tensor.is_inference():
        return id(tensor), tensor._version
    try:
        return shape, summed(dense(tensor))
    except RuntimeError:  # fake tensors, those on no device, and some types of numbers
        return shape


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the marks that aren't what they were."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


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


# Put back ----------------------------------------------------------------------------------------

_COLLECTIONS = (dict, list, set, deque)
"""What can change by itself; the slots of one that has some aren't looked at."""


class Remembered:
    """A collection or object that can change, and what was in it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._then = _all_in(value)
        self._slots = {} if isinstance(value, _COLLECTIONS) else slots_of(value)

    def put_back(self) -> None:
        """Have the same things in it again."""
        value, then = self._value, self._then
        now = _all_in(value)
        if len(now) == len(then) and all(map(_is_same, now, then)):
            return
        items: Any = [item for _, item in then]
        if isinstance(value, _COLLECTIONS):
            value.clear()
            if isinstance(value, dict):
                value.update(then)
            else:
                value.update(items) if isinstance(value, set) else value.extend(items)
        else:
            attributes, slots = getattr(value, "__dict__", {}), slots_of(value)
            for name in {*attributes, *slots} - {name for name, _ in then}:
                attributes.pop(name) if name in attributes else object.__delattr__(value, name)
            for name, item in then:
                if name in self._slots:
                    object.__setattr__(value, name, item)
                else:
                    attributes[name] = item


def _all_in(value: Any) -> list[tuple[Any, Any]]:
    found = entries(value)
    return [] if found is None else list(found[1])


def _is_same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two entries are one: positions are numbers made anew, keys may be tensors."""
    same_key = a[0] is b[0] or (type(a[0]) in (int, str) and a[0] == b[0])
    return same_key and a[1] is b[1]


def kept_in(attributes: Mapping[str, Any]) -> dict[int, Remembered]:
    """All that can change in a module's or another object's attributes, at any depth, by id."""
    return {id(value): Remembered(value) for value in _changeable(attributes)}


def _changeable(attributes: Mapping[str, Any]) -> Iterator[Any]:
    named = ((k, v) for k, v in attributes.items() if type(v) not in PLAIN)
    todo = [value for name, value in named if name not in OF_EVERY_MODULE]
    seen = set[int]()
    while todo and len(seen) < _MOST:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (str, Tensor, Number)):
            continue
        seen.add(id(value))
        # Of the longest lists, data mostly, no copies are made.
        if (found := entries(value)) is None or found[0] > _MOST:
            continue
        if isinstance(value, _COLLECTIONS) or is_users_object(value):
            yield value
        inside = islice(found[1], _LOOKED_INTO)
        todo += [item for _, item in inside if type(item) not in PLAIN]


# Where a forward can leave things ----------------------------------------------------------------


def places_of(model: nn.Module, functions: Iterable[Any] = ()) -> dict[str, Any]:
    """What a model's forward, its hooks, or other functions can reach besides its arguments: by
    name, attributes of its modules and of their classes, and what functions have of the scopes
    around them."""
    found: dict[str, Any] = {}
    functions, classes = list(functions), dict[type, None]()
    for path, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if k not in OF_EVERY_MODULE}
        found |= {f"{path}.{name}".lstrip("."): value for name, value in attributes.items()}
        others = (value for value in attributes.values() if type(value) not in COLLECTED)
        functions += filter(inspect.isroutine, others)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            functions += hooks.values()
        classes[type(module)] = None
    for kind in dict.fromkeys(k for c in classes for k in c.__mro__ if not _of_library(k)):
        found |= _in_class(kind)
        functions += [value for value in vars(kind).values() if inspect.isfunction(value)]
    for function in functions:
        found |= scope_of(function)
    return found


def marks_of_places(model: nn.Module, functions: Iterable[Any] = ()) -> dict[str, Any]:
    """What tells all that from what it was (`mark`), by name."""
    return {name: mark(value) for name, value in places_of(model, functions).items()}


def _of_library(kind: Any) -> bool:
    """Whether a class or function is of torch, ours or the like: what those keep is theirs."""
    return str(getattr(kind, "__module__", None)).partition(".")[0] in _OF_LIBRARIES


def _in_class(kind: type) -> dict[str, Any]:
    return {
        f"{kind.__name__}.{name}": value
        for name, value in vars(kind).items()
        if not (name.startswith("__") or callable(value))
    }


def scope_of(function: Any) -> dict[str, Any]:
    """By name, what is in a function's own object, its closure and the globals that it names."""
    found: dict[str, Any] = {}
    if isinstance(function, partial):
        found = {str(k): value for k, value in enumerate(function.args)} | function.keywords
        return found | scope_of(function.func)
    if _of_library(function if inspect.isroutine(function) else type(function)):
        return {}
    # Of a method its object; or one of a class that can be called.
    found["self"] = getattr(function, "__self__", function)
    with suppress(TypeError, ValueError):
        scope = inspect.getclosurevars(inspect.unwrap(getattr(function, "__func__", function)))
        found |= {**scope.globals, **scope.nonlocals}
    named: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, type) and not _of_library(value):
            # What one of its objects has for itself is that object's.
            named = {**_in_class(value), **named}
        elif is_users_object(value):
            named |= {f"{type(value).__name__}.{k}": v for k, v in vars_of(value).items()}
        else:
            named[name] = value
    return named
