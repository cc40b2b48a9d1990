"""Samples and batches of whatever a task's data(split) gives: a Dataset, an IterableDataset or a
DataLoader. How many there are, how they are read, a few of them, and rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..errors import TargetError, TraceError
from ..tracing.call import Call
from ..tracing.pieces import is_container, items_in, map_items, take_apart
from .prefetch import OwnRandomness
from .task import Split

Given = Any
"""What a task's data(split) gives: a Dataset, an IterableDataset or a DataLoader."""
Names = Sequence[str | None] | Callable[[Collection[str]], Sequence[str | None]]
"""Names of a model's arguments; or what makes them of the keys of a batch."""


# What they are ------------------------------------------------------------------------------------


def comes_in_batches(given: Given) -> bool:
    """Whether it says itself how a batch is put together, or what is in it and which comes next;
    else we choose samples."""
    return isinstance(given, (DataLoader, IterableDataset)) or collates(given)


def collates(given: Given) -> bool:
    """Whether it is a map-style data set with a `collate_fn` of its own, which makes a mini-batch
    of a list of samples."""
    return not isinstance(given, DataLoader) and callable(getattr(given, "collate_fn", None))


def alike(given: Given) -> bool:
    """Whether samples are dealt into its batches one after another, so that only the last may be
    smaller: not where a batch sampler is the user's own, whatever size that says."""
    if not isinstance(given, DataLoader):
        return collates(given)
    return given.batch_size is not None or type(given.batch_sampler) is BatchSampler


def may_vary(given: Given) -> bool:
    """Whether its batches may have different shapes: not where torch's own `default_collate` stacks
    samples that are chosen one by one."""
    if isinstance(given, DataLoader):
        return given.batch_size is None or given.collate_fn is not default_collate
    return collates(given)


def has_one_sequence(given: Given) -> bool:
    """Whether its samples come in the same sequence in each epoch: a DataLoader's without
    shuffle."""
    return isinstance(given, DataLoader) and type(_sampler(given)) is SequentialSampler


