"""Calling a task's hooks: what they give is checked, and their errors are told in one line."""

from __future__ import annotations

import functools
import inspect
import math
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import RunError, StoppedError, TargetError, TimeprestError, is_ours, is_users
from ..tracing.call import Call, unchanged
from ..tracing.pieces import map_tensors, tensors_in
from ..tracing.random_states import GENERATORS, seed_everywhere, set_own_states, state_of
from ..tracing.remembered import Remembered, changes, kept_in, marks_of_places, places_of, scope_of
from .task import Loss, Split, Task, read_figure, read_loss


def call_hook(
    name: str,
    hook: Callable[..., Any],
    *arguments: Any,
    doing: str = "",
    kind: type[TimeprestError] = TargetError,
) -> Any:
    """What the user's hook returns.

    Args:
        doing: what failed, where that isn't the hook itself but what it gave: "step()".

    Raises `kind` naming the hook when it raises: RunError where training is under way.
    """
    try:
        return hook(*arguments)
    except BaseException:
        with in_one_line(f"the task's {name} failed" + (f" in {doing}" if doing else ""), kind):
            raise


@contextmanager
def reading(split: Split) -> Iterator[None]:
    """A split's data are opened. Errors of test data say how to do without."""
    try:
        yield
    except TargetError as error:
        if split == "train":
            raise
        raise TargetError(f"{error} (or train with tp-run --no-evaluate)") from error


@contextmanager
def before_training() -> Iterator[None]:
    """Trials of hooks in this block: what would fail a run is the user's mistake where none has
    begun. Raises TargetError in place of RunError."""
    try:
        yield
    except StoppedError:
        raise
    except RunError as error:
        raise TargetError(str(error)) from error


def task_metrics(task: Task, output: Any, target: Any) -> dict[str, Any]:
    """The task's figures beside the loss, by name; none where it has no `metrics`.

    Raises TargetError when it gives no dict, RunError when it raises.
    """
    metrics = getattr(task, "metrics", None)
    if metrics is None:
        return {}
    found = call_hook("metrics", metrics, output, target, kind=RunError)
    if not isinstance(found, Mapping):
        raise TargetError(
            f"the task's metrics gave {described(found)}; return a dict of figures by their names"
        )
    for name in found:
        if not isinstance(name, str):
            raise TargetError(
                f"the task's metrics gave a figure named {name!r}; names must be text"
            )
    return dict(found)


def check_depends(loss: Loss, output: Any) -> None:
    """Raises TargetError for a loss that knows nothing of an output that gradients could reach."""
    if loss.value.requires_grad or not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in tensors_in(output)):
        raise TargetError(
            "the task's loss gives a number without a gradient: it must be computed from the "
            "model's output, without .item(), .detach() or no_grad()"
        )


# What they read besides what they are given ------------------------------------------------------

_ALIKE = 1e-6
"""Of a figure, what rounding may do."""


def check_reads(
    name: str, hook: Callable[..., Any], model: nn.Module, call: Call, target: Any
) -> None:
    """Refuse a loss, or figures, that read what the model's forward leaves outside its result: a
    number that a hook keeps, a list of a class. In a pipeline other forwards come between, or none
    at all where the loss has a process of its own.

    It is asked on one result, after forwards of its own samples and of others; under the modes
    that the caller has on, with the same random numbers. What it keeps for itself is put back.
    What fails by itself is passed over: others tell of it.

    Args:
        call, target: of a micro-batch.

    Raises TargetError naming the hook, and what changed.
    """
    try:
        with unchanged(model):
            _check_reads(name, hook, model, call, target)
    except TimeprestError:
        raise
    except Exception:  # the user's model
        return


