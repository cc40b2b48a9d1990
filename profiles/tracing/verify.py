"""A graph held against its model: the same results, gradients and buffers.

A trace sees what a forward does with tensors, and not all of it: what a custom backward, a hook or
a switch of the gradient mode makes of gradients, or what a forward adds to a buffer without an
input, can be lost without a word. So both run on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import TraceError
from .call import Call, numbers_unchanged, unchanged
from .pieces import Built, take_apart
from .random_states import seed_everywhere
from .remembered import OF_EVERY_MODULE, changes, dense, mark, marks_of_places

_WITHIN = 1e-3, 5e-2
"""Of a gradient, what may differ at once: in single and double precision, in half."""

_NOISE = 1e-5, 1e-3
"""Of the largest gradient, what any may differ by: the key's bias in attention has a gradient of
rounding errors alone."""

_SHAKEN = 10.0
"""Gradients that differ more are looked at again: by so much more than those of weights changed in
their last digits, and they are wrong."""

_SMALL, _STEP = 1e-3, 0.05
"""Weights smaller than the one count as zeros, and are changed by about the other."""

_LOOKED_AT = 8
"""Of more than these parameters not all are looked at again."""

_FROM_OUTSIDE = (
    "that goes by what no trace sees (random branches, modes, values kept elsewhere, or weights "
    "that it reaches otherwise than by their names)"
)


_DIRECTIONS = 4
_REPEATED = 65521
"""Numbers of a direction: a prime, so that they don't go by a matrix's rows, whose sum may be 0."""

_ZERO = (0.0,) * _DIRECTIONS
_AT_ONCE = 32
"""So many times a direction's length is added up in one piece: a copy in double precision."""

Sketch = tuple[float, ...]
"""Of a gradient, how long it is in each direction."""


@dataclass(frozen=True)
class RunResult:
    """What a module did on some inputs.

    Attributes:
        other: of its result for other samples, which it was called with before; empty where the
            model doesn't take such.
        leaves: of its result, tensors and others.
        gradients: by parameter; None where there are none: in evaluation mode, on fake tensors,
            or where the model itself has no backward.
        buffers: after the first call and, where there is one, after the second.
        second: the leaves of a second call, where the first changed a buffer, or a number or
            tensor that is an attribute; None where it didn't.
        counted: names of such attributes.
        structure: of the result, with a `Slot` for each tensor.
    """

    other: tuple[Any, ...]
    leaves: tuple[Any, ...]
    gradients: Mapping[str, Sketch] | None
    buffers: tuple[Mapping[str, Tensor], ...]
    second: tuple[Any, ...] | None
    counted: tuple[str, ...] = ()
    structure: Any = None


def run(
    model: nn.Module, module: nn.Module, call: Call, *, backward: bool = True, twice: bool = False
) -> RunResult:
    """Run the model, or a graph of it, with everything put back afterwards: on other samples, and
    then on these.

    Args:
        call: of a graph, whose inputs are tensors alone, `Call.flat`.
        backward: look at gradients too; False where the model has none.
        twice: call it twice in any case.

    Raises TraceError where the model's result hangs on the calls before, otherwise than by buffers.
    """
    learns = backward and model.training and torch.is_grad_enabled()
    with unchanged(model), _moved(model), torch.set_grad_enabled(learns):
        alone: tuple[Any, ...] = ()
        if module is model:
            with numbers_unchanged(model):
                alone = _result(model, call)
        # Of other samples, after which what is left elsewhere than in the result is neither what
        # the next call leaves, nor what the trace left. The user's forward runs here.
        other: tuple[Any, ...] = ()
        with numbers_unchanged(model), suppress(Exception):
            other = _result(module, call.of_first())
        left = marks_of_places(model) if module is model else {}
        seed_everywhere(0)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        numbers, second = _numbers(model), None
        leaves, structure = _taken_apart(module, call)
        kept = _kept(leaves)
        if not all_same(alone, kept):
            raise TraceError(_remembers(left, marks_of_places(model)))
        buffers = [_buffers(model, module)]
        gradients = None
        if learns and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            gradients = _sketches(model, leaves)
        del leaves
        changed = any(not _same(buffers[0].get(name), value) for name, value in before.items())
        after = _numbers(model)
        # One that a class has begins as the module's own when it is first changed.
        counted = tuple(changes(numbers, after))
        if twice or changed or counted:
            with torch.no_grad():
                second, _ = _taken_apart(module, call)
            buffers.append(_buffers(model, module))
    return RunResult(other, kept, gradients, tuple(buffers), second, counted, structure)


