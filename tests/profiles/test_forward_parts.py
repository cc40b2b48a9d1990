"""Forwards that mix the samples of a batch are told, and no others."""

from __future__ import annotations

import copy
import random
import re

import numpy as np
import pytest
import torch
from timeprest.profiles.tasks.forward_parts import why_mixed
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.random_states import same_states, states
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations


class Layer(nn.Module):
    """A function of features ``[m, 32]`` between two linear layers, and of modules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 3)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        found = self.function(self, torch.tanh(self.first(x)))
        return (self.last(found[0]), *found[1:]) if isinstance(found, tuple) else self.last(found)


def balanced(model, h):
    used = model.gate(h).softmax(1)
    return h * used.amax(1, keepdim=True), used.mean(0).square().sum()


def experts(model, h):
    weights, chosen = model.gate(h).softmax(1).topk(2)
    sparse = h.new_zeros(len(h), 4).scatter(1, chosen, weights)
    return sum(model.gate(h)[:, k : k + 1] * h * sparse[:, k : k + 1] for k in range(4))


def counting(model, h):
    model.calls += 1
    return h * model.calls


def remembering(model, h):
    found = h + model.norm.running_mean
    model.norm.running_mean.add_(h.detach().mean(0))
    return found


def sequence(h):
    return h.view(-1, 4, 8)


MIXING = {
    "centred": (lambda model, h: h - h.mean(0), {}, "the forward, ahead of 'last' .Linear."),
    "by the first": (lambda model, h: h - h[0], {}, "the forward, ahead of 'last' .Linear."),
    "attention over the batch": (
        lambda model, h: h + model.attention(h, h, h)[0],
        {"attention": nn.MultiheadAttention(32, 2)},
        "'attention' .MultiheadAttention. mixes",
    ),
    "a balance": (balanced, {"gate": nn.Linear(32, 4)}, "output 1 of the model's result"),
    "all pairs": (lambda model, h: (h, h @ h.t()), {}, "the model's forward mixes"),
    "samples last": (lambda model, h: (h, (h - h.mean(0)).t()), {}, "the model's forward mixes"),
}

OTHERS = {
    "batch norm": (lambda model, h: model.norm(h), {"norm": nn.BatchNorm1d(32)}),
    "batch norm alone": (
        lambda model, h: model.norm(h),
        {"norm": nn.BatchNorm1d(32, track_running_stats=False)},
    ),
    "function": (lambda model, h: functional.batch_norm(h, None, None, training=True), {}),
    "dropout": (
        lambda model, h: functional.alpha_dropout(model.drop(h), 0.3, training=model.training),
        {"drop": nn.Dropout(0.5)},
    ),
    "drop path": (lambda model, h: h * (torch.rand(len(h), 1) > 0.3), {}),
    "layer drop": (lambda model, h: h if random.random() < 0.5 else 2 * h, {}),
    "attention": (
        lambda model, h: model.attention(*[sequence(h)] * 3)[0].flatten(1),
        {"attention": nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)},
    ),
    "encoder": (
        lambda model, h: model.encoder(sequence(h)).flatten(1),
        {"encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)},
    ),
    "lstm": (
        lambda model, h: (model.lstm(sequence(h))[0].flatten(1), *model.lstm(sequence(h))[1]),
        {"lstm": nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)},
    ),
    "experts": (experts, {"gate": nn.Linear(32, 4)}),
    "embedding": (
        lambda model, h: model.embedding((h > 0).long()).mean(1) + h,
        {"embedding": nn.Embedding(2, 32, max_norm=0.5)},
    ),
    "group norm": (
        lambda model, h: model.norm(sequence(h)).flatten(1),
        {"norm": nn.GroupNorm(2, 4)},
    ),
    "instance norm": (
        lambda model, h: model.norm(sequence(h)).flatten(1),
        {"norm": nn.InstanceNorm1d(4, track_running_stats=True)},
    ),
    "spectral norm": (
        lambda model, h: model.linear(h),
        {"linear": parametrizations.spectral_norm(nn.Linear(32, 32))},
    ),
    "weight norm": (
        lambda model, h: model.linear(h),
        {"linear": parametrizations.weight_norm(nn.Linear(32, 32))},
    ),
    "a buffer": (remembering, {"norm": nn.BatchNorm1d(32)}),
    "a count": (counting, {}),
    "a mean": (lambda model, h: (h, h.square().mean(), model.last.bias), {}),
    "figures": (lambda model, h: (h, h.argmax(1), len(h), h.detach().mean(0).norm()), {}),
    "pairs": (
        lambda model, h: (h.view(-1, 2, 32) - h.view(-1, 2, 32).mean(1, True)).flatten(0, 1),
        {},
    ),
    "refuses": (lambda model, h: h - h.mean(0) if len(h) == 8 else h.nothing, {}),
    "longest": (lambda model, h: (h, h[:, : 3 + int(10 * h.abs().max())]), {}),
}


def told(function, modules, dtype=torch.float32):
    torch.manual_seed(0)
    model = Layer(function, **copy.deepcopy(modules)).to(dtype)
    model.calls = 0
    x = torch.randn(8, 20, dtype=dtype)

    def loss(result, part):
        first, *others = result if isinstance(result, tuple) else (result,)
        # Of figures nothing is trained.
        if len(others) == 3:
            others = []
        return first.float().mean() + sum(other.float().mean() for other in others)

    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before, kept = states(), dict(vars(model))
    found = why_mixed(model, [Call((x[:4],), (None,)), Call((x[4:],), (None,))], loss)
    assert same_states(before, states())
    assert vars(model) == kept
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert all(not module._forward_hooks for module in model.modules())
    return found


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_named(name):
    function, modules, why = MIXING[name]
    assert re.match(why, told(function, modules))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_said_of_others(name, dtype):
    assert told(*OTHERS[name], dtype) == ""


@pytest.mark.parametrize(("counted", "told"), [(True, False), (False, True)])
def test_a_mean_over_what_a_loss_counts_is_no_other_term(counted, told):
    """As of labels, of which a part of the samples has more, in a model that has its loss."""
    torch.manual_seed(0)
    model = Layer(lambda model, h: (h, h[h[:, 0] > 0].square().mean()))
    x = torch.randn(8, 20)
    x[4:] += 9 * model.first.weight[0].detach()
    parts = [Call((some,), (None,)) for some in (x[:4], x[4:])]

    def loss(result, part):
        count = (torch.tanh(model.first(parts[part].tensors[0]))[:, 0] > 0).sum()
        return (result[1] * count, count) if counted else result[1]

    assert ("output 1 of the model's result" in why_mixed(model, parts, loss)) == told


def test_numbers_of_other_generators_are_seen():
    assert told(lambda model, h: h * float(np.random.rand()), {}) == ""