def _check_reads(
    name: str, hook: Callable[..., Any], model: nn.Module, call: Call, target: Any
) -> None:
    own = scope_of(hook)
    kept = kept_in({"": getattr(hook, "__self__", None), **own}).values()
    generators = [(g, state_of(g)) for g in own.values() if isinstance(g, GENERATORS)]
    result: Any = None

    def asked() -> list[float] | str:
        seed_everywhere(0)
        try:
            with torch.set_grad_enabled(model.training):
                return _figures_in(hook(map_tensors(_as_made, result), target))
        except Exception as error:  # the user's code
            return describe_error(error)

    def put_back() -> None:
        for one in kept:
            one.put_back()
        set_own_states(generators)

    def after(given: Call) -> tuple[list[float] | str, dict[str, Any]]:
        nonlocal result
        put_back()
        seed_everywhere(0)
        with unchanged(model):
            with torch.no_grad():
                made = given.of(model)
            result, left_by = made if result is None else result, marks_of_places(model, [hook])
            return asked(), left_by

    try:
        # What looks before this one have left in a list is gone then, where the loss clears it.
        after(call)
        first, left_by_own = after(call)
        other, left_by_others = after(call.of_first())
        put_back()
        left_by_none, without = marks_of_places(model, [hook]), asked()
        if _alike(first, other) and _alike(other, without):
            return
        again, _ = after(call)
        # One that goes by its own numbers gives another each time it is asked.
        if isinstance(first, str) or not (_alike(first, again) or _alike(other, without)):
            return
    finally:
        put_back()
    apart = not _alike(first, other)
    odd, when = (other, "one of other samples") if apart else (without, "none")
    names = changes(left_by_own, left_by_others if apart else left_by_none)
    mine = [n for n in names if n in own] or names
    where = f" ({shorten(', '.join(mine), 100, placeholder=' …')})" if mine else ""
    here, there = _told(first, odd), _told(odd, first)
    raise TargetError(
        f"the task's {name}() reads what the model's forward leaves outside its result{where}: "
        f"of one result it makes {here} after a forward of its samples, and {there} after {when}. "
        "In a pipeline other forwards come between, or none does: have forward return it, and "
        "take it from the output"
    )


@contextmanager
def task_unchanged(task: Task) -> Iterator[None]:
    """Afterwards a task is what it was: its loss may count its calls, draw from a generator of its
    own, or have a module with buffers."""
    attributes = getattr(task, "__dict__", {})
    around = places_of(nn.Module(), [task.loss])
    inside = [Remembered(attributes), *kept_in({**attributes, **around}).values()]
    own = {id(g): g for g in [*attributes.values(), *around.values()] if isinstance(g, GENERATORS)}
    generators = [(g, state_of(g)) for g in own.values()]
    modules = [value for value in attributes.values() if isinstance(value, nn.Module)]
    try:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(unchanged(module))
            yield
    finally:
        for kept in inside:
            kept.put_back()
        set_own_states(generators)


def _as_made(tensor: Tensor) -> Tensor:
    """A result's tensor as a loss gets it, which may change it in place."""
    found = tensor.detach().clone()
    return found.requires_grad_().clone() if found.is_floating_point() else found


def _figures_in(found: Any) -> list[float]:
    leaves = tree_leaves(found)
    numbers = [x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in leaves]
    return [float(x) for x in numbers if isinstance(x, (int, float))]


def _alike(one: list[float] | str, other: list[float] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str)
    return len(one) == len(other) and all(map(_close, one, other))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ALIKE) or (math.isnan(a) and math.isnan(b))


def _told(found: list[float] | str, beside: list[float] | str) -> str:
    """Of figures, the first that isn't what it is beside."""
    if isinstance(found, str):
        return f"nothing ({found})"
    there = beside if len(beside) == len(found) else []
    apart = [
        a for a, b in zip_longest(found, there) if not isinstance(b, float) or not _close(a, b)
    ]
    return f"{(apart or [math.nan])[0]:.6g}"


def try_loss(task: Task, output: Any, target: Any) -> None:
    """Call the loss as training does, with the backward down to the output.

    Raises as the hook does, and TargetError for what can't be trained by.
    """

    def trained(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.dtype.is_floating_point)

    output = map_tensors(trained, output)
    found = call_hook("loss", task.loss, output, target, kind=RunError)
    if isinstance(found, tuple):
        # Of which tensors of the output the model has gradients isn't known here.
        found = (*found[:1], *tree_map_only(Tensor, Tensor.detach, found[1:]))
    loss = read_loss(found)
    check_depends(loss, output)
    call_hook("loss", loss.value.backward, doing="its backward", kind=RunError)


