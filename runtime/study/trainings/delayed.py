"""Plain training with a uniform delay: gradients of old weights, applied to the latest.

W(t+1) = step(W(t), g(W(max(0, t − D)))) with one delay D for all layers, as people measure
staleness without a pipeline. A pipeline's own delays are shorter at its later stages, and so is
their price. As a pipeline runs empty at the end of an epoch, the delay begins anew there.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ....profiles.tasks.task import Task
from ...prepare.data import Segment
from ...prepare.prepared import Prepared
from ...training.plain import PlainTraining


class DelayedTraining(PlainTraining):
    """Trains the task's model, each gradient made with the weights `delay` updates before."""

    def __init__(self, prepared: Prepared, delay: int, *, task: Task | None = None) -> None:
        super().__init__(prepared, by_micro_batch=False, task=task)
        self._parameters = list(self.model.parameters())
        self._versions: deque[list[Tensor]] = deque(maxlen=delay + 1)
        """The latest last."""

    def _mini_batch(self, segment: Segment, b: int) -> None:
        if b == 0:
            self._versions.clear()
        if b % segment.update_every == 0:
            self._versions.append([p.detach().clone() for p in self._parameters])
        self._give(self._versions[0])
        super()._mini_batch(segment, b)
        if not segment.updates_after(b):
            self._give(self._versions[-1])

    def _update(self, *, ends_epoch: bool) -> None:
        self._give(self._versions[-1])
        super()._update(ends_epoch=ends_epoch)

    def _give(self, version: list[Tensor]) -> None:
        with torch.no_grad():
            for p, tensor in zip(self._parameters, version, strict=True):
                p.copy_(tensor)
