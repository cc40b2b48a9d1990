"""What a run measured of each worker's time: computing, communicating, idle.

There is one figure of each, for the summary, the report, its page and its figures: of all training
from the first operation of an epoch to its last, so without start-up and evaluation
(docs/reading_tables.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...planner.recording import LaneTimes, Recording, lane_times, mini_batches_in
from .metrics import EpochRecord, StageEpoch


def training_times(epochs: Iterable[StageEpoch]) -> LaneTimes:
    """A worker's times in all its epochs, in seconds."""
    each = [LaneTimes(e.compute_s, e.communication_s, e.idle_s) for e in epochs]
    return LaneTimes(*(sum(seconds) for seconds in zip(*each, strict=True))) if each else _NONE


def measured_times(
    rank: int,
    epochs: Sequence[StageEpoch],
    records: Sequence[EpochRecord],
    recording: Recording | None,
) -> LaneTimes | None:
    """A worker's times per mini-batch, in seconds: of the epochs that are done.

    Args:
        epochs, records: as the worker and as the run has written them down.
        recording: what counts until the first epoch is done.

    Returns:
        None while there is neither.
    """
    lengths = {record.epoch: record.mini_batches for record in records}
    done = [epoch for epoch in epochs if epoch.epoch in lengths]
    if done:
        return training_times(done).per(sum(lengths[epoch.epoch] for epoch in done))
    if recording is None or all(span.lane != rank for span in recording.spans):
        return None
    return lane_times(recording)[rank].per(mini_batches_in(recording, rank))


_NONE = LaneTimes(0.0, 0.0, 0.0)
