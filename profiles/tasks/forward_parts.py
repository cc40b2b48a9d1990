"""Whether a forward can be taken apart: what it makes of samples together, and of parts of them.

One that goes by what the samples of a batch have in common (their mean, an attention over them, a
matrix of all pairs) makes something else of a micro-batch than of the mini-batch. Two ways of the
same samples through a model are compared, by what comes out and by what its modules give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.dropout import HeldStatistics, WithoutDropout
from ..tracing.call import Call, unchanged
from ..tracing.pieces import fill, take_apart, tensors_in
from ..tracing.random_states import own_states, same_own_states, same_states, states
from .hooks import is_ctrl_c
from .loss_parts import output_names
from .task import read_loss

_MIXES = (
    "{where} mixes the samples of a batch: what it gives for samples of a mini-batch isn't what it "
    "gives for those of a micro-batch or a replica, in any pipeline, so that another model is "
    "trained; it is the mini-batch's with --micro-batches 1 and one replica"
)
_TERM = (
    "{name} of the model's result has nothing of each sample, and of a mini-batch it isn't the "
    "mean of what it is of micro-batches (as an auxiliary loss for the balance of experts): with "
    "micro-batches or replicas it is another term, in any pipeline; it is the mini-batch's with "
    "--micro-batches 1 and one replica"
)

_WITHIN, _WITHIN_HALF, _WITHIN_TF32 = 1e-3, 5e-2, 1e-2
"""Of a tensor's largest number, what passes for rounding: far more than any rounding makes."""

_OF_TERM = 0.1
"""Of that, in a term that all samples have together: a balance of experts hardly moves."""

_MOST_S = 2.0
"""That a part may take, so that nobody waits for it."""

_MOST_NUMBERS = 2**17
"""Of a sample in a tensor, that are looked at."""

_SHARE = 0.5
"""Of the samples come out otherwise where they are mixed. A tie that rounding decides, as between
experts, has few of them do so."""


def why_mixed(model: nn.Module, parts: Sequence[Call], loss: Callable[[Any, int], Any]) -> str:
    """Why a forward of samples isn't what it is of parts of them, in one sentence; empty: it is, or
    that can't be told: it fails on some of them, or draws random numbers.

    Dropout is left out, and batch norms normalize by the statistics that they have. Model and
    random states are afterwards what they were.

    Args:
        model: in training mode; called in the modes (autocast) that are on.
        parts: of as many samples each.
        loss: of a part's result, and which part it is. What it doesn't go by doesn't count.
    """
    try:
        with torch.no_grad(), WithoutDropout(), HeldStatistics():
            return _mixed(model, parts, loss)
    except BaseException as error:  # the user's code
        if is_ctrl_c(error):
            raise
        return ""


def _mixed(model: nn.Module, parts: Sequence[Call], loss: Callable[[Any, int], Any]) -> str:
    tensors = [torch.cat(some) for some in zip(*(part.tensors for part in parts), strict=True)]
    every, sizes = parts[0].with_tensors(tensors), [len(part.tensors[0]) for part in parts]

    def of(*calls: Call) -> list[list[Tensor]]:
        return [_result(model, call, _thinned)[0] for call in calls]

    begin = time.perf_counter()
    in_parts = of(parts[0])
    if time.perf_counter() - begin > _MOST_S:
        return ""
    in_parts += of(*parts[1:])
    (whole,) = of(every)
    within = _within(model, whole)
    odd = odd_in(whole, in_parts, sizes, within, within * _OF_TERM, _SHARE)
    if not odd or odd_in(whole, of(every), [sum(sizes)], within, within):
        return ""
    result, structure = _result(model, parts[0])
    with unchanged(model):
        taken = _taken(result, structure, lambda found: loss(found, 0))
    odd = {k: is_term for k, is_term in odd.items() if taken is None or k in taken}
    if any(odd.values()) and (weights := _weights(model, parts, loss)):
        for k in [k for k, is_term in odd.items() if is_term]:
            mean = _mean([of_part[k] for of_part in in_parts], weights)
            if _close(mean, whole[k], within * _OF_TERM).all():
                del odd[k]
    if not odd:
        return ""
    calls = []
    for some in ([every], parts):
        with noted_calls(model) as made:
            of(*some)
        calls.append(by_sample(made, [(len(part.tensors[0]),) * 2 for part in some]))
    names = output_names(fill(structure, result))
    return next(what_mixes(odd, names, calls[0], calls[1], within))


