"""Models that change at their first forward: looks that put it back, and one that stays."""

from __future__ import annotations

import pytest
import torch
from front_end_tasks import Alone, Fast, FirstForward
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from timeprest.profiles.errors import TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.call import Call, settle, unchanged
from timeprest.profiles.tracing.front_ends import trace
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.check import check
from torch._subclasses.fake_tensor import FakeTensorMode

FILE = TESTS / "tasks/front_end_tasks.py"
KINDS = {"hooks": 4, "exchanges": 1, "another class": 1, "freezes": 1}
"""What a first forward does, and how many tensors the result has."""


def model_and_call(kind):
    torch.manual_seed(0)
    model = FirstForward(kind).double()
    return model, Call((torch.stack([Alone(0)[k][0] for k in range(3)]),), (None,))


def seen(model):
    """Hooks, classes and what is trained."""
    return (
        [(name, type(m), len(m._forward_hooks)) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad, p._backward_hooks) for name, p in model.named_parameters()],
        model.training,
        len(model.handles),
        model.state,
    )


@pytest.mark.parametrize("kind", [*KINDS, "makes weights", "carries"])
def test_a_look_leaves_nothing_of_a_first_forward(kind):
    model, call = model_and_call(kind)
    before = seen(model)
    for _ in range(2):
        with unchanged(model):
            found = call.of(model)
            assert len(found["kept"]) == 2 * (kind in ("hooks", "carries"))
            assert seen(model) != before
        assert seen(model) == before


def test_a_look_leaves_no_hook_on_a_weight_and_no_other_mode():
    model, _ = model_and_call("freezes")
    model.register_buffer("seen", torch.zeros(()), persistent=False)
    model.a.weight.register_hook(lambda gradient: gradient)
    hooks = [list(p._backward_hooks or ()) for p in model.parameters()]
    with unchanged(model):
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient)
        model.b.weight.register_post_accumulate_grad_hook(lambda p: None)
        model.a.eval()
        model.register_buffer("other", torch.ones(()), persistent=False)
        del model.seen
    assert [list(p._backward_hooks or ()) for p in model.parameters()] == hooks
    assert not model.b.weight._post_accumulate_grad_hooks
    assert model.a.training
    assert list(dict(model.named_buffers())) == ["seen"]
    assert model._non_persistent_buffers_set == {"seen"}


class Loading(dict):
    """Loads what it gives, as transformers does the classes of all its models."""

    def __len__(self):
        return 3

    def items(self):
        raise ValueError("not there")


def test_a_dict_loads_nothing_for_a_look():
    model, _ = model_and_call("freezes")
    model.classes = Loading(first=1)
    with unchanged(model):
        model.classes["second"] = 2
    assert dict.items(model.classes) == {"first": 1}.items()


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_first_forward_does_once_stays(kind, fake):
    model, call = model_and_call(kind)
    weights = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    drawn = torch.get_rng_state()
    settle(model, call, "it", fake=fake)
    once = seen(model)
    assert len(model.a._forward_hooks) == (kind == "hooks")
    assert (type(model.attention) is Fast) == (kind in ("exchanges", "another class"))
    assert torch.equal(torch.get_rng_state(), drawn)
    call.of(model)
    settle(model, call, "it")
    assert seen(model) == once
    for name, p in model.named_parameters():
        assert id(p) == weights[name][0]
        assert torch.equal(p, weights[name][1])
    assert trace(model, "it", call).layers


def test_nothing_stays_of_a_first_forward_that_hooks_nothing():
    model, call = model_and_call("none")
    settle(model, call, "it")
    assert not model.ready


def test_what_is_carried_on_is_not_begun():
    """The flag of hooks that are there stays, a state that another mini-batch left doesn't."""
    model, call = model_and_call("carries")
    settle(model, call, "it")
    assert len(model.handles) == 2
    assert model.state is None


def test_nothing_fake_is_carried_on():
    """A profile of a device that isn't there runs on tensors without numbers."""
    with FakeTensorMode():
        model = FirstForward("carries")
        settle(model, Call((torch.randn(3, 4),), (None,)), "it")
    assert len(model.handles) == 2
    assert model.state is None


def test_weights_that_a_first_forward_makes_are_refused():
    model, call = model_and_call("makes weights")
    with pytest.raises(TargetError, match=r"^it: parameter 'attention.query.weight' is made by "):
        settle(model, call, "it")


@pytest.mark.parametrize(
    "name", ["FirstForwardTask", "ExchangesTask", "OtherClassTask", "FreezesTask"]
)
def test_they_are_trained_as_one_process_does(name):
    profile = measure(
        resolve(f"{FILE}:{name}"), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0
    )
    plan = plan_by_hand(with_times(profile), "pipedream-flush", 3, 4)
    report = check(plan, RunSettings(task=f"{FILE}:{name}"), inline=True)
    assert report.verdict == "same"
    assert all(d.absolute < 1e-14 for one in report.against for d in one.differences)
