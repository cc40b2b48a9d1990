"""What a profile says is left: held against what it takes then."""

from __future__ import annotations

import pytest
import torch
from timeprest.profiles.measuring import bench
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import InputSpec, Target
from torch import nn


class Clock:
    """Goes on when a layer is called."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize("each_s", [0.05, 5.0])
@pytest.mark.parametrize("seconds", [0.0, 15.0])
def test_what_is_left_is_what_it_takes(each_s, seconds, monkeypatch):
    """Long rounds go on when the seconds are over: then 0 s weren't left."""
    clock = Clock()

    class Slow(nn.Linear):
        def forward(self, x):
            clock.now += each_s
            return super().forward(x)

    told = []

    def progress(what, done, total):
        told.append((clock.now, what, done, total))

    monkeypatch.setattr(bench, "time", clock)
    monkeypatch.setattr(bench.Bench, "worst_error", lambda self: 1.0)
    monkeypatch.setattr(bench, "_MAX_ROUNDS", 40)
    make = lambda: nn.Sequential(*(Slow(4, 4) for _ in range(3)))  # noqa: E731
    target = Target("it", None, make, (InputSpec((4,), torch.float32),))
    # Kept whole, a layer is called when it is measured.
    measure(
        target,
        batch_size=2,
        micro_batch_sizes=[1, 2],
        seconds=seconds,
        relative_error=1e-9,
        progress=progress,
        granularity="0,1,2",
    )
    known = [(now, total - done) for now, _, done, total in told if total]
    end = max(now for now, what, _, _ in told if what.startswith("micro-batch size"))
    assert len(known) > 10
    # None of them is far off, and each says that there is something left.
    for now, left in known:
        assert left > 0
        assert abs(now + left - end) <= max(0.4 * end, 2 * each_s), (now, left, end)
    others = {what for _, what, _, total in told if not total}
    assert {"finding the graph", "memory of a step", "shapes that depend on values"} <= others
