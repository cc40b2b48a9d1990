"""The backward in two parts: together exactly the whole backward, and nothing is done twice."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from helpers.by_hand.pieces import leaves_of, run_pieces, without_chance
from helpers.models.any import EXAMPLES
from helpers.models.small import ZOO
from helpers.plans import plan_by_hand, with_times
from timeprest.profiles.autograd.boundary import Inlet
from timeprest.profiles.autograd.split_backward import SplitBackward
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import shared_state
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

TOLERANCE = 1e-12


def assert_same(got, wanted):
    """Both None, or the same to so many digits of the largest entry."""
    assert (got is None) == (wanted is None)
    if got is not None:
        scale = max(float(wanted.abs().max()), 1e-30)
        assert float((got - wanted).abs().max()) <= TOLERANCE * scale


# Models in pieces --------------------------------------------------------------------------------


def cuts_of(traced, pieces):
    """Consecutive layers in about so many groups, tied ones on one."""
    count = len(traced.layers)
    borders = {round(k * count / pieces) for k in range(1, pieces)}
    for group in shared_state(traced).tied:
        borders -= set(range(min(group) + 1, max(group) + 1))
    ends = [0, *sorted(borders), count]
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def check_model(model, call, front_end, pieces):
    model = without_chance(model).double()
    tensors = tuple(t.double() if t.is_floating_point() else t for t in call.tensors)
    found = {}
    for split in (False, True):
        mine = copy.deepcopy(model)
        traced = trace(mine, "it", Call(tensors, call.names), front_end=front_end)
        groups = cuts_of(traced, pieces)
        run_pieces(traced, groups, tensors, 7, fake=False, leaves=leaves_of, split=split)
        found[split] = {name: p.grad for name, p in mine.named_parameters()}
    assert any(grad is not None for grad in found[False].values())
    for name, wanted in found[False].items():
        assert_same(found[True][name], wanted)


@pytest.mark.parametrize("name", ["mlp", "resnet18", "gpt2", "bert", "gnmt"])
def test_models(name):
    """Convolutions, norms, attention, embeddings, recurrent layers, tied weights."""
    target = resolve(ZOO[name])
    check_model(target.model(), target.call(2)[0], None, 3)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_small_models(name, pieces):
    """In-place operations, several inputs, a recurrent layer, tied weights."""
    make, inputs = EXAMPLES[name]
    tensors = inputs(3)
    check_model(make(), Call(tensors, (None,) * len(tensors)), None, pieces)


# One graph ---------------------------------------------------------------------------------------


def both_ways(make, function, inputs):
    """Check both; returns the split one, after its first part.

    Args:
        make: the module.
        function: (module, *inputs) → outputs that get gradients.
        inputs: received tensors; those that aren't floating point need no gradient.
    """
    torch.manual_seed(0)
    module = make().double()
    runs = []
    for split in (False, True):
        mine = copy.deepcopy(module)
        inlets = [Inlet() if t.is_floating_point() else None for t in inputs]
        arguments = [
            t.clone() if inlet is None else inlet.admit(t.clone())
            for t, inlet in zip(inputs, inlets, strict=True)
        ]
        outs = [out for out in function(mine, *arguments) if out.requires_grad]
        torch.manual_seed(1)
        grads = [torch.randn_like(out) for out in outs]
        edges = [get_gradient_edge(out) for out in outs]
        admitted = [inlet for inlet in inlets if inlet is not None]
        del outs, arguments
        # Gradients of an earlier micro-batch are there already.
        for p in mine.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        half = None
        if split:
            half = SplitBackward(edges, grads, admitted, mine.parameters())
            half.inputs()
            early = [p.grad is not None and bool((p.grad != 1).any()) for p in mine.parameters()]
            del edges, grads
            half.weights()
        else:
            torch.autograd.backward(edges, grads)
        runs.append((mine, admitted))
    for plain, parts in zip(*(inlets for _, inlets in runs), strict=True):
        assert_same(parts.grad, plain.grad)
    for plain, parts in zip(*(mine.parameters() for mine, _ in runs), strict=True):
        assert_same(parts.grad, plain.grad)
    return early


def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


def test_weights_wait():
    early = both_ways(Two, lambda m, v: [m.b(torch.relu(m.a(v)))], [x(3, 4)])
    assert early == [False] * 5


def test_a_weight_used_twice_on_the_way_gets_its_gradient_at_once():
    early = both_ways(Two, lambda m, v: [m.b(m.a(torch.tanh(m.a(v))))], [x(3, 4)])
    assert early == [False, True, True, False, False]


def test_a_weight_used_side_by_side_waits():
    early = both_ways(Two, lambda m, v, w: [m.a(v) * m.a(w) + m.scale], [x(3, 4), x(3, 4)])
    assert early == [False] * 5


def hooked(tensor):
    tensor.register_hook(lambda grad: 0.5 * grad)
    return tensor


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda m, v: [m.a(v), m.b(v.detach())], id="an output beside the chain"),
        pytest.param(lambda m, v: [m.a(v) + m.a(v.detach())], id="a weight on and off the chain"),
        pytest.param(lambda m, v: [m.a(v.detach())], id="nothing to send back"),
        pytest.param(lambda m, v: [m.a(v), m.scale], id="an output that is a weight"),
        pytest.param(lambda m, v: [m.a(v), m.a(v.detach()).sum()], id="two ends, one weight"),
        pytest.param(lambda m, v: [v + m.scale, v * 2], id="an output that is an input"),
        pytest.param(lambda m, v: [m.a(v).add_(m.scale).relu_()], id="in place"),
        pytest.param(lambda m, v: [v.mul_(m.scale), m.a(v)], id="the input in place"),
        pytest.param(
            lambda m, v: [sum(m.a(part) for part in v.split(1)), m.b(v)], id="several outputs"
        ),
        pytest.param(
            lambda m, v: [functional.linear(v, m.a.weight @ m.b.weight) + m.b(v)],
            id="a weight made of weights",
        ),
        pytest.param(
            lambda m, v: [functional.linear(m.a(v), m.a.weight * m.scale)],
            id="a weight, and what is made of it behind",
        ),
        pytest.param(lambda m, v: [v * 3], id="no weights"),
        pytest.param(
            lambda m, v: [m.b(checkpoint(lambda z: m.a(z.tanh()), v, use_reentrant=False))],
            id="a checkpoint",
        ),
        pytest.param(lambda m, v: [torch.stack([m.a(v), v]).unbind()[0]], id="half used"),
        pytest.param(lambda m, v: [m.b(hooked(m.a(v)))], id="a hook on what a layer makes"),
    ],
)
def test_graphs(function):
    both_ways(Two, function, [x(3, 4)])


def test_integers_and_what_needs_no_gradient():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.out = nn.Linear(4, 4)

    tokens = torch.tensor([[1, 4], [7, 1]])
    both_ways(
        Words,
        lambda m, words, v: [m.out(m.frozen(m.embed(words) + v)), words * 2, m.frozen(v)],
        [tokens, x(2, 2, 4)],
    )


class InChannelsLast(nn.Module):
    def forward(self, v):
        return (2 * v).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LSTM(4, 4, 2), (5, 3, 4)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), (2, 4, 9)),
        (lambda: nn.BatchNorm1d(4), (6, 4)),
        (lambda: nn.Sequential(InChannelsLast(), nn.GroupNorm(2, 4)), (2, 4, 3, 3)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (2, 5, 4)),
    ],
)
def test_layers(make, shape):
    def outputs(module, v):
        found = module(v)
        return [found[0] if isinstance(found, tuple) else found]

    both_ways(make, outputs, [x(*shape)])


class _Counted(torch.autograd.Function):
    """Doubles, and counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        _Counted.calls += 1
        return grad * 2


