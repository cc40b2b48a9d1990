"""A replica's share of the data: model inputs and targets of its micro-batches, on its device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor

from ...planner.systems.operations import FORWARD, Op
from ...profiles.tasks.hooks import reading
from ...profiles.tasks.parts import ALL, INPUTS, TARGET, Parts
from ...profiles.tasks.task import Split
from ..prepare.data import MicroBatchPart, Segment, part_of, real_samples
from ..prepare.devices import put
from ..prepare.prepared import Prepared
from ..prepare.samples import Samples
from ..prepare.workers import Replica


class StageData:
    """Loads a replica's inputs and targets, ahead of use, and puts them on its device.

    Attributes:
        inputs: names of the model's inputs that its piece takes.
        targets: whether it takes targets: the last stage does.
        loads: whether it takes inputs or targets at all.
        beyond_profile: mini-batches with a sample larger than any that was profiled, counted over
            the run, where this replica is the run's reporter.
    """

    def __init__(
        self, prepared: Prepared, replica: Replica, names: Iterable[str], device: torch.device
    ) -> None:
        """
        Args:
            names: of the piece's inputs.
        """
        self._prepared, self._replica, self._device = prepared, replica, device
        self._share = prepared.distribution.shares[replica.number]
        self.inputs = [name for name in names if name in prepared.model.inputs]
        self.targets = replica.stage == len(prepared.plan.stages) - 1
        self.loads = self.targets or bool(self.inputs)
        self.beyond_profile: list[int] = []
        self._samples: dict[Split, Samples] = {}

    @property
    def evaluations(self) -> int:
        """Micro-batches in one evaluation."""
        return self.samples("test").evaluations

    def load(self) -> None:
        """Load now what is going to be needed."""
        if self.loads:
            self.samples("train")
        if self._prepared.settings.evaluate:
            self.samples("test")

    def close(self) -> None:
        """End what loads in the background."""
        for samples in self._samples.values():
            samples.close()

    def samples(self, split: Split) -> Samples:
        """The samples of a split, loaded on first use."""
        if split not in self._samples:
            prepared = self._prepared
            plan, settings, evaluated = prepared.plan, prepared.settings, prepared.distribution
            # The run's reporter looks at all of a sample, where shapes vary.
            varies = self._replica.is_reporter and prepared.varies
            needs = [part for part, some in ((INPUTS, self.inputs), (TARGET, self.targets)) if some]
            with reading(split):
                self._samples[split] = Samples(
                    prepared.task,
                    split,
                    plan.micro_batch if split == "train" else evaluated.evaluation_samples,
                    settings.seed,
                    prepared.model.arguments,
                    plan.mini_batch,
                    settings.timeout_s,
                    ALL if varies else Parts(needs) or ALL,
                )
        return self._samples[split]

    def expect(self, segment: Segment, ops: Iterable[Op]) -> None:
        """Load ahead what these operations of a segment are going to take."""
        if self.loads:
            share = self._share
            self.samples("train").expect(
                (
                    segment.epoch,
                    real_samples(segment, op.mini_batch, op.micro_batch, share.dealt),
                    share.samples,
                )
                for op in ops
                if op.kind == FORWARD and op.micro_batch is not None and share.of(op)
            )

    def of(
        self, segment: Segment, mini_batch: int, micro_batch: int
    ) -> tuple[dict[str, Tensor], Any, MicroBatchPart]:
        """Inputs by name, ``[samples of a micro-batch, ...]``, and target of a micro-batch; what
        part of its mini-batch it is."""
        share = self._share
        positions = real_samples(segment, mini_batch, micro_batch, share.dealt)
        part = part_of(segment, mini_batch, len(positions), share.samples)
        if not self.loads:
            return {}, None, part
        inputs, target = self.samples("train").take(segment.epoch, positions, share.samples)
        if self._replica.is_reporter and micro_batch == share.micro_batches[0]:
            varying = self._prepared.plan.profile.varying
            if varying is not UNSET and varying.beyond([t.shape[1:] for t in inputs]):
                self.beyond_profile.append(segment.first + mini_batch)
        return *self._put(inputs, target), part

    def of_evaluation(self, k: int) -> tuple[dict[str, Tensor], Any, int]:
        """The same of an evaluation's k-th micro-batch, and how many samples are no padding."""
        if not self.loads:
            return {}, None, 0
        inputs, target, real = self.samples("test").evaluation(k)
        return *self._put(inputs, target), real

    def _put(self, inputs: Sequence[Tensor], target: Any) -> tuple[dict[str, Tensor], Any]:
        named = dict(zip(self._prepared.model.inputs, inputs, strict=False))
        mine = {name: put(named[name], self._device) for name in self.inputs}
        return mine, put(target, self._device) if self.targets else None
