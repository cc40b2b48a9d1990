"""Runs whose passes are replayed have the weights and losses of runs whose passes aren't, to the
last bit. Without a GPU a stand-in records and replays."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.alike import assert_same_training, assert_same_weights
from helpers.by_hand.profiles import chain
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled, with_times
from helpers.recorded_graphs import Recorded, RecordedGraphs
from mlp_task import MLPTask
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import UserError
from timeprest.profiles.measuring import capture
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.graphs import Graphs, most_in_flight


@pytest.fixture
def graphs(monkeypatch):
    """Stages on the CPU are captured, by the stand-in."""
    RecordedGraphs.captured, RecordedGraphs.pools = 0, ()
    monkeypatch.setattr(capture, "capture_on", RecordedGraphs)


profile_of = cache(profiled)


def check_same(plan, settings, where, says="all passes are replayed"):
    """`says`: each stage's line. Returns them."""
    off = msgspec.structs.replace(settings, graphs="off")
    assert not any(report.graphs for report in run(plan, off, where / "off", inline=True).stages)
    summary = run(plan, settings, where / "on", inline=True)
    assert_same_training(where / "on", where / "off")
    lines = [report.graphs for report in summary.stages]
    assert all(says in line for line in lines), lines
    return lines


@pytest.mark.choice(8)
@pytest.mark.parametrize("variant", ALL)
def test_all_systems(variant, mlp_profile, mlp_target, tmp_path, graphs):
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, 4)
    adam = OptimizerChoice(name="adam", lr=0.01, weight_decay=0.1)
    settings = RunSettings(task=mlp_target, steps=6, optimizer=adam)
    check_same(plan, settings, tmp_path)


PLACED = [
    *[(variant, (0, 1, 1, 0)) for variant in ("timeprest", "i-timeprest", "zb-v", "v-half")],
    *[(variant, (0, 1, 0, 1)) for variant in ("pipedream-2bw", "pipemare", "interleaved-1f1b")],
]


@pytest.mark.choice(4)
@pytest.mark.parametrize(("variant", "placement"), PLACED)
def test_several_stages_a_device(variant, placement, mlp_profile, mlp_target, tmp_path, graphs):
    plan = plan_by_hand(with_times(mlp_profile), variant, 4, 4, placement=placement)
    check_same(plan, RunSettings(task=mlp_target, steps=6), tmp_path)


TASKS = TESTS / "tasks"
MODELS = {
    "dropout-batch-norm": f"{TASKS / 'checkpoint_tasks.py'}:ShakenTask",
    "resnet": f"{TASKS / 'variety_tasks.py'}:ResNetTask",
    "tied-gpt": f"{TASKS / 'variety_tasks.py'}:TiedTask",
    "skips": f"{TASKS / 'variety_tasks.py'}:SkipsTask",
    "frozen-norm": f"{TASKS / 'variety_tasks.py'}:FrozenNormTask",
}


@pytest.mark.choice(5)
@pytest.mark.parametrize("variant", ["timeprest", "i-timeprest", "pipedream-2bw", "zb-h1"])
@pytest.mark.parametrize(
    ("model", "stages"),
    # Where one device has both layers, these have one weight.
    [
        (model, stages)
        for model in MODELS
        for stages in (1, 2)
        if (model, stages) != ("tied-gpt", 2)
    ],
)
def test_models(model, variant, stages, tmp_path, graphs):
    """With evaluations between, and mini-batches in pieces whose gradients are added up."""
    plan = plan_by_hand(profile_of(MODELS[model]), variant, stages, 4)
    more = {"dropout": False} if variant == "i-timeprest" else {"clip_norm": 1.0}
    settings = RunSettings(task=MODELS[model], steps=5, eval_every=2, **more)
    check_same(plan, settings, tmp_path)


