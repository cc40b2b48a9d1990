"""Gradient messages, and those that say that there is no gradient."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.plans import plan_by_hand
from timeprest.profiles.errors import PlanError
from timeprest.runtime.prepare.messages import add_gradients, mark_missing, missing_gradients
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.settings import RunSettings

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]


def message(dtype, *gone):
    """Two samples of three numbers for each slot, all 1."""
    found = torch.ones(len(gone), 2, 3, dtype=dtype)
    for slot, none in zip(found, gone, strict=True):
        if none:
            mark_missing(slot)
    return found


@pytest.mark.parametrize("dtype", TYPES + COMPLEX)
def test_slots_without_a_gradient_are_known(dtype):
    assert message(dtype, True).isnan().all()
    for in_parts in (True, False):
        found = missing_gradients(message(dtype, True, False, True), in_parts=in_parts)
        assert found == [True, False, True]
    assert missing_gradients(message(dtype, False)) == [False]
    assert missing_gradients(message(dtype, True).clone()) == [True]
    # What computations make isn't taken for it.
    made = torch.tensor([[0.0]], dtype=dtype) / 0.0
    assert (
        missing_gradients(made)
        == missing_gradients(-made)
        == missing_gradients(made * 0 + 1)
        == [False]
    )
    assert missing_gradients(torch.full((1, 2), float("inf"), dtype=dtype).sub(float("inf"))) == [
        False
    ]


@pytest.mark.parametrize("dtype", TYPES + COMPLEX)
def test_messages_add_up(dtype):
    total = message(dtype, True, True, False, False)
    add_gradients(total, message(dtype, True, False, True, False))
    assert missing_gradients(total) == [True, False, False, False]
    assert total[1:].tolist() == [[[k] * 3] * 2 for k in (1.0, 1.0, 2.0)]
    add_gradients(total, message(dtype, False, False, False, True))
    assert missing_gradients(total) == [False] * 4
    assert total[:, 0, 0].tolist() == [1.0, 2.0, 2.0, 2.0]


def test_samples_without_one_beside_others_count_as_zero():
    found = message(torch.float32, False, True)
    mark_missing(found[0, 1])
    assert missing_gradients(found) == [False, True]
    assert found[0].tolist() == [[1.0] * 3, [0.0] * 3]
    # Samples may be another dimension.
    found = message(torch.float32, False)
    mark_missing(found[0, :, 2])
    assert missing_gradients(found) == [False]
    assert found[0].tolist() == [[1.0, 1.0, 0.0]] * 2


def test_what_has_no_mark_is_zero():
    found = torch.ones(1, 2).to(torch.float8_e5m2)
    mark_missing(found[0])
    assert missing_gradients(found) == [False]
    assert not found.float().any()
    assert missing_gradients(torch.ones(2, 0)) == [False, False]
    assert missing_gradients(torch.ones(2)) == [False, False]


def test_edges_say_which_messages_have_gradients(mlp_profile, mlp_target):
    """Schedules are made of the plan's edges: a backward would come before its gradient."""
    plan = plan_by_hand(mlp_profile, "pipedream-flush", 2, 2)
    edges = tuple(msgspec.structs.replace(edge, needs_grad=False) for edge in plan.edges)
    with pytest.raises(PlanError, match=r"edges: .* has needs_grad true in this model; .* check"):
        prepare(msgspec.structs.replace(plan, edges=edges), RunSettings(task=mlp_target, steps=1))
