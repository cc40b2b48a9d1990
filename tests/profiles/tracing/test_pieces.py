"""Wherever a plan may cut a model, the pieces give the whole's outputs and gradients."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from helpers.by_hand.cuts import places_to_cut
from helpers.by_hand.pieces import leaves_of, run_pieces, without_chance
from helpers.models.small import all_but, light_models, make_shallow
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace

CUTS = 2


@pytest.fixture(autouse=True)
def shallow_nets(monkeypatch):
    make_shallow(monkeypatch)


def drawn_groups(profile, rng):
    """A rising chain of downsets that the planner may use, as layers of each stage."""
    rows = places_to_cut(profile)
    below = set()
    groups = []
    for k in sorted(rng.sample(range(1, len(rows)), min(3, len(rows) - 1))):
        row = {int(i) for i in rows[k].nonzero()[0]}
        if below < row:
            groups.append(sorted(row - below))
            below = row
    rest = sorted(set(range(len(profile.layers))) - below)
    return [*groups, rest] if rest else groups


def check_cuts(target, batch_size, tolerance):
    """The same weights and buffers for every cut; traced once, and run once in one piece."""
    profile = measure(target, batch_size=batch_size, micro_batch_sizes=[batch_size], seconds=0)
    model = without_chance(target.model()).double()
    before = copy.deepcopy(model.state_dict())
    whole = copy.deepcopy(model)
    call = target.call(batch_size)[0]
    tensors = tuple(t.double() if t.is_floating_point() else t for t in call.tensors)
    call = Call(tensors, call.names)
    traced = trace(model, "it", call, front_end=profile.front_end)
    assert [layer.name for layer in traced.layers] == [la.name for la in profile.layers]
    wanted = call.of(whole)
    wanted_loss = sum(t.square().sum() for t in leaves_of(wanted))
    wanted_loss.backward()
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    rng = random.Random(str(profile.fingerprint))
    for _ in range(CUTS):
        model.load_state_dict(before)
        model.zero_grad()
        groups = drawn_groups(profile, rng)
        result, loss = run_pieces(traced, groups, tensors, 7, fake=False, leaves=leaves_of)
        assert type(result) is type(wanted)
        torch.testing.assert_close(loss, wanted_loss, rtol=tolerance, atol=tolerance)
        for got, want in zip(leaves_of(result), leaves_of(wanted), strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[n], rtol=tolerance, atol=tolerance, msg=n)


@pytest.mark.choice(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", all_but("resnet18", "resnet50", "hf-gpt2", "hf-llama"))
def test_pieces_equal_the_whole(name):
    check_cuts(resolve(name), 2, 1e-8)


@pytest.mark.choice(0)
@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in light_models() if "shuffle" in p.stem])
def test_pieces_of_an_onnx_model_equal_the_whole(path):
    check_cuts(resolve(str(path)), 2, 1e-8)
