"""A stage's figures on their way from a segment to the epoch of its worker."""

from __future__ import annotations

from dataclasses import fields

from msgspec.structs import asdict, replace
from timeprest.runtime.prepare.data import Segment
from timeprest.runtime.records.metrics import EpochSums, SegmentMetrics, StageEpoch, worker_epochs
from timeprest.runtime.weights.staleness import Staleness

OF_A_SEGMENT = {"first_s", "last_s", "first_update_s", "last_update_s", "step_s", "counted"}
"""What no epoch is asked for."""
OF_RECORDS = {"mini_batches", "samples", "weighted_loss", "weight", "wall_s", "others_s"}
"""Of sums, what goes into the run's records of epochs, or into idle time."""
RENAMED = {
    **dict.fromkeys(("backwards", "distances"), "weight_distance"),
    "largest_distance": "largest_weight_distance",
}
"""Of sums, what epochs have by other names."""


def test_no_figure_of_a_stage_is_left_out():
    """Each that differs from its default differs from it further on."""
    figures = SegmentMetrics(**{f.name: k + 2.0 for k, f in enumerate(fields(SegmentMetrics))})
    assert {f.name for f in fields(figures)} - OF_A_SEGMENT <= set(EpochSums.__struct_fields__)
    seen = Staleness({1: 3}, distance=6.0, largest_distance=4.0, backwards=3, versions_held=2)
    sums, nothing = EpochSums(), asdict(EpochSums())
    sums.add(Segment(1, 0, 5, 40, 8, 1), figures, seen, [SegmentMetrics(3.0, 2.0, 1.0)])
    assert [name for name, value in asdict(sums).items() if value == nothing[name]] == []
    kept = {RENAMED.get(name, name) for name in nothing} - OF_RECORDS
    assert kept | {"epoch", "idle_s"} == set(StageEpoch.__struct_fields__)
    sums.wall_s = 1000.0
    epoch = sums.stage_epoch(1)
    assert [name for name, value in asdict(epoch).items() if not value] == []
    (both,) = worker_epochs([[epoch], [epoch]])
    doubled = {n: 2 * getattr(epoch, n) for n in ("compute_s", "communication_s", "loading_s")}
    assert both == replace(epoch, **doubled, version_differences={1: 6})
