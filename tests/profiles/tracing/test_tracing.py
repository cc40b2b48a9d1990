"""Tracing, cutting and measuring: pieces equal the whole, bytes are exact, errors name lines."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from helpers.by_hand.cuts import places_to_cut
from helpers.by_hand.pieces import assert_learnt_alike, run_pieces
from helpers.models.any import EXAMPLES, Branches, flat
from helpers.models.front_ends import positional
from helpers.paths import TESTS
from helpers.processes.forked import Python
from helpers.stage_costs import stage_cost
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timeprest.profiles.autograd.boundary import Inlet, SavedBytes
from timeprest.profiles.errors import TargetError, TraceError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import InputSpec, Target, parse_input, resolve
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import fingerprint, shared_state
from timeprest.profiles.tracing.pieces import cut


def build(name):
    torch.manual_seed(0)
    make, inputs = EXAMPLES[name]
    return make().double(), inputs


def graph_of(name, model):
    """The graph of an example, or of what was made of one."""
    return trace(model, name, positional(*EXAMPLES[name][1](2)))


def as_target(name):
    """The example as a target that brings its own data."""
    make, inputs = EXAMPLES[name]

    class Fixed(InputSpec):
        def sample(self, samples):
            torch.manual_seed(1)
            return inputs(samples)[self.high]

    count = len(inputs(1))
    specs = tuple(Fixed((), torch.float64, k) for k in range(count))
    return Target(name, None, lambda: make().double(), specs)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([n for n in EXAMPLES if not n.startswith(("tied", "changes"))]), st.data())
def test_pieces_equal_the_whole_wherever_it_is_cut(name, data):
    model, inputs = build(name)
    batch = inputs(4)
    whole = copy.deepcopy(model)
    torch.manual_seed(7)
    wanted = whole(*[t.clone() for t in batch])
    wanted_loss = sum(t.square().sum() for t in flat(wanted))
    wanted_loss.backward()
    traced = graph_of(name, model)
    count = len(traced.layers)
    places = data.draw(st.sets(st.integers(1, count - 1), max_size=3))
    borders = [0, *sorted(places), count]
    groups = [list(range(a, b)) for a, b in itertools.pairwise(borders)]
    result, loss = run_pieces(traced, groups, batch, seed=7, fake=data.draw(st.booleans()))
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-12, atol=1e-12)
    for got, want in zip(flat(result), flat(wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert_learnt_alike(model, whole)


@pytest.mark.parametrize("name", EXAMPLES)
def test_saved_bytes_are_what_autograd_holds(name):
    """Sum over the profile's stages of a whole model = hooks around the plain model."""
    profile = measure(as_target(name), batch_size=4, micro_batch_sizes=[2, 4], seconds=0)
    model, inputs = build(name)
    for size in (2, 4):
        batch = inputs(size)
        with SavedBytes(ignore=[*model.parameters(), *model.buffers()]) as saved:
            result = model(*batch)
        assert flat(result)
        total = next(w.saved_bytes for w in profile.whole_model if w.micro_batch == size)
        assert total == saved.total
        names = [layer.name for layer in profile.layers]
        assert stage_cost(profile, names, size, last=True).kept_bytes == saved.total


def test_stage_bytes_are_what_the_pieces_hold():
    """Wherever the model is cut, the predicted kept bytes equal those of the running piece."""
    profile = measure(as_target("residual"), batch_size=4, micro_batch_sizes=[2, 4], seconds=0)
    model, inputs = build("residual")
    traced = graph_of("residual", model)
    names = [layer.name for layer in traced.layers]
    state = [*model.parameters(), *model.buffers()]
    for border in range(1, len(names)):
        first, second = cut(traced, [range(border), range(border, len(names))])
        known = dict(zip((n.name for n in traced.inputs), inputs(4), strict=True))
        for piece, layers in ((first, names[:border]), (second, names[border:])):
            with SavedBytes(ignore=state) as saved:
                arguments = [
                    Inlet().admit(known[n].clone())
                    if isinstance(known[n], torch.Tensor) and known[n].requires_grad
                    else known[n]
                    for n in piece.inputs
                ]
                out = piece.module(*arguments)
            known.update(zip(piece.outputs, out, strict=False))
            cost = stage_cost(profile, layers, 4, last=piece is second)
            assert cost.kept_bytes == saved.total, (border, layers)


