"""What is planned of each system where nothing is asked for: its paper's own setting, which
docs/systems.md has a table of."""

from __future__ import annotations

import pytest
from helpers.by_hand.profiles import chain
from timeprest.planner.search.request import PlanRequest
from timeprest.planner.systems.variants import VARIANTS

STAGES = 4
S_LESS_S = (4, 3, 2, 1)
SETTINGS = {
    "timeprest": (S_LESS_S, (3, 3, 3, 3)),
    "timeprest-stashed": (S_LESS_S, (3, 3, 3, 3)),
    "i-timeprest": (S_LESS_S, (3, 3, 3, 3)),
    "v-timeprest": (S_LESS_S, (3, 2, 1, 0)),
    "pipedream": (S_LESS_S, (3, 2, 1, 0)),
    "pipedream-vertical-sync": (S_LESS_S, (3, 3, 3, 3)),
    "pipedream-unstashed": (S_LESS_S, (3, 3, 3, 3)),
    "spectrain": (S_LESS_S, (3, 2, 1, 0)),
    "pipeoptim": (S_LESS_S, (3, 2, 1, 0)),
    "pipedream-nesterov": (S_LESS_S, (3, 2, 1, 0)),
    "pipedream-2bw": ((2, 2, 2, 1), (1, 1, 1, 1)),
}
"""Mini-batches in flight by stage, and how many updates late each stage's gradients are."""


@pytest.mark.parametrize("system", VARIANTS)
def test_a_papers_own_setting_is_planned_where_nothing_is_asked_for(system):
    request = PlanRequest(chain(STAGES), variant=system, devices=STAGES, stages=STAGES)
    plan = request.read().best()
    limits = tuple(stage.in_flight for stage in plan.stages)
    delays = tuple(stage.delay for stage in plan.predicted.stages)
    n = plan.micro_batches
    assert plan.update_every == 1
    if VARIANTS[system].flushes:
        assert (max(limits), max(delays)) == (1, 0)
    elif system == "pipemare":
        # As many micro-batches as there are stages behind, of which N are a mini-batch, and one.
        behind = range(STAGES - 1, -1, -1)
        assert limits == tuple(-(-k // n) + 1 if k else 1 for k in behind)
    else:
        assert (limits, delays) == SETTINGS[system]
    if VARIANTS[system].whole_mini_batches:
        assert n == 1
    if system == "pipedream-2bw":
        assert n >= STAGES
