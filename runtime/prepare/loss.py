"""What a task's loss is: a mean over samples, or (sum, weight); which parameters it uses; and
whether it, and the forward before it, can be taken apart."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...profiles.errors import TargetError, TaskWarning, TimeprestError
from ...profiles.tasks import forward_parts
from ...profiles.tasks.hooks import describe_error, is_ctrl_c, stand_in
from ...profiles.tasks.loss_parts import (
    LossInParts,
    RandomLossError,
    described,
    fixed_in,
    loss_in_parts,
    own_copy,
)
from ...profiles.tasks.samples import pick
from ...profiles.tasks.task import Loss, Task, read_loss, root_of
from ...profiles.tracing.pieces import map_tensors
from .devices import random_kept
from .traced_task import TracedTask, tensors_in

_MOST_NAMED = 3

_SAMPLES, _PART = 8, 2
"""Of a micro-batch, that a loss is asked of in parts; and of a part."""

_MOST_BYTES = 2**27
"""Of a result, that it is asked of in parts."""


@dataclass(frozen=True)
class LossKind:
    """Whether a task's loss is a mean or (sum, weight), found out before the run.

    Attributes:
        weighted: (sum, weight); else a mean.
        unknown: why that couldn't be found out; empty: it could.
        takes: what its gradient goes to besides the model's result: parameters that it uses by
            itself.
    """

    weighted: bool = False
    unknown: str = ""
    takes: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    def read(self, found: Any) -> Loss:
        """What the loss returned in training. Raises TargetError where it isn't what it was."""
        loss = read_loss(found)
        if (loss.weight is not None) != self.weighted:
            now, before = ("a mean", "(sum, weight)")[:: 1 if self.weighted else -1]
            why = f" (it failed then: {self.unknown})" if self.unknown else ""
            raise TargetError(
                f"the task's loss gives {now}, and gave {before} when it was tried before the "
                f"run{why}: it must give the same for any output and target"
            )
        return loss


def kind_of_loss(task: Task, result: Any, target: Any) -> LossKind:
    """Whether a task's loss gives (sum, weight), and what it takes besides the result.

    It is asked once, of a copy of the task, with a result of the right shapes, under the autocast
    that the caller has on; once more where it can't be asked with gradients.

    Args:
        result: the model's, with its gradients; fake tensors (of one mode) where it wasn't
            computed.

    Raises TargetError for a (sum, weight) whose weight has a gradient.
    """
    with contextlib.suppress(Exception):  # the user's object
        task = copy.copy(task)
    before, found = torch.random.get_rng_state(), None
    try:
        with contextlib.suppress(Exception), torch.enable_grad():  # the user's code
            found = _tried(task, result, target, needs_grad=True)
        if found is None:
            with torch.no_grad():
                found = _tried(task, result, target)
    except BaseException as error:  # the user's code
        if is_ctrl_c(error):
            raise
        return LossKind(unknown=describe_error(error))
    finally:
        torch.random.set_rng_state(before)
    root_of(found)
    return LossKind(isinstance(found, tuple), takes=_leaves(found))


def why_apart(
    traced: TracedTask, samples: int, result: Any, target: Any, *, mixed: bool = False
) -> str:
    """Why the loss of a mini-batch isn't the mean of its parts', in one sentence; empty: it is, or
    that can't be told. It is asked of a micro-batch in parts, on a result that stays the same.

    Args:
        samples: in a micro-batch of the last stage.
        result, target: of one; numbers stand in for a result without any, if it isn't too large.
        mixed: the forward isn't taken apart: that a loss fails on parts of its result says nothing.
    """
    graph, own = traced.training[samples], samples
    with contextlib.suppress(TimeprestError, RandomLossError, RuntimeError):
        few = samples == 1 or (samples < _SAMPLES and not traced.fake)
        if few and graph.only_size is None:
            samples = _SAMPLES
            look = traced.look(samples, graph)
            result, target = look.result, look.target
        elif samples == 1:
            return ""
        found = _in_some_parts(traced, samples, result, target)
        if found is None or found.same:
            return ""
        if found.fails:
            # It may take micro-batches of so many as it needs.
            return _why_several_apart(traced, own) if graph.only_size is None and not mixed else ""
        if graph.only_size is None:
            # What merely happens to have as many rows shows.
            other = samples + 1
            look = traced.look(other, graph)
            shapes = [t.shape for t in tensors_in(result)]
            fixed = fixed_in(shapes, look.result_shapes, samples, other)
            if fixed is None:
                return ""
            samples = other
            found = _in_some_parts(traced, samples, look.result, look.target, fixed)
        if found is not None and not (found.same or found.fails):
            return described(found, min(samples, _SAMPLES), len(_sizes(samples)))
    return ""