def test_an_inlet_admits_what_is_conjugated():
    """torch leaves that in memory as it was, and computes it when it is read."""
    conjugate = torch.tensor([1.0 + 2.0j]).conj()
    for tensor in (conjugate, conjugate.imag):
        assert tensor.is_conj() or tensor.is_neg()
        torch.testing.assert_close(Inlet().admit(tensor).detach(), tensor)


@pytest.mark.parametrize("name", EXAMPLES)
def test_layers_have_the_users_names_and_all_parameters(name):
    model, _ = build(name)
    profile = measure(as_target(name), batch_size=2, micro_batch_sizes=[1, 2], seconds=0)
    children = {n for n, m in model.named_modules() if n and not list(m.children())}
    assert {layer.name for layer in profile.layers} <= children
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(layer.parameter_bytes for layer in profile.layers) == total
    assert all(m.forward_s >= 0 for layer in profile.layers for m in layer.measurements)


def test_edges_carry_bytes_and_gradients():
    profile = measure(as_target("sizes"), batch_size=4, micro_batch_sizes=[2, 4], seconds=0)
    edges = {(e.producer, e.consumer, e.tensor): e for e in profile.edges}
    (embedded,) = [
        e for (p, c, _), e in edges.items() if (p, c) == ("embed", "mix") and not e.needs_grad
    ][-1:]
    assert embedded.bytes_per_sample == 0
    assert embedded.fixed_bytes == 3 * 8
    (mixed,) = [e for (p, c, _), e in edges.items() if (p, c) == ("mix", "recur")]
    assert (mixed.bytes_per_sample, mixed.fixed_bytes) == (5 * 6 * 8, 0)
    assert mixed.needs_grad
    assert profile.inputs[0].dtype == "int64"
    assert profile.inputs[0].shape == (5,)


def test_tied_layers_are_found_and_kept_together():
    traced = graph_of("tied", build("tied")[0])
    assert [traced.layers[k].name for k in shared_state(traced).tied[0]] == ["embed", "head"]
    profile = measure(as_target("tied"), batch_size=2, micro_batch_sizes=[2], seconds=0)
    assert profile.tied == (("embed", "head"),)
    assert len(places_to_cut(profile)) == 2


def test_a_change_in_place_that_others_see_keeps_layers_together():
    """Cut anywhere the profile allows, the pieces mean the whole; elsewhere they wouldn't."""
    profile = measure(as_target("changes"), batch_size=4, micro_batch_sizes=[4], seconds=0)
    assert profile.tied == (("relu", "body"),)
    assert measure(as_target("residual"), batch_size=2, micro_batch_sizes=[2], seconds=0).tied == ()
    model, inputs = build("changes")
    batch = inputs(4)
    wanted = copy.deepcopy(model)(*batch)
    traced = graph_of("changes", model)
    ends = {tuple(int(k) for k in row.nonzero()[0]) for row in places_to_cut(profile)}
    assert ends == {(), (0,), (0, 1, 2), (0, 1, 2, 3)}
    result, _ = run_pieces(traced, [[0], [1, 2], [3]], batch, seed=0)
    torch.testing.assert_close(result, wanted)
    again = graph_of("changes", build("changes")[0])
    apart, _ = run_pieces(again, [[0], [1], [2, 3]], batch, seed=0)
    assert not torch.allclose(apart, wanted)


@pytest.mark.parametrize(
    ("name", "bound", "wrong"),
    [
        ("changes a view", ("flat", "relu", "body"), [[0, 1], [2, 3, 4]]),
        ("changes a slice", ("stem", "relu", "head"), [[0], [1, 2, 3]]),
    ],
)
def test_a_view_that_is_changed_stays_with_those_that_take_its_base(name, bound, wrong):
    """As two messages, view and base would have nothing in common."""
    profile = measure(as_target(name), batch_size=4, micro_batch_sizes=[4], seconds=0)
    assert profile.tied == (bound,)
    model, inputs = build(name)
    batch = inputs(4)
    wanted = copy.deepcopy(model)(*batch)
    for row in places_to_cut(profile):
        groups = [[int(k) for k in part.nonzero()[0]] for part in (row, ~row)]
        if all(groups):
            traced = graph_of(name, copy.deepcopy(model))
            result, _ = run_pieces(traced, groups, batch, seed=0)
            torch.testing.assert_close(result, wanted)
    apart, _ = run_pieces(graph_of(name, model), wrong, batch, seed=0)
    assert not torch.allclose(apart, wanted)