def try_figures(task: Task, output: Any, target: Any, *, metrics: bool = True) -> list[str]:
    """Call the loss, and the metrics unless left out, as an evaluation does. Returns a line for
    each figure that seems to be a sum over the samples: it doubles where each is there twice; and
    one where the task's `figures` divides by zero, as a precision without any positives.

    Raises as the hooks do, and TargetError for a figure that isn't a number.
    """
    once, lines = _figures(task, output, target, metrics), list[str]()
    try:
        if metrics:
            task_figures(task, {name: _mean(name, value) for name, value in once.items()})
    except RunError as error:
        if not isinstance(error.__cause__, ArithmeticError):
            raise
        lines = [
            f"{error}, of a few samples before training: such means in an evaluation end a run"
        ]
    try:
        twice = _figures(task, *_each_twice(output, target), metrics)
    except (TimeprestError, ValueError):
        # Of what can't be doubled, nothing can be told.
        return lines
    return lines + [
        f"the task's {name if name == 'loss' else f'metric {name!r}'} doubles where every sample "
        "is there twice: it seems to be a sum, and must be a mean over the samples, or (sum, "
        "weight) (docs/training.md)"
        for name, value in once.items()
        if not isinstance(value, tuple)
        and name in twice
        and _mean(name, value)
        and math.isclose(_mean(name, twice[name]), 2 * _mean(name, value), rel_tol=1e-3)
    ]


def _figures(task: Task, output: Any, target: Any, metrics: bool) -> dict[str, Any]:
    """What the loss and the task's metrics give, by name."""
    with torch.no_grad():
        found = {"loss": call_hook("loss", task.loss, output, target, kind=RunError)}
        if metrics:
            found.update(task_metrics(task, output, target))
    for name, value in found.items():
        _mean(name, value)
    return found


def _mean(name: str, value: Any) -> float:
    total, weight = read_figure(name, value, 1)
    return total / weight if weight else math.nan


def task_figures(task: Task, means: Mapping[str, float]) -> dict[str, float]:
    """What the task's `figures` makes of the means over the test samples; none where it has none.

    Raises TargetError when it gives no dict of numbers, RunError when it raises.
    """
    hook = getattr(task, "figures", None)
    if hook is None:
        return {}
    made = call_hook("figures", hook, dict(means), kind=RunError)
    if not isinstance(made, Mapping):
        raise TargetError(
            f"the task's figures gave {described(made)}; return a dict of figures by names"
        )
    found: dict[str, float] = {}
    for name, value in made.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(number, (int, float)):
            raise TargetError(f"the task's figure {name!r} must be a number")
        found[str(name)] = float(number)
    return found


def _each_twice(output: Any, target: Any) -> tuple[Any, Any]:
    """The same samples once more behind themselves. Raises ValueError where there are none."""
    rows = [tensor.shape[0] for tensor in tensors_in(target) if tensor.dim()]
    if not rows or not rows[0]:
        raise ValueError

    def twice(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] % rows[0]:
            raise ValueError
        return torch.cat([tensor, tensor])

    return map_tensors(twice, output), map_tensors(twice, target)


def stand_in(value: Any) -> Any:
    """Numbers of the same shapes in place of a model's result that was made without any: floats
    from 0 to 1, zeros else."""

    def real(tensor: Tensor) -> Tensor:
        make = torch.rand if tensor.dtype.is_floating_point else torch.zeros
        return make(tuple(tensor.shape)).to(tensor.dtype)

    return map_tensors(real, value)


class RunLength(NamedTuple):
    """How many updates there are in a run, and in a whole epoch."""

    steps: int
    steps_per_epoch: int


