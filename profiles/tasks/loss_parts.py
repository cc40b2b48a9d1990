"""Whether a loss can be taken apart: what it is of some samples together, and of parts of them.

Micro-batches and replicas each have the loss of their own samples, and a mini-batch's is the mean
of those. Of a loss that compares samples with each other, or goes by their mean, that is another
one. It is asked of outputs that stay the same, so that no layer of the model has a part in it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tracing.pieces import fill, items_in, take_apart
from ..tracing.random_states import same_states, set_states, states
from .hooks import describe_error, is_ctrl_c
from .samples import pick
from .task import Loss, Task, read_loss

_EXACT = 1e-5
"""Largest difference that passes for rounding where float64 was asked for: some losses take float32
all the same. Of the largest loss of a part."""

_ROUNDS = {torch.float64: _EXACT, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_FLOAT32 = 3e-4
"""By what the loss gives, or the model where it can't be asked in float64."""

_FITTED = 0.02
"""Most that a mean by weights, which are told from the losses themselves, leaves unexplained."""

_MOST_CHARACTERS = 160
"""Of what a loss fails with."""

_FEWEST_FITTED, _MOST_FITTED = 3, 8
"""Samples that weights are told of."""


_COMPARES = (
    "it compares samples with each other, or goes by what they have in common, and each "
    "micro-batch or replica has its own alone, so that another loss is trained; it is the "
    "mini-batch's with --micro-batches 1 and one replica"
)


class LossInParts(NamedTuple):
    """A loss of samples together, and in parts.

    Attributes:
        together: of all samples at once.
        in_parts: the mean of its parts', each by its share of the samples, or its own weight.
        same: whether the two differ by rounding alone.
        weighs: it is a mean all the same, by weights of its own, such as numbers of words.
        takes: names of the outputs that it can't be taken apart in, where others are none of them.
        fails: why it fails on parts, though not on all samples together; empty: it doesn't.
        remembers: asked of the same samples again it gives something else, which `in_parts` has,
            and draws nothing at random for that.
    """

    together: float
    in_parts: float
    same: bool
    weighs: bool = False
    takes: tuple[str, ...] = ()
    fails: str = ""
    remembers: bool = False


class RandomLossError(Exception):
    """The loss draws random numbers."""


def own_copy(task: Task) -> Task:
    """A copy of a task for a trial of its loss: what that leaves in the task, or in modules and
    tensors of it, isn't there afterwards."""
    with suppress(Exception):  # the user's object
        task = copy.copy(task)
        for name, value in list(vars(task).items()):
            if isinstance(value, (nn.Module, Tensor)):
                setattr(task, name, copy.deepcopy(value))
    return task


def loss_in_parts(
    task: Task,
    result: Any,
    target: Any,
    samples: int,
    sizes: Sequence[int],
    fixed: Collection[int] = (),
) -> LossInParts | None:
    """Ask a task's loss of samples together and in parts.

    Args:
        result: the model's, of so many samples: of each tensor, which isn't fixed, a row or more
            for each, samples first.
        target: of the same samples.
        sizes: of the parts: the first samples are in the first, and so on; not all need be asked.
        fixed: positions of the tensors in the result that have nothing of each sample.

    Returns None where that can't be told: the loss fails on all samples together, or what is which
    sample's can't be told.

    Raises RandomLossError for a loss that draws random numbers.
    """
    try:
        asked = _Asked(own_copy(task), result, target, samples, fixed)
        asked.settle(range(sum(sizes)))
        found = _in_parts(asked, sizes)
        if found is not None and found.same:
            # Where losses are alike, as ahead of training, their weights may not be.
            with suppress(Exception):  # the user's code, which needn't take other outputs
                asked.move()
                other = _in_parts(asked, sizes)
                found = other if other is not None and not other.fails else found
        return found
    except RandomLossError:
        raise
    except BaseException as error:  # the user's code
        if is_ctrl_c(error):
            raise
        return None


def fixed_in(
    shapes: Sequence[Sequence[int]], others: Sequence[Sequence[int]], size: int, other: int
) -> set[int] | None:
    """Positions of the tensors in a model's result that have nothing of each sample, by their
    shapes for two numbers of samples; None where some have samples, and not first."""
    if len(shapes) != len(others):
        return None
    fixed = set()
    for k, (shape, moved) in enumerate(zip(shapes, others, strict=True)):
        if tuple(shape) == tuple(moved):
            fixed.add(k)
        elif not shape or shape[0] % size or moved[0] != shape[0] // size * other:
            return None
    return fixed


