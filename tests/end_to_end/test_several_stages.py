"""Workers that run several stages: runs against the oracle, inline and in processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.against_oracle import STEPS, train
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.recording import predicted
from timeprest.planner.systems.placement import placements
from timeprest.planner.systems.variants import VARIANTS
from timeprest.runtime.records.recording import measured
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings


def layouts(variant, devices):
    """Placements with two stages on each device, where the system takes them."""
    found = placements("loop", 2 * devices, devices) + placements("v", 2 * devices, devices)
    found += placements("v", 2 * devices - 1, devices)
    kind = VARIANTS[variant].placement
    return found if kind == "any" else found[:1] if kind == "loop" else found[1:2]


def cases(devices, counts):
    for name, variant in VARIANTS.items():
        for d in devices:
            for placement in layouts(name, d):
                least = variant.least_micro_batches(len(placement))
                several = sorted({max(n, least) for n in counts})
                for n in [1] if variant.whole_mini_batches else several:
                    yield name, placement, n


@pytest.mark.parametrize(("variant", "placement", "n"), [*cases((2, 3), (2, 4))])
def test_inline_equals_the_oracle(variant, placement, n, mlp_profile, mlp_target, tmp_path):
    stages = len(placement)
    profile = with_times(mlp_profile)
    plan = plan_by_hand(profile, variant, stages, n, placement=placement)
    summary = train(plan, mlp_target, "momentum", tmp_path / "run")
    for report in summary.stages:
        assert report.worker == placement[report.stage]
        assert report.peak.total <= plan.predicted.device_of(report.stage).memory_bytes
    assert summary.mini_batches == STEPS


# In processes ------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("variant", "placement", "n"),
    [
        ("timeprest", (0, 1, 1, 0), 4),
        ("pipedream-2bw", (0, 1, 0, 1), 4),
        ("zb-h1", (0, 1, 0), 2),
        ("i-timeprest", (0, 1, 2, 0, 1, 2), 2),
        ("timeprest", (0, 0), 2),
    ],
)
def test_processes_are_the_inline_run(variant, placement, n, mlp_profile, mlp_target, tmp_path):
    """Bit for bit, and what the oracle says."""
    stages = len(placement)
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, placement=placement)
    train(plan, mlp_target, "momentum", tmp_path / "processes", inline=False)
    train(plan, mlp_target, "momentum", tmp_path / "inline")
    inline = load_weights(tmp_path / "inline")
    for name, weight in load_weights(tmp_path / "processes").items():
        assert torch.equal(weight, inline[name]), name


# Records -----------------------------------------------------------------------------------


def test_a_lane_is_a_worker_with_its_stages(mlp_profile, mlp_target, tmp_path):
    """Spans don't overlap, messages go between lanes alone, memory is the worker's."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 4, 4, placement=(0, 1, 1, 0))
    summary = train(plan, mlp_target, "momentum", tmp_path / "run")
    found = measured(tmp_path / "run", (0, STEPS))
    assert [lane.stages for lane in found.lanes] == [(0, 3), (1, 2)]
    for k, lane in enumerate(found.lanes):
        spans = [span for span in found.spans if span.lane == k]
        assert {span.stage for span in spans} == {*lane.stages}
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        most = max(sum(point.nbytes) for point in found.memory if point.lane == k)
        assert most == summary.stages[lane.stages[0]].peak.total
    between = {(m.source_stage, m.target_stage, m.backward) for m in found.messages}
    assert between == {(0, 1, False), (1, 0, True), (2, 3, False), (3, 2, True)}
    wanted = predicted(plan, STEPS)
    assert len(found.messages) == len(wanted.messages)


def test_times_of_a_worker_are_of_all_its_stages(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 4, 2, placement=(0, 1, 0, 1))
    settings = RunSettings(task=mlp_target, steps=4)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    for first, second in (summary.stages[::2], summary.stages[1::2]):
        assert first.wall_s == second.wall_s
        assert first.idle_s == pytest.approx(second.idle_s, abs=1e-9)
        busy_s = sum(r.compute_s + r.communication_s for r in (first, second))
        assert first.wall_s == pytest.approx(busy_s + first.idle_s)
        assert first.sent_bytes > 0
