"""Activations computed again: the same run, to the bit, with less to hold."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from graph_task import GraphTask
from helpers.alike import assert_same_training, assert_same_weights
from helpers.drawn.pipelines import ALL
from helpers.plans import REPORT, plan_by_hand, profiled, with_times
from timeprest.planner.evaluate import evaluate, make_plan
from timeprest.planner.question import Question
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import PlanError, RunError
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import GraphBody
from timeprest.runtime.prepare.data import MicroBatchPart
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage.batch_norm import only_updated
from timeprest.runtime.stage.recompute import Recomputation
from timeprest.runtime.weights.in_place import ChangedBuffers
from torch import fx, nn

FILE = Path(__file__)


class Norms(nn.Module):
    """Dropout, running statistics, and layers that overwrite what they get."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.act1 = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.act2 = nn.ReLU(inplace=True)
        self.two = nn.Linear(8, 8)
        self.act3 = nn.ReLU(inplace=True)
        self.three = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.act1(self.one(x)))
        x = self.two(self.act2(self.drop(x)))
        return self.three(self.act3(x))


class Vectors(torch.utils.data.Dataset):
    """Random vectors."""

    def __len__(self):
        return 64

    def __getitem__(self, k):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        return x, x[:3].abs()


class NormsTask:
    """Regression."""

    net = Norms

    def model(self):
        return self.net().double()

    def data(self, split):
        return Vectors()

    def loss(self, output, target):
        return (output - target).square().mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Pooled(nn.Module):
    """Its first layers overwrite what they get, and hand something else on."""

    def __init__(self):
        super().__init__()
        self.one, self.act1 = nn.Linear(6, 8), nn.ReLU(inplace=True)
        self.two, self.act2 = nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.three = nn.Linear(4, 3)

    def forward(self, x):
        x = self.act1(self.one(x)) * 1.5
        return self.three(nn.functional.max_pool1d(self.act2(self.two(x)), 2))


class PooledTask(NormsTask):
    """What makes the memory that they overwrite isn't computed again."""

    net = Pooled


class Averaged(nn.Module):
    """Takes a running mean from its input that the forward has changed just before, and after that
    once more."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.ones(8))

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        x = x - self.mean * self.table
        self.mean.mul_(0.9)
        return x


class Buffered(nn.Module):
    """Forwards that read buffers which they change."""

    def __init__(self, norm=None):
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.two = nn.Linear(8, 8)
        self.average = Averaged() if norm is None else nn.BatchNorm1d(8)
        self.three = nn.Linear(8, 8)
        self.four = nn.Linear(8, 3)
        if norm is not None:
            self.two, self.three = norm(self.two), norm(self.three)

    def forward(self, x):
        x = self.average(self.two(torch.relu(self.one(x))))
        return self.four(torch.relu(self.three(torch.relu(x))))


class AveragedTask(NormsTask):
    """A running mean that the forward takes off."""

    net = Buffered


class SpectralTask(AveragedTask):
    """Weights divided by their norms, which each forward approximates further."""

    net = partial(Buffered, nn.utils.spectral_norm)


class ParametrizedTask(AveragedTask):
    """The same by a parametrization."""

    net = partial(Buffered, nn.utils.parametrizations.spectral_norm)


class Product(nn.Module):
    """A layer that keeps both of what it takes."""

    def forward(self, x, y):
        return x * y


class Aliases(nn.Module):
    """A view is changed in place, and its base and a slice of that are taken then."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.flat = nn.Flatten()
        self.act = nn.ELU(inplace=True)
        self.product = Product()
        self.part = Product()
        self.two = nn.Linear(4, 3)

    def forward(self, x):
        x = self.one(x)
        y = self.product(self.act(self.flat(x)), x)
        return self.two(self.part(y[:, 1::2], x[:, 4:]))


class AliasesTask(NormsTask):
    net = Aliases


class Times(nn.Module):
    """Multiplies what it takes, in place."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x.mul_(self.factor)


class Squashed(Times):
    """And makes something of it that is needed again."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


class InTurnTask(NormsTask):
    """Several layers that change one memory, one after another."""

    def model(self):
        inside = Times(3.0), Times(0.5), Squashed(2.0)
        return nn.Sequential(nn.Linear(6, 8), *inside, nn.Linear(8, 3)).double()


class Mean(nn.Module):
    """Saves nothing."""

    def forward(self, x):
        return x.mean(1, keepdim=True)