@pytest.mark.slow
def test_fingerprint_survives_a_restart_and_changes_with_the_model():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from helpers.models.any import EXAMPLES;"
        "from helpers.models.front_ends import positional;"
        "from timeprest.profiles.tracing.front_ends import trace;"
        "from timeprest.profiles.tracing.graph import fingerprint;"
        "make, inputs = EXAMPLES['residual'];"
        "print(fingerprint(trace(make().double(), 'it', positional(*inputs(2)))))"
    )
    other = Python("-c", code, TESTS).ended().strip()
    torch.manual_seed(5)
    model = EXAMPLES["residual"][0]().double()
    assert fingerprint(graph_of("residual", model)) == other
    changed = copy.deepcopy(model)
    changed.right = torch.nn.Conv2d(4, 4, 3, padding=1).double()
    assert fingerprint(graph_of("residual", changed)) != other
    padded = copy.deepcopy(model)
    padded.left.padding = padded.left.dilation = (2, 2)
    assert fingerprint(graph_of("residual", padded)) != other


def test_an_untraceable_model_is_blamed_on_its_own_line():
    with pytest.raises(TraceError) as caught:
        trace(Branches(), "it", positional(torch.randn(2, 3)))
    line = (
        (TESTS / "helpers/models/any.py")
        .read_text()
        .splitlines()
        .index("        if x.sum() > 0:  # the line that an error must name")
    )
    assert f"any.py:{line + 1}" in str(caught.value)
    assert "\n" not in str(caught.value)


# Targets -----------------------------------------------------------------------------------

USER_FILE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

def breaks():
    raise ValueError("bad luck")

class Task:
    def model(self): return net()
    def data(self, split): return TensorDataset(torch.randn(20, 3), torch.randn(20, 2))
    def loss(self, output, target): return ((output - target) ** 2).mean()
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)

class Vector(Task):
    def loss(self, output, target): return output - target

class NoOptimizer:
    def model(self): return net()
    def data(self, split): return None