def task_scheduler(task: Task, optimizer: torch.optim.Optimizer, length: RunLength) -> Any:
    """What the task's `scheduler` makes of a stage's optimizer, and of the run's length where its
    arguments ask for that by name; None where it has none.

    Raises TargetError when it raises, asks for anything else, or gives what can't be stepped or
        is over another optimizer; or when the task's `scheduler_step` says something else than
        when to step.
    """
    hook = getattr(task, "scheduler", None)
    if hook is None:
        return None
    scheduler_step(task)
    asked = {name: getattr(length, name) for name in totals_asked(hook)}
    odd = [name for name in needed_arguments(hook)[1:] if name not in asked]
    if odd:
        raise TargetError(
            f"the task's scheduler asks for {odd[0]!r}: besides the optimizer it is given steps "
            "and steps_per_epoch, in updates, where it asks for them"
        )
    found = call_hook("scheduler", lambda: hook(optimizer, **asked))
    if not callable(getattr(found, "step", None)):
        raise TargetError(
            f"the task's scheduler gave {described(found)}; return one of "
            "torch.optim.lr_scheduler's classes"
        )
    if needed := needed_arguments(found.step):
        raise TargetError(
            f"the task's scheduler gave {described(found)}, whose step() needs {needed[0]}: "
            "schedulers are stepped without figures here; return another one"
        )
    if getattr(found, "optimizer", optimizer) is not optimizer:
        raise TargetError(
            "the task's scheduler is over another optimizer than the one it was given: the "
            "learning rate would never change"
        )
    return found


def scheduler_step(task: Task) -> str | None:
    """When the task says that its scheduler is stepped: "update", "epoch"; None: it doesn't. Raises
    TargetError for anything else."""
    found: Any = getattr(task, "scheduler_step", None)
    if found not in (None, "update", "epoch"):
        raise TargetError(
            f'the task\'s scheduler_step is {found!r}; it must be "update" or "epoch"'
        )
    return found  # type: ignore[no-any-return]


def totals_asked(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Which of a run's totals a `scheduler` has arguments for, and hasn't been given yet."""
    given = hook.keywords if isinstance(hook, functools.partial) else {}
    return tuple(
        name for name in RunLength._fields if name in _parameters(hook) and name not in given
    )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that it can't be called without."""
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some that aren't written in Python don't tell.
        return {}


def described(value: Any) -> str:
    """What a hook gave, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"


# Errors of the user's code, told in one line ----------------------------------------------------


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it is the user at the keyboard who ended the user's code.

    Where Ctrl-C isn't Python's to handle, as in the workers of a run, a hook has raised it.
    """
    handled = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and handled


def from_users_code(error: BaseException) -> bool:
    """Whether an exception came out of the user's code: SystemExit may be ours, too."""
    return bool(_users_frames(error))


def ended_in_users_code(error: BaseException) -> bool:
    """Whether it was raised there, or in a library that was called there: not in code of ours that
    the user's has called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [is_users(frame.filename) for frame in frames]
    mine = [is_ours(frame.filename) for frame in frames]
    return any(own) and not any(mine[own.index(True) :])


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_users(frame.filename)]


def describe_error(error: BaseException) -> str:
    """One line: the last place in the user's code, and what went wrong there."""
    frames = _users_frames(error)
    try:
        text = " ".join(str(error).split())
    except BaseException as failed:  # the user's exception
        text = f"(its text can't be had: __str__ raised {type(failed).__name__})"
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    if not frames:
        return reason
    return f"{frames[-1].filename}:{frames[-1].lineno}: {reason}"


@contextmanager
def in_one_line(
    what: str,
    kind: type[TimeprestError] = TargetError,
    *,
    mend: str = "",
    text: Callable[[BaseException], str] = describe_error,
) -> Iterator[None]:
    """Where the user's code runs, or a library on what the user gave: whatever that raises is told
    in one line. Errors of ours and Ctrl-C stay what they are.

    Raises `kind`: what failed, the error's text, and what to do about it.
    """
    try:
        yield
    except TimeprestError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise kind(f"{what}: {text(error)}{mend}") from error
