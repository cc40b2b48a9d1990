"""Data that comes in batches of its own: a torch DataLoader, or an IterableDataset.

What is fixed before it is opened: how many samples there are, in which sequence, and a few of them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from ..errors import RunError, TargetError, TimeprestError
from ..tracing.call import Call
from .hooks import describe_error
from .parts import SEEDS, each_alone, has_only
from .prefetch import OwnRandomness, seed_all
from .task import Names, Split, dataset_size, fetch_call, read_batch

Given = Any
"""What a task's data(split) gives: a Dataset, an IterableDataset or a DataLoader."""


def comes_in_batches(given: Given) -> bool:
    """Whether it says itself how a batch is put together, or what is in it and which comes next;
    else we choose samples."""
    return isinstance(given, (DataLoader, IterableDataset)) or collates(given)


def collates(given: Given) -> bool:
    """Whether it is a map-style data set with a `collate_fn` of its own, which makes a mini-batch
    of a list of samples."""
    return not isinstance(given, DataLoader) and callable(getattr(given, "collate_fn", None))


def may_vary(given: Given) -> bool:
    """Whether its batches may have different shapes: not where torch's own `default_collate` stacks
    samples that are chosen one by one."""
    if isinstance(given, DataLoader):
        return given.batch_size is None or given.collate_fn is not default_collate
    return collates(given)


def batch_size_of(given: Given) -> int | None:
    """Samples in a batch, where the data say; None: they don't."""
    if not isinstance(given, DataLoader):
        return None
    size = given.batch_size
    if size is None:
        size = getattr(given.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def size_of(given: Given, split: Split, mini_batch: int) -> int | None:
    """Number of samples in one pass; None: nobody can know.

    Args:
        mini_batch: samples in a batch, where the data don't say.

    Raises TargetError for nothing at all.
    """
    if not comes_in_batches(given):
        return dataset_size(given, split)
    size = _size(given, mini_batch)
    if size is not None and size <= 0:
        raise TargetError(f"data({split!r}) is empty")
    return size


def check_batches(given: Given, split: Split, mini_batch: int) -> None:
    """Raise TargetError for training data in batches of another size than mini-batches have."""
    size = batch_size_of(given)
    if size is not None and size != mini_batch:
        raise TargetError(
            f"data({split!r}): its DataLoader makes batches of {size} samples, and the plan's "
            f"mini-batch has {mini_batch}: plan with --mini-batch {size}, or give the loader "
            f"batch_size={mini_batch}"
        )


def _size(given: Given, mini_batch: int) -> int | None:
    if not isinstance(given, DataLoader):
        return _length(given)
    each = batch_size_of(given) or mini_batch
    if is_stream(given):
        count = _length(given.dataset)
        if count is None:
            return None
        if given.batch_size is None:
            return count * each
        return count - count % each if given.drop_last else count
    plain = given.batch_size is not None or type(given.batch_sampler) is BatchSampler
    sampler = getattr(given.batch_sampler, "sampler", given.sampler)
    if plain and (count := _length(sampler)) is not None:
        drops = given.drop_last or getattr(given.batch_sampler, "drop_last", False)
        return count - count % each if drops else count
    batches = _length(given.batch_sampler if given.batch_sampler is not None else given.sampler)
    return None if batches is None else batches * each


def _length(value: Any) -> int | None:
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


# A few samples, without opening it ---------------------------------------------------------------


def some_samples(given: Given, split: Split, count: int, names: Names = sorted) -> tuple[Call, Any]:
    """Inputs and target of so many samples, the first ones again where there are fewer.

    Of batches that are put together elsewhere, rows of the first one.

    Raises TargetError as `read_batch` does, and for a stream that gives nothing.
    """
    if not comes_in_batches(given):
        size = dataset_size(given, split)
        return fetch_call(given, [k % size for k in range(count)], names)
    if isinstance(given, DataLoader) and not is_stream(given) and not may_vary(given):
        size = dataset_size(given.dataset, split)
        chosen = [given.dataset[k % size] for k in range(count)]
        return read_batch(given.collate_fn(chosen), names)
    return rows_among(*read_batch(first_batch(given, split, count), names), split, count)


def rows_among(call: Call, target: Any, split: Split, count: int) -> tuple[Call, Any]:
    """So many samples of a batch, the first ones again where it has fewer. Raises TargetError."""
    rows = rows_of(call.tensors, split)
    taken = torch.arange(count) % rows
    return (
        call.with_tensors(pick(call.tensors, taken, rows)),
        pick(target, taken, rows),
    )


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
            more: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
            if loader.batch_sampler is None or is_stream(loader):
                more = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
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
    return DataLoader(_FirstBatches([first_batch(given, split, count)]), batch_size=None)


class _FirstBatches(Dataset[Any]):
    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, k: int) -> Any:
        return self.batches[k]


