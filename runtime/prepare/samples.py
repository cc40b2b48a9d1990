"""Samples of a run's mini-batches, in the same sequence on every worker, read in parts where they
can be."""

from __future__ import annotations

import copy
import functools
import hashlib
import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ...profiles.errors import TargetError
from ...profiles.tasks.batches import START_S, WAIT_S, Batches
from ...profiles.tasks.hooks import call_hook
from ...profiles.tasks.loaders import set_epoch
from ...profiles.tasks.parts import ALL, SEEDS, Parts, fetch_parts, has_only, only
from ...profiles.tasks.prefetch import LOADING, Ahead
from ...profiles.tasks.samples import (
    Names,
    alike,
    batch_size_of,
    check_whole,
    comes_in_batches,
    size_of,
)
from ...profiles.tasks.task import Split, Task
from ...profiles.tracing.random_states import same_states, states


class Samples:
    """One split of the task's data, dealt into micro-batches."""

    def __init__(
        self,
        task: Task,
        split: Split,
        micro_batch: int,
        seed: int,
        names: Names = sorted,
        mini_batch: int | None = None,
        wait_s: float = WAIT_S,
        parts: Parts = ALL,
    ) -> None:
        """
        Args:
            names: of the model's arguments, where a batch is a dict alone.
            mini_batch: samples in a mini-batch, where data that come in batches don't say; by
                default as many as in a micro-batch.
            wait_s: longest wait for a batch.
            parts: of samples, that are wanted: only those are read, where the data can.
        """
        self.dataset: Any = call_hook(f"data({split!r})", task.data, split)
        check_whole(self.dataset, split)
        self.split = split
        self.micro_batch = micro_batch
        self.mini_batch = batch_size_of(self.dataset) or mini_batch or micro_batch
        self.size = size_of(self.dataset, split, self.mini_batch) or 0
        """0: nobody can know."""
        self.seed = seed
        self._names = names
        self._wait_s = wait_s
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)
        self.looked = False
        """Whole samples were held against what is read of them."""
        self.drew = False
        """A sample that has random numbers of its own drew some."""
        self._open(parts, ahead=True)

    def _open(self, parts: Parts, *, ahead: bool) -> None:
        self._read_from = self.dataset
        self._told = [self.dataset] if hasattr(self.dataset, "set_epoch") else []
        self._batches: Batches | None = None
        self._alone = False
        self.parts = parts
        """What is read of samples: all, where the data can't tell parts apart."""
        if comes_in_batches(self.dataset):
            self._batches = Batches(
                self.dataset,
                self.split,
                self.seed,
                self.mini_batch,
                self._names,
                self._wait_s,
                parts,
                ahead=ahead,
            )
            self.parts = self._batches.parts
        else:
            found = only(self.dataset, parts, self._names)
            self._alone = has_only(self.dataset)
            self._read_from, self.parts = (self.dataset, ALL) if found is None else (found, parts)
            self._told += [found] if hasattr(found, "set_epoch") else []
            if not isinstance(self._read_from, TensorDataset):
                self._read_from = _Named(self._read_from, self.split)
        self._ahead = _TakenAhead(self, self._wait_s)
        # Nothing of the user's runs where samples are taken.
        self._in_memory = type(self._read_from) is TensorDataset

    def for_a_look(self, parts: Parts) -> Samples:
        """The same samples with other parts of them, to look at some: nothing is loaded ahead.

        To be closed by itself.
        """
        found = copy.copy(self)
        found.__dict__.pop("_evaluated", None)
        found._open(parts, ahead=False)
        return found

    def chosen(self, epoch: int, positions: range) -> str:
        """Which samples of the data set these are, once they were taken; of a stream: nothing."""
        if self._batches is not None:
            return self._batches.chosen(epoch, positions.start // self.mini_batch)
        return repr(self._shuffle(epoch)[positions.start : positions.stop].tolist())

    def take(
        self, epoch: int, positions: range, size: int | None = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs and target of the samples at these positions of an epoch's own shuffle.

        The inputs are filled up to `size`, by default a micro-batch, with copies of their first
        sample; the target is that of the real ones, and None where there are none. Raises
        TargetError where the data have no such samples, or fail.
        """
        size = size or self.micro_batch
        if self._in_memory:
            return self.take_now(epoch, positions, size)
        if self._batches is not None:
            return self._of_batch(self._batches, epoch, positions, size)
        return self._ahead.take((epoch, positions, size))

    def expect(self, takes: Iterable[Take]) -> None:
        """Say what is going to be taken, one after another: it is loaded ahead.

        What is in memory is taken when it is asked for, and so is what draws random numbers:
        training draws them too. Batches come ahead by themselves.
        """
        if self._batches is None and not isinstance(self.dataset, TensorDataset):
            self._ahead.expect(takes)

    def close(self) -> None:
        """End what loads in the background."""
        self._ahead.close()
        if self._batches is not None:
            self._batches.close()

    def take_now(
        self, epoch: int, positions: range, size: int, *, beside: bool = False
    ) -> tuple[tuple[Tensor, ...], Any]:
        """As `take`, of a data set whose samples are chosen here.

        Args:
            beside: the training, which draws random numbers too: samples are known to draw none.
        """
        for data in self._told:
            call_hook("data set's set_epoch", set_epoch, data, epoch)
        shuffled = self._shuffle(epoch)
        chosen = shuffled[positions.start : positions.stop : positions.step]
        seeds = None
        if self._alone and not beside:
            seeds = self._seeds(epoch, positions)
        if chosen.shape[0] == size:
            return self._fetch(chosen, seeds)
        real = chosen.tolist()
        # Where there is none to copy, any sample will do: nothing is made of the output.
        return self._filled(real, real[0] if real else int(shuffled[0]), size, seeds)

    def _of_batch(
        self, batches: Batches, epoch: int, positions: range, size: int
    ) -> tuple[tuple[Tensor, ...], Any]:
        number = positions.start // self.mini_batch
        before = number * self.mini_batch
        real = range(positions.start - before, positions.stop - before, positions.step)
        batch = batches.batch(epoch, number)
        if batch.rows > self.mini_batch or (real and real[-1] >= batch.rows):
            raise TargetError(
                f"data({self.split!r}): batch {number + 1} of epoch {epoch + 1} has {batch.rows} "
                f"samples where a mini-batch has {self.mini_batch}: "
                + self._instead(batches, number, batch.rows)
            )
        return batch.part(real, size)

    def _instead(self, batches: Batches, number: int, rows: int) -> str:
        short = batches.stream and rows < self.mini_batch
        if short and batches.loader.num_workers > 1:
            return batches.ends_of_workers("ends with a batch of its own")
        if short and not self.size and number:
            return (
                f"there it ends: give --steps {number} or fewer, or give the data set a __len__, "
                "by which epoch follows epoch and --ragged says what becomes of what is left over"
            )
        return (
            f"have the data make batches of {self.mini_batch}, and leave out what doesn't fill "
            "one (drop_last=True)"
        )

    def _shuffle(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shuffled = torch.randperm(self.size, generator=generator)
            self._epoch = epoch
        return self._shuffled

    def _seeds(self, epoch: int, positions: range) -> list[int]:
        """Of samples' own random numbers, whoever reads them and whatever of them."""
        text = repr((self.seed, self.split, epoch)).encode()
        first = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return [(first + k) & SEEDS for k in positions]

    def _fetch(
        self, chosen: list[int] | Tensor, seeds: list[int] | None
    ) -> tuple[tuple[Tensor, ...], Any]:
        *found, drew = call_hook(
            f"data({self.split!r})",
            fetch_parts,
            self._read_from,
            chosen,
            self._names,
            self.parts,
            seeds,
        )
        self.drew = self.drew or drew
        return found[0], found[1]

    def _filled(
        self, real: list[int], padding: int, size: int, seeds: list[int] | None
    ) -> tuple[tuple[Tensor, ...], Any]:
        # Taken once: a sample that draws random numbers is another one the next time.
        inputs, target = self._fetch(real or [padding], None if seeds is None else seeds or [0])
        missing = size - len(real)
        if not missing:
            return inputs, target
        rows = [*range(len(real)), *[0] * missing]
        return tuple(tensor[rows] for tensor in inputs), target if real else None

    @property
    def evaluations(self) -> int:
        """Micro-batches in one pass over the split."""
        if self._batches is not None:
            return len(self._evaluated)
        return -(-self.size // self.micro_batch)

    def evaluation(self, k: int) -> tuple[tuple[Tensor, ...], Any, int]:
        """Inputs, target and number of samples of the k-th micro-batch. The last one, and of
        batches that are put together elsewhere the last of each, is filled up as in `take`."""
        if self._batches is not None:
            number, real, count = self._evaluated[k]
            batch = self._batches.batch(0, number)
            if batch.rows != count:
                raise TargetError(
                    f"data({self.split!r}): batch {number + 1} has {batch.rows} samples, and is to "
                    f"be of {count}: have its collate_fn keep every sample, once"
                )
            return *batch.part(real, self.micro_batch), len(real)
        real = range(k * self.micro_batch, min((k + 1) * self.micro_batch, self.size))
        seeds = self._seeds(0, real) if self._alone else None
        inputs, target = self._filled(list(real), real[0], self.micro_batch, seeds)
        return inputs, target, len(real)

    @functools.cached_property
    def _evaluated(self) -> list[tuple[int, range, int]]:
        """The evaluation's micro-batches: which batch, which of its rows, and how many it has."""
        assert self._batches is not None
        if self.size and alike(self.dataset) and not self._batches.stream:
            each = self.mini_batch
            rows = [min(each, self.size - done) for done in range(0, self.size, each)]
        else:
            rows = self._batches.sizes()
        if not rows:
            raise TargetError(f"data({self.split!r}) is empty")
        return [
            (number, range(start, min(start + self.micro_batch, count)), count)
            for number, count in enumerate(rows)
            for start in range(0, count, self.micro_batch)
        ]


class _Named:
    """A map-style data set whose errors name the split and the sample."""

    def __init__(self, dataset: Any, split: Split) -> None:
        self._dataset = dataset
        self._hook = f"data({split!r})"

    def __getitem__(self, k: int) -> Any:
        return call_hook(self._hook, operator.getitem, self._dataset, k, doing=f"sample {k}")


Take = tuple[int, range, int]
"""Epoch, positions and size of what is taken."""


class _TakenAhead:
    """Samples that a thread takes before they are asked for, where they are asked for in the
    sequence that was said."""

    def __init__(self, samples: Samples, wait_s: float) -> None:
        self._samples = samples
        self._wait_s = wait_s
        self._coming: deque[Take] = deque()
        self._thread: Ahead[tuple[tuple[Tensor, ...], Any]] | None = None
        # None: nothing is known yet.
        self._draws: bool | None = None

    def expect(self, takes: Iterable[Take]) -> None:
        self.close()
        self._coming = deque(takes)
        if self._draws is False:
            self._start()

    def take(self, wanted: Take) -> tuple[tuple[Tensor, ...], Any]:
        if not self._coming or self._coming[0] != wanted:
            return self._now(wanted)
        self._coming.popleft()
        if self._thread is not None:
            # It makes as many as are expected.
            return self._thread.next(max(self._wait_s, START_S), f"data({self._samples.split!r})")
        if self._draws is not None:
            return self._now(wanted)
        before = states()
        found = self._now(wanted)
        self._draws = self._samples.drew or not same_states(before, states())
        if not self._draws:
            self._start()
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._coming.clear()

    def _start(self) -> None:
        takes = list(self._coming)
        if takes:
            made = (self._samples.take_now(*each, beside=True) for each in takes)
            self._thread = Ahead(made, lock=LOADING)

    def _now(self, wanted: Take) -> tuple[tuple[Tensor, ...], Any]:
        with LOADING:
            return self._samples.take_now(*wanted)
