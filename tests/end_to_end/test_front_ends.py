"""Models of every front end are trained: gpipe equals plain training, and processes inline."""

from __future__ import annotations

import msgspec
import pytest
from helpers.alike import check_processes
from helpers.paths import TESTS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, profiled
from timeprest.profiles.errors import PlanError
from timeprest.profiles.profile import ELSEWHERE
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

FILE = TESTS / "tasks/front_end_tasks.py"
STEPS = 5

TASKS = {"ByExport": "export", "ByStaticExport": "export-static", "ByChildren": "sequential"}


def plan_of(name, variant, stages, micro_batches, **options):
    profile = profiled(name, **options)
    return profile, plan_by_hand(profile, variant, stages, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_gpipe_equals_plain_training(name, tmp_path):
    name, front_end = f"{FILE}:{name}", TASKS[name]
    profile, plan = plan_of(name, "gpipe", 3, 4)
    assert profile.front_end == plan.profile.front_end == front_end
    assert profile.refusals
    run(plan, RunSettings(task=name, steps=STEPS), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_plainly(name, plan.mini_batch, STEPS))


@pytest.mark.parametrize("granularity", ["op", "b,c"])
def test_other_granularities_run(granularity, tmp_path):
    name = f"{FILE}:ByExport"
    profile, plan = plan_of(name, "gpipe", 2, 2, granularity=granularity)
    assert profile.granularity == plan.profile.granularity == granularity
    run(plan, RunSettings(task=name, steps=STEPS), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_plainly(name, plan.mini_batch, STEPS))


def test_a_module_that_is_kept_whole_runs_as_it_is(tmp_path):
    """With the user's own backward, hooks and checkpointing inside."""
    name = f"{FILE}:KeptWhole"
    profile, plan = plan_of(name, "gpipe", 4, 2, granularity="own")
    assert [layer.name for layer in profile.layers] == ["first", "own", "more", "last.linear"]
    run(plan, RunSettings(task=name, steps=STEPS), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_plainly(name, plan.mini_batch, STEPS))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_equal_inline_on_an_exported_graph(tmp_path):
    name = f"{FILE}:ByExport"
    _, plan = plan_of(name, "timeprest", 2, 4)
    check_processes(plan, RunSettings(task=name, steps=STEPS), tmp_path)


def test_what_has_no_model_behind_it_is_refused(tmp_path):
    name = f"{FILE}:ByExport"
    _, plan = plan_of(name, "gpipe", 2, 4)
    for change, message in (
        (
            {"front_end": "pipedream", "device": ELSEWHERE},
            r"numbers \(pipedream\) .*can be planned and shown but not run",
        ),
        ({"autocast": "float16"}, "under autocast .float16.*--autocast bf16 or off"),
        ({"granularity": "op"}, "another model"),
        (
            {"target": "net.py:Net", "front_end": "fx"},
            "plan: was made for net.py:Net, and as that was traced .*:ByExport can't be: profile",
        ),
    ):
        changed = msgspec.structs.replace(plan.profile, **change)
        with pytest.raises(PlanError, match=message):
            run(
                msgspec.structs.replace(plan, profile=changed),
                RunSettings(task=name, steps=1),
                tmp_path / message[:4],
                inline=True,
            )