def described(found: LossInParts, samples: int, parts: int) -> str:
    """What a loss is that can't be taken apart, and what to do about it, in one sentence."""
    if found.fails:
        return (
            f"the task's loss takes {samples} samples together, and fails on their {parts} parts "
            f"({found.fails}): {_COMPARES}"
        )
    if found.remembers:
        return (
            f"the task's loss gives {found.together:.6g}, and {found.in_parts:.6g} where it is "
            "asked of the same samples again: it goes by what it was asked before, and it is asked "
            "of each micro-batch, of evaluations' too, and begins anew in a run that goes on; have "
            "the model's forward count its calls in training in a buffer, and return that"
        )
    of = f" in {' and '.join(found.takes)}" if found.takes else ""
    if found.weighs:
        advice = (
            "it is a mean over something else than samples, and may return (sum, weight) instead "
            "(docs/training.md)"
        )
    elif math.isclose(found.together, parts * found.in_parts, rel_tol=1e-3):
        advice = (
            "it seems to be a sum, and must be a mean over the samples, or (sum, weight) "
            "(docs/training.md)"
        )
    else:
        advice = _COMPARES
    return (
        f"the task's loss can't be taken apart{of}: of {samples} samples together it is "
        f"{found.together:.6g}, and the mean of their {parts} parts is {found.in_parts:.6g}: "
        f"{advice}"
    )