@pytest.mark.choice(5)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *itertools.product(["TiedV", "TiedLoop"], ["timeprest", "pipedream-2bw", "zb-h1"]),
        *itertools.product(["TiedV"], ["pipedream-flush", "zb-v", "v-half"]),
    ],
)
def test_tied_weights(name, variant, tmp_path, graphs):
    """That several stages of a device use; they have versions and gradients of their own."""
    task = f"{TASKS / 'mlp_task.py'}:{name}"
    placement = (0, 1, 0, 1) if name == "TiedLoop" else (0, 1, 1, 0)
    plan = plan_by_hand(profile_of(task), variant, 4, 4, placement=placement)
    check_same(plan, RunSettings(task=task, steps=6), tmp_path)


@pytest.mark.choice(3)
@pytest.mark.parametrize("update_every", [1, 2])
@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw", "gpipe"])
def test_the_last_mini_batch_is_filled_up(variant, update_every, tmp_path, graphs):
    task = MODELS["dropout-batch-norm"]
    every = update_every if VARIANTS[variant].flushes else 1
    plan = plan_by_hand(profile_of(task), variant, 2, 2, mini_batch=10, update_every=every)
    says = "the others: micro-batches that are filled up"
    check_same(plan, RunSettings(task=task, epochs=2, ragged="pad"), tmp_path, says)


@pytest.mark.parametrize("variant", ["timeprest", "pipedream", "zb-h1"])
def test_a_run_goes_on(variant, tmp_path, graphs):
    task = MODELS["dropout-batch-norm"]
    plan = plan_by_hand(profile_of(task), variant, 2, 4)
    settings = RunSettings(task=task, steps=8, checkpoint_every=4)
    check_same(plan, settings, tmp_path)
    wanted = load_weights(tmp_path / "on")
    for graphs_are in ("auto", "off"):
        resume(tmp_path / "on", {"graphs": graphs_are}, at=4, inline=True)
        assert_same_weights(tmp_path / "on", wanted)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2]])
def test_replicas(replicas, mlp_profile, mlp_target, tmp_path, graphs):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4, replicas=replicas)
    check_same(plan, RunSettings(task=mlp_target, steps=4, on_nan="skip"), tmp_path)


@pytest.mark.parametrize(
    ("options", "more", "reason"),
    [
        ({"recompute": (True, True)}, {}, "activations are recomputed"),
        ({}, {"deferred_batch_norm": True}, "--deferred-batch-norm"),
    ],
)
def test_what_isnt_captured(options, more, reason, tmp_path, graphs):
    task = MODELS["dropout-batch-norm"]
    plan = plan_by_hand(profile_of(task), "timeprest", 2, 2, **options)
    lines = check_same(plan, RunSettings(task=task, steps=4, **more), tmp_path, reason)
    assert all(line.startswith("nothing is captured") for line in lines), lines


class SumTask(MLPTask):
    def loss(self, output, target):
        return ((output - target) ** 2).sum(), target.numel()


@pytest.mark.parametrize("variant", ["gpipe", "timeprest"])
def test_sums_as_losses_arent_captured(variant, tmp_path, graphs):
    """What counts is a number; and gradients are put aside from mini-batch to mini-batch."""
    task, every = f"{Path(__file__)}:SumTask", 2 if VARIANTS[variant].flushes else 1
    plan = plan_by_hand(profile_of(task), variant, 2, 4, update_every=every)
    says = "nothing is captured: the loss gives (sum, weight)"
    check_same(plan, RunSettings(task=task, steps=4), tmp_path, says)


class Odd(torch.nn.Module):
    """Does what a graph can't, as its task says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.one, self.two = torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        x = self.one(x)
        if self.how == "mask":
            x = x + x[x > 0].mean()
        if self.how == "draws":
            x = x * random.choice([1.0, 0.5])
        if self.how == "looks":
            x = x * (1.0 if float(x.detach().abs().max()) > 1e-9 else 0.5)
        return self.two(x)


class OddTask(MLPTask):
    how = ""

    def model(self):
        return torch.nn.Sequential(Odd(self.how)).double()


class Masks(OddTask):
    how = "mask"


class Draws(OddTask):
    how = "draws"


class Looks(OddTask):
    how = "looks"


class Annealed(MLPTask):
    """Its loss counts."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        return super().loss(output, target) * (1 + 1 / self.calls)


