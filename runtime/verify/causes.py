"""Why a mini-batch isn't what its micro-batches are together: the loss, or a layer of the model.

Found on the first mini-batch, in one process and on the user's own model: a forward of the whole,
and one of each micro-batch, which all begin with the same buffers. Batch norms, which are known to
be others, have the statistics in both that they have before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ...profiles.autograd.dropout import HeldStatistics, WithoutDropout
from ...profiles.tasks.forward_parts import by_sample, noted_calls, odd_in, what_mixes
from ...profiles.tasks.loss_parts import (
    RandomLossError,
    described,
    fixed_in,
    loss_in_parts,
    output_names,
)
from ...profiles.tasks.task import Task
from ..prepare.devices import Modes
from ..prepare.prepared import Prepared
from ..prepare.traced_task import tensors_in
from ..training.plain import PlainTraining

_UNKNOWN = (
    "the pipeline does what one process does with the same micro-batches, and that isn't what it "
    "does with whole mini-batches: either the loss isn't a mean over the samples (it may return "
    "(sum, weight) instead: docs/training.md), or a layer mixes the samples of a batch"
)
_HOOKS_BY_PART = (
    "hooks ({names}) make the difference: they see what comes of a micro-batch, in any pipeline, "
    "and not of the mini-batch; without them both are the same"
)
_HOOKS_UNSEEN = (
    "hooks ({names}) make the difference: what they do to the model isn't done in its stages; "
    "without them both sides are the same. Do it in a forward or in the loss, or leave it out"
)
_BUFFERS = (
    "buffers make the difference, which each forward changes and goes by (as spectral_norm's, or a "
    "moving mean): a mini-batch in micro-batches changes them once for each, in any pipeline; "
    "with the same buffers for all forwards both are the same"
)
_ASKS_DETERMINISTIC = (
    "the forward asks whether torch's deterministic algorithms are on, as a check and "
    "--deterministic have them, and goes another way in its stages, which were traced without: "
    "make it the same for both"
)
_SHOWN = 3


Trial = Callable[[nn.Module], AbstractContextManager[None]]
"""What a training runs within, made of its model."""


def why_not_whole(
    prepared: Prepared, tolerance: float, same_within: Callable[[Trial], bool]
) -> list[str]:
    """Sentences that say why plain training on whole mini-batches differs from that on their
    micro-batches.

    Args:
        same_within: whether it differs no more where both run within a context.
    """
    found = []
    with suppress(Exception):  # the user's code
        with WithoutDropout(), HeldStatistics():
            whole, by_part = (_Look(prepared, by_micro_batch=by) for by in (False, True))
        found = list(_causes(whole, by_part, prepared.task, tolerance))
    model = PlainTraining(prepared, by_micro_batch=False).model
    named = hooks_of(model)
    if not found and [*model.buffers()] and _holds(same_within, buffers_held):
        found.append(_BUFFERS)
    if not found and named and _holds(same_within, without_hooks):
        found.append(_HOOKS_BY_PART.format(names=_some(named)))
    # What was warned of may be too little to see on this one mini-batch.
    return found or [*prepared.cautions] or [_UNKNOWN]


def why_not_one_by_one(prepared: Prepared, same_within: Callable[[Trial], bool]) -> list[str]:
    """Sentences that say why a run differs from plain training on the same micro-batches.

    Args:
        same_within: whether it differs no more where that runs within a context.
    """
    named = hooks_of(PlainTraining(prepared, by_micro_batch=True).model)
    if named and _holds(same_within, without_hooks):
        return [_HOOKS_UNSEEN.format(names=_some(named))]
    if _holds(same_within, lambda model: Modes(None, deterministic=False).on()):
        return [_ASKS_DETERMINISTIC]
    return []


def _holds(same_within: Callable[[Trial], bool], trial: Trial) -> bool:
    """Whether it is the same; not, where a training that is otherwise done fails."""
    with suppress(Exception):  # the user's code
        return same_within(trial)
    return False


@contextmanager
def buffers_held(model: nn.Module) -> Iterator[None]:
    """Each forward begins with the buffers that there are now."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def put_back(*_: Any) -> None:
        with torch.no_grad():
            for buffer, value in before:
                # Backwards of earlier forwards may take it, as it was written into.
                buffer.data = value.clone()

    handle = model.register_forward_pre_hook(put_back)
    try:
        yield
    finally:
        handle.remove()


def hooks_of(model: nn.Module) -> list[str]:
    """Names of modules and parameters that have hooks."""
    return [name or "the model" for name, hooks in _every_hook(model) if _users(hooks)]


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """No hook of its modules and parameters is called, but for torch's own."""
    kept = [(hooks, dict(hooks)) for _, hooks in _every_hook(model)]
    for hooks, before in kept:
        for key in _users(before):
            del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def _every_hook(model: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    for name, module in model.named_modules():
        for kind in ("_forward_pre", "_forward", "_backward_pre", "_backward"):
            yield name, getattr(module, f"{kind}_hooks")
    for name, p in model.named_parameters():
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
            yield name, hooks or {}


def _users(hooks: Mapping[Any, Any]) -> list[Any]:
    """Keys of those that aren't torch's, which make weights (weight_norm, spectral_norm, pruning):
    without them it would be another model."""
    return [
        key
        for key, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.nn.utils.")
    ]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in dict.fromkeys(names[:_SHOWN]))
    return f"{shown} and more" if len(names) > _SHOWN else shown


class _Look:
    """The first mini-batch's way through the model.

    Attributes:
        parts: result, target and samples of each part.
        calls: of modules in the forward, as of `by_sample`.
    """

    def __init__(self, prepared: Prepared, *, by_micro_batch: bool) -> None:
        plain = PlainTraining(prepared, by_micro_batch=by_micro_batch)
        segment = prepared.segments[0]
        with noted_calls(plain.model) as made, buffers_held(plain.model):
            self.parts = plain.look(segment, 0)
        sizes = [(part.real, part.size) for _, part in plain.parts(segment, 0)]
        self.calls = by_sample(made, sizes)


def _causes(whole: _Look, by_part: _Look, task: Task, tolerance: float) -> Iterator[str]:
    (result, target, samples), parts = whole.parts[0], by_part.parts
    together, in_parts = tensors_in(result), [tensors_in(part) for part, _, _ in parts]
    first = [tuple(t.shape) for t in in_parts[0]]
    fixed = fixed_in(first, [tuple(t.shape) for t in together], parts[0][2], samples)
    sizes = [real for _, _, real in parts]
    found = None
    with suppress(RandomLossError):
        if fixed is not None:
            found = loss_in_parts(task, result, target, samples, sizes, fixed)
    odd = odd_in(together, in_parts, sizes, tolerance, tolerance)
    # Of a result that isn't by samples, that it fails on parts says nothing.
    if found is not None and not (found.same or (found.fails and odd)):
        yield described(found, samples, len(sizes))
    yield from what_mixes(odd, output_names(result), whole.calls, by_part.calls, tolerance)
