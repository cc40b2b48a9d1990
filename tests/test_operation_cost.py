"""What running a stage costs besides its layers: measured, and counted by plans."""

from __future__ import annotations

import msgspec
import pytest
from plans import with_times
from timeprest.planner.cluster import uniform_cluster
from timeprest.planner.search import solve
from timeprest.planner.stage_costs import stage_cost
from timeprest.profiles.profile import OperationCost
from timeprest.runtime.operation_cost import measure_operations

COST = OperationCost(forward_s=0.01, mini_batch_s=0.03)


def test_a_small_network_tells():
    found = measure_operations(1)
    assert 0 < found.forward_s < 0.1
    assert 0 < found.mini_batch_s < 0.1


def test_plans_count_it_and_stay_proven(mlp_profile):
    free = with_times(mlp_profile)
    dear = msgspec.structs.replace(free, operation=COST)
    names = [layer.name for layer in free.layers]
    cheap, costly = (stage_cost(p, names, 2, last=True) for p in (free, dear))
    assert costly.forward_s - cheap.forward_s == pytest.approx(0.01)
    assert costly.backward_s == cheap.backward_s
    assert costly.update_s - cheap.update_s == pytest.approx(0.03)
    for variant in ("timeprest", "gpipe"):
        before, after = (
            solve(p, uniform_cluster(2), variant, mini_batch=8, stages=2, micro_batches=4)
            for p in (free, dear)
        )
        assert after.predicted.period_s >= before.predicted.period_s + 4 * 0.01 + 0.03 - 1e-9
        assert after.solver.bound_s <= after.solver.objective_s
        assert after.solver.optimal == before.solver.optimal
