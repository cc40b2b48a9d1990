"""Stages with several workers train as those with one: same weights, losses and versions."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.alike import check_processes, run_replicated
from helpers.drawn.cases import examples
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, profiled, with_times
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timeprest.planner.systems.operations import parse_op
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import PlanError, RunError
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.prepare.workers import all_replicas
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings

GRAPH = TESTS / "tasks/graph_task.py"
STEPS = 7
ADAM = OptimizerChoice(name="adam", lr=0.05)
MOMENTUM = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)
RUNNING = list(ALL)
WHOLE = [name for name in RUNNING if VARIANTS[name].whole_mini_batches]


def plans(profile, variant, replicas, n=4, **how):
    """The replicated plan, and one of the same stages with a device each."""
    return [
        plan_by_hand(profile, variant, len(replicas), n, replicas=r, **how)
        for r in (replicas, None)
    ]


def logged(run_dir, name):
    """(operation, version) of each line of a log."""
    lines = (run_dir / "operations" / f"{name}.jsonl").read_text().splitlines()
    return [(line["op"], line["version"]) for line in map(json.loads, lines)]


def compare(plan, where):
    """The version of every operation, each of which one replica logs."""
    whole = VARIANTS[plan.variant].whole_mini_batches
    for worker in all_replicas(plan):
        mine = []
        for text, version in logged(where / "alone", f"stage{worker.stage}"):
            i = parse_op(text)[1].micro_batch
            if i is None or whole or i % worker.count == worker.index:
                mine.append((text, version))
        assert logged(where / "replicated", worker.file) == mine


@pytest.mark.choice(18)
@pytest.mark.slow
@pytest.mark.parametrize("variant", RUNNING)
@pytest.mark.parametrize("replicas", [(2,), (1, 2), (4, 2), (2, 2, 1)])
def test_replicas_equal_one_worker(variant, replicas, mlp_profile, mlp_target, tmp_path):
    plan, alone = plans(with_times(mlp_profile), variant, replicas)
    how = RunSettings(
        task=mlp_target,
        optimizer=ADAM if replicas == (1, 2) else MOMENTUM,
        steps=STEPS,
        evaluate=False,
        log_operations=True,
    )
    summary, _ = run_replicated(plan, alone, how, tmp_path)
    compare(plan, tmp_path)
    of_workers = [(report.stage, report.replica) for report in summary.stages]
    assert of_workers == [(s, j) for s, r in enumerate(replicas) for j in range(r)]
    for report in summary.stages:
        predicted = plan.predicted.stages[report.stage]
        assert report.versions_held == predicted.versions_held
        # Where a backward is split, the last stage also keeps the loss's own number.
        more = 8 * VARIANTS[variant].split_backward
        kept = predicted.accounted_memory.activations_bytes
        assert kept <= report.peak.activations_bytes <= kept + more
        if how.optimizer is MOMENTUM:
            most = predicted.accounted_memory.total
            assert report.peak.total <= most + more


@pytest.mark.slow
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_else_the_plan_asks_for(data, mlp_profile, mlp_target, tmp_path_factory):
    """Fewer updates, recomputation, uneven stages and limits, in any number of replicas."""
    variant = VARIANTS[data.draw(st.sampled_from(RUNNING))]
    stages = data.draw(st.integers(1, 3))
    most = data.draw(st.sampled_from([2, 4])) if stages < 3 else 4
    replicas = tuple(data.draw(st.sampled_from([1, 2, most])) for _ in range(stages))
    recompute = [not variant.prediction and data.draw(st.booleans()) for _ in range(stages)]
    names = [layer.name for layer in mlp_profile.layers]
    shares = data.draw(st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names)))
    plan, alone = plans(
        with_times(mlp_profile, shares=shares),
        variant.name,
        replicas,
        most,
        update_every=data.draw(st.integers(1, 3)),
        recompute=recompute,
    )
    where = tmp_path_factory.mktemp("drawn")
    choice = data.draw(st.sampled_from([ADAM, MOMENTUM]))
    how = RunSettings(
        task=mlp_target, optimizer=choice, steps=STEPS, evaluate=False, log_operations=True
    )
    summary, _ = run_replicated(plan, alone, how, where)
    compare(plan, where)
    for report in summary.stages:
        predicted = plan.predicted.stages[report.stage]
        assert report.versions_held <= predicted.versions_held
        more = 8 * variant.split_backward
        assert report.peak.activations_bytes <= predicted.memory.activations_bytes + more


@pytest.mark.choice(10)
@pytest.mark.slow
@pytest.mark.parametrize("variant", WHOLE)
@pytest.mark.parametrize("replicas", [(2, 3), (3, 2, 1), (1, 3, 2)])
def test_uneven_replicas_share_whole_mini_batches(
    variant, replicas, mlp_profile, mlp_target, tmp_path
):
    """Samples k mod 2 on one stage and k mod 3 on the next; evaluation has parts left over."""
    plan, alone = plans(with_times(mlp_profile), variant, replicas, mini_batch=6)
    how = RunSettings(task=mlp_target, steps=STEPS, log_operations=True)
    summary, _ = run_replicated(plan, alone, how, tmp_path)
    compare(plan, tmp_path)
    assert summary.epochs[-1].test == pytest.approx(by_hand(mlp_target, tmp_path), abs=1e-10)


def by_hand(target, where):
    """What the unreplicated run's weights give in evaluation, by hand."""
    task = resolve(target).task
    model = task.model()
    model.load_state_dict(load_weights(where / "alone"))
    model.eval()
    x, y = task.data("test").tensors
    with torch.no_grad():
        return {"loss": task.loss(model(x), y).item()}