def _thinned(tensor: Tensor) -> Tensor:
    """Some of its numbers, where there are very many, as of a vocabulary."""
    each = tensor.numel() // len(tensor) if tensor.dim() and len(tensor) else 0
    return tensor[..., :: each // _MOST_NUMBERS + 1] if tensor.dim() else tensor


def _result(
    model: nn.Module, call: Call, kept: Callable[[Tensor], Tensor] = Tensor.detach
) -> tuple[list[Tensor], Any]:
    """What is kept of each tensor of a forward, which begins with the same buffers and attributes
    as any other, and their structure. Raises RandomForwardError."""
    cards = {tensor.device for tensor in call.tensors if tensor.is_cuda}
    with unchanged(model):
        before = states(), own_states(model.modules()), [*map(torch.cuda.get_rng_state, cards)]
        leaves, structure = take_apart(call.of(model, [t.clone() for t in call.tensors]))
        after = map(torch.cuda.get_rng_state, cards)
        same = same_states(before[0], states()) and same_own_states(before[1])
        if not same or not all(map(torch.equal, before[2], after)):
            raise RandomForwardError
        # Buffers, which are put back, may be a part of it.
        return [kept(leaf).clone() for leaf in leaves], structure


class RandomForwardError(Exception):
    """The forward draws random numbers besides dropout's."""


def _within(model: nn.Module, result: Sequence[Tensor]) -> float:
    tensors = [*result, *model.parameters()]
    halves = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)
    kinds = {t.device.type for t in tensors}
    if halves or any(map(torch.is_autocast_enabled, kinds)):
        return _WITHIN_HALF
    return _WITHIN_TF32 if "cuda" in kinds else _WITHIN


def _taken(result: Sequence[Tensor], structure: Any, loss: Callable[[Any], Any]) -> set[int] | None:
    """Positions of the tensors that a loss goes by; None: that can't be told."""
    with suppress(Exception), torch.enable_grad():  # the user's code
        given = [
            t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in result
        ]
        value = read_loss(loss(fill(structure, [t.clone() for t in given]))).value
        asked = [k for k, t in enumerate(given) if t.requires_grad]
        found = torch.autograd.grad(value, [given[k] for k in asked], allow_unused=True)
        return {k for k, gradient in zip(asked, found, strict=True) if gradient is not None}
    return None


def _weights(
    model: nn.Module, parts: Sequence[Call], loss: Callable[[Any, int], Any]
) -> list[float]:
    """By what a loss of (sum, weight) counts each part; empty: it is a mean, or can't be told."""
    found = []
    with suppress(Exception), unchanged(model):  # the user's code
        for k, part in enumerate(parts):
            result, structure = _result(model, part)
            found.append(read_loss(loss(fill(structure, result), k)).weight)
    weights = [weight for weight in found if weight is not None]
    return weights if len(weights) == len(parts) and any(weights) else []


# Two ways compared ------------------------------------------------------------------------------


def odd_in(
    whole: Sequence[Tensor],
    in_parts: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    within: float,
    of_term: float,
    share: float = 0.0,
) -> dict[int, bool]:
    """Positions of tensors in the result that come out otherwise in parts; True for one that has
    nothing of each sample.

    Args:
        whole: tensors of the result of all samples.
        in_parts: the same of each part.
        sizes: samples in each part.
        within, of_term: of a tensor's largest number, what passes for rounding: in one with
            something of each sample, and in others.
        share: of the samples that must come out otherwise.
    """
    found = {}
    for k, of_all in enumerate(whole):
        if not (of_all.is_floating_point() or of_all.is_complex()):
            continue
        of_parts = [result[k] for result in in_parts]
        moved = _moved(of_all, of_parts, sizes)
        if moved is None:
            continue
        if not moved:
            odd = not _close(_mean(of_parts, sizes), of_all, of_term).all()
        elif len(moved) == 1:
            same = _close(torch.cat(of_parts, moved[0]), of_all, within).movedim(moved[0], 0)
            samples = (~same).reshape(sum(sizes), -1).any(1)
            odd = bool(samples.any()) and float(samples.double().mean()) >= share
        else:
            # A matrix of all pairs.
            odd = True
        if odd:
            found[k] = not moved
    return found


