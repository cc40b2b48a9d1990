"""The reference: training in one process, without a pipeline, which flush systems must equal.

The user's own loop: the model as it is, neither traced nor cut, its loss, optimizer and scheduler
as the task gives them, and what the loss says of a mini-batch differentiated by autograd as a
whole. Nothing of that goes by what stages do; only the samples are read alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...profiles.autograd.dropout import Traits, WithoutDropout
from ...profiles.autograd.optimizer_step import fuse
from ...profiles.autograd.random_numbers import same_numbers
from ...profiles.errors import RunError
from ...profiles.target import kept_numbers, resolve
from ...profiles.tasks.hooks import in_one_line
from ...profiles.tasks.task import Task
from ...profiles.tracing.random_states import same_states, states
from ..checkpoint.gradients import GradientFiles
from ..prepare.data import DROP, MicroBatchPart, Segment, part_of, real_part, real_samples
from ..prepare.devices import forward_context, move, own_device, put, random_state
from ..prepare.prepared import Prepared
from ..prepare.samples import Samples
from ..stage.batch_norm import DeferredBatchNorm
from .plain_updates import (
    mean_of,
    plain_optimizer,
    plain_scheduler,
    state_for_use,
    steps_by_epoch,
)


class PlainTraining:
    """Trains the task's model for as long as a prepared run does.

    Attributes:
        model: the user's own.
        losses: of each mini-batch.
        traits: what the model was seen to do.
        numbers: gives samples the same random numbers as the run does; None: nothing is drawn, or
            it isn't known what.
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
        # What the task's loss reads may be its weights: it is trained itself, and put back.
        self._put_back, self._trained = kept_numbers(self.model), dict[str, Tensor]()
        # The first GPU, where the inline run's stages are.
        self._device = own_device(prepared.plan, settings, 0)
        move([self.model], self._device)
        self.model.train()
        matrices = prepared.model.matrices
        self.optimizer = plain_optimizer(self.task, settings, self.model, matrices)
        self._fused = False
        self.scheduler = plain_scheduler(self.task, settings, self.optimizer, prepared.length)
        self._batch_norm = (
            DeferredBatchNorm(self.model)
            if settings.deferred_batch_norm and by_micro_batch
            else None
        )
        if gradients is not None:
            GradientFiles(gradients, self.model, self.optimizer, prepared.model.names)
        self.numbers = same_numbers(prepared.random, settings.seed)
        self.losses: list[float] = []
        self.traits = Traits()
        self._samples: dict[int, Samples] = {}

    def state(self) -> dict[str, Tensor]:
        """The model's state_dict, as it is for use, on the CPU."""
        return self._trained or state_for_use(self.model, self.optimizer)

    def run(self) -> None:
        """Train, without dropout, and look at what the model does."""
        with WithoutDropout(self.traits), self.numbers or nullcontext():
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
                    at = f"plain training, at mini-batch {segment.first + b}"
                    with in_one_line(at, RunError):
                        self._mini_batch(segment, b)
                    if after is not None:
                        after(segment, b, self.losses[-1])
        finally:
            self._close()

    def _mini_batch(self, segment: Segment, b: int) -> None:
        together, pairs, mean = segment.together(b), [], 0.0
        for share, loss in self._losses(segment, b):
            # Gradients are averaged over the mini-batches between two updates.
            if isinstance(loss, tuple):
                pairs.append(loss)
            else:
                (loss * (share / together)).backward()
                mean += share * float(loss.detach())
        if pairs:
            found = mean_of(pairs)
            (found / together).backward()
            mean = float(found.detach()) if sum(weight for _, weight in pairs) else math.nan
        self.losses.append(mean)
        if segment.updates_after(b):
            if self._batch_norm is not None:
                self._batch_norm.due(segment.first + b)
            self._update(ends_epoch=segment.ends_epoch(b))

    def _update(self, *, ends_epoch: bool) -> None:
        if self.optimizer is None:
            return
        settings = self.prepared.settings
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        # As the stages do, so that rounding alone tells the two apart by as little as can be.
        self._fused = self._fused or fuse(self.optimizer)
        before = random_state(self._device)
        self.optimizer.step()
        self.traits.step_random |= not torch.equal(before, random_state(self._device))
        if self.scheduler is not None and (ends_epoch or not steps_by_epoch(self.task, settings)):
            self.scheduler.step()
        self.model.zero_grad()

    def look(self, segment: Segment, b: int) -> list[tuple[Any, Any, int]]:
        """The model's result, the target and the samples of each part of a mini-batch that goes
        through it at once, padding left out. Nothing is trained."""
        found = []
        try:
            with torch.no_grad(), self.numbers or nullcontext():
                for positions, part in self.parts(segment, b):
                    output, target = self._forward(segment, b, positions, part)
                    found += [(output, target, part.real)] if part.real else []
        finally:
            self._close()
        return found

    def _losses(self, segment: Segment, b: int) -> Iterator[tuple[float, Any]]:
        """Share of the mini-batch's samples and loss of each part of it."""
        for positions, part in self.parts(segment, b):
            statistics = (
                self._batch_norm.noting(segment.first + b, part.real, part.size)
                if self._batch_norm is not None
                else nullcontext()
            )
            with statistics:
                output, target = self._forward(segment, b, positions, part)
            if not part.real:
                continue
            with forward_context(self.prepared.model.autocast, self._device.type):
                before, others = random_state(self._device), states()
                loss = self.task.loss(output, target)
                self.traits.loss_random |= not torch.equal(before, random_state(self._device))
                self.traits.loss_hides |= not same_states((others[0], *states()[1:]), others)
            yield part.real / segment.samples_of(b), loss

    def parts(self, segment: Segment, b: int) -> Iterator[tuple[range, MicroBatchPart]]:
        """What of a mini-batch goes through the model at once: positions in the epoch, and size."""
        if not self.by_micro_batch:
            start, count = real_samples(segment, b, 0).start, segment.samples_of(b)
            share = 1.0 / segment.together(b)
            yield range(start, start + count), MicroBatchPart(count, count, 1.0, share)
            return
        for i in range(segment.micro_batches):
            positions = real_samples(segment, b, i)
            yield positions, part_of(segment, b, len(positions), self.prepared.plan.micro_batch)

    def _forward(
        self, segment: Segment, b: int, positions: range, part: MicroBatchPart
    ) -> tuple[Any, Any]:
        inputs, target = self._take(segment, positions, part.size)
        if self.numbers is not None:
            self.numbers.begin(None, (segment.first + b,), positions)
        with forward_context(self.prepared.model.autocast, self._device.type):
            before = random_state(self._device)
            output = self._call.of(self.model, inputs)
            self.traits.random |= not torch.equal(before, random_state(self._device))
        if part.real and part.padded:
            output = real_part(output, part.real, part.size, DROP)
        return output, target

    def _close(self) -> None:
        for samples in self._samples.values():
            samples.close()
        if self._put_back is not None:
            self._trained = self.state()
            self._put_back()

    def _take(self, segment: Segment, positions: range, size: int) -> tuple[Any, Any]:
        if size not in self._samples:
            seed = self.prepared.settings.seed
            mini_batch = self.prepared.plan.mini_batch
            self._samples[size] = Samples(
                self.task, "train", size, seed, self._call.names, mini_batch
            )
        return put(self._samples[size].take(segment.epoch, positions), self._device)  # type: ignore[no-any-return]
