"""The Task protocol: what a user writes once so that a model can be profiled and trained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..errors import TargetError

Split = Literal["train", "test"]


@runtime_checkable
class Task(Protocol):
    """A model, its data, its loss and its optimizer.

    A task may also have

    - ``metrics(output, target) -> dict[str, Tensor]``: figures beside the loss for evaluation
      (such as ``{"accuracy": ...}``), each a mean over the samples given, or ``(sum, weight)``
      as of a loss.
    - ``figures(means) -> dict[str, float]``: figures made of the means over the whole test set,
      the loss's among them (such as ``{"perplexity": math.exp(means["loss"])}``).
    - ``parameter_groups(named_parameters) -> list[dict]``: groups as torch's optimizers take
      them, of the ``(name, parameter)`` pairs of the whole model under its own names. A stage
      takes its own of each: groups keep their places, and may be empty there.
    - ``scheduler(optimizer)``: a new torch.optim.lr_scheduler of one stage's optimizer. Of the
      arguments ``steps`` and ``steps_per_epoch``, it is given those it has: updates in the run,
      and in a whole epoch.
    - ``scheduler_step``: "update" or "epoch", when that is stepped; by default after each update.
    """

    def model(self) -> nn.Module:
        """A new model with its initial weights. The seed is set before the call, and every
        worker calls it: the same seed must give the same weights."""

    def data(self, split: Split) -> Dataset[Any] | DataLoader[Any]:
        """The samples, each ``(inputs, target)``; inputs are a tensor, a tuple in the order of the
        model's arguments, or a dict by the arguments' names, each argument a tensor or a nest of
        tuples and dicts of tensors. Or each a dict, which is the target as a whole and whose
        entries with the names of the model's arguments are the inputs. With a length and
        indexable; or a DataLoader or IterableDataset, whose batches are such. A data set with a
        method ``only(parts)`` is read in parts (docs/data.md)."""

    def loss(self, output: Any, target: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """The loss of a micro-batch: a mean over its samples, so that uneven ones weigh right.

        Or ``(sum, weight)``: the sum over what counts in it (tokens, say), and how much that is;
        a mini-batch's loss is then the sum over its micro-batches by their weight."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer over one stage's trainable parameters, all of them and no others, or over
        groups of them where there is a ``parameter_groups``, or weight decay is for matrices
        alone. Called once for each stage."""


# What its loss and figures give -------------------------------------------------------------------


class Loss(NamedTuple):
    """What a task's loss gave for a micro-batch: a mean over its samples, or the sum over what
    counts in it, and then how much counts (`weight`)."""

    value: Tensor
    weight: float | None = None

    @property
    def mean(self) -> Tensor:
        """Of this micro-batch alone."""
        return self.value if self.weight is None else self.value / self.weight


def read_loss(found: Any) -> Loss:
    """What a task's loss returned. Raises TargetError when it is neither a mean nor a pair, or has
    a weight with a gradient."""
    value = root_of(found)
    if not isinstance(found, tuple):
        return Loss(_one_number(value))
    if len(found) != 2:
        raise TargetError(
            f"the task's loss gave a tuple of {len(found)}; it must give a mean over the samples, "
            "or (sum, weight)"
        )
    weight = _as_number(found[1])
    if weight is None or not 0 <= weight < math.inf:
        shown = "its weight" if weight is None else f"its weight is {weight:g}, and"
        raise TargetError(
            f"the task's loss gave (sum, weight): {shown} must be one number, 0 or more: how much "
            "counts in the sum"
        )
    return Loss(_one_number(value), weight)


def root_of(found: Any) -> Any:
    """What a backward begins with, of what a task's loss returned; not looked at.

    Raises TargetError for a weight with a gradient: a sum's gradients are divided by a number.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        return found
    if isinstance(found[1], Tensor) and found[1].requires_grad:
        raise TargetError(
            "the task's loss gave (sum, weight) with a weight that has a gradient (it is computed "
            "from the model's result or parameters), which would be left out: return a mean as one "
            "number; or, should the weight count as a constant, weight.detach()"
        )
    return found[0]


def read_figure(name: str, found: Any, samples: int) -> tuple[float, float]:
    """Sum and weight of one of a task's figures for so many test samples. Raises TargetError."""
    pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    value, weight = _as_number(pair[0]), _as_number(pair[1])
    what = f"the task's {name if name == 'loss' else f'metric {name!r}'}"
    if value is None or (weight is None and pair[1] is not None):
        raise TargetError(f"{what} must be one number: a mean over the samples, or (sum, weight)")
    if weight is not None and not 0 <= weight < math.inf:
        raise TargetError(f"{what}: its weight is {weight:g}; it must be 0 or more")
    return (value * samples, samples) if weight is None else (value, weight)


def _one_number(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise TargetError(
            "the task's loss must give one number as a tensor: a mean over the samples; or (sum, "
            "weight)"
        )
    return found.reshape(()) if found.dim() else found


def _as_number(found: Any) -> float | None:
    if isinstance(found, Tensor):
        found = found.item() if found.numel() == 1 else None
    return float(found) if isinstance(found, Real) else None