class TakenAgain(nn.Module):
    """What a layer takes, another one has changed through a view in the meantime."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.up, self.flat, self.down = Times(3.0), nn.Flatten(), Times(0.5)
        self.mean, self.squash = Mean(), Squashed(2.0)

    def forward(self, x):
        x = self.one(x)
        y = self.mean(self.up(x) + self.down(self.flat(x)))
        return self.two(self.squash(x) + y)


class TakenAgainTask(NormsTask):
    net = TakenAgain


class Dropped(GraphTask):
    """Skips, two inputs, dropout."""

    dropout = 0.3


def unevenly_timed(target):
    """Its profile: no two operations can start at the same moment by chance."""
    profile = profiled(target)
    shares = [1 + 0.137 * k for k in range(len(profile.layers))]
    return with_times(profile, backward_s=2.3e-3, shares=shares)


@pytest.fixture(scope="module", params=["NormsTask", "Dropped"])
def drawn(request):
    """Target and profile of a model that draws at random."""
    target = f"{FILE}:{request.param}"
    return target, unevenly_timed(target)


def again(profile, plan, stages):
    """The same plan with activations computed again on some stages, evaluated anew.

    Args:
        stages: their numbers; or for some, the layers that are computed again.
    """
    question = Question(
        profile, plan.cluster, plan.variant, plan.mini_batch, plan.optimizer_state_factor
    )
    changed = [
        msgspec.structs.replace(
            stage, recompute=stages.get(s, False) if isinstance(stages, dict) else s in stages
        )
        for s, stage in enumerate(plan.stages)
    ]
    return make_plan(question, evaluate(question, changed, plan.micro_batches), REPORT)


def check_again(target, plain, planned, where, steps=7):
    """A plan, and the same that recomputes as another one, train alike. Returns both summaries."""
    # Orders follow from times: those of the plain plan, whatever the work done twice takes.
    rebuilt = msgspec.structs.replace(plain, stages=planned.stages)
    settings = RunSettings(task=target, steps=steps, evaluate=False)
    whole = run(plain, settings, where / "plain", inline=True)
    some = run(rebuilt, settings, where / "again", inline=True)
    assert_same_training(where / "again", where / "plain")
    return whole, some


RECOMPUTING = [name for name in ALL if not VARIANTS[name].recompute_refusal]


@pytest.mark.choice(8)
@pytest.mark.slow
@pytest.mark.parametrize("variant", RECOMPUTING)
def test_the_run_is_the_same(variant, drawn, tmp_path):
    target, profile = drawn
    plain = plan_by_hand(profile, variant, 3, 4)
    check_again(target, plain, again(profile, plain, {0, 1, 2}), tmp_path)


def some_layers(plan, seed):
    """About half of each stage's layers."""
    rng = random.Random(seed)
    found = {s: tuple(n for n in x.nodes if rng.random() < 0.5) for s, x in enumerate(plan.stages)}
    return {s: names for s, names in found.items() if names}


@pytest.mark.choice(10)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", ["gpipe", "timeprest", "i-timeprest", "pipedream"])
def test_the_run_is_the_same_where_some_layers_run_again(variant, seed, drawn, tmp_path):
    target, profile = drawn
    plain = plan_by_hand(profile, variant, 3, 4)
    found = again(profile, plain, some_layers(plain, seed))
    whole, some = check_again(target, plain, found, tmp_path)
    rows = zip(whole.stages, some.stages, found.predicted.stages, strict=True)
    for s, (before, report, predicted) in enumerate(rows):
        assert report.versions_held <= predicted.versions_held
        held = report.peak.activations_bytes
        assert held <= predicted.accounted.activations_bytes
        # It may be about as much: where nothing was kept of them, or one micro-batch is all.
        planned = plain.predicted.stages[s].accounted.activations_bytes
        if predicted.accounted.activations_bytes < 0.7 * planned:
            assert held < 0.9 * before.peak.activations_bytes


@pytest.fixture(scope="module")
def aliases(tmp_path_factory):
    """Target, plan for one stage, and weights where nothing is computed again."""
    target = f"{FILE}:AliasesTask"
    plan = plan_by_hand(unevenly_timed(target), "gpipe", 1, 2)
    return target, plan, weights_of(target, plan, tmp_path_factory.mktemp("plain"))


def weights_of(target, plan, run_dir):
    """Weights after some mini-batches."""
    run(plan, RunSettings(task=target, steps=3, evaluate=False), run_dir, inline=True)
    return load_weights(run_dir)


