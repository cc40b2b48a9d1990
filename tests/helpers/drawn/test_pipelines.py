"""Drawn pipelines are such as plans have (helpers/drawn/pipelines.py)."""

from __future__ import annotations

import pytest
from helpers.drawn.cases import examples
from helpers.drawn.pipelines import pipelines
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.systems.placement import check_placement
from timeprest.planner.systems.variants import VARIANTS


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("system", sorted(VARIANTS))
@settings(max_examples=examples(40))
@given(data=st.data())
def test_stages_are_placed_as_their_system_has_them(system, placed, data):
    drawn = data.draw(pipelines((system,), placed=placed))
    check_placement(drawn.variant, drawn.placement, drawn.stages)
    assert not placed or len(drawn.placement) == drawn.stages
