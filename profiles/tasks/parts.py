"""Parts of samples: what a stage needs of them, and data sets that read no more than that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from ..errors import TargetError
from ..tracing.random_states import same_states, seed_all, set_states, states
from .hooks import call_hook
from .samples import Names, collated, fetch, read_batch

INPUTS, TARGET = "inputs", "target"

Parts = frozenset[str]
"""INPUTS, TARGET or both."""

ALL: Parts = frozenset({INPUTS, TARGET})

SEEDS = 2**63 - 1
"""The largest seed."""


def only(given: Any, parts: Parts, names: Names) -> Any:
    """A map-style data set with the same samples in the same sequence, of which it reads these
    parts alone; the other part of a sample is whatever it likes. None where it can't be had: what
    a sample is made of is known to its ``__getitem__`` alone.

    It is had of tensors in memory, of whatever has a method ``only(parts)``, of `datasets`' own
    sets with columns, and of torch's Subset and ConcatDataset of such. `names`: of the model's
    arguments, or what makes them of the names of columns.

    Raises TargetError where the user's `only` fails, or gives another number of samples.
    """
    if parts == ALL:
        return None
    if type(given) is TensorDataset and len(given.tensors) == 2:
        # As many rows of nothing: taking some of them costs nothing.
        nothing = torch.empty((len(given), 0))
        x, y = given.tensors
        return TensorDataset(x if INPUTS in parts else nothing, y if TARGET in parts else nothing)
    if type(given) is Subset:
        inside = only(given.dataset, parts, names)
        return None if inside is None else Subset(inside, given.indices)
    if type(given) is ConcatDataset:
        each = [only(one, parts, names) for one in given.datasets]
        return None if any(one is None for one in each) else ConcatDataset(each)
    if has_only(given):
        found = call_hook(f"only({set(parts)})", given.only, parts)
        if not _as_long(found, given):
            raise TargetError(
                f"data(split): {type(given).__name__}.only({set(parts)}) must give a data set with "
                f"the same {len(given)} samples, of which it needn't read the rest"
            )
        return found
    return _columns(given, parts, names)


def has_only(given: Any) -> bool:
    """Whether the user says how parts are read, of some samples at least. Then random numbers are
    drawn for each sample anew (`each_alone`), whichever of its parts are read."""
    # What a class made of these does with samples, it alone knows.
    if type(given) is Subset:
        return has_only(given.dataset)
    if type(given) is ConcatDataset:
        return any(map(has_only, given.datasets))
    return callable(getattr(given, "only", None))


def _as_long(found: Any, given: Any) -> bool:
    try:
        return hasattr(found, "__getitem__") and len(found) == len(given)
    except TypeError:
        return False


def _columns(given: Any, parts: Parts, names: Names) -> Any:
    """Columns of a set of `datasets` that are inputs; all are the target. One with a transform is
    left alone: what that needs, it alone knows."""
    select, columns = getattr(given, "select_columns", None), getattr(given, "column_names", None)
    form = getattr(given, "format", None)
    if not callable(select) or TARGET in parts or not isinstance(form, Mapping):
        return None
    if transforms(given) or not isinstance(columns, list):
        return None
    wanted = list(names(columns) if callable(names) else names)
    return select(wanted) if wanted and set(wanted) <= set(columns) else None


def transforms(rows: Any) -> bool:
    """Whether a set of the library `datasets` makes its rows by a transform of the user's own,
    which may take any column and give others."""
    form = getattr(rows, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"


def reader(
    loader: DataLoader[Any], parts: Parts, names: Names
) -> tuple[Any, Callable[[Any], Any]] | None:
    """A data set and a `collate_fn` that make these parts of a loader's batches; None: they can't
    be had, as the loader's own `collate_fn` wants whole samples. Raises TargetError as `only`, and
    where the data set's own `collate_fn` isn't had of its parts."""
    given, collate = loader.dataset, loader.collate_fn
    if parts == ALL or loader.batch_sampler is None:
        return None
    own = getattr(collate, "__self__", None) is given
    if not own and collate is not default_collate:
        return None
    found = only(given, parts, names)
    if found is None:
        return None
    if not own:
        return found, partial(_put_together, parts=parts, names=names)
    together = getattr(found, collate.__name__, None)
    if not callable(together):
        raise TargetError(
            f"data(split): {type(given).__name__}.only({set(parts)}) must give a data set with a "
            f"{collate.__name__}, as it has itself"
        )
    return found, together


def _put_together(samples: Sequence[Any], parts: Parts, names: Names) -> Any:
    """Parts of samples, as torch does it with whole ones."""
    return default_collate([part_of_sample(each, parts, names) for each in samples])


def part_of_sample(sample: Any, parts: Parts, names: Names) -> Any:
    """What is to be put together: a pair has a 0 in place of the part that isn't wanted, a dict the
    names of inputs alone, where they are."""
    if parts == ALL:
        return sample
    if isinstance(sample, Mapping):
        if TARGET in parts:
            return sample
        wanted = names(sample) if callable(names) else names
        return {name: sample[name] for name in wanted if name in sample}
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        return (sample[0], 0) if INPUTS in parts else (0, sample[1])
    return sample


def fetch_parts(
    dataset: Any,
    indices: Sequence[int] | Tensor,
    names: Names,
    parts: Parts,
    seeds: Sequence[int] | None = None,
) -> tuple[tuple[Tensor, ...], Any, bool]:
    """As `fetch`, of what `only` gave for these parts: inputs, target, and whether anything was
    drawn, where there are seeds of each sample's random numbers. What isn't among the parts is ()
    or None."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and parts != ALL:
        # Of what nobody wants none is taken.
        inputs, target = dataset.tensors
        wanted = TARGET in parts
        return () if wanted else (inputs[indices],), target[indices] if wanted else None, False
    if isinstance(dataset, TensorDataset):
        call, target = fetch(dataset, indices, names)
        return call.tensors if INPUTS in parts else (), target if TARGET in parts else None, False
    indices, drew = [int(k) for k in indices], False
    if seeds is None:
        samples = [dataset[k] for k in indices]
    else:
        samples, drew = each_alone(dataset.__getitem__, indices, seeds)
    batch = collated([part_of_sample(each, parts, names) for each in samples])
    return (*read_parts(batch, names, parts), drew)


def read_parts(batch: Any, names: Names, parts: Parts) -> tuple[tuple[Tensor, ...], Any]:
    """Inputs and target of samples that are put together; () or None for what isn't among the
    parts. Raises TargetError as `read_batch`."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if INPUTS in parts:
        if pair and TARGET not in parts:
            batch = (batch[0], None)
        call, target = read_batch(batch, names)
        return call.tensors, target if TARGET in parts else None
    if not pair and not isinstance(batch, Mapping):
        read_batch(batch, names)
    return (), batch[1] if pair else batch


# Random numbers of each sample ------------------------------------------------------------------


def each_alone(
    take: Callable[[int], Any], indices: Sequence[int], seeds: Sequence[int]
) -> tuple[list[Any], bool]:
    """Samples, each with random numbers of its own seed: they don't depend on what was read of the
    samples before it; and whether any drew. Torch's, Python's and NumPy's own generators are then
    as they were."""
    before, drew, found = states(), False, []
    try:
        for index, seed in zip(indices, seeds, strict=True):
            seed_all(seed)
            fresh = states()
            found.append(take(index))
            drew = drew or not same_states(fresh, states())
    finally:
        set_states(before)
    return found, drew
