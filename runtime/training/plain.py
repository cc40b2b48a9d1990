"""The reference: training in one process, without a pipeline, which flush systems must equal.

The user's model as it is, neither traced nor cut; the same data, seed, loss and optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...profiles.autograd.optimizer_step import fuse
from ...profiles.errors import RunError, TimeprestError
from ...profiles.target import resolve
from ...profiles.tasks.hooks import describe_error
from ...profiles.tasks.task import Loss, Task, read_loss
from ..checkpoint.gradients import GradientFiles
from ..prepare.data import DROP, Segment, part_of, real_part, real_samples
from ..prepare.devices import forward_context, move, own_device, put, random_state
from ..prepare.prepare import Prepared
from ..prepare.samples import Samples
from ..stage.batch_norm import DeferredBatchNorm
from ..stage.optimizer import make_optimizer, make_scheduler, step_optimizer
from ..stage.summed_losses import MiniBatchMeans
from .dropout import Traits, WithoutDropout


class PlainTraining:
    """Trains the task's model for as long as a prepared run does.

    Attributes:
        model: the user's own.
        losses: of each mini-batch.
        traits: what the model was seen to do.
    """

    def __init__(
        self,
        prepared: Prepared,
        gradients: Path | None = None,
        *,
        by_micro_batch: bool,
        task: Task | None = None,
    ) -> None:
        """
        Args:
            gradients: a folder for the gradients of each update; None: they aren't kept.
            by_micro_batch: a mini-batch's micro-batches one after another, each as large as the
                pipeline has it, their gradients added up; else the mini-batch in one piece.
            task: instead of the one that the settings name.
        """
        settings = prepared.settings
        target = resolve(settings.task)
        assert target.task is not None  # prepared
        self.prepared = prepared
        self.by_micro_batch = by_micro_batch
        self.task = task or target.task
        self._call = target.call(1)[0]
        self.model: nn.Module = target.model(settings.seed)
        # The first GPU, where the inline run's stages are.
        self._device = own_device(prepared.plan, settings, 0)
        move([self.model], self._device)
        self.model.train()
        named, matrices = self.model.named_parameters(), prepared.model.matrices
        self.optimizer = make_optimizer(self.task, settings, named, matrices=matrices)
        self._means = MiniBatchMeans(self.model.parameters())
        self._fused = False
        self.scheduler = make_scheduler(self.task, settings, self.optimizer, prepared.length)
        self._batch_norm = (
            DeferredBatchNorm(self.model)
            if settings.deferred_batch_norm and by_micro_batch
            else None
        )
        if gradients is not None:
            GradientFiles(gradients, self.model, self.optimizer, prepared.model.names)
        self.losses: list[float] = []
        self.traits = Traits()
        self._samples: dict[int, Samples] = {}

    def run(self) -> None:
        """Train, without dropout, and look at what the model does."""
        with WithoutDropout(self.traits):
            self.train()

    def train(self, after: Callable[[Segment, int, float], None] | None = None) -> None:
        """Train.

        Args:
            after: is called after each mini-batch with its segment, its number there and its loss.

        Raises RunError naming the mini-batch.
        """
        try:
            for segment in self.prepared.segments:
                for b in range(segment.mini_batches):
                    try:
                        self._mini_batch(segment, b)
                    except TimeprestError:
                        raise
                    except Exception as error:  # the user's code
                        at = f"plain training, at mini-batch {segment.first + b}"
                        raise RunError(f"{at}: {describe_error(error)}") from error
                    if after is not None:
                        after(segment, b, self.losses[-1])
        finally:
            for samples in self._samples.values():
                samples.close()

    def _mini_batch(self, segment: Segment, b: int) -> None:
        total, weight = 0.0, 0.0
        for share, loss in self._losses(segment, b):
            value = loss.value.detach()
            if loss.weight is None:
                # Gradients are averaged over the mini-batches between two updates.
                (loss.value * (share / segment.together(b))).backward()
                total += float(value) * share
            else:
                loss.value.backward()
                total, weight = total + float(value), weight + loss.weight
        if self.prepared.model.loss.weighted:
            total = total / weight if weight else math.nan
            self._means.settle(weight, segment.together(b))
        self.losses.append(total)
        if segment.updates_after(b):
            if self._batch_norm is not None:
                self._batch_norm.settle(segment.first + b)
            self._update(ends_epoch=segment.ends_epoch(b))
        elif self.prepared.model.loss.weighted:
            self._means.set_aside()

    def _update(self, *, ends_epoch: bool) -> None:
        if self.optimizer is None:
            return
        most = self.prepared.settings.clip_norm
        if most is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        # As the stages do, so that rounding alone tells the two apart by as little as can be.
        self._fused = self._fused or fuse(self.optimizer)
        step_optimizer(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.after_update(ends_epoch=ends_epoch)
        self.optimizer.zero_grad(set_to_none=True)

    def _losses(self, segment: Segment, b: int) -> Iterator[tuple[float, Loss]]:
        """Share of the mini-batch and loss of each part that goes through the model at once."""
        if not self.by_micro_batch:
            start, count = real_samples(segment, b, 0).start, segment.samples_of(b)
            whole = self._loss(segment, range(start, start + count), count, count)
            assert whole is not None
            yield 1.0, whole
            return
        for i in range(segment.micro_batches):
            part = part_of(segment, b, i, self.prepared.plan.micro_batch)
            statistics = (
                self._batch_norm.forward(segment.first + b, part.real, part.size)
                if self._batch_norm is not None
                else nullcontext()
            )
            with statistics:
                loss = self._loss(segment, real_samples(segment, b, i), part.real, part.size)
            if loss is not None:
                yield part.share, loss

    def _loss(self, segment: Segment, positions: range, real: int, size: int) -> Loss | None:
        """The loss of these samples, filled up to `size`; None where there are none."""
        inputs, target = self._take(segment, positions, size)
        with forward_context(self.prepared.model.autocast, self._device.type):
            before = random_state(self._device)
            output = self._call.of(self.model, inputs)
            self.traits.draws |= not torch.equal(before, random_state(self._device))
            if not real:
                return None
            if real < size:
                output = real_part(output, real, size, DROP)
            return read_loss(self.task.loss(output, target))

    def _take(self, segment: Segment, positions: range, size: int) -> tuple[Any, Any]:
        if size not in self._samples:
            seed = self.prepared.settings.seed
            mini_batch = self.prepared.plan.mini_batch
            self._samples[size] = Samples(
                self.task, "train", size, seed, self._call.names, mini_batch
            )
        return put(self._samples[size].take(segment.epoch, positions), self._device)  # type: ignore[no-any-return]
