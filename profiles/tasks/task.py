"""The Task protocol: what a user writes once so that a model can be profiled and trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from ..errors import TargetError, TraceError
from ..tracing.call import Call
from ..tracing.pieces import take_apart

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
      them, of one stage's ``(name, parameter)`` pairs under the model's own names. Groups that
      are empty on a stage are left out there.
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
        method ``only(parts)`` is read in parts (docs/tasks.md)."""

    def loss(self, output: Any, target: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """The loss of a micro-batch: a mean over its samples, so that uneven ones weigh right.

        Or ``(sum, weight)``: the sum over what counts in it (tokens, say), and how much that is;
        a mini-batch's loss is then the sum over its micro-batches by their weight."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer over one stage's trainable parameters, all of them and no others, or over
        groups of them where there is a ``parameter_groups``, or weight decay is for matrices
        alone. Called once for each stage."""


class Loss(NamedTuple):
    """What a task's loss gave for a micro-batch.

    Attributes:
        value: a mean over its samples, or the sum over what counts in it.
        weight: how much counts; None: `value` is a mean.
    """

    value: Tensor
    weight: float | None = None

    @property
    def mean(self) -> Tensor:
        """Of this micro-batch alone."""
        return self.value if self.weight is None else self.value / self.weight


def read_loss(found: Any) -> Loss:
    """What a task's loss returned. Raises TargetError when it is neither a mean nor a pair."""
    if not isinstance(found, tuple):
        return Loss(_one_number(found))
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
    return Loss(_one_number(found[0]), weight)


def root_of(found: Any) -> Any:
    """What a backward begins with, of what a task's loss returned; not looked at."""
    return found[0] if isinstance(found, tuple) and len(found) == 2 else found


def read_figure(name: str, found: Any, samples: int) -> tuple[float, float]:
    """Sum and weight of one of a task's figures for so many test samples. Raises TargetError."""
    if name == "loss":
        loss = read_loss(found)
        pair: tuple[Any, Any] = loss.value, loss.weight
    else:
        pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    value, weight = _as_number(pair[0]), _as_number(pair[1])
    if value is None or (weight is None and pair[1] is not None):
        raise TargetError(
            f"the task's metric {name!r} must be a number, a mean over the samples, or (sum, "
            "weight)"
        )
    if weight is not None and not 0 <= weight < math.inf:
        raise TargetError(
            f"the task's metric {name!r}: its weight is {weight:g}; it must be 0 or more"
        )
    return (value * samples, samples) if weight is None else (value, weight)


def _one_number(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise TargetError(
            "the task's loss must give one number: a mean over the samples; or (sum, weight)"
        )
    return found.reshape(())


def _as_number(found: Any) -> float | None:
    if isinstance(found, Tensor):
        found = found.item() if found.numel() == 1 else None
    return found if isinstance(found, (int, float)) else None


Names = Sequence[str | None] | Callable[[Collection[str]], Sequence[str | None]]
"""Names of a model's arguments; or what makes them of the keys of a batch."""


def fetch(
    dataset: Dataset[Any], indices: Sequence[int] | Tensor, names: Names = sorted
) -> tuple[tuple[Tensor, ...], Any]:
    """Collate the samples at `indices`.

    Args:
        names: as for `read_batch`.

    Returns:
        The model's inputs, each ``[len(indices), ...]``, and the target, collated alike.

    Raises:
        TargetError: the samples aren't ``(inputs, target)`` with tensors as inputs, or can't be
            collated.
    """
    call, target = fetch_call(dataset, indices, names)
    return call.tensors, target


def fetch_call(
    dataset: Dataset[Any], indices: Sequence[int] | Tensor, names: Names = sorted
) -> tuple[Call, Any]:
    """Like `fetch`, with the arguments that the inputs are for."""
    if isinstance(dataset, TensorDataset):
        # With a tensor as index, a third of the time that a list takes.
        batch: Any = dataset[indices if isinstance(indices, Tensor) else torch.tensor(indices)]
    else:
        if isinstance(indices, Tensor):
            indices = indices.tolist()
        batch = collated([dataset[k] for k in indices])
    return read_batch(batch, names)


def collated(samples: list[Any]) -> Any:
    """Samples put together as torch does it. Raises TargetError where they can't be."""
    try:
        return default_collate(samples)
    except Exception as error:  # of samples that differ, or are of a kind torch can't collate
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TargetError(
            f"data(split): its samples can't be put into a batch: {reason}"
        ) from error


def read_batch(batch: Any, names: Names = sorted) -> tuple[Call, Any]:
    """Inputs and target of samples that are put together already.

    Args:
        batch: a pair ``(inputs, target)``; or a dict alone, which is the target as a whole, and
            whose entries that the model has arguments for are its inputs.
        names: of the model's arguments, for such a dict; all of its keys by default.

    Raises TargetError for anything else.
    """
    inputs: Any
    if isinstance(batch, Mapping):
        taken = names(batch) if callable(names) else names
        missing = [name for name in taken if name not in batch]
        if missing:
            raise TargetError(
                f"data(split): a batch has no {missing[0]!r}, which the first ones had; it has "
                f"{', '.join(map(repr, batch))}"
            )
        inputs, target = {name: batch[name] for name in taken}, batch
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, target = batch
    else:
        raise TargetError(
            "data(split): every sample must be a pair (inputs, target), with several inputs a "
            "tuple or dict of tensors as the first of the pair; or a dict with all of it"
        )
    by_name: tuple[Any, ...]
    if isinstance(inputs, Mapping):
        # By name, since samples may list them in any order.
        by_name = tuple(sorted(inputs))
        inputs = tuple(inputs[name] for name in by_name)
    else:
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        by_name = (None,) * len(inputs)
    if all(isinstance(tensor, Tensor) for tensor in inputs):
        return Call(inputs, by_name), target
    try:
        tensors, nests = take_apart(inputs)
    except TraceError:
        tensors = ()
    if not tensors or not all(map(_of_tensors, inputs)):
        raise TargetError(
            "data(split): the inputs of a sample must be tensors, or tuples, lists and dicts of "
            "tensors"
        )
    return Call(tensors, by_name, nests), target


def _of_tensors(value: Any) -> bool:
    """Whether a nest of containers holds nothing but tensors; None may stand for what isn't
    given."""
    if isinstance(value, Mapping):
        return all(map(_of_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_of_tensors, value))
    return value is None or isinstance(value, Tensor)


def dataset_size(dataset: Dataset[Any], split: Split) -> int:
    """Number of samples. Raises TargetError for a dataset without a length, or an empty one."""
    if dataset is None:
        raise TargetError(f"data({split!r}) gave None; return a map-style Dataset")
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise TargetError(f"data({split!r}) has no length; give a map-style Dataset") from None
    if not size:
        raise TargetError(f"data({split!r}) is empty")
    return size
