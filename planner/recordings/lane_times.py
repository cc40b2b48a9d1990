"""Where each worker's time goes: computing, communicating, loading, idle.

Idle is what is left of a worker's time in training when the other three are taken out of it; its
share of that time is what every table, page and figure calls idle (docs/reading_tables.md). What a
plan predicts is `timeline.idle_shares`, of the steady state; what a run measured is
`runtime.records.metrics.measured_times`, of all training.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..plan import Plan, pipeline_of
from ..systems.operations import FORWARD
from .recording import Recording


class LaneTimes(NamedTuple):
    """One worker's, in seconds; together they are all of its time.

    Attributes:
        compute_s: operations.
        communication_s: handing messages over, and summing gradients with others. What is predicted
            has these inside operations, or beside them.
        idle_s: none of it; waiting for messages above all.
        loading_s: samples: waiting for them, and cutting them into micro-batches. What loads in the
            background counts nowhere. None is predicted.
    """

    compute_s: float
    communication_s: float
    idle_s: float
    loading_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return sum(self)

    @property
    def idle_share(self) -> float:
        """Share of it that is idle."""
        return self.idle_s / self.wall_s if self.wall_s else 0.0

    @property
    def loading_share(self) -> float:
        """Share of it that goes into waiting for samples."""
        return self.loading_s / self.wall_s if self.wall_s else 0.0

    def per(self, count: float) -> LaneTimes:
        """Mean of so many."""
        return LaneTimes(*(seconds / count for seconds in self)) if count else self


def of_wall(
    wall_s: float, compute_s: float, communication_s: float, loading_s: float = 0.0
) -> LaneTimes:
    """What wasn't spent on any of it is idle. Times in seconds."""
    idle_s = max(wall_s - compute_s - communication_s - loading_s, 0.0)
    return LaneTimes(compute_s, communication_s, idle_s, loading_s)


def steady_times(plan: Plan) -> tuple[LaneTimes, ...]:
    """What the plan predicts for a mini-batch in the steady state: of each stage's device, with
    all that it runs; of replicas' devices, of the busiest. In seconds."""
    pipeline, period_s = pipeline_of(plan), plan.predicted.period_s
    found = []
    for s, stage in enumerate(plan.predicted.stages):
        idle_s = stage.idle_share * period_s
        work_s = sum(pipeline.work_s(t) for t in pipeline.beside(s))
        compute_s = min(work_s, period_s - idle_s)
        found.append(LaneTimes(compute_s, period_s - idle_s - compute_s, idle_s))
    return tuple(found)


def lane_times(recording: Recording) -> tuple[LaneTimes, ...]:
    """Of each lane, from its first moment in the recording to its last."""
    count = len(recording.lanes)
    compute, communication, loading = ([0.0] * count for _ in range(3))
    first, last = [float("inf")] * count, [0.0] * count
    for span in recording.spans:
        compute[span.lane] += span.end_s - span.start_s
        first[span.lane] = min(first[span.lane], span.start_s)
        last[span.lane] = max(last[span.lane], span.end_s)
    for activity in recording.activities:
        lane, seconds = activity.lane, activity.end_s - activity.start_s
        if activity.kind == "load":
            loading[lane] += seconds
        elif activity.kind != "wait":
            communication[lane] += seconds
        first[lane] = min(first[lane], activity.start_s)
        last[lane] = max(last[lane], activity.end_s)
    return tuple(
        of_wall(max(last[k] - first[k], 0.0), compute[k], communication[k], loading[k])
        for k in range(count)
    )


def mini_batches_in(recording: Recording, lane: int) -> float:
    """How many mini-batches' work a lane did in the recording, by its forwards."""
    mine = (span for span in recording.spans if span.lane == lane and span.kind == FORWARD)
    forwards = Counter(span.mini_batch for span in mine)
    return sum(forwards.values()) / max(forwards.values(), default=1)