def batch_size_of(given: Given) -> int | None:
    """Samples in a batch, where the data say; None: they don't."""
    if not isinstance(given, DataLoader):
        return None
    size = given.batch_size
    if size is None:
        size = getattr(given.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def size_of(given: Given, split: Split, mini_batch: int) -> int | None:
    """Number of samples in one pass, of batches of `mini_batch` where the data don't say; None:
    nobody can know. Raises TargetError for nothing at all."""
    if not comes_in_batches(given):
        return dataset_size(given, split)
    size = _size(given, mini_batch)
    if size is not None and size <= 0:
        raise TargetError(f"data({split!r}) is empty")
    return size


def check_whole(given: Given, split: Split) -> None:
    """Raise TargetError for tensors in place of a data set, whose items would be taken for samples,
    and for data of which a sampler gives each process another part."""
    if isinstance(given, (tuple, list)) and given and isinstance(given[0], (Tensor, np.ndarray)):
        raise TargetError(
            f"data({split!r}) gave a {type(given).__name__} of {type(given[0]).__name__}s; "
            "wrap tensors in a data set: torch.utils.data.TensorDataset(inputs, target)"
        )
    if not isinstance(given, DataLoader):
        return
    inside = given.batch_sampler
    for sampler in (given.sampler, inside, getattr(inside, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise TargetError(
                f"data({split!r}): a DistributedSampler gives one of {sampler.num_replicas} parts "
                "of the samples, and here all workers read the same mini-batches, which replicas "
                "share: leave it out (shuffle=True shuffles)"
            )


def check_batches(given: Given, split: Split, mini_batch: int) -> None:
    """Raise TargetError for training data in batches of another size than mini-batches have."""
    check_whole(given, split)
    size = batch_size_of(given)
    if size is not None and size != mini_batch:
        raise TargetError(
            f"data({split!r}): its DataLoader makes batches of {size} samples, and the plan's "
            f"mini-batch has {mini_batch}: plan with --mini-batch {size}, or give the loader "
            f"batch_size={mini_batch}"
        )


def _sampler(loader: DataLoader[Any]) -> Any:
    """What chooses samples one by one; it may be in a batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _size(given: Given, mini_batch: int) -> int | None:
    if not isinstance(given, DataLoader):
        return length_of(given)
    each = batch_size_of(given) or mini_batch
    if is_stream(given):
        count = length_of(given.dataset)
        if count is None:
            return None
        if given.batch_size is None:
            return count * each
        return count - count % each if given.drop_last else count
    if alike(given) and (count := length_of(_sampler(given))) is not None:
        drops = given.drop_last or getattr(given.batch_sampler, "drop_last", False)
        return count - count % each if drops else count
    chooses = given.batch_sampler if given.batch_sampler is not None else given.sampler
    batches = length_of(chooses)
    if batches is None:
        return None
    with suppress(Exception), OwnRandomness(0)():  # the user's sampler, which a run is to tell of
        chosen = islice(_unused(given, chooses), batches)
        return sum(len(k) if isinstance(k, (list, tuple)) else each for k in chosen)
    return batches * each


def _unused(loader: DataLoader[Any], sampler: Any) -> Any:
    """A copy to look at: what a sampler draws by, and remembers, is as it was when a run begins.
    The sampler itself where it can't be copied."""
    try:
        return deepcopy(sampler, {id(loader.dataset): loader.dataset})
    except Exception:  # the user's
        return sampler


def length_of(value: Any) -> int | None:
    """Its length; None: it doesn't know it."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def is_stream(given: Given) -> bool:
    """Whether batches can only be had one after another, from the first on."""
    if not isinstance(given, DataLoader):
        return isinstance(given, IterableDataset)
    return isinstance(given.dataset, IterableDataset) or _own_way(given)


def _own_way(loader: DataLoader[Any]) -> bool:
    """Whether it is of a class that iterates otherwise than torch's."""
    return type(loader).__iter__ is not DataLoader.__iter__


def as_loader(given: Given, mini_batch: int, split: Split = "train") -> DataLoader[Any]:
    """A DataLoader as it is; a stream of samples, or a data set that collates them itself, in one
    that makes mini-batches of them, shuffled for training where they can be."""
    if isinstance(given, DataLoader):
        return given
    if collates(given) and not isinstance(given, IterableDataset):
        shuffled = split == "train"
        return DataLoader(given, mini_batch, shuffle=shuffled, collate_fn=given.collate_fn)
    return DataLoader(given, mini_batch, collate_fn=getattr(given, "collate_fn", None))


def dataset_size(dataset: Dataset[Any], split: Split) -> int:
    """Number of samples. Raises TargetError for a dataset without a length, or an empty one."""
    if dataset is None:
        raise TargetError(f"data({split!r}) gave None; return a map-style Dataset")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(map(repr, islice(dataset, 4)))
        raise TargetError(f"data({split!r}) gave a mapping of {keys}; return that split's Dataset")
    if isinstance(dataset, Iterator):
        raise TargetError(
            f"data({split!r}) gave an iterator, which is over after one pass; return the "
            "DataLoader that made it, or an IterableDataset"
        )
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise TargetError(f"data({split!r}) has no length; give a map-style Dataset") from None
    if not size:
        raise TargetError(f"data({split!r}) is empty")
    return size


# Read ---------------------------------------------------------------------------------------------


def fetch(
    dataset: Dataset[Any], indices: Sequence[int] | Tensor, names: Names = sorted
) -> tuple[Call, Any]:
    """The samples at `indices`: the model's inputs, each ``[len(indices), ...]``, and the target,
    collated alike. `names`: as for `read_batch`.

    Raises TargetError: the samples aren't ``(inputs, target)`` with tensors as inputs, or can't be
    collated.
    """
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
    """Whether a nest holds nothing but tensors, and None for what isn't given."""
    if isinstance(value, Mapping):
        return all(map(_of_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_of_tensors, value))
    return value is None or isinstance(value, Tensor)


# A few samples, without opening it ---------------------------------------------------------------


def some_samples(given: Given, split: Split, count: int, names: Names = sorted) -> tuple[Call, Any]:
    """Inputs and target of so many samples, the first ones again where there are fewer; of batches
    that are put together elsewhere, rows of the first one. Raises TargetError as `read_batch` does,
    and for a stream that gives nothing."""
    if not comes_in_batches(given):
        size = dataset_size(given, split)
        return fetch(given, [k % size for k in range(count)], names)
    if isinstance(given, DataLoader) and not is_stream(given) and not may_vary(given):
        size = dataset_size(given.dataset, split)
        chosen = [given.dataset[k % size] for k in range(count)]
        return read_batch(given.collate_fn(chosen), names)
    return first_rows(*read_batch(first_batch(given, split, count), names), split, count)


def first_rows(call: Call, target: Any, split: Split, count: int) -> tuple[Call, Any]:
    """So many samples of a batch, the first ones again where it has fewer. Raises TargetError."""
    rows = rows_of(call.tensors, split)
    taken = torch.arange(count) % rows
    return call.with_tensors(pick(call.tensors, taken, rows)), pick(target, taken, rows)


def first_batch(given: Given, split: Split, mini_batch: int) -> Any:
    """The first batch, made in this process: where a sampler chooses samples one by one, of the
    first samples. Raises TargetError where there is none."""
    loader = as_loader(given, mini_batch, split)
    with OwnRandomness(0)():
        if _own_way(loader):
            found = next(iter(loader), None)
        elif not is_stream(loader) and loader.batch_size is not None:
            size = dataset_size(loader.dataset, split)
            found = loader.collate_fn([loader.dataset[k % size] for k in range(loader.batch_size)])
        else:
            more: dict[str, Any] = {"batch_sampler": _unused(loader, loader.batch_sampler)}
            if is_stream(loader):
                more = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            elif loader.batch_sampler is None:
                more = {"batch_size": None, "sampler": _unused(loader, loader.sampler)}
            alone = DataLoader(loader.dataset, collate_fn=loader.collate_fn, **more)
            found = next(iter(alone), None)
    if found is None:
        raise TargetError(f"data({split!r}) gives nothing: it ran dry before its first batch")
    return found


def few(given: Given, split: Split, count: int) -> Given:
    """The same data with so many samples at most; of a stream its first batch."""
    if not comes_in_batches(given):
        return Subset(given, range(min(count, dataset_size(given, split))))
    if collates(given) and not is_stream(given):
        given = as_loader(given, count, split)
    if not is_stream(given) and given.batch_size is not None:
        some = Subset(given.dataset, range(min(count, dataset_size(given.dataset, split))))
        return DataLoader(some, batch_size=given.batch_size, collate_fn=given.collate_fn)
    # A list will do as a data set.
    return DataLoader([first_batch(given, split, count)], batch_size=None)  # type: ignore[arg-type]


# Rows of a batch ----------------------------------------------------------------------------------


def rows_of(inputs: Sequence[Tensor], split: Split) -> int:
    """Samples in a batch, whose inputs these are. Raises TargetError where they don't agree."""
    found = {tensor.shape[0] if tensor.dim() else 0 for tensor in inputs}
    if len(found) != 1 or not min(found):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
        flat = any(tensor.dim() == 1 and tensor.dtype == torch.int64 for tensor in inputs)
        more = (
            " (of words of all samples in one row, and offsets where each begins, nobody can tell: "
            "give a row of words for each sample, padded to the longest)"
            if flat and len(inputs) > 1
            else ""
        )
        raise TargetError(
            f"data({split!r}): the inputs of a batch have the shapes {shapes}: each must have a "
            f"row for every sample, so that it can be cut into micro-batches{more}"
        )
    return found.pop()


def pick(value: Any, taken: slice | Tensor, rows: int) -> Any:
    """These samples' part of a nest of tensors, arrays and lists.

    A list with an entry for each sample, and no tensor in it, is cut as tensors are. What has
    nothing of each sample (a number, a text) is the same for all of them.

    Raises TargetError for a tensor whose rows aren't samples, and where nobody can tell what is
    which sample's.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return _some_rows(value, taken, rows)
    if _lists_samples(value, rows):
        chosen = range(rows)[taken] if isinstance(taken, slice) else taken.tolist()
        return type(value)(value[k] for k in chosen)
    if is_container(value):
        return map_items(lambda item: pick(item, taken, rows), value)
    inside = getattr(value, "__dict__", {}).values()
    if not isinstance(value, (str, bytes, type)) and (
        length_of(value) == rows or any(isinstance(item, Tensor) for item in inside)
    ):
        raise TargetError(
            f"a batch of {rows} samples holds a {type(value).__name__}, which can't be cut into "
            "micro-batches: give what is in it as tensors, in tuples, lists, dicts or dataclasses"
        )
    return value


def _some_rows(value: Any, taken: slice | Tensor, rows: int) -> Any:
    if not value.ndim:
        return value
    if value.shape[0] != rows:
        raise TargetError(
            f"a batch of {rows} samples holds a tensor of shape {list(value.shape)}, without a "
            "row for every sample: it can't be cut into micro-batches"
        )
    array = isinstance(value, np.ndarray)
    if not isinstance(taken, slice):
        return value[taken.numpy()] if array else value[taken]
    if range(*taken.indices(rows)) == range(rows):
        return value
    # Of its own memory: what a micro-batch keeps isn't all of its mini-batch.
    return value[taken].copy() if array else value[taken].clone()


def _lists_samples(value: Any, rows: int) -> bool:
    """Whether it is a list of samples, which hold whatever they like, and not a container of what
    all samples have a part of, as anything is that tensors are in.

    Raises TargetError where it may be either.
    """
    if not _is_list(value) or len(value) != rows:
        return False
    counts = {count for item in value for count in _counts_in(item)}
    tensors = any(of_tensor for of_tensor, _ in counts)
    alike = all(isinstance(item, Mapping) and set(item) == set(value[0]) for item in value)
    if rows > 1 and {count for _, count in counts} == {rows} and (alike or not tensors):
        raise TargetError(
            f"a batch of {rows} samples holds a {type(value).__name__} of {rows}, each with "
            f"{rows} of something: nobody can tell whether these are the samples; give tensors "
            "with a row for every sample, or a dict of such tensors and lists"
        )
    return not tensors


def _counts_in(value: Any) -> Iterator[tuple[bool, int]]:
    """Rows of tensors (True) and lengths of innermost lists (False) in a nest."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        yield True, value.shape[0]
    elif is_container(value):
        inside = [count for item in items_in(value) for count in _counts_in(item)]
        yield from inside or ([(False, len(value))] if _is_list(value) else ())


def _is_list(value: Any) -> bool:
    """Whether what is in it has no names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
