"""Workers that run several stages: runs against the oracle, inline and in processes."""

from __future__ import annotations

import pytest
import torch
from helpers.against_oracle import STEPS, train
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.systems.placement import placements
from timeprest.planner.systems.variants import VARIANTS
from timeprest.runtime.records.run_dir import load_weights


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
