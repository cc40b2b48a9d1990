"""Which samples make up each mini-batch: the same on every worker, without a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..planner.plan import Plan
from ..profiles.errors import TargetError
from ..profiles.task import Split, Task, dataset_size, fetch
from .settings import RunSettings


@dataclass(frozen=True)
class Segment:
    """A stretch of training that ends drained: an epoch, or what `steps` leave of it.

    Attributes:
        epoch: counted from 0.
        first: number of its first mini-batch in the whole run.
        mini_batches: how many it has.
    """

    epoch: int
    first: int
    mini_batches: int


def segments(plan: Plan, settings: RunSettings, samples: int) -> tuple[Segment, ...]:
    """The run's segments. Samples that don't fill a mini-batch sit an epoch out.

    Raises TargetError when the data doesn't fill one mini-batch.
    """
    each = samples // plan.mini_batch
    if not each:
        raise TargetError(
            f"{settings.task}: {samples} training samples don't fill one mini-batch of "
            f"{plan.mini_batch}; plan with a smaller --mini-batch"
        )
    total = settings.steps if settings.steps is not None else settings.epochs * each
    found: list[Segment] = []
    first = 0
    while first < total:
        count = min(each, total - first)
        found.append(Segment(len(found), first, count))
        first += count
    return tuple(found)


class Samples:
    """One split of the task's data, in micro-batches of one size."""

    def __init__(self, task: Task, split: Split, micro_batch: int, seed: int) -> None:
        self.dataset: Dataset[Any] = task.data(split)
        self.size = dataset_size(self.dataset, split)
        self.micro_batch = micro_batch
        self.seed = seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def train(
        self,
        epoch: int,
        mini_batch: int,
        micro_batches: int,
        micro_batch: int,
        dealt: slice = slice(None),
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs and target of a micro-batch; samples are shuffled anew in each epoch.

        Args:
            mini_batch: within the epoch.
            micro_batch: within the mini-batch.
            dealt: which of its samples, where replicas share them.
        """
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shuffled = torch.randperm(self.size, generator=generator).tolist()
            self._epoch = epoch
        start = (mini_batch * micro_batches + micro_batch) * self.micro_batch
        return fetch(self.dataset, self._shuffled[start : start + self.micro_batch][dealt])

    @property
    def evaluations(self) -> int:
        """Micro-batches in one pass over the split."""
        return -(-self.size // self.micro_batch)

    def evaluation(self, k: int) -> tuple[tuple[Tensor, ...], Any, int]:
        """Inputs, target and number of samples of the k-th micro-batch, in order.

        The last one is filled up to full size with its own first sample; the target holds
        only what is real, and so must what is made of the output.
        """
        real = list(range(k * self.micro_batch, min((k + 1) * self.micro_batch, self.size)))
        padded: Sequence[int] = real + [real[0]] * (self.micro_batch - len(real))
        inputs, _ = fetch(self.dataset, padded)
        _, target = fetch(self.dataset, real)
        return inputs, target, len(real)