def test_the_chain_runs_once():
    module, inlet = Two().double(), Inlet()
    out = _Counted.apply(module.b(_Counted.apply(module.a(inlet.admit(x(3, 4))))))
    half = SplitBackward(
        [get_gradient_edge(out)], [torch.ones_like(out)], [inlet], module.parameters()
    )
    _Counted.calls = 0
    half.inputs()
    assert _Counted.calls == 2
    # Gradients wait at both layers.
    assert half.held_bytes == 2 * 3 * 4 * 8
    half.weights()
    assert _Counted.calls == 2
    assert half.held_bytes == 0
    assert module.a.weight.grad is not None


def test_the_graph_is_let_go():
    """Behind the last branch after the first part, all of it after the second."""
    module, inlet = Two().double(), Inlet()
    alive = set()

    class Kept:
        def __init__(self, name, tensor):
            self.name, self.tensor = name, tensor.detach()
            alive.add(name)

        def __del__(self):
            alive.discard(self.name)

    def saving(name):
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Kept(name, tensor), lambda kept: kept.tensor
        )

    value = inlet.admit(x(3, 4))
    with saving("first"):
        value = module.a(value)
    with saving("second"):
        value = module.b(value)
    with saving("behind"):
        value = torch.tanh(value)
    edge, grad = get_gradient_edge(value), torch.ones_like(value)
    del value
    half = SplitBackward([edge], [grad], [inlet], module.parameters())
    del edge
    half.inputs()
    assert alive == {"first", "second"}
    half.weights()
    assert alive == set()


@pytest.mark.slow
def test_a_run_leaves_no_graph_behind(mlp_profile, mlp_target, tmp_path):
    """Operations that save their own output (tanh) mustn't keep a graph alive: no backward frees
    what it saved, its graph being kept for the weight part."""
    plan = plan_by_hand(with_times(mlp_profile), "zb-h1", 2, 4)

    def tensors_after(steps):
        settings = RunSettings(task=mlp_target, steps=steps, evaluate=False)
        run(plan, settings, tmp_path / f"run{steps}", inline=True)
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    tensors_after(1)
    few = tensors_after(2)
    # Each of the 24 micro-batches more saves one tensor of that kind at least on each stage.
    assert tensors_after(8) < few + 24
