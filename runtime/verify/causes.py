"""Why a mini-batch isn't what its micro-batches are together: the loss, or a layer of the model.

Found on the first mini-batch, in one process and on the user's own model: a forward of the whole,
and one of each micro-batch. Batch norms, which are known to be others, have the statistics in both
that they have before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...profiles.autograd.dropout import HeldStatistics, WithoutDropout
from ...profiles.errors import TimeprestError
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
_ASKS_DETERMINISTIC = (
    "the forward asks whether torch's deterministic algorithms are on, as a check and "
    "--deterministic have them, and goes another way in its stages, which were traced without: "
    "make it the same for both"
)
_SHOWN = 3
_MIXES = (
    "{where} mixes the samples of a batch: what it gives for samples of a mini-batch isn't what it "
    "gives for those of a micro-batch, in any pipeline"
)
_TERM = (
    "{name} of the model's result has nothing of each sample, and of a mini-batch it isn't the "
    "mean of what it is of micro-batches (as an auxiliary loss for the balance of experts): with "
    "micro-batches it is another term, in any pipeline; it is the mini-batch's with "
    "--micro-batches 1"
)


def why_not_whole(
    prepared: Prepared, tolerance: float, *, without_hooks: Callable[[], bool]
) -> list[str]:
    """Sentences that say why plain training on whole mini-batches differs from that on their
    micro-batches.

    Args:
        without_hooks: whether the two are the same where no hook is called.
    """
    found = []
    with suppress(TimeprestError, RuntimeError):
        with WithoutDropout(), HeldStatistics():
            whole, by_part = (_Look(prepared, by_micro_batch=by) for by in (False, True))
        found = list(_causes(whole, by_part, prepared.task, tolerance))
    named = hooks_of(PlainTraining(prepared, by_micro_batch=False).model)
    if not found and named and without_hooks():
        found.append(_HOOKS_BY_PART.format(names=_some(named)))
    # What was warned of may be too little to see on this one mini-batch.
    return found or [prepared.model.loss.apart or _UNKNOWN]


def why_not_one_by_one(prepared: Prepared, same_within: Callable[..., bool]) -> list[str]:
    """Sentences that say why a run differs from plain training on the same micro-batches.

    Args:
        same_within: whether it differs no more where that runs within a context, made of its model.
    """
    named = hooks_of(PlainTraining(prepared, by_micro_batch=True).model)
    if named and same_within(without_hooks):
        return [_HOOKS_UNSEEN.format(names=_some(named))]
    if same_within(lambda model: Modes(None, deterministic=False).on()):
        return [_ASKS_DETERMINISTIC]
    return []


def hooks_of(model: nn.Module) -> list[str]:
    """Names of modules and parameters that have hooks."""
    return [name or "the model" for name, hooks in _every_hook(model) if hooks]


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """No hook of its modules and parameters is called."""
    kept = [(hooks, dict(hooks)) for _, hooks in _every_hook(model)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _every_hook(model: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    for name, module in model.named_modules():
        for kind in ("_forward_pre", "_forward", "_backward_pre", "_backward"):
            yield name, getattr(module, f"{kind}_hooks")
    for name, p in model.named_parameters():
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
            yield name, hooks or {}


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in dict.fromkeys(names[:_SHOWN]))
    return f"{shown} and more" if len(names) > _SHOWN else shown


class _Look:
    """The first mini-batch's way through the model.

    Attributes:
        parts: result, target and samples of each part.
        calls: of modules in the forward, each with its name and figures of each sample in what it
            gave; None where that has nothing of each sample.
    """

    def __init__(self, prepared: Prepared, *, by_micro_batch: bool) -> None:
        plain = PlainTraining(prepared, by_micro_batch=by_micro_batch)
        segment = prepared.segments[0]
        made: list[tuple[str, Tensor]] = []
        with _noted(plain.model, made):
            self.parts = plain.look(segment, 0)
        sizes = [(part.real, part.size) for _, part in plain.parts(segment, 0)]
        each, more = divmod(len(made), len(sizes))
        self.calls = [
            (made[k][0], _of_samples([figures for _, figures in made[k::each]], sizes))
            for k in range(each if not more else 0)
        ]


@contextmanager
def _noted(model: nn.Module, made: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Note figures of what modules give, by rows: ``[rows, 2]``; of nothing with rows, none."""

    def note(where: str, given: Any) -> None:
        leaves = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.dim()]
        figures = torch.zeros(0, 2)
        for leaf in [t for t in leaves if t.is_floating_point()][:1]:
            rows = leaf.detach().double().reshape(len(leaf), -1)
            figures = torch.stack([rows.sum(1), rows.square().sum(1)], 1).cpu()
        made.append((where, figures))

    def before(name: str, module: nn.Module, given: Any) -> None:
        note(f"the forward, ahead of {name},", given)

    def after(name: str, module: nn.Module, given: Any, made: Any) -> None:
        note(name, made)

    handles = []
    for name, module in model.named_modules():
        shown = f"{name!r} ({type(module).__name__})"
        if name:
            handles.append(module.register_forward_pre_hook(partial(before, shown)))
            handles.append(module.register_forward_hook(partial(after, shown)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_samples(figures: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> Tensor | None:
    """``[samples, …]`` of all parts."""
    if any(len(f) % size or not len(f) for f, (_, size) in zip(figures, sizes, strict=True)):
        return None
    found = [f.view(size, -1)[:real] for f, (real, size) in zip(figures, sizes, strict=True)]
    return torch.cat(found) if len({f.shape[1] for f in found}) == 1 else None


def _causes(whole: _Look, by_part: _Look, task: Task, tolerance: float) -> Iterator[str]:
    (result, target, samples), parts = whole.parts[0], by_part.parts
    together, structure = tensors_in(result), [tensors_in(part) for part, _, _ in parts]
    first = [tuple(t.shape) for t in structure[0]]
    fixed = fixed_in(first, [tuple(t.shape) for t in together], parts[0][2], samples)
    if fixed is None:
        return
    sizes = [real for _, _, real in parts]
    found = None
    with suppress(RandomLossError):
        found = loss_in_parts(task, result, target, samples, sizes, fixed)
    if found is not None and not found.same:
        yield described(found, samples, len(sizes))
    names, mixed = output_names(result), False
    for k, of_all in enumerate(together):
        if not (of_all.is_floating_point() or of_all.is_complex()):
            continue
        of_parts = [tensors[k] for tensors in structure]
        if k not in fixed:
            mixed |= _apart(torch.cat(of_parts), of_all, tolerance)
            continue
        mean = sum(t * (n / samples) for t, n in zip(of_parts, sizes, strict=True))
        if _apart(torch.as_tensor(mean), of_all, tolerance):
            yield _TERM.format(name=names[k])
    if mixed:
        pairs = zip(whole.calls, by_part.calls, strict=False)
        where = next(
            (
                name
                for (name, a), (other, b) in pairs
                if name == other and a is not None and b is not None and _apart(b, a, tolerance)
            ),
            "the model's forward",
        )
        yield _MIXES.format(where=where)


def _apart(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return True
    a, b = (t.detach().to(torch.promote_types(t.dtype, torch.float64)) for t in (a, b))
    scale = float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
    return not torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)
