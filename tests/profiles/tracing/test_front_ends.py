"""Every front end gives a graph that is the model: whole, in pieces, in every container."""

from __future__ import annotations

import copy
import importlib.util
import itertools

import pytest
import torch
from helpers.by_hand.pieces import assert_learnt_alike, run_pieces
from helpers.drawn.cases import examples
from helpers.models.any import flat
from helpers.models.front_ends import CASES, Choice, Scores, WithChoice, doubles, positional
from helpers.paths import TESTS
from helpers.processes.forked import Python
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.profiles.errors import TraceError
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import fingerprint
from timeprest.profiles.tracing.pieces import take_apart
from torch import nn


def build(name):
    torch.manual_seed(0)
    front_end, make, call = CASES[name]
    return make().double(), call, front_end


@pytest.mark.parametrize("name", CASES)
def test_the_first_front_end_that_can_takes_the_model(name):
    model, call, front_end = build(name)
    before = copy.deepcopy(model.state_dict())
    traced = trace(model, name, call(4))
    assert traced.front_end == front_end
    order = ["fx", "export", "export-static", "sequential"]
    assert len(traced.refusals) == order.index(front_end)
    # Looking at a model changes nothing in it.
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    own = dict(model.named_parameters())
    for key, parameter in traced.module.named_parameters():
        assert parameter is own[key]


def test_a_forward_that_does_something_else_with_many_samples_has_a_graph_for_each_size():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 2)

        def forward(self, x):
            return self.a(x) * 2 if x.shape[0] > 4 else self.a(x)

    traced = trace(Many().double(), "it", positional(doubles(2, 4)))
    assert traced.front_end == "export-static"
    assert traced.refusals[1].endswith("something else with more than 4 samples")


def leaves_of(value):
    return take_apart(value)[0]


