"""Training in one process, without a pipeline: what flush systems must equal.

The user's model as it is, neither traced nor cut; the same data, seed, loss and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..profiles.target import resolve
from ..profiles.tracing.call import Call
from .data import Samples, Segment, part_of, real_samples
from .draws import Traits, WithoutDropout
from .gradient_files import GradientFiles
from .optimizers import make_optimizer
from .padding import real_part
from .prepare import Prepared

_ADVICE = "leave it out: --ragged drop"


class PlainTraining:
    """Trains the task's model for as long as a prepared run does.

    Attributes:
        model: the user's own.
        losses: of each mini-batch.
        traits: what the model was seen to do.
    """

    def __init__(self, prepared: Prepared, gradients: Path, *, by_micro_batch: bool) -> None:
        """
        Args:
            gradients: a folder for the gradients of each update.
            by_micro_batch: a mini-batch's micro-batches one after another, each as large as the
                pipeline has it, their gradients added up; else the mini-batch in one piece.
        """
        settings = prepared.settings
        target = resolve(settings.task)
        assert target.task is not None  # prepared
        self.prepared = prepared
        self.by_micro_batch = by_micro_batch
        self.task = target.task
        self.names = target.call(1)[0].names
        self.model: nn.Module = target.model(settings.seed)
        self.model.train()
        self.optimizer = make_optimizer(
            self.task, settings.optimizer, list(self.model.parameters())
        )
        GradientFiles(gradients, self.model, self.optimizer)
        self.losses: list[float] = []
        self.traits = Traits()
        self._samples: dict[int, Samples] = {}

    def run(self) -> None:
        """Train."""
        with WithoutDropout(self.traits):
            for segment in self.prepared.segments:
                for b in range(segment.mini_batches):
                    self._mini_batch(segment, b)

    def _mini_batch(self, segment: Segment, b: int) -> None:
        every = self.prepared.pipeline.update_every
        # Gradients are averaged over the mini-batches between two updates.
        together = min(every, segment.mini_batches - b // every * every)
        total = 0.0
        for share, loss in self._losses(segment, b):
            (loss * (share / together)).backward()
            total += float(loss.detach()) * share
        self.losses.append(total)
        if self.optimizer is not None and ((b + 1) % every == 0 or b + 1 == segment.mini_batches):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _losses(self, segment: Segment, b: int) -> Iterator[tuple[float, Tensor]]:
        """Share of the mini-batch and loss of each part that goes through the model at once."""
        if not self.by_micro_batch:
            start, count = b * segment.mini_batch, segment.samples_of(b)
            inputs, target = self._take(segment, range(start, start + count), count)
            yield 1.0, self.task.loss(self._output(inputs), target).reshape(())
            return
        for i in range(segment.micro_batches):
            part = part_of(segment, b, i)
            inputs, target = self._take(segment, real_samples(segment, b, i), part.size)
            output = self._output(inputs)
            if part.real:
                if part.padded:
                    output = real_part(output, part.real, part.size, _ADVICE)
                yield part.share, self.task.loss(output, target).reshape(())

    def _take(self, segment: Segment, positions: range, size: int) -> tuple[Any, Any]:
        if size not in self._samples:
            seed = self.prepared.settings.seed
            self._samples[size] = Samples(self.task, "train", size, seed)
        return self._samples[size].take(segment.epoch, positions)

    def _output(self, inputs: Any) -> Any:
        before = torch.get_rng_state()
        output = Call(inputs, self.names).of(self.model)
        self.traits.draws |= not torch.equal(before, torch.get_rng_state())
        return output
