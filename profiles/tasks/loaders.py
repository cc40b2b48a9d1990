"""A DataLoader's epochs: in which sequence its sampler draws, its workers, and what they raise."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..errors import RunError, TargetError, TimeprestError, is_users, one_line
from ..tracing.random_states import seed_all
from .hooks import describe_error
from .parts import SEEDS, each_alone, has_only
from .prefetch import OwnRandomness
from .samples import length_of
from .task import Split

# Sequence -----------------------------------------------------------------------------------------

_ENDLESS = 1 << 20
"""Samples, and twice the data set, behind which a sampler without a length is taken for endless."""


def sequence_of(loader: DataLoader[Any], epoch: int, seed: int) -> list[Any]:
    """What a loader over a map-style data set takes in an epoch: indices, batch by batch.

    Samplers that draw, torch's or the user's own, draw the same for the same seed.

    Raises TargetError for one without end.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    count, most = length_of(sampler), _ENDLESS + 2 * (length_of(loader.dataset) or 0)
    found: list[Any] = []
    taken = 0
    prepare_epoch(loader, epoch, seed)
    with OwnRandomness(seed)():
        for each in itertools.islice(iter(sampler), count):
            found.append(list(each) if isinstance(each, (list, tuple)) else each)
            taken += len(found[-1]) if isinstance(found[-1], list) else 1
            if count is None and taken > most:
                raise TargetError(
                    f"data(split): the DataLoader's sampler has no length, and no end within "
                    f"{most} samples; give it a __len__: how many it gives in an epoch"
                )
    return found


def prepare_epoch(loader: DataLoader[Any], epoch: int, seed: int) -> None:
    """Tell whatever wants to know which epoch begins, and seed the loader's own generators."""
    batch_sampler = loader.batch_sampler
    parts = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None), loader.dataset]
    for part in {id(part): part for part in parts if part is not None}.values():
        set_epoch(part, epoch)
        generator = None if part is loader.dataset else getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
    loader.generator = torch.Generator().manual_seed(seed)


def set_epoch(part: Any, epoch: int) -> None:
    """Tell a sampler or a data set, if it wants to know, which epoch begins."""
    tell = getattr(part, "set_epoch", None)
    if callable(tell):
        tell(epoch)


# Workers ------------------------------------------------------------------------------------------


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


# Errors -------------------------------------------------------------------------------------------

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_IN_WORKER = "in DataLoader worker process"
_DIED = "DataLoader worker (pid"


def died(error: BaseException) -> bool:
    """Whether a worker of a DataLoader is gone, by no mistake of its data set: torch has seen that,
    or what the worker had sent can't be fetched from it any more."""
    if isinstance(error, RuntimeError) and _DIED in str(error):
        return True
    lost = isinstance(
        error, (EOFError, ConnectionError, FileNotFoundError)
    ) and _IN_WORKER not in str(error)
    frames = traceback.walk_tb(error.__traceback__) if lost else ()
    return any(frame.f_code.co_filename == reductions.__file__ for frame, _ in frames)


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
    frames = [(path, line) for path, line in _FRAME.findall(text) if is_users(path)]
    return f"{frames[-1][0]}:{frames[-1][1]}: {reason}" if frames else reason


def as_ours(error: BaseException, split: Split) -> TimeprestError:
    """What loading raised as an error of ours: the user's mistake, but for a worker that died."""
    if isinstance(error, TimeprestError):
        return error
    if died(error):
        return RunError(f"data({split!r}): a worker of its DataLoader is gone: {one_line(error)}")
    return TargetError(f"data({split!r}) failed: {why(error)}")
