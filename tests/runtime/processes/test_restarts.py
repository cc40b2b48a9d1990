"""--max-restarts: whoever is killed, and whenever, the run ends with the weights it would have had.

`make chaos` draws CHAOS_RUNS of them; by default each rank is killed once.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from helpers.processes.chaos import drawn
from timeprest.profiles.errors import RunError, StoppedError, UserError
from timeprest.runtime.records.run_dir import RunDir, load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.trainer import with_restarts

RUNS = int(os.environ.get("CHAOS_RUNS", "2"))
MINI_BATCHES = 60


def failing(times, error=RunError):
    calls = []

    def attempt(name):
        calls.append(name)
        if len(calls) <= times:
            raise error(f"failure {len(calls)}")
        return name

    return calls, partial(attempt, "first"), partial(attempt, "again")


def test_it_goes_on_after_failures_and_tells_of_them():
    calls, first, again = failing(2)
    told = []
    assert with_restarts(first, again, 2, lambda event: told.append(str(event))) == "again"
    assert calls == ["first", "again", "again"]
    assert told == ["failure 1; restart 1 of 2", "failure 2; restart 2 of 2"]


def test_the_last_failure_is_the_error():
    _, first, again = failing(3)
    with pytest.raises(RunError, match="failure 3"):
        with_restarts(first, again, 2, lambda _: None)
    _, first, again = failing(1)
    with pytest.raises(RunError, match="failure 1"):
        with_restarts(first, again, 0, lambda _: None)


@pytest.mark.parametrize("error", [UserError, StoppedError])
def test_what_the_user_has_to_mend_or_has_stopped_is_not_tried_again(error):
    calls, first, again = failing(1, error)
    with pytest.raises(error):
        with_restarts(first, again, 5, lambda _: None)
    assert calls == ["first"]


@pytest.fixture(scope="module")
def undisturbed(mlp_profile, mlp_target, tmp_path_factory):
    """A run by the same plan and settings that nobody disturbs."""
    plan = plan_by_hand(with_times(mlp_profile), "pipedream-2bw", 2, 4)
    adam = OptimizerChoice(name="adam", lr=0.01)
    settings = RunSettings(
        task=mlp_target,
        steps=MINI_BATCHES,
        optimizer=adam,
        evaluate=False,
        timeout_s=5,
        checkpoint_every=7,
    )
    where = tmp_path_factory.mktemp("undisturbed")
    run(plan, settings, where, inline=True)
    return plan, settings, load_weights(where)


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(RUNS))
def test_a_killed_worker_changes_nothing(seed, undisturbed, tmp_path):
    plan, settings, wanted = undisturbed
    where = tmp_path / "run"
    told = []
    with drawn(seed, 2, MINI_BATCHES, RunDir(where).statuses) as killer:
        with_restarts(
            partial(run, plan, settings, where),
            partial(resume, where),
            1,
            lambda event: told.append(str(event)),
        )
    assert killer.killed_at is not None
    assert len(told) == 1, (killer.killed_at, killer.how)
    assert f"stage {killer.rank} (rank {killer.rank})" in told[0]
    found = load_weights(where)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), (name, killer.killed_at)
