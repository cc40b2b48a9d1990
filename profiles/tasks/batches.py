"""Whole batches of a loader or a stream, epoch by epoch, loaded ahead in the background."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import TargetError
from .loaders import Fetched, as_ours, opened, prepare_epoch, sequence_of, set_epoch
from .parts import ALL, INPUTS, Parts, read_parts, reader
from .prefetch import LOADING, Ahead, OwnRandomness
from .samples import Given, Names, as_loader, is_stream, length_of, pick, rows_of
from .task import Split

WAIT_S = 60.0
START_S = 120.0
"""Longest wait for an epoch's first batch: workers start, and buffers of shuffles fill."""
_KEPT = 2
"""Batches that are kept, for whoever looks at the first ones before they are trained on."""


@dataclass(frozen=True)
class Batch:
    """Samples that the data put together."""

    inputs: tuple[Tensor, ...]
    """Each of shape ``[rows, ...]``."""
    target: Any
    rows: int

    def part(self, real: Sequence[int], size: int) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs of these rows, filled up to `size` with copies of the first of them, and their
        target; None where there are no rows. Raises TargetError where something has no row for
        every sample."""
        if isinstance(real, range) and real and len(real) == size:
            taken: slice | Tensor = slice(real.start, real.stop, real.step)
            return pick(self.inputs, taken, self.rows), pick(self.target, taken, self.rows)
        rows = list(real)
        filled = torch.tensor(rows + [rows[0] if rows else 0] * (size - len(rows)))
        target = pick(self.target, torch.tensor(rows), self.rows) if rows else None
        return pick(self.inputs, filled, self.rows), target


class Batches:
    """Batches of a DataLoader or an IterableDataset, in the sequence that the run's seed and the
    epoch make.

    They come from the loader's own workers, or from a thread. Only what draws random numbers in
    this process is loaded when it is asked for: training draws them too.
    """

    def __init__(
        self,
        given: Given,
        split: Split,
        seed: int,
        mini_batch: int,
        names: Names = sorted,
        wait_s: float = WAIT_S,
        parts: Parts = ALL,
        *,
        ahead: bool = True,
    ) -> None:
        """
        Args:
            seed: of the run.
            mini_batch: samples in a batch of a stream that comes sample by sample.
            names: of the model's arguments, where a batch is a dict alone.
            wait_s: longest wait for a batch.
            parts: of samples, that are wanted; see `parts`.
            ahead: False: for a look at a few of them, which this process loads itself.
        """
        self.split = split
        self.loader = as_loader(given, mini_batch, split)
        self.stream = is_stream(self.loader)
        self._looks = not ahead and not self.stream
        read = None if self.stream else reader(self.loader, parts, names)
        self.parts = ALL if read is None else parts
        """What is read of samples: all, where parts can't be had."""
        self._read_by = read
        self._here = Fetched(self.loader, read)
        self._seed = seed
        self._names = names
        self._wait_s = wait_s
        self._epoch = -1
        self._first = self._next = 0
        self._kept: dict[int, Batch] = {}
        self._items: Iterator[Any] = iter(())
        self._ahead: Ahead[Any] | None = None
        self._alone = OwnRandomness(seed)
        self._jobs: list[tuple[int, Any]] = []
        """Of a map-style data set: a seed for each batch of the epoch, and what is in it. One list
        for all epochs, as a loader that keeps its workers has it for its sampler."""
        self._fetched: DataLoader[Any] | None = None
        self._workers: Iterator[Any] | None = None

    def batch(self, epoch: int, number: int) -> Batch:
        """The batch of this number in an epoch. Cheap where they are asked for in their sequence,
        and for the last two once more.

        Raises TargetError: it failed in the user's code, isn't what a batch may be, or isn't there;
        RunError: a worker of the loader died, or gave nothing for too long.
        """
        if epoch != self._epoch or (number < self._next and number not in self._kept):
            self._open(epoch, number)
        while self._next <= number:
            self._kept[self._next] = self._read(self._take())
            self._kept.pop(self._next - _KEPT, None)
            self._next += 1
        return self._kept[number]

    def sizes(self, epoch: int = 0) -> list[int]:
        """Samples in each batch of an epoch: all are loaded once. Raises as `batch`."""
        found: list[int] = []
        while True:
            try:
                found.append(self.batch(epoch, len(found)).rows)
            except DryError:
                break
        self.close()
        return found

    def close(self) -> None:
        """End what loads in the background, for good: also workers that are kept over epochs."""
        self._stop()
        for loader in (self.loader, self._fetched):
            kept = getattr(loader, "_iterator", None)
            if kept is not None:
                loader._iterator = None  # type: ignore[union-attr]
                _end_workers(kept)
        self._fetched = None

    def _stop(self) -> None:
        ahead, self._ahead = self._ahead, None
        ended = ahead is None or ahead.close()
        self._epoch, self._kept = -1, {}
        self._jobs.clear()
        workers, self._workers = self._workers, None
        if ended:
            self._items = iter(())
            if self._fetched is None or not self._fetched.persistent_workers:
                # Of a stream, kept ones would go on with the random numbers of the epoch before,
                # which a resumed run hasn't drawn.
                self.loader._iterator = None
                _end_workers(workers)

    def _open(self, epoch: int, first: int) -> None:
        self._stop()
        self._epoch, self._first, self._next = epoch, first, first
        # What a sampler or a stream's worker draws before its own seeds are set.
        self._alone = OwnRandomness(self._number(epoch, "stream"))
        try:
            with self._alone(), _own_signals():
                self._items = self._opened(epoch, first)
        except Exception as error:  # the user's data set and sampler run here
            self._epoch = -1
            raise as_ours(error, self.split) from error
        self._alone.used = False
        if self.loader.num_workers and not self._looks:
            # They load ahead themselves; the thread takes what they have to this process.
            self._ahead = Ahead(self._items, 1)

    def _opened(self, epoch: int, first: int) -> Iterator[Any]:
        loader, seed = self.loader, self._number(epoch)
        if self.stream:
            prepare_epoch(loader, epoch, seed)
            self._workers = opened(loader)
            return islice(self._workers, first, None)
        order = sequence_of(loader, epoch, seed)[first:]
        if self._read_by is not None:
            set_epoch(self._read_by[0], epoch)
        self._jobs += [(self._number(epoch, first + k), each) for k, each in enumerate(order)]
        if not loader.num_workers or self._looks:
            self._here = Fetched(loader, self._read_by)
            return map(self._here.__getitem__, self._jobs)
        if self._fetched is None:
            self._fetched = _loader_of_jobs(loader, self._jobs, self._read_by)
        self._fetched.generator = torch.Generator().manual_seed(seed)
        self._workers = opened(self._fetched)
        return self._workers

    def chosen(self, epoch: int, number: int) -> str:
        """What the sampler chose for the batch of this number, which was the last one taken or one
        of those before; of a stream nothing."""
        k = number - self._first
        known = epoch == self._epoch and 0 <= k < len(self._jobs)
        return repr(self._jobs[k][1]) if known else ""

    def _take(self) -> Any:
        begins = self._next == self._first
        wait_s = max(self._wait_s, START_S) if begins else self._wait_s
        try:
            if self._ahead is not None:
                return self._ahead.next(wait_s, f"data({self.split!r})")
            own = self._randomness()
            with LOADING, own():
                found = next(self._items)
            if begins and not own.used and not self._here.drew and not self._looks:
                # Training draws beside the thread.
                self._here.alone = False
                self._ahead = Ahead(self._items, lock=LOADING)
            return found
        except StopIteration:
            raise DryError(
                f"data({self.split!r}) ran dry: it has no batch {self._next + 1} in epoch "
                f"{self._epoch + 1}; {self._instead()}"
            ) from None
        except Exception as error:  # the user's data set runs here
            raise as_ours(error, self.split) from error

    def _instead(self) -> str:
        """What to do about an epoch that ends too soon."""
        loader = self.loader
        if self.stream and loader.num_workers > 1 and loader.drop_last:
            return self.ends_of_workers("leaves out what doesn't fill its last batch")
        if not self.stream or length_of(loader.dataset) is not None:
            return "have its __len__ say how many there are"
        return (
            f"give --steps {self._next} or fewer, or data that say how many they are (__len__)"
            if self._next
            else "give data that say how many they are (__len__)"
        )

    def ends_of_workers(self, does: str) -> str:
        """What to do about workers of a loader which each have a part of a stream."""
        return (
            f"each of its DataLoader's {self.loader.num_workers} workers {does}: num_workers=1 "
            "makes one end of them, which --ragged is for"
        )

    def _randomness(self) -> OwnRandomness:
        """The random numbers of the next batch, which this process makes: a stream's own, that go
        on, and else the batch's own."""
        k = self._next - self._first
        if self.stream or k >= len(self._jobs):
            return self._alone
        return OwnRandomness(self._jobs[k][0])

    def _read(self, found: Any) -> Batch:
        inputs, target = read_parts(found, self._names, self.parts)
        if INPUTS in self.parts:
            return Batch(inputs, target, rows_of(inputs, self.split))
        return Batch(inputs, target, len(self._jobs[self._next - self._first][1]))

    def _number(self, *what: Any) -> int:
        """A number for a seed, of the run's seed and what it is for."""
        text = repr((self._seed, self.split, *what)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class DryError(TargetError):
    """There are no more batches."""


def _loader_of_jobs(
    loader: DataLoader[Any], jobs: list[tuple[int, Any]], read: tuple[Any, Any] | None
) -> DataLoader[Any]:
    """The user's loader, whose workers are given jobs: those in the list when an epoch begins."""
    return DataLoader(
        Fetched(loader, read),
        batch_size=None,
        sampler=jobs,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        # It is told of each epoch here, which doesn't reach workers that have a copy.
        persistent_workers=loader.persistent_workers and not hasattr(loader.dataset, "set_epoch"),
    )


def _end_workers(iterator: Iterator[Any] | None) -> None:
    """End the workers behind a loader's iterator, if any. Left to the garbage collection, maybe in
    a process forked since, torch waits 5 s for them or complains that they are another's."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _own_signals() -> Iterator[None]:
    """Without the handler that torch has for workers that die: it raises wherever the main thread
    happens to be, and who waits for a batch is told anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)