@pytest.mark.parametrize("chosen", range(2**4))
def test_a_view_and_its_base_are_one_memory_when_they_are_made_again(chosen, aliases, tmp_path):
    """Whichever layers those are; or the run ends in a line."""
    target, plan, wanted = aliases
    nodes = ("one", "flat", "act", "product")
    names = (*(name for k, name in enumerate(nodes) if chosen >> k & 1), "part")
    stage = msgspec.structs.replace(plan.stages[0], recompute=names)
    plan = msgspec.structs.replace(plan, stages=(stage,))
    made = {"one", "flat"} & set(names)
    if "product" in names and made and ("act" not in names or made == {"one"}):
        # What is made again isn't what was changed.
        with pytest.raises(RunError, match="changed in place between two layers"):
            weights_of(target, plan, tmp_path)
        return
    assert_same_weights(weights_of(target, plan, tmp_path), wanted)


@pytest.mark.parametrize(
    ("name", "chosen"), [("InTurnTask", ("1", "3")), ("TakenAgainTask", ("down", "up", "squash"))]
)
def test_a_copy_is_of_the_memory_as_it_was_when_it_was_taken(name, chosen, tmp_path):
    """Between two layers that change it, and are computed again, one does that isn't; or one of
    them changes it through a view, and another takes it as before."""
    target = f"{FILE}:{name}"
    plan = plan_by_hand(unevenly_timed(target), "gpipe", 1, 2)
    wanted = weights_of(target, plan, tmp_path / "plain")
    stage = msgspec.structs.replace(plan.stages[0], recompute=chosen)
    plan = msgspec.structs.replace(plan, stages=(stage,))
    assert_same_weights(weights_of(target, plan, tmp_path / "again"), wanted)


def test_copies_of_what_is_overwritten_are_in_the_plan(tmp_path):
    """Though the layers that overwrite it hand on a tensor of their own."""
    target = f"{FILE}:PooledTask"
    profile = unevenly_timed(target)
    assert [layer.changes or () for layer in profile.layers[:4]] == [(), ("one",), (), ("two",)]
    plan = again(profile, plan_by_hand(profile, "gpipe", 1, 4), {0: ("act1", "act2")})
    summary = run(plan, RunSettings(task=target, steps=2, evaluate=False), tmp_path, inline=True)
    held = summary.stages[0].peak.activations_bytes
    assert held == plan.predicted.stages[0].accounted.activations_bytes


@pytest.mark.parametrize("variant", ["gpipe", "timeprest", "v-timeprest", "pipedream-2bw"])
def test_what_is_held_is_what_was_predicted(variant, drawn, tmp_path):
    target, profile = drawn
    plain = plan_by_hand(profile, variant, 3, 4)
    plan = again(profile, plain, {0, 1})
    settings = RunSettings(task=target, steps=12, evaluate=False)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    for report, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert report.peak.total <= predicted.memory_bytes
        assert report.peak.versions_bytes <= predicted.memory.versions_bytes
        assert report.versions_held == predicted.versions_held
        accounted = predicted.accounted_memory.activations_bytes
        assert report.peak.activations_bytes == accounted
    # It is for less: of activations, where several micro-batches are in flight.
    first, before = plan.predicted.stages[0].memory, plain.predicted.stages[0].memory
    assert first.activations_bytes < before.activations_bytes


def test_old_weights_are_kept_for_it(drawn):
    """v-timeprest holds one version; to compute on the forward's weights again, more."""
    _, profile = drawn
    plain = plan_by_hand(profile, "v-timeprest", 3, 1)
    rebuilt = again(profile, plain, {0, 1, 2})
    assert [stage.versions_held for stage in plain.predicted.stages] == [1, 1, 1]
    assert [stage.versions_held for stage in rebuilt.predicted.stages] == [3, 2, 1]


@pytest.mark.parametrize("variant", ["spectrain", "pipeoptim"])
def test_predicted_weights_are_gone(variant, drawn):
    _, profile = drawn
    plain = plan_by_hand(profile, variant, 2, 1)
    with pytest.raises(PlanError, match=r"stages\[1\].recompute: .* predicts"):
        again(profile, plain, {1})


def test_stages_keep_nothing_else(drawn, tmp_path):
    """Between operations the first stage holds no activations: model inputs count nothing."""
    target, profile = drawn
    plain = plan_by_hand(profile, "gpipe", 2, 4)
    plan = again(profile, plain, {0})
    settings = RunSettings(task=target, steps=3, evaluate=False)
    reports = run(plan, settings, tmp_path / "again", inline=True).stages
    whole = run(plain, settings, tmp_path / "plain", inline=True).stages
    # One micro-batch's at a time instead of four.
    assert reports[0].peak.activations_bytes * 4 == whole[0].peak.activations_bytes


# Buffers that forwards change and read ----------------------------------------------------------

BUFFERED = ["AveragedTask", "SpectralTask", "ParametrizedTask"]


@pytest.fixture(scope="module", params=BUFFERED)
def buffered(request):
    """Target and profile of a model whose forward reads a buffer that it changes."""
    target = f"{FILE}:{request.param}"
    return target, unevenly_timed(target)


