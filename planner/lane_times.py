"""Where the time of each worker goes in a recording: computing, communicating, idle."""

from __future__ import annotations

from typing import NamedTuple

from .recording import Recording


class LaneTimes(NamedTuple):
    """One lane's, in seconds; together they are the time from its first moment to its last.

    Attributes:
        compute_s: operations, and the loading of samples for them.
        communication_s: handing messages over, and summing gradients with others. What is predicted
            has these inside operations, or beside them.
    """

    compute_s: float
    communication_s: float
    idle_s: float

    @property
    def wall_s(self) -> float:
        """All of it."""
        return self.compute_s + self.communication_s + self.idle_s


def lane_times(recording: Recording) -> tuple[LaneTimes, ...]:
    """Of each lane."""
    count = len(recording.lanes)
    compute, communication = [0.0] * count, [0.0] * count
    first, last = [float("inf")] * count, [0.0] * count
    for span in recording.spans:
        compute[span.lane] += span.end_s - span.start_s
        first[span.lane] = min(first[span.lane], span.start_s)
        last[span.lane] = max(last[span.lane], span.end_s)
    for activity in recording.activities:
        lane, seconds = activity.lane, activity.end_s - activity.start_s
        if activity.kind == "load":
            compute[lane] += seconds
        elif activity.kind != "wait":
            communication[lane] += seconds
        first[lane] = min(first[lane], activity.start_s)
        last[lane] = max(last[lane], activity.end_s)
    return tuple(
        LaneTimes(own, other, max(last[k] - first[k] - own - other, 0.0))
        if last[k] > first[k]
        else LaneTimes(own, other, 0.0)
        for k, (own, other) in enumerate(zip(compute, communication, strict=True))
    )