# Rows of a batch ----------------------------------------------------------------------------------


def rows_of(inputs: Sequence[Tensor], split: Split) -> int:
    """Samples in a batch, whose inputs these are. Raises TargetError where they don't agree."""
    found = {tensor.shape[0] if tensor.dim() else 0 for tensor in inputs}
    if len(found) != 1 or not min(found):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
        raise TargetError(
            f"data({split!r}): the inputs of a batch have the shapes {shapes}: each must have a "
            "row for every sample, so that it can be cut into micro-batches"
        )
    return found.pop()


def pick(value: Any, taken: slice | Tensor, rows: int) -> Any:
    """These samples' part of a nest of tensors and lists.

    What has no row for each sample (a number, a text) is the same for all of them.

    Raises TargetError for a tensor whose rows aren't samples.
    """
    if isinstance(value, Tensor):
        if not value.dim():
            return value
        if value.shape[0] != rows:
            raise TargetError(
                f"a batch of {rows} samples holds a tensor of shape {list(value.shape)}, without a "
                "row for every sample: it can't be cut into micro-batches"
            )
        if isinstance(taken, slice) and range(*taken.indices(rows)) == range(rows):
            return value
        # Of its own memory: what a micro-batch keeps isn't all of its mini-batch.
        return value[taken].clone() if isinstance(taken, slice) else value[taken]
    if isinstance(value, Mapping):
        inside = {key: pick(item, taken, rows) for key, item in value.items()}
        return inside if type(value) is dict else _of_kind(value, inside)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(pick(item, taken, rows) for item in value))
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(isinstance(item, (Tensor, Mapping)) for item in value):
            chosen = range(rows)[taken] if isinstance(taken, slice) else taken.tolist()
            return type(value)(value[k] for k in chosen)
        return type(value)(pick(item, taken, rows) for item in value)
    return value


def _of_kind(value: Any, inside: dict[Any, Any]) -> Any:
    try:
        return type(value)(inside)
    except Exception:  # a class of some library that is made otherwise
        return inside


# Sequence and errors ------------------------------------------------------------------------------


def sequence_of(loader: DataLoader[Any], epoch: int, seed: int) -> list[Any]:
    """What a loader over a map-style data set takes in an epoch: indices, batch by batch.

    Samplers that draw, torch's or the user's own, draw the same for the same seed.

    Raises TargetError for one without end.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if isinstance(sampler, Iterable) and _length(sampler) is None and batch_size_of(loader) is None:
        raise TargetError(
            f"data(split): the DataLoader's {type(sampler).__name__} has no length; give it a "
            "__len__: batches in an epoch"
        )
    prepare_epoch(loader, epoch, seed)
    with OwnRandomness(seed)():
        count = _length(sampler)
        found = itertools.islice(iter(sampler), count)
        return [list(each) if isinstance(each, (list, tuple)) else each for each in found]


def prepare_epoch(loader: DataLoader[Any], epoch: int, seed: int) -> None:
    """Tell whatever wants to know which epoch begins, and seed the loader's own generators."""
    batch_sampler = loader.batch_sampler
    parts = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None), loader.dataset]
    for part in {id(part): part for part in parts if part is not None}.values():
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)
        generator = None if part is loader.dataset else getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
    loader.generator = torch.Generator().manual_seed(seed)


