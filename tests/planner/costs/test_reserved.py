"""What each process takes of its GPU besides tensors: planned once for each, against its memory."""

from __future__ import annotations

import pytest
from helpers.by_hand.profiles import chain
from helpers.plans import lone_stages
from msgspec.structs import replace
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.memory import Moment
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import Plan
from timeprest.planner.question import Question
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.profile import Profile

RESERVED, SHARE = 5000, 0.25
BARE = chain(6)
TAKES = replace(BARE, reserved_bytes=RESERVED, reserved_share=SHARE)


def with_more(memory_bytes):
    return memory_bytes + RESERVED + round(SHARE * memory_bytes)


def evaluated(profile, placement=()):
    stages = lone_stages([["n0", "n1"], ["n2", "n3"], ["n4", "n5"]], [1, 1, 1])
    if placement:
        pairs = zip(stages, placement, strict=True)
        stages = tuple(replace(stage, devices=(d,)) for stage, d in pairs)
    asked = Question(profile, uniform_cluster(3), "gpipe", 4, 1.0)
    return evaluate(asked, stages, 2).prediction


def test_it_is_held_besides_what_a_run_accounts_for():
    for bare, found in zip(evaluated(BARE).stages, evaluated(TAKES).stages, strict=True):
        assert found.memory_bytes == found.memory.total == with_more(bare.memory_bytes)
        assert found.accounted_memory == bare.accounted_memory
        assert found.holds == bare.holds
        more = found.memory_bytes - bare.memory_bytes
        assert found.memory.workspace_bytes == bare.memory.workspace_bytes + more


def test_a_process_of_several_stages_takes_it_once():
    bare, found = (evaluated(profile, (0, 1, 0)) for profile in (BARE, TAKES))
    for before, device in zip(bare.devices, found.devices, strict=True):
        assert device.memory_bytes == with_more(before.memory_bytes)
        assert device.accounted == before.accounted


@pytest.mark.parametrize("options", [{}, {"recompute": "auto"}, {"stages_per_device": 2}])
def test_plans_fit_with_it(options, tmp_path):
    def plan(profile, memory):
        cluster = uniform_cluster(2, memory)
        return solve(
            profile, cluster, "gpipe", micro_batches=2, optimizer_state_factor=1.0, **options
        )

    most = max(stage.memory_bytes for stage in evaluated(BARE).stages) * 2
    bare = plan(BARE, most)
    found = plan(TAKES, with_more(most))
    assert [stage.nodes for stage in found.stages] == [stage.nodes for stage in bare.stages]
    for s, stage in enumerate(found.stages):
        held = found.predicted.device_of(s).memory_bytes
        assert held <= with_more(most)
        assert held == with_more(bare.predicted.device_of(s).memory_bytes)
        assert stage.devices == bare.stages[s].devices
    with pytest.raises(InfeasibleError):
        plan(TAKES, RESERVED)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    assert found.profile.reserved_bytes == RESERVED


def test_profiles_say_it_where_it_was_measured(tmp_path):
    for profile, says in ((BARE, False), (TAKES, True)):
        path = tmp_path / f"{says}.json"
        profile.save(path)
        assert ("reserved_bytes" in path.read_text()) is says
        assert Profile.load(path) == profile


@pytest.mark.parametrize("placement", [(), (0, 1, 0)])
def test_an_optimizers_step_takes_more_while_it_runs(placement):
    """More than all else does, here: its moment is the peak."""
    steps = replace(BARE.optimizer, scratch_bytes_per_parameter_byte=3.0)
    bare = evaluated(BARE, placement)
    found = evaluated(replace(BARE, optimizer=steps), placement)
    for before, stage in zip(bare.stages, found.stages, strict=True):
        assert stage.accounted_memory == before.accounted_memory
        assert stage.memory.workspace_bytes == 3 * stage.parameter_bytes
        assert stage.memory.activations_bytes == 0
        assert stage.memory_bytes > before.memory_bytes
        assert stage.holds.total(Moment("F", 1, 0, 1)) == before.holds.total(Moment("F", 1, 0, 1))
    for before, device in zip(bare.devices, found.devices, strict=True):
        assert device.accounted == before.accounted
        assert device.memory_bytes > before.memory_bytes