@pytest.mark.choice(16)
@pytest.mark.slow
@pytest.mark.parametrize("variant", RUNNING)
@pytest.mark.parametrize("replicas", [(2,), (2, 4)])
def test_replicas_weigh_a_loss_together(variant, replicas, mlp_profile, mlp_target, tmp_path):
    """A loss of sums and weights; what counts is spread unevenly over the replicas' samples."""
    plan, alone = plans(with_times(mlp_profile), variant, replicas, update_every=2)
    task = mlp_target.replace("MLPTask", "ShortWeighted")
    how = RunSettings(task=task, optimizer=MOMENTUM, steps=STEPS, ragged="pad", log_operations=True)
    summary, _ = run_replicated(plan, alone, how, tmp_path)
    compare(plan, tmp_path)
    alone_test = msgspec.json.decode((tmp_path / "alone" / "summary.json").read_bytes())
    wanted = alone_test["epochs"][-1]
    assert summary.epochs[-1].test == pytest.approx(wanted["test"], abs=1e-10)
    assert summary.epochs[-1].train_loss == pytest.approx(wanted["train_loss"], abs=1e-10)


@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush"])
@pytest.mark.parametrize("replicas", [(2,), (4,), (1, 4)])
def test_flushed_replicas_are_plain_training(variant, replicas, mlp_profile, mlp_target, tmp_path):
    """With one stage that is data parallelism."""
    plan, _ = plans(with_times(mlp_profile), variant, replicas)
    run(plan, RunSettings(task=mlp_target, steps=STEPS), tmp_path, inline=True)
    assert_trained_as(tmp_path, train_plainly(mlp_target, plan.mini_batch, STEPS))


@pytest.fixture(scope="module")
def graph_profile():
    return profiled(f"{GRAPH}:GraphTask")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpipe", "timeprest", "i-timeprest", "pipedream", "spectrain"])
def test_tensors_that_skip_stages(variant, graph_profile, tmp_path):
    """From 2 replicas over 4 to 2 and 1, with integers, sizes and samples in dimension 1."""
    plan, alone = plans(graph_profile, variant, (2, 4, 1, 2))
    assert any(edge.target - edge.source > 1 for edge in plan.edges)
    how = RunSettings(
        task=f"{GRAPH}:GraphTask", optimizer=MOMENTUM, steps=STEPS, log_operations=True
    )
    summary, _ = run_replicated(plan, alone, how, tmp_path)
    compare(plan, tmp_path)
    alone_test = msgspec.json.decode((tmp_path / "alone" / "summary.json").read_bytes())
    wanted = alone_test["epochs"][-1]["test"]
    assert summary.epochs[-1].test == pytest.approx(wanted, abs=1e-10)