class Fetched(Dataset[Any]):
    """A map-style data set that gives the batch of a job: as the loader would, but with random
    numbers that depend on the batch alone, whoever makes it; on the sample alone, where the data
    set can be read in parts.

    Attributes:
        alone: samples have random numbers of their own. To be had where nobody else draws
            meanwhile.
        drew: some sample did that had its own.
    """

    def __init__(self, loader: DataLoader[Any], read: tuple[Any, Any] | None = None) -> None:
        """Args: `read`: a data set and a `collate_fn` that make parts of the batches."""
        self.dataset: Any = loader.dataset if read is None else read[0]
        self.collate: Callable[[Any], Any] = loader.collate_fn if read is None else read[1]
        self.together = loader.batch_sampler is not None
        self.alone = has_only(loader.dataset)
        self.drew = False

    def __getitem__(self, job: tuple[int, Any]) -> Any:
        """Args: `job`: a seed and what the sampler gave."""
        seed, chosen = job
        if get_worker_info() is not None:
            # A process of its own, with nobody else's random numbers.
            seed_all(seed)
        if not self.together:
            return self.collate(self.dataset[chosen])
        if self.alone:
            seeds = [(seed + k) & SEEDS for k in range(len(chosen))]
            samples, drew = each_alone(self.dataset.__getitem__, chosen, seeds)
            self.drew = self.drew or drew
            return self.collate(samples)
        if getattr(self.dataset, "__getitems__", None):
            return self.collate(self.dataset.__getitems__(chosen))
        return self.collate([self.dataset[k] for k in chosen])


def opened(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over a loader, whose workers end with this process."""
    own = loader.worker_init_fn
    if loader.num_workers:
        loader.worker_init_fn = _WorkerInit(loader)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = own


class _WorkerInit:
    """Starts a loader's worker: the user's own data set is what the user's code finds there, and
    it doesn't outlive the process that opened the loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.own = loader.worker_init_fn
        self.opener = os.getpid()
        context = loader.multiprocessing_context or multiprocessing
        self.children = context.get_start_method() != "forkserver"
        """Whether workers are the opener's children."""

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if isinstance(info.dataset, Fetched):
            # Torch lets nobody change it in passing.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.own is not None:
            self.own(worker)
        # From here on torch ends a worker whose parent changes. Where it changed before, torch
        # doesn't notice, and the worker would wait for ever.
        if self.children and self.opener not in (os.getppid(), os.getpid()):
            os._exit(1)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_IN_WORKER = "in DataLoader worker process"
_DIED = "DataLoader worker (pid"


def died(error: BaseException) -> bool:
    """Whether a worker of a DataLoader is gone, by no mistake of its data set."""
    return isinstance(error, RuntimeError) and _DIED in str(error)


def why(error: BaseException) -> str:
    """One line: the place in the user's code, and what went wrong there, in this process or in a
    loader's worker."""
    text = str(error)
    if _IN_WORKER not in text:
        return describe_error(error)
    # The traceback's lines are indented, and the error's text behind them, of however many, isn't.
    lines = text.splitlines()
    indented = [k for k, line in enumerate(lines) if line.startswith("  ")]
    reason = " ".join(" ".join(lines[indented[-1] + 1 if indented else 0 :]).split())
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [(path, line) for path, line in _FRAME.findall(text) if not path.startswith(ours)]
    return f"{frames[-1][0]}:{frames[-1][1]}: {reason}" if frames else reason


def as_ours(error: BaseException, split: Split) -> TimeprestError:
    """What loading raised as an error of ours: the user's mistake, but for a worker that died."""
    if isinstance(error, TimeprestError):
        return error
    if died(error):
        line = " ".join(str(error).split())
        return RunError(f"data({split!r}): a worker of its DataLoader is gone: {line}")
    return TargetError(f"data({split!r}) failed: {why(error)}")