def whole_run(model, call):
    torch.manual_seed(7)
    result = call.of(model, [t.clone() for t in call.tensors])
    loss = sum(t.square().sum() for t in leaves_of(result))
    loss.backward()
    return result, loss


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.sampled_from(sorted(CASES)), st.data())
def test_pieces_equal_the_whole_for_every_front_end(name, data):
    """Outputs, gradients and buffers, wherever the graph is cut, at any batch size."""
    model, call, front_end = build(name)
    size = data.draw(st.sampled_from([2, 3, 5]))
    batch = call(size)
    whole = copy.deepcopy(model)
    wanted, wanted_loss = whole_run(whole, batch)
    if front_end == "fx":
        front_end = data.draw(st.sampled_from(["fx", "export"]))
    sample = call(size if front_end == "export-static" else 2)
    traced = trace(model, name, sample, front_end=front_end)
    count = len(traced.layers)
    places = data.draw(st.sets(st.integers(1, count - 1), max_size=3)) if count > 1 else set()
    if name == "masked":  # the tied embedding stays with the head
        places = set()
    borders = [0, *sorted(places), count]
    groups = [list(range(a, b)) for a, b in itertools.pairwise(borders)]
    result, loss = run_pieces(traced, groups, batch.tensors, seed=7, leaves=leaves_of)
    assert type(result) is type(wanted)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-12, atol=1e-12)
    for got, want in zip(leaves_of(result), leaves_of(wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert_learnt_alike(model, whole)


@pytest.mark.parametrize("name", CASES)
def test_layers_have_the_users_names(name):
    model, call, _ = build(name)
    traced = trace(model, name, call(4))
    modules = {path for path, _ in model.named_modules()}
    assert {layer.name.split("@")[0] for layer in traced.layers} <= modules


def test_the_same_layers_by_symbolic_tracing_and_by_export():
    model, call, _ = build("dict")
    found = [trace(model, "it", call(4), front_end=name) for name in ("fx", "export")]
    assert [la.name for la in found[0].layers] == [la.name for la in found[1].layers]
    crossing = [{n.name for la in t.layers for n in la.nodes} for t in found]
    assert {"a", "norm", "drop", "b"} <= crossing[0] & crossing[1]


def test_a_dataclass_comes_back_as_itself():
    model, call, _ = build("dataclass")
    for front_end in ("fx", "export"):
        result = trace(model, "it", call(3), front_end=front_end).module(*call(3).tensors)
        assert isinstance(result, Scores)
        assert result.unused is None
        assert set(result.hidden) == {"last", "both"}


@pytest.mark.parametrize("front_end", ["fx", "export"])
def test_each_operation_can_be_a_layer(front_end):
    model, call, _ = build("dict")
    traced = trace(model, "it", call(4), front_end=front_end, granularity="op")
    names = [layer.name for layer in traced.layers]
    assert len(names) == len(set(names)) > len(trace(model, "it", call(4)).layers)
    assert all(len(layer.kind.split(" + ")) == 1 for layer in traced.layers)


def test_a_pattern_keeps_modules_whole_even_those_that_nothing_can_trace():
    call = positional(doubles(4, 4))
    with pytest.raises(TraceError):
        trace(WithChoice().double(), "it", call)
    model = WithChoice().double()
    traced = trace(model, "it", call, granularity="blocks.*")
    assert [layer.name for layer in traced.layers] == ["stem", "blocks.0", "blocks.1", "head"]
    torch.testing.assert_close(traced.module(*call.tensors), model(*call.tensors))
    with pytest.raises(TraceError, match="no module's name matches 'layers'"):
        trace(model, "it", call, granularity="blocks.*,layers")


def test_what_nothing_takes_names_the_line_and_every_reason():
    with pytest.raises(TraceError) as caught:
        trace(Choice().double(), "it", positional(doubles(4, 4)))
    text = (TESTS / "helpers/models/front_ends.py").read_text().splitlines()
    line = 1 + next(k for k, row in enumerate(text) if "self.up(x) if x.sum()" in row)
    message = str(caught.value)
    assert f"front_ends.py:{line}: `return self.up(x)" in message
    for words in ("torch.fx symbolic tracing:", "torch.export", "--granularity", "nn.Sequential"):
        assert words in message
    assert "\n" not in message
    assert len(message) < 1500


class Knows(torch.nn.Module):
    """Gives something else where it is traced."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * (1 if type(x) is torch.Tensor else 2)


def test_a_graph_that_computes_something_else_is_passed_over():
    with pytest.raises(TraceError, match="computes something else than the model does"):
        trace(Knows().double(), "it", positional(doubles(4, 4)))


def test_fingerprints_differ_between_front_ends_batches_and_settings():
    model, call, _ = build("fixed batch")
    first = fingerprint(trace(model, "it", call(2)))
    assert fingerprint(trace(model, "it", call(2))) == first
    changed = copy.deepcopy(model)
    changed.drop.p = 0.4
    assert fingerprint(trace(changed, "it", call(2))) != first


def test_an_unknown_object_in_the_result_is_named():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x), object()

    with pytest.raises(TraceError, match="holds a object: return tensors"):
        trace(Odd().double(), "it", Call((doubles(2, 4),), (None,)))


def test_flat_takes_what_take_apart_takes():
    value = {"a": torch.ones(1), "b": [torch.zeros(2), None, 3]}
    assert [t.numel() for t in flat(value)] == [t.numel() for t in leaves_of(value)]


@pytest.mark.slow
def test_fingerprints_survive_a_restart():
    """Another process with another hash seed finds the same graph; another width another one."""
    names = [
        "gpt2:layers=1,width=16,heads=2,vocabulary=30,context=8",
        "gpt2:layers=1,width=32,heads=2,vocabulary=30,context=8",
    ]
    if importlib.util.find_spec("transformers"):
        names += ["hf:bert,num_hidden_layers=1"]
    code = (
        "import sys; from timeprest.profiles.tracing.graph import fingerprint\n"
        "from timeprest.profiles.tracing.front_ends import trace\n"
        "from timeprest.profiles.target import resolve\n"
        "for target in map(resolve, sys.argv[2:]):\n"
        "    model = target.model(int(sys.argv[1]))\n"
        "    print(fingerprint(trace(model, 'it', target.call(2)[0])))"
    )
    printed = Python("-c", code, 1, *names).ended()
    here = [
        fingerprint(trace(target.model(2), "it", target.call(2)[0]))
        for target in map(resolve, names)
    ]
    assert printed.split() == here
    assert len(set(here)) == len(names)