def _why_several_apart(traced: TracedTask, samples: int) -> str:
    """The same of some micro-batches, which the loss is asked of together and one by one."""
    sizes = [samples] * max(2, _SAMPLES // samples)
    graph, every = traced.training[samples], sum(sizes)
    one, several = traced.look(samples, graph), traced.look(every, graph)
    fixed = fixed_in(one.result_shapes, several.result_shapes, samples, every)
    if fixed is None:
        return ""
    found = _in_some_parts(traced, every, several.result, several.target, fixed, sizes)
    return "" if found is None or found.same else described(found, every, len(sizes))


def why_mixed(traced: TracedTask, samples: int) -> str:
    """Why the forward of a mini-batch isn't that of its parts, as `forward_parts.why_mixed` has it;
    empty, too, where it isn't run for real.

    Args:
        samples: in a micro-batch.
    """
    half = min(samples, _SAMPLES // 2)
    if traced.fake:
        return ""
    # What the data draw for these samples must not move what a run draws.
    with random_kept(torch.device("cpu")), contextlib.suppress(Exception):  # the user's data
        call, target = traced.target.call(2 * half)
        parts = [pick(call.tensors, slice(k, k + half), 2 * half) for k in (0, half)]

        def loss(result: Any, part: int) -> Any:
            rows = slice(part * half, (part + 1) * half)
            return own_copy(traced.task).loss(result, pick(target, rows, 2 * half))

        calls = [call.with_tensors(tensors) for tensors in parts]
        return forward_parts.why_mixed(traced.model, calls, loss)
    return ""


def _in_some_parts(
    traced: TracedTask,
    samples: int,
    result: Any,
    target: Any,
    fixed: Collection[int] = (),
    sizes: Sequence[int] = (),
) -> LossInParts | None:
    if sum(t.nbytes for t in tensors_in(result)) > _MOST_BYTES:
        return None
    if traced.fake:
        result = stand_in(result)
    return loss_in_parts(traced.task, result, target, samples, sizes or _sizes(samples), fixed)


def _sizes(samples: int) -> list[int]:
    """Of parts: of two samples, as far as there are such, since some losses take one for none."""
    some = min(samples, _SAMPLES)
    return [1, 1] if some == _PART else [min(_PART, some - k) for k in range(0, some, _PART)]


def check_parameters(
    loss: LossKind, named: Mapping[str, nn.Parameter], updated: Collection[nn.Parameter]
) -> None:
    """Refuse a loss that uses parameters of the model which its stage doesn't update: gradients
    would go to copies of them that nobody else has, or to none that are trained.

    Args:
        named: all parameters of the model.
        updated: those that the last stage updates.

    Warns of those that are no part of the model. Raises TargetError naming one that is.
    """
    names, mine = {id(p): name for name, p in named.items()}, {id(p) for p in updated}
    others = [p for p in loss.takes if isinstance(p, nn.Parameter) and id(p) not in names]
    if others:
        shapes = ", ".join(
            f"of shape {list(p.shape)}" if p.dim() else "a number" for p in others[:_MOST_NAMED]
        )
        one = len(others) == 1
        which = "a parameter that isn't" if one else f"{len(others)} parameters that aren't"
        warnings.warn(
            f"the task's loss takes gradients to {which} the model's ({shapes}), and "
            "that nothing trains: make such the model's, and return them from forward",
            TaskWarning,
            stacklevel=2,
        )
    odd = [names[id(p)] for p in loss.takes if id(p) in names and id(p) not in mine]
    if odd:
        # In the model's own sequence.
        first = next(name for name in named if name in odd)
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        raise TargetError(
            f"the task's loss uses the model's parameter {first!r}{more}, which the last stage "
            "doesn't update, so it wouldn't be trained by this loss; return it, or what the loss "
            "computes from it, as an output of forward"
        )


def _leaves(found: Any) -> tuple[Tensor, ...]:
    """What the gradient of a loss is accumulated in."""
    todo = [t.grad_fn for t in tree_leaves(found) if isinstance(t, Tensor)]
    seen, leaves = set[Any](), list[Tensor]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        todo += [following for following, _ in node.next_functions]
    return tuple(leaves)


def _tried(task: Task, result: Any, target: Any, *, needs_grad: bool = False) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    modes: list[AbstractContextManager[Any]] = []

    def entered(found: Tensor, like: Tensor) -> Tensor:
        if not needs_grad or not like.requires_grad:
            return found
        # No leaf, which the loss couldn't change in place; and it may change what this is of.
        return found.requires_grad_().clone()

    def note(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            modes.append(tensor.fake_mode)
        return entered(tensor.detach(), tensor)

    result = map_tensors(note, result)
    try:
        # On fake tensors it takes no memory.
        with modes[0] if modes else nullcontext():
            return task.loss(result, target)
    except Exception:
        if not modes:
            raise
        # A loss that looks at numbers.
        zeros = map_tensors(lambda t: entered(torch.zeros(t.shape, dtype=t.dtype), t), result)
        return task.loss(zeros, target)