half = NoOptimizer()
three = 3
wide = nn.Linear(30, 2)
lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
synced = nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2))
scripted = nn.Sequential(nn.Linear(3, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
traced = torch.jit.trace(nn.Linear(3, 2), torch.randn(2, 3))

def program(): return torch.export.export(nn.Linear(3, 2), (torch.randn(2, 3),))
def exported(): return nn.Sequential(nn.Linear(3, 3), program().module())

class Parts(Task):
    def data(self, split):
        data = super().data(split)
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        return DataLoader(data, batch_size=4, sampler=sampler)

class OwnPart(Task):
    def data(self, split):
        data = super().data(split)
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(20, 4), nn.Linear(4, 2)
    def forward(self, words, offsets): return self.out(self.words(words, offsets))

class Offsets(Task):
    # Words of all samples in one row: one or several for each.
    most = 3
    def model(self): return Bag()
    def data(self, split):
        samples = [torch.arange(1 + k % self.most) for k in range(20)]
        return DataLoader(samples, 4, collate_fn=self.together)
    def together(self, samples):
        begins = torch.tensor([0, *map(len, samples[:-1])]).cumsum(0)
        inputs = {"words": torch.cat(samples), "offsets": begins}
        return inputs, torch.zeros(len(samples), 2)

class EvenOffsets(Offsets):
    most = 1
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_a_users_task_and_factory_are_profiled(user_file):
    profile = measure(resolve(f"{user_file}:Task"), batch_size=4, seconds=0)
    assert [layer.name for layer in profile.layers] == ["_0", "_1", "_2"] or [
        layer.name for layer in profile.layers
    ] == ["0", "1", "2"]
    assert profile.loss
    found = resolve(f"{user_file}:net", [parse_input("3:float32")])
    assert not measure(found, batch_size=4, seconds=0).loss


def test_a_seed_makes_the_same_weights_whoever_draws_them():
    def drawn():
        sizes = np.random.randint(1, 2**20), random.randrange(1, 2**20)
        return torch.nn.Linear(*map(int, sizes), device="meta")

    target = Target("it", None, drawn, ())
    found = [str(target.model(seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no such target; give alexnet, .*digits"),
        ("no_such_file.py:x", "no such file"),
        ("model.pt", "model.pt: is called like a file of weights; a target is code"),
        ("model.safetensors:x", "is called like a file of weights"),
        ("no.such.module:x", "No module named 'no'"),
        ("{file}:missing", "there is no 'missing' in it; it has"),
        ("{file}", r"say what of it is meant, as in .*mine\.py:\w+; it has \w+, "),
        ("{file}:three", "is a int; expected a task, a model or a function"),
        ("{file}:half", "a task without loss\\(output, target\\) and optimizer"),
        ("{file}:net", r"say what it takes with --input .*; in Python inputs=\["),
        ("digits:x", "takes no argument"),
        ("text:/no/such/text", "no such file"),
    ],
)
def test_bad_targets_are_named(name, message, user_file):
    with pytest.raises(TargetError, match=message) as caught:
        resolve(name.format(file=user_file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("breaks", ["3"], "mine.py:10: ValueError: bad luck"),
        ("wide", ["3"], "failed on its own inputs"),
        ("Vector", [], "loss must be one number"),
        ("three", ["3"], "expected a task"),
        ("lazy", ["3"], "'0.weight' has no shape before the model's first call"),
        ("sparse", ["3"], "'0' has sparse gradients.*: make it with sparse=False"),
        ("scripted", ["3"], "'1' is made by torch.jit, which hides its parameters"),
        ("traced", ["3"], "py:traced: the model is made by torch.jit, .*load_state_dict"),
        ("program", ["3"], "gave a ExportedProgram .*give the module that was exported"),
        ("exported", ["3"], "'1' is the module of an exported program: .*give the module that"),
        ("Parts", [], "a DistributedSampler gives one of 2 parts .*: leave it out"),
        ("OwnPart", [], "group has not been initialized.*leave out DistributedSampler"),
        ("Offsets", [], "of words of all samples in one row, and offsets where each begins"),
        ("EvenOffsets", [], "takes a batch of 4 samples, and fails on 2 of them: .*offsets, edges"),
        ("synced", ["3"], "'1' is a SyncBatchNorm, .*: use BatchNorm, .* --deferred-batch-norm"),
    ],
)
def test_the_users_own_errors_are_one_line(name, inputs, message, user_file):
    with pytest.raises(TargetError, match=message) as caught:
        measure(
            resolve(f"{user_file}:{name}", [parse_input(text) for text in inputs]),
            batch_size=2,
            seconds=0,
        )
    assert "\n" not in str(caught.value)


def test_a_file_with_a_syntax_error_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(TargetError, match=r"broken\.py:1: SyntaxError"):
        resolve(f"{tmp_path / 'broken.py'}:f")


@pytest.mark.parametrize("text", ["", "3:float33", "3x-1", "axb", "3:int64:0", "3:int64:1:2"])
def test_bad_inputs_are_named(text):
    if not text:
        assert parse_input(text).shape == ()
        return
    with pytest.raises(TargetError, match="--input"):
        parse_input(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "text"])
def test_built_in_tasks_profile(name):
    profile = measure(resolve(name), batch_size=4, micro_batch_sizes=[2, 4], seconds=0)
    assert profile.loss
    assert profile.optimizer.state_bytes_per_parameter_byte == 2.0
    assert profile.target == name


def test_text_learns_from_any_file(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text("so much depends upon a red wheel barrow\n" * 100)
    task = resolve(f"text:{path}").task
    inputs, target = task.data("train")[0]
    assert (inputs[1:] == target[:-1]).all()
    path.write_text("short")
    with pytest.raises(TargetError, match="only 5 characters"):
        resolve(f"text:{path}")