class Compiled(MLPTask):
    """A layer is compiled; what is captured would be what it computes without."""

    def model(self):
        model = super().model()
        model[0].compile(backend="eager")
        return model


class Hooks(MLPTask):
    """Somebody looks at what a layer makes."""

    def model(self):
        model = super().model()
        model[0].register_forward_hook(lambda *call: None)
        return model


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Masks", "as a mask says"),
        ("Draws", "Python's or NumPy's random numbers"),
        ("Looks", "_local_scalar_dense"),
        ("Annealed", "a forward or the loss counts or keeps something (Annealed.calls)"),
        ("Hooks", "have hooks"),
        ("Compiled", "compiled parts"),
    ],
)
def test_a_model_that_cant_be_captured(name, reason, tmp_path, graphs):
    """Modules as they are are layers of their own, which tracing leaves alone."""
    task = f"{Path(__file__)}:{name}"
    plan = plan_by_hand(profile_of(task), "timeprest", 1, 4)
    sgd = OptimizerChoice(name="sgd", lr=0.01)
    (line,) = check_same(plan, RunSettings(task=task, steps=4, optimizer=sgd), tmp_path, reason)
    assert line.startswith("nothing is captured")


def test_what_a_forward_leaves_on_the_host_cant_be_replayed():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    with capture.nothing_left_on_host(module):
        module(torch.ones(3, 2))
    with (
        pytest.raises(capture.CannotCaptureError, match="other attributes \\(calls\\)"),
        capture.nothing_left_on_host(module),
    ):
        module[0].calls = 1
    module[0].seen = {"calls": [1]}
    with (
        pytest.raises(capture.CannotCaptureError, match=r"counts or keeps something \(0\.seen\)"),
        capture.nothing_left_on_host(module),
    ):
        module[0].seen["calls"].append(2)
    with (
        pytest.raises(capture.CannotCaptureError, match="running_mean"),
        capture.nothing_left_on_host(module),
    ):
        module[0].running_mean = module[0].running_mean + 1


@pytest.mark.parametrize("at", [2, 5])
def test_a_capture_that_fails_leaves_a_run_as_it_was(at, tmp_path, graphs, monkeypatch):
    """In a forward, or in a backward."""
    task = MODELS["dropout-batch-norm"]
    plan = plan_by_hand(profile_of(task), "timeprest", 1, 4)
    # Of the run's captures, not of the profile's.
    monkeypatch.setattr(RecordedGraphs, "captured", 0)
    monkeypatch.setattr(RecordedGraphs, "fails_at", at)
    says = "operation not permitted when stream is capturing"
    (line,) = check_same(plan, RunSettings(task=task, steps=4), tmp_path, says)
    assert "nothing is captured" in line


@pytest.mark.parametrize(
    ("name", "options"), [("TiedV", {"placement": (0, 1, 1, 0)}), ("MLPTask", {})]
)
def test_memory_that_was_for_weights_may_become_other_tensors(
    name, options, tmp_path, graphs, monkeypatch
):
    """What autograd saves is told by it to be weights."""
    known, leave = [], Graphs.leave

    def noted(self, error):
        leave(self, error)
        owners = [self._weights, *(other for _, other in self._weights._joined)]
        known.extend(len(own._index) - len(own.parameters) for own in owners)

    task = f"{TASKS / 'mlp_task.py'}:{name}"
    plan = plan_by_hand(profile_of(task), "timeprest", 4, 4, **options)
    monkeypatch.setattr(RecordedGraphs, "free", 0)
    monkeypatch.setattr(Graphs, "leave", noted)
    check_same(plan, RunSettings(task=task, steps=4), tmp_path, "nothing is captured")
    assert len(known) >= 4
    assert not any(known)