def _remembers(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = changes(before, now)
    kept = f" ({shorten(', '.join(names), 100, placeholder=' …')})" if names else ""
    return (
        f"the forward remembers something from one call to the next{kept}: the same samples give "
        "another result after a call of others. A pipeline calls it for each micro-batch, and "
        "carries nothing on but buffers: have each call begin anew"
    )


def compare(model: nn.Module, module: nn.Module, call: Call, wanted: RunResult) -> list[str]:
    """Raise TraceError where a graph of the model does something else on these inputs than the
    model itself did. Returns names of attributes that the model changes and the graph doesn't,
    which made no difference."""
    twice, backward = wanted.second is not None, wanted.gradients is not None
    found = run(model, module, call.flat(), backward=backward, twice=twice)
    if len(found.leaves) != len(wanted.leaves):
        raise TraceError(
            f"its graph gives {len(found.leaves)} tensors, the model {len(wanted.leaves)}"
        )
    apart = _apart(found.structure, wanted.structure)
    if apart is not None:
        raise TraceError(f"its graph's result has {apart}: {_FROM_OUTSIDE}")
    if wanted.other and not found.other:
        raise TraceError("its graph fails on other samples than those it was traced with")
    # In their sequence: what remembers does something else from the second call on.
    _compare_leaves(found.other, wanted.other)
    _compare_buffers(found, wanted)
    _compare_leaves(found.leaves, wanted.leaves)
    if wanted.gradients is not None:
        _compare_gradients(model, module, call, found.gradients or {}, wanted.gradients)
        _check_held(model, module, wanted.gradients)
    _compare_leaves(found.second or (), wanted.second or ())
    return [name for name in wanted.counted if name not in found.counted]


def _compare_buffers(found: RunResult, wanted: RunResult) -> None:
    # A third call would show nothing that the second didn't.
    for mine_then, own_then in zip(found.buffers, wanted.buffers, strict=False):
        for name, own in own_then.items():
            if not isinstance(own, FakeTensor) and not _same(mine_then.get(name), own):
                raise TraceError(
                    f"its graph leaves another value in buffer {name!r} than the model does: a "
                    "trace sees what is written into a buffer (copy_, mul_), and not a new tensor "
                    "in its place"
                )


def _compare_leaves(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for mine, own in zip(found, wanted, strict=False):
        if isinstance(own, Tensor) and not isinstance(own, FakeTensor) and not _same(mine, own):
            raise TraceError(
                f"its graph computes something else than the model does: {_FROM_OUTSIDE}"
            )


def _apart(mine: Any, own: Any, where: str = "") -> str | None:
    """Where two results differ besides their tensors: in keys, or in numbers and words, which a
    graph has as they were at the trace; None: nowhere."""
    if isinstance(mine, Built) and isinstance(own, Built):
        mine, own = ({**dict(enumerate(x.args)), **x.kwargs} for x in (mine, own))
    if isinstance(mine, (list, tuple)) and isinstance(own, (list, tuple)):
        mine, own = (dict(enumerate(x)) for x in (mine, own))
    if isinstance(mine, dict) and isinstance(own, dict):
        if mine.keys() != own.keys():
            keys = [" and ".join(map(repr, x)) or "nothing" for x in (mine, own)]
            return f"{keys[0]} where the model has {keys[1]}{where and f' in {where}'}"
        inside = (_apart(mine[key], own[key], f"{where}[{key!r}]") for key in own)
        return next(filter(None, inside), None)
    same = mine == own
    if isinstance(mine, (int, float)) and isinstance(own, (int, float)):
        same = math.isclose(mine, own, rel_tol=1e-4) or (math.isnan(mine) and math.isnan(own))
    return None if same else f"{mine!r} at {where or 'its place'} where the model has {own!r}"


def _result(module: nn.Module, call: Call) -> tuple[Any, ...]:
    seed_everywhere(0)
    return _kept(_taken_apart(module, call)[0])


def _kept(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in leaves)


def _taken_apart(module: nn.Module, call: Call) -> tuple[tuple[Any, ...], Any]:
    given = [t.clone() for t in call.tensors]
    return take_apart(call.of(module, given))


def _buffers(model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
    """The model's buffers; a graph may have its own in their places."""
    own = dict(module.named_buffers())
    return {name: own.get(name, b).detach().clone() for name, b in model.named_buffers()}


def all_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two results' tensors are the same but for rounding."""
    return all(_same(a, b) for a, b in zip(some, others, strict=False) if isinstance(b, Tensor))


def _numbers(model: nn.Module) -> dict[str, Any]:
    """What modules may count or remember in, by name."""
    return {
        f"{path}.{name}".lstrip("."): found
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and (found := mark(value)) is not None
    }


def _same(mine: Any, own: Tensor) -> bool:
    """Equal but for rounding: on a GPU, another algorithm may be taken for the same operation."""
    if not isinstance(mine, Tensor) or mine.shape != own.shape or mine.dtype != own.dtype:
        return False
    if isinstance(own, FakeTensor):
        return True
    # Under autocast, what is computed in half may be handed on in single precision.
    coarse = _coarse(own) or torch.is_autocast_enabled(own.device.type)
    tolerance = 1e-2 if coarse else 1e-4
    mine, own = dense(mine), dense(own)
    mine, own = (t.double() if not t.is_complex() else t for t in (mine, own))
    finite = own[own.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(mine, own, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _coarse(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16) or tensor.is_cuda


# Gradients --------------------------------------------------------------------------------------
# Not kept, which would take as much memory as the model twice: of each how long it is in a few
# directions, drawn by the parameter's number. Parts of a gradient that come one by one, as where
# activations are computed again, add up in each.


def _compare_gradients(
    model: nn.Module,
    module: nn.Module,
    call: Call,
    found: Mapping[str, Sketch],
    wanted: Mapping[str, Sketch],
) -> None:
    parameters = dict(model.named_parameters())
    sizes = {name: math.hypot(*sketch) / _DIRECTIONS**0.5 for name, sketch in wanted.items()}
    most = max(filter(math.isfinite, sizes.values()), default=0.0)
    apart = []
    for name, p in parameters.items():
        own, mine = wanted.get(name, _ZERO), found.get(name, _ZERO)
        size = sizes.get(name, 0.0)
        within = _WITHIN[_coarse(p)] * size + _NOISE[_coarse(p)] * most
        alike = all(abs(a - b) <= 4 * within for a, b in zip(own, mine, strict=True))
        if math.isfinite(size) and not alike:
            apart.append(name)
    if not apart:
        return
    names = apart[:_LOOKED_AT]
    whole, graphs = _whole(model, model, call, names), _whole(model, module, call, names)
    shaken = _whole(model, model, call, names, shaken=True)
    for name in names:
        by = float((graphs[name] - whole[name]).norm())
        if by > _SHAKEN * float((shaken[name] - whole[name]).norm()):
            which = "another gradient" if graphs[name].any() else "no gradient"
            raise TraceError(
                f"its graph gives parameter {name!r} {which}: a trace can't see a custom "
                "autograd.Function's backward, a hook on gradients, or what torch.no_grad does to "
                "an operation in place"
            )


def _check_held(model: nn.Module, module: nn.Module, wanted: Mapping[str, Sketch]) -> None:
    """Raise TraceError for a parameter with a gradient that isn't the graph's: it would get none
    of its stage's updates."""
    held = set(map(id, module.parameters()))
    for name, p in model.named_parameters():
        if any(wanted.get(name, ())) and id(p) not in held:
            raise TraceError(
                f"its graph doesn't hold parameter {name!r}, which the forward trains: a trace "
                "can't see what a function reaches that an autograd.Function is given"
            )


def _sketches(model: nn.Module, leaves: Sequence[Any]) -> dict[str, Sketch] | None:
    """By parameter, its gradient in the directions; None where there is no backward."""
    found: dict[str, Sketch] = {}
    numbers = {name: k for k, (name, _) in enumerate(model.named_parameters())}

    def take(name: str, gradient: Tensor) -> None:
        before = found.get(name, _ZERO)
        along = _along(gradient.to_dense(), numbers[name])
        found[name] = tuple(a + b for a, b in zip(before, along, strict=True))

    return found if _backward(model, leaves, take) else None


def _whole(
    model: nn.Module, module: nn.Module, call: Call, names: Sequence[str], *, shaken: bool = False
) -> dict[str, Tensor]:
    """These parameters' gradients; zeros where there is none. `shaken`: see `_shaken`."""
    found: dict[str, Tensor] = {
        name: torch.zeros_like(p, dtype=torch.complex128 if p.is_complex() else torch.float64)
        for name, p in model.named_parameters()
        if name in names
    }

    def take(name: str, gradient: Tensor) -> None:
        if name in found:
            found[name] += gradient.to_dense()

    # Shaken weights aren't all one number any more: they are moved before.
    last_digits = _shaken(model) if shaken else nullcontext()
    with unchanged(model), _moved(model), last_digits, torch.enable_grad():
        seed_everywhere(0)
        leaves, _ = _taken_apart(module, call if module is model else call.flat())
        _backward(model, leaves, take)
    return found


def _backward(model: nn.Module, leaves: Sequence[Any], take: Callable[[str, Tensor], None]) -> bool:
    """Hand over gradients of the results, each weighed with numbers drawn for it, as they come.

    False: there are none, or a backward fails. Not by torch.autograd.grad, which doesn't find what
    is computed again in between.
    """
    ends = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not ends or not learnt:
        return False
    before = [(p.grad, p._post_accumulate_grad_hooks) for _, p in learnt]
    hooks = []
    try:
        for name, p in learnt:
            # What the user's do when a gradient is there, an update maybe, comes after all.
            p.grad, p._post_accumulate_grad_hooks = None, None  # type: ignore[assignment]

            def there(p: Tensor, name: str = name) -> None:
                assert p.grad is not None
                take(name, p.grad)
                p.grad = None

            hooks.append(p.register_post_accumulate_grad_hook(there))
        torch.autograd.backward(ends, [_drawn(end, k) for k, end in enumerate(ends)])
    except Exception:  # whatever a backward of the user's raises
        return False
    finally:
        for hook in hooks:
            hook.remove()
        for (_, p), (gradient, others) in zip(learnt, before, strict=True):
            p.grad, p._post_accumulate_grad_hooks = gradient, others
    return True


def _along(gradient: Tensor, number: int) -> list[float]:
    """How long a gradient is in each direction; those of large ones repeat themselves."""
    numbers = gradient.resolve_conj()
    flat = (torch.view_as_real(numbers) if numbers.is_complex() else numbers).flatten()
    whole = len(flat) // _REPEATED * _REPEATED
    summed = torch.zeros(min(len(flat), _REPEATED), dtype=torch.float64, device=flat.device)
    for first in range(0, whole, _AT_ONCE * _REPEATED):
        some = flat[first : min(first + _AT_ONCE * _REPEATED, whole)]
        summed += some.view(-1, _REPEATED).sum(0, dtype=torch.float64)
    summed[: len(flat) - whole] += flat[whole:]
    generator = torch.Generator().manual_seed(number)
    directions = torch.randn(_DIRECTIONS, len(summed), generator=generator).to(summed)
    found: list[float] = (directions @ summed).tolist()
    return found


def _drawn(like: Tensor, number: int) -> Tensor:
    """Numbers from a normal distribution, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return drawn.to(device=like.device, dtype=like.dtype)


@contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """Other weights than those at the trace, by which constants that were made of them show.

    Those that are all one number are changed a little: where a head begins with zeros, or a layer's
    scale with next to nothing, gradients would be zeros, whatever becomes of them. The others are
    doubled or halved, which is exact, and so can be undone without a copy; not of the smallest
    numbers of float16.
    """
    before: list[tuple[nn.Parameter, Tensor | None, float]] = []
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            if not p.is_floating_point() or not p.numel() or isinstance(p, FakeTensor):
                continue
            value = p.detach().flatten()[0]
            if bool((p == value).all()):
                before.append((p, value.clone(), 1.0))
                by = 0.1 * float(value.abs()) if abs(value) > _SMALL else _STEP
                p.add_(by * _drawn(p, k))
            elif p.requires_grad:
                # As many of the one as of the other, whatever repeats itself in the model.
                factor = 2.0 if k.bit_count() % 2 else 0.5
                copied = p.detach().clone() if p.dtype == torch.float16 else None
                before.append((p, copied, factor))
                p.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, was, factor in reversed(before):
                p.mul_(1 / factor) if was is None else p.copy_(was)


@contextmanager
def _shaken(model: nn.Module) -> Iterator[None]:
    """Every weight changed in its last digits."""
    before = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
    try:
        with torch.no_grad():
            for k, (p, _) in enumerate(before):
                last = 8 * torch.finfo(p.dtype).eps
                if torch.is_autocast_enabled(p.device.type):
                    last = max(last, torch.finfo(torch.get_autocast_dtype(p.device.type)).eps)
                p.mul_(1 + last * _drawn(p, k).sign())
        yield
    finally:
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)