def every_layer(plan, seed):
    """Of all stages, by name."""
    return {s: tuple(stage.nodes) for s, stage in enumerate(plan.stages)}


def whole_stages(plan, seed):
    """All of them."""
    return set(range(len(plan.stages)))


@pytest.mark.choice(12)
@pytest.mark.parametrize(
    ("layers", "seed"),
    [(whole_stages, 0), (every_layer, 0), *((some_layers, seed) for seed in range(3))],
)
@pytest.mark.parametrize(
    ("variant", "n"), [("gpipe", 2), ("gpipe", 4), ("timeprest", 2), ("pipedream", 1)]
)
def test_a_second_forward_finds_the_buffers_of_the_first(
    variant, n, layers, seed, buffered, tmp_path
):
    target, profile = buffered
    plain = plan_by_hand(profile, variant, 2, n)
    check_again(target, plain, again(profile, plain, layers(plain, seed)), tmp_path, 5)


def buffers_kept(target):
    """Names of the buffers that a model's only stage keeps for each micro-batch."""
    plan = plan_by_hand(unevenly_timed(target), "gpipe", 1, 2, recompute=[True])
    prepared = prepare(plan, RunSettings(task=target, steps=1, evaluate=False))
    module = prepared.model.pieces[0].module.train()
    changed = ChangedBuffers(module, only_updated(module))
    changed.begin()
    module(torch.randn(4, 6, dtype=torch.float64))
    changed.end()
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    return {names[id(buffer)] for buffer, _ in changed.copies()}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("NormsTask", set()),
        ("AveragedTask", {"average.mean"}),
        ("SpectralTask", {"two.weight_u", "two.weight_v", "three.weight_u", "three.weight_v"}),
    ],
)
def test_only_buffers_that_are_read_and_changed_are_kept(name, kept):
    """No running statistics of batch norms, and no constants."""
    assert buffers_kept(f"{FILE}:{name}") == kept


def body_of(model):
    return GraphBody(model, fx.symbolic_trace(model).graph)


def test_running_statistics_in_an_exported_graph_are_not_kept():
    call = Call((torch.randn(4, 6),), (None,))
    exported = trace(Norms(), "it", call, front_end="export").module
    changed = ChangedBuffers(exported, only_updated(exported))
    changed.begin()
    exported(torch.randn(4, 6))
    changed.end()
    assert changed.copies() == []


def test_a_buffer_that_only_later_forwards_change_ends_the_run():
    """What the first run of that one found is gone."""
    module = body_of(Averaged())
    changed = ChangedBuffers(module, only_updated(module))
    changed.begin()
    changed.end()
    changed.begin()
    module.mean.add_(1)
    with pytest.raises(RunError, match="is changed, and wasn't in the first one"):
        changed.end()


def test_a_buffer_that_a_forward_replaces_ends_the_run():
    """A second run would begin at what the first one put there."""
    module = nn.BatchNorm1d(8)
    changed = ChangedBuffers(module)
    changed.begin()
    module.running_mean = module.running_mean + 1
    with pytest.raises(RunError, match=r"given a new tensor in its forward \(self\.mean = …\)"):
        changed.end()


def test_an_input_that_only_later_forwards_change_ends_the_run():
    """It isn't copied any more by then."""
    recomputation, x = Recomputation(body_of(nn.Identity())), torch.randn(4, 8)
    part = MicroBatchPart(4, 4, 1.0, 1.0)
    recomputation.kept(recomputation.keep({"x": x}, set(), None, part))
    found = recomputation.keep({"x": x}, set(), None, part)
    x.mul_(2)
    with pytest.raises(RunError, match="'x', which a stage's forward is computed again from, is"):
        recomputation.kept(found)


def test_whatever_generator_is_drawn_from_again_draws_the_same():
    """A forward that a granularity keeps whole may ask Python's or NumPy's."""

    def drawn():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    recomputation = Recomputation(body_of(nn.Identity()))
    found = recomputation.keep({}, set(), None, MicroBatchPart(4, 4, 1.0, 1.0))
    first = drawn()
    recomputation.kept(found)
    with recomputation.as_in_first_run(found):
        assert drawn() == first
    assert drawn() != first


def test_what_is_kept_of_buffers_counts():
    """Of 8 numbers of 4 bytes for each micro-batch; data counts nothing."""
    module = body_of(Averaged())
    recomputation, x = Recomputation(module), torch.randn(4, 8)
    for _ in range(2):
        found = recomputation.keep({"x": x}, set(), None, MicroBatchPart(4, 4, 1.0, 1.0))
        module(x)
        recomputation.kept(found)
        assert found.nbytes == 32