def test_graphs_leave_what_comes_later_its_memory(tmp_path, graphs, monkeypatch):
    """Optimizer state comes with the first update."""
    task = MODELS["dropout-batch-norm"]
    plan = plan_by_hand(profile_of(task), "timeprest", 1, 4)
    planned = plan.predicted.device_of(0).memory
    later = planned.optimizer_bytes + planned.versions_bytes + planned.boundary_bytes
    later += planned.workspace_bytes
    assert planned.optimizer_bytes
    # The profile's are let go.
    RecordedGraphs.pools = ()
    check_same(plan, RunSettings(task=task, steps=4), tmp_path / "held")
    held = RecordedGraphs(torch.device("cpu")).held_bytes()
    for free, ragged, said in (
        (later, "drop", "all passes are replayed"),
        (later - 1, "drop", "nothing is captured: with graphs of"),
        # Some micro-batches run beside them.
        (later + planned.activations_bytes, "pad", "all passes are replayed"),
        (later + planned.activations_bytes - 1, "pad", "nothing is captured: with graphs of"),
        # Of four forwards there is room for none.
        (later - held, "drop", "nothing is captured: with graphs of"),
    ):
        monkeypatch.setattr(RecordedGraphs, "free", held + free)
        RecordedGraphs.pools, RecordedGraphs.captured = (), 0
        settings = RunSettings(task=task, steps=4, ragged=ragged)
        (line,) = check_same(plan, settings, tmp_path / f"{ragged} {free}", said)
        assert line.startswith(said), (line, free)
    # It is seen when there is one.
    assert RecordedGraphs.captured == 1


@pytest.mark.parametrize("model", ["dropout-batch-norm", "resnet"])
@pytest.mark.parametrize("of_backward", [False, True])
def test_a_replay_that_gives_other_numbers_is_never_trained_with(
    model, of_backward, tmp_path, graphs, monkeypatch
):
    replay, replayed = Recorded.replay, []

    def replay_wrongly(graph):
        replay(graph)
        replayed.append(graph)
        if graph.pool.index(graph) == of_backward:
            for tensor in itertools.chain.from_iterable(call[-1] for call in graph.calls):
                if tensor is not None and tensor.is_floating_point():
                    tensor.add_(0.5)

    plan = plan_by_hand(profile_of(MODELS[model]), "timeprest", 2, 4)
    monkeypatch.setattr(Recorded, "replay", replay_wrongly)
    says = "nothing is captured: a replay gives another "
    check_same(plan, RunSettings(task=MODELS[model], steps=4), tmp_path, says)
    # Of each stage the first one's.
    assert len(replayed) == 4


def test_each_slot_is_replayed_before_it_is_trained_with(tmp_path, graphs, monkeypatch):
    """The last one too, before the first message."""
    replay = Recorded.replay

    def replay_wrongly(graph):
        replay(graph)
        if graph.pool is RecordedGraphs.pools[-1]:
            for _, _, _, outputs in graph.calls:
                for tensor in outputs:
                    if tensor is not None and tensor.is_floating_point():
                        tensor.fill_(7.0)

    plan = plan_by_hand(profile_of(MODELS["resnet"]), "gpipe", 1, 4)
    monkeypatch.setattr(Recorded, "replay", replay_wrongly)
    says = "nothing is captured: a replay gives another "
    check_same(plan, RunSettings(task=MODELS["resnet"], steps=2), tmp_path, says)
    assert len(RecordedGraphs.pools) >= 4


class BiasBeforeNorm(MLPTask):
    """Its gradient is 0, and what is computed is rounding."""

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
        ).double()


def test_rounding_alone_is_no_other_gradient(tmp_path, graphs, monkeypatch):
    replay, task = Recorded.replay, f"{Path(__file__)}:BiasBeforeNorm"

    def replay_roughly(graph):
        replay(graph)
        for tensor in graph.aliases.values():
            if tensor.shape == (6,) and graph.pool.index(graph):
                tensor.add_(3e-17)

    plan = plan_by_hand(profile_of(task), "timeprest", 1, 2)
    monkeypatch.setattr(Recorded, "replay", replay_roughly)
    settings = RunSettings(task=task, steps=2, evaluate=False)
    (stage,) = run(plan, settings, tmp_path, inline=True).stages
    assert stage.graphs.startswith("all passes are replayed")