def test_a_tensor_that_cant_be_dealt_is_refused(graph_profile):
    """Behind the embedding batch and time are one dimension: five rows are a sample's."""
    names = [layer.name for layer in graph_profile.layers]
    plan = plan_by_hand(
        graph_profile, "pipedream", 2, 1, cut=[names[:1], names[1:]], replicas=(2, 1)
    )
    with pytest.raises(PlanError, match=r"different numbers of replicas: .* \[20, 6\] for 4 sam"):
        prepare(plan, RunSettings(task=f"{GRAPH}:GraphTask"))
    # Nothing has to be taken apart where micro-batches are dealt, or both have as many.
    for variant, n, replicas in (("gpipe", 4, (2, 1)), ("pipedream", 1, (2, 2))):
        plan = plan_by_hand(
            graph_profile, variant, 2, n, cut=[names[:1], names[1:]], replicas=replicas
        )
        prepare(plan, RunSettings(task=f"{GRAPH}:GraphTask"))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_equal_inline_with_dropout(graph_profile, tmp_path):
    """Each of three processes draws the masks of its replica's own stream."""
    task = f"{GRAPH}:DropoutTask"
    plan = plan_by_hand(profiled(task), "timeprest", 2, 4, replicas=(2, 1))
    processes_equal_inline(plan, RunSettings(task=task, epochs=2), tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_equal_inline_with_uneven_replicas(mlp_profile, mlp_target, tmp_path):
    plan, _ = plans(with_times(mlp_profile), "pipedream", (2, 3), mini_batch=6)
    how = RunSettings(task=mlp_target, epochs=1, optimizer=ADAM)
    processes_equal_inline(plan, how, tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_weigh_a_loss_together(mlp_target, tmp_path):
    """Backwards begin before all that counts is known, in a system that never drains."""
    task = mlp_target.replace("MLPTask", "ShortWeighted")
    plan, _ = plans(profiled(task), "pipedream-2bw", (1, 2), update_every=2)
    how = RunSettings(task=task, epochs=2, optimizer=ADAM, ragged="pad", clip_norm=0.3)
    processes_equal_inline(plan, how, tmp_path)


def processes_equal_inline(plan, how, where):
    ended = check_processes(plan, how, where, 1e-10)
    workers = all_replicas(plan)
    assert [(r.stage, r.replica) for r in ended[1].stages] == [(w.stage, w.index) for w in workers]
    for report in ended[1].stages:
        predicted = plan.predicted.stages[report.stage]
        assert report.versions_held == predicted.versions_held
        assert report.peak.activations_bytes == predicted.memory.activations_bytes
    written = sorted(path.name for path in (where / "processes" / "weights").iterdir())
    assert written == [f"stage{s}.safetensors" for s in range(len(plan.stages))]


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("trap", "replicas", "message"),
    [
        ("SIGKILL:1", (2, 1), r"stage 0, replica 1 \(rank 1\) was killed by SIGKILL"),
        # Nobody but the other replica waits for it, for its gradients.
        ("SIGSTOP:1", (2,), r"stage 0, replica 0, at 0U\d+: waiting for stage 0, replica 1: noth"),
    ],
)
def test_a_lost_replica_ends_the_run(trap, replicas, message, mlp_profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trap.txt").write_text(trap)
    plan, _ = plans(with_times(mlp_profile), "timeprest", replicas)
    how = RunSettings(
        task=f"{TESTS / 'tasks/failing_tasks.py'}:TrapTask", steps=40, evaluate=False, timeout_s=3
    )
    begin = time.monotonic()
    with pytest.raises(RunError, match=message) as caught:
        run(plan, how, tmp_path / "run")
    assert time.monotonic() - begin < 45
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_weights_that_forwards_compute(tmp_path):
    name = f"{TESTS / 'tasks/variety_tasks.py'}:WeightNormTask"
    plan, _ = plans(profiled(name), "gpipe", (2, 1))
    run(plan, RunSettings(task=name, steps=STEPS), tmp_path, inline=True)
    assert_trained_as(tmp_path, train_plainly(name, plan.mini_batch, STEPS))


@pytest.mark.parametrize("replicas", [(2,), (2, 1), (1, 4)])
def test_types_and_missing_gradients(replicas, tmp_path):
    """Two types of parameters; AdamW would move one without a gradient if it had one of zero."""
    name = f"{TESTS / 'tasks/variety_tasks.py'}:MixedTask"
    plan, _ = plans(profiled(name), "gpipe", replicas)
    run(plan, RunSettings(task=name, steps=STEPS), tmp_path, inline=True)
    _, model = train_plainly(name, plan.mini_batch, STEPS)
    state = load_weights(tmp_path)
    assert state["shift"].tolist() == [1.0] * 6
    for key, weight in model.state_dict().items():
        exact = weight.dtype == torch.float64
        torch.testing.assert_close(state[key], weight, rtol=0, atol=1e-5 if exact else 1e-4)