class _Asked:
    """A loss and what it is asked of: samples by their numbers."""

    def __init__(
        self, task: Task, result: Any, target: Any, samples: int, fixed: Collection[int]
    ) -> None:
        self._task, self._target, self.samples = task, target, samples
        leaves, self._structure = take_apart(result)
        self.names = output_names(result)
        self.by_sample = [
            k
            for k, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and k not in fixed
            and leaf.dim()
            and not leaf.shape[0] % samples
        ]
        floats = [leaf.dtype for leaf in leaves if _is_float(leaf)]
        self.tolerance = max([_ROUNDS.get(dtype, _FLOAT32) for dtype in floats], default=_EXACT)
        self.leaves = leaves
        self._exact = False

    def settle(self, samples: Sequence[int]) -> None:
        """Find out whether it can be asked in float64."""
        self._exact = True
        try:
            dtype = self.of(samples).value.dtype
            self.tolerance = _ROUNDS.get(dtype, _FLOAT32)
        except RandomLossError:
            raise
        except Exception:  # the user's code, which may be for float32
            self._exact = False

    def move(self) -> None:
        """Add noise to what is by samples, so that no two are alike."""
        drawn, leaves = torch.Generator().manual_seed(0), list(self.leaves)
        for k in filter(lambda k: _is_float(leaves[k]), self.by_sample):
            noise = torch.randn(leaves[k].shape, generator=drawn).to(leaves[k])
            leaves[k] = leaves[k].detach() + noise
        self.leaves = tuple(leaves)

    def follow(self) -> list[Tensor]:
        """Have gradients go to the tensors that the loss is asked of; those that are by samples, in
        the result's sequence."""
        self.leaves = tuple(
            leaf.detach().requires_grad_() if _is_float(leaf) else leaf for leaf in self.leaves
        )
        return [self.leaves[k] for k in self.by_sample if self.leaves[k].requires_grad]

    def of(self, samples: Sequence[int]) -> Loss:
        mine, leaves = torch.tensor(list(samples)), list(self.leaves)
        for k in self.by_sample:
            rows = leaves[k].shape[0] // self.samples
            inner = torch.arange(rows).repeat(len(mine))
            leaves[k] = leaves[k][mine.repeat_interleave(rows) * rows + inner]
        if self._exact:
            leaves = list(map(_exact, leaves))
        target = pick(self._target, mine, self.samples)
        before = states()
        try:
            loss = read_loss(self._task.loss(fill(self._structure, leaves), target))
            if not same_states(before, states()):
                raise RandomLossError
        finally:
            set_states(before)
        return loss

    def mean(self, parts: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
        """The mean of these parts' losses, and the largest of them."""
        asked = [(len(part), self.of(part)) for part in parts if len(part)]
        if any(loss.weight is not None for _, loss in asked):
            total: Any = sum(loss.weight or 0.0 for _, loss in asked)
            values = [loss.value / loss.weight for _, loss in asked if loss.weight]
            mean = sum(loss.value for _, loss in asked) / (total or math.nan)
        else:
            values = [loss.value for _, loss in asked]
            mean = sum(n * loss.value for n, loss in asked) / sum(n for n, _ in asked)
        return torch.as_tensor(mean), max(
            map(abs, map(float, map(Tensor.detach, values))), default=0.0
        )


def _in_parts(asked: _Asked, sizes: Sequence[int]) -> LossInParts | None:
    every = range(sum(sizes))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    parts = [range(start, start + n) for start, n in zip(starts, sizes, strict=True)]
    with torch.no_grad():
        together, most = asked.mean([every])
        if not math.isfinite(together):
            return None
        second = float(asked.mean([every])[0])
        if second != float(together):
            return LossInParts(float(together), second, same=False, remembers=True)
        try:
            mean, largest = asked.mean(parts)
        except RandomLossError:
            raise
        except Exception as error:  # the user's code
            fails = shorten(describe_error(error), _MOST_CHARACTERS, placeholder=" …")
            return LossInParts(float(together), math.nan, same=False, fails=fails)
        found = LossInParts(float(together), float(mean), same=True)
        # In a part without any that counts, a mean over something else isn't a number.
        if abs(found.together - found.in_parts) <= asked.tolerance * max(most, largest) < math.inf:
            return found
        weighs = False
        with suppress(Exception):  # the user's code, which may not take single samples
            weighs = asked.of(every).weight is None and _weighs(asked, every)
    takes = () if weighs else _takes(asked, every, parts)
    return found._replace(same=False, weighs=weighs, takes=takes)


def _takes(asked: _Asked, every: range, parts: Sequence[range]) -> tuple[str, ...]:
    """Outputs whose part in the loss isn't the sum of what it is in parts: by their gradients."""
    names = [asked.names[k] for k in asked.by_sample if _is_float(asked.leaves[k])]
    given = asked.follow()
    with torch.enable_grad():
        together, mean = asked.mean([every])[0], asked.mean(parts)[0]
        if not (together.requires_grad and mean.requires_grad):
            return ()
        whole = torch.autograd.grad(together, given, allow_unused=True)
        summed = torch.autograd.grad(mean, given, allow_unused=True)
    takes = []
    for name, a, b in zip(names, whole, summed, strict=True):
        gradients = [g for g in (a, b) if g is not None]
        off = (a - b if a is not None and b is not None else gradients[0]) if gradients else None
        most = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
        if off is not None and off.numel() and float(off.abs().max()) > asked.tolerance * most:
            takes.append(name)
    return tuple(takes) if len(takes) < len(names) else ()


def _weighs(asked: _Asked, samples: Sequence[int]) -> bool:
    """Whether it is a mean by weights: those that pairs of samples tell then hold for all."""

    def of(some: Sequence[int]) -> float:
        return float(asked.of(some).value)

    # From all parts: labels that don't count may be in later ones alone.
    alone = {k: of([k]) for k in samples[:: -(-len(samples) // _MOST_FITTED)]}
    finite = sum(map(math.isfinite, alone.values()))
    if 0 < finite < len(alone):
        # A sample in which nothing counts has no mean.
        return True
    if finite < _FEWEST_FITTED:
        return False
    first, *others = alone
    least = 10 * asked.tolerance * max(map(abs, alone.values()))
    weights = {first: 1.0}
    for k in others:
        if abs(alone[k] - alone[first]) <= least:
            continue
        pair = of([first, k])
        if not (pair - alone[first]) * (alone[k] - pair) > 0:
            return False
        weights[k] = (pair - alone[first]) / (alone[k] - pair)
    if len(weights) < _FEWEST_FITTED:
        return False
    together = of(list(weights))
    fitted = sum(w * alone[k] for k, w in weights.items()) / sum(weights.values())
    evenly = sum(alone[k] for k in weights) / len(weights)
    return abs(together - fitted) <= _FITTED * abs(together - evenly)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _exact(leaf: Any) -> Any:
    return leaf.double() if _is_float(leaf) else leaf


def output_names(result: Any) -> list[str]:
    """What to call each of `take_apart`'s leaves."""
    names: list[str] = []

    def walk(item: Any, name: str) -> None:
        if isinstance(item, Tensor):
            names.append(name if name.startswith("output ") else repr(name or "output"))
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                walk(inner, f"{name}.{key}".lstrip("."))
        elif not isinstance(item, (str, bytes, int, float, type(None))):
            for k, inner in enumerate(items_in(item)):
                walk(inner, f"{name}[{k}]" if name else f"output {k}")

    walk(result, "")
    return names