def _mean(of_parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    each = zip(of_parts, weights, strict=True)
    return torch.as_tensor(sum(t * (weight / sum(weights)) for t, weight in each))


def _moved(of_all: Tensor, of_parts: Sequence[Tensor], sizes: Sequence[int]) -> list[int] | None:
    """The dimensions that go by the number of samples; None: some go by something else."""
    if any(part.dim() != of_all.dim() for part in of_parts):
        return None
    moved = []
    for d, rows in enumerate(of_all.shape):
        of_sizes = [part.shape[d] for part in of_parts]
        if all(n == rows for n in of_sizes):
            continue
        each, more = divmod(rows, sum(sizes))
        if more or of_sizes != [each * size for size in sizes]:
            return None
        moved.append(d)
    return moved


def what_mixes(
    odd: Mapping[int, bool],
    names: Sequence[str],
    whole: Sequence[tuple[str, Tensor | None]],
    in_parts: Sequence[tuple[str, Tensor | None]],
    within: float,
) -> Iterator[str]:
    """What mixes samples, in sentences: the first module whose samples come out otherwise in calls
    of `by_sample`, and terms, by the names of the tensors that are odd as of `odd_in`."""
    if not all(odd.values()):
        where = (
            name
            for (name, a), (other, b) in zip(whole, in_parts, strict=False)
            if name == other and a is not None and b is not None and a.shape == b.shape
            if not _close(b, a, within).all()
        )
        yield _MIXES.format(where=next(where, "the model's forward"))
    yield from (_TERM.format(name=names[k]) for k, is_term in odd.items() if is_term)


def _close(found: Tensor, wanted: Tensor, within: float) -> Tensor:
    exact = torch.promote_types(wanted.dtype, torch.float64)
    found, wanted = found.detach().to(exact), wanted.detach().to(exact)
    scale = wanted[wanted.isfinite()].abs()
    most = float(scale.max()) if scale.numel() else 0.0
    return torch.isclose(found, wanted, rtol=0, atol=within * most, equal_nan=True)


@contextmanager
def noted_calls(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Note figures of what modules give, by rows: ``[rows, 2]``; of nothing with rows, none."""
    made: list[tuple[str, Tensor]] = []

    def note(where: str, given: Any) -> None:
        leaves = [t for t in tensors_in(given) if t.dim()]
        figures = torch.zeros(0, 2)
        for leaf in [t for t in leaves if t.is_floating_point()][:1]:
            rows = leaf.detach().double().reshape(len(leaf), -1)
            figures = torch.stack([rows.sum(1), rows.square().sum(1)], 1).cpu()
        made.append((where, figures))

    def before(name: str, module: nn.Module, given: Any) -> None:
        note(f"the forward, ahead of {name},", given)

    def after(name: str, module: nn.Module, given: Any, found: Any) -> None:
        note(name, found)

    handles = []
    for name, module in model.named_modules():
        shown = f"{name!r} ({type(module).__name__})"
        if name:
            handles.append(module.register_forward_pre_hook(partial(before, shown)))
            handles.append(module.register_forward_hook(partial(after, shown)))
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def by_sample(
    made: Sequence[tuple[str, Tensor]], sizes: Sequence[tuple[int, int]]
) -> list[tuple[str, Tensor | None]]:
    """The calls that were noted of one part after another: each with its figures of all samples;
    None where it has nothing of each. `sizes`: of the parts without what fills them up, and with
    it."""
    each, more = divmod(len(made), len(sizes))
    return [
        (made[k][0], _of_samples([figures for _, figures in made[k::each]], sizes))
        for k in range(each if not more else 0)
    ]


def _of_samples(figures: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> Tensor | None:
    """``[samples, …]`` of all parts."""
    if any(len(f) % size or not len(f) for f, (_, size) in zip(figures, sizes, strict=True)):
        return None
    found = [f.view(size, -1)[:real] for f, (real, size) in zip(figures, sizes, strict=True)]
    return torch.cat(found) if len({f.shape[1] for f in found}) == 1 else None