def test_users_cant_ask_for_graphs_on_the_cpu(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    with pytest.raises(UserError, match="--graphs on: CUDA graphs are of GPUs, and stages are"):
        run(plan, RunSettings(task=mlp_target, graphs="on"), tmp_path / "run", inline=True)
    assert not any(report.graphs for report in run_off(plan, mlp_target, tmp_path).stages)


def run_off(plan, task, where):
    return run(plan, RunSettings(task=task, steps=2), where / "auto", inline=True)


def test_slots_are_as_many_as_micro_batches_in_flight():
    pipeline = pipeline_of(plan_by_hand(chain(4), "gpipe", 2, 4))
    ops = make_schedule(pipeline, 3)[0]
    assert most_in_flight(ops, lambda op: () if op.micro_batch is None else (op.micro_batch,)) == 4
    pipeline = pipeline_of(plan_by_hand(chain(4), "timeprest", 2, 4))
    for ops, most in zip(make_schedule(pipeline, 9), (8, 4), strict=True):
        every = most_in_flight(
            ops, lambda op: range(4) if op.micro_batch is None else (op.micro_batch,)
        )
        assert every == most


@pytest.mark.parametrize("variant", ["timeprest", "gpipe"])
def test_autocast(variant, tmp_path, graphs):
    """Backwards make copies of weights in its precision of their own."""
    plan = plan_by_hand(profile_of(MODELS["tied-gpt"]), variant, 1, 4)
    settings = RunSettings(task=MODELS["tied-gpt"], steps=3, autocast="bfloat16", evaluate=False)
    check_same(plan, settings, tmp_path)


def test_what_graphs_hold_is_in_the_account(mlp_profile, mlp_target, tmp_path, graphs):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 1, 4)
    peaks = []
    for asked in ("off", "auto"):
        settings = RunSettings(task=mlp_target, steps=3, graphs=asked, evaluate=False)
        (report,) = run(plan, settings, tmp_path / asked, inline=True).stages
        peaks.append(report.peak)
    assert peaks[1].activations_bytes > peaks[0].activations_bytes
    assert peaks[1].gradients_bytes == peaks[0].gradients_bytes


class TestTheStandIn:
    """It is as strict as a card."""

    def graph(self, pool, compute):
        with RecordedGraphs(torch.device("cpu")).of(pool) as graph:
            made = compute()
        return graph, made

    def test_nothing_is_computed_before_a_replay(self):
        x, total = torch.ones(3), torch.zeros(3)
        graph, made = self.graph([], lambda: total.add_(x) * 2)
        assert bool(made.isnan().all())
        assert total.tolist() == [0, 0, 0]
        graph.replay()
        assert (total.tolist(), made.tolist()) == ([1, 1, 1], [2, 2, 2])
        x.fill_(5)
        graph.replay()
        assert made.tolist() == [12, 12, 12]

    def test_it_reads_where_a_tensor_was(self):
        x = torch.nn.Parameter(torch.ones(3))
        kept = x.data
        graph, made = self.graph([], lambda: x.detach() + 1)
        x.data = torch.full((3,), 7.0)
        graph.replay()
        assert made.tolist() == [2, 2, 2]
        del kept
        with pytest.raises(RuntimeError, match="let go"):
            graph.replay()

    def test_graphs_of_a_pool_write_over_what_was_let_go(self):
        x, pool = torch.ones(3), []
        first, made = self.graph(pool, lambda: x + 1)
        second, later = self.graph(pool, lambda: x + 2)
        first.replay()
        second.replay()
        assert (made.tolist(), later.tolist()) == ([2, 2, 2], [3, 3, 3])
        first.replay()
        assert bool(later.isnan().all())

    def test_random_numbers_go_on(self):
        torch.manual_seed(1)
        wanted = [torch.rand(2) for _ in range(3)]
        torch.manual_seed(1)
        graph, made = self.graph([], lambda: torch.rand(2))
        for k in range(2):
            graph.replay()
            assert torch.equal(made, wanted[k])
        assert torch.equal(torch.rand(2), wanted[2])
