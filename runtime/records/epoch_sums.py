"""What a worker saw of an epoch so far, where checkpoints cut it into segments."""

from __future__ import annotations

import math

import msgspec

from ...planner.lane_times import of_wall
from ..prepare.data import Segment
from ..weights.staleness import Staleness
from .metrics import EpochRecord, StageEpoch, StageScore


class EpochSums(msgspec.Struct, kw_only=True):
    """Sums over the segments of an epoch that are done. Times in seconds."""

    mini_batches: int = 0
    samples: int = 0
    weighted_loss: float | None = 0.0
    """Losses of mini-batches times their weights, on the worker that tells of progress. None, as
    JSON has it: not a number."""
    weight: float | None = None
    """Of all these mini-batches: their samples, or what counts in them. None: nothing yet."""
    wall_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    versions_held: int = 1
    version_differences: dict[int, int] = {}
    backwards: int = 0
    distances: float = 0.0
    largest_distance: float = 0.0

    @property
    def loss(self) -> float:
        """The weighted loss as a number."""
        return math.nan if self.weighted_loss is None else self.weighted_loss

    def add(self, segment: Segment, score: StageScore, seen: Staleness) -> None:
        """A segment is done."""
        self.mini_batches += segment.mini_batches
        self.samples += segment.samples
        for loss, weight in zip(score.losses, score.weights, strict=True):
            if weight:
                self.weighted_loss = self.loss + loss * weight
                self.weight = (self.weight or 0.0) + weight
        self.wall_s += score.wall_s
        self.compute_s += score.compute_s
        self.communication_s += score.communication_s
        self.versions_held = max(self.versions_held, seen.versions_held)
        for difference, count in seen.differences.items():
            before = self.version_differences.get(difference, 0)
            self.version_differences[difference] = before + count
        self.backwards += seen.backwards
        self.distances += sum(seen.distances)
        self.largest_distance = max(self.largest_distance, *seen.distances, 0.0)

    def stage_epoch(self, epoch: int) -> StageEpoch:
        """The epoch as its stage saw it."""
        return StageEpoch(
            epoch=epoch,
            compute_s=self.compute_s,
            communication_s=self.communication_s,
            idle_s=of_wall(self.wall_s, self.compute_s, self.communication_s).idle_s,
            versions_held=self.versions_held,
            version_differences=dict(sorted(self.version_differences.items())),
            weight_distance=self.distances / self.backwards if self.backwards else 0.0,
            largest_weight_distance=self.largest_distance,
        )

    def record(self, segment: Segment, test: dict[str, float], lr: float | None) -> EpochRecord:
        """The epoch as it is told.

        Args:
            segment: its last.
            lr: of its last update.
        """
        return EpochRecord(
            epoch=segment.epoch,
            mini_batches=self.mini_batches,
            seconds=self.wall_s,
            samples_per_s=self.samples / self.wall_s if self.wall_s else 0.0,
            train_loss=self.loss / self.weight if self.weight else math.nan,
            test=test,
            lr=lr,
        )
