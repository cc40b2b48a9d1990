"""Models that are no chains, trained: skips over stages, integers, sizes, dicts, dropout."""

from __future__ import annotations

import pytest
import torch
from graph_task import GraphTask
from helpers.alike import assert_same_weights, check_processes
from helpers.paths import TESTS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, profiled
from timeprest.profiles.errors import TargetError
from timeprest.profiles.target import resolve
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

FILE = TESTS / "tasks/graph_task.py"
STEPS = 7


def profile_of(name):
    return profiled(f"{FILE}:{name}")


@pytest.fixture(scope="module")
def graph_profile():
    return profile_of("GraphTask")


@pytest.fixture(scope="module")
def dropout_profile():
    return profile_of("DropoutTask")


def test_something_skips_a_stage(graph_profile):
    plan = plan_by_hand(graph_profile, "gpipe", 4, 2)
    assert any(edge.target - edge.source > 1 for edge in plan.edges)
    assert any(not edge.needs_grad for edge in plan.edges)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "stages"), [*(("gpipe", s) for s in (1, 2, 3, 4, 7)), ("zb-h1", 3), ("zb-h1", 7)]
)
def test_flush_systems_on_a_graph_are_plain_training(variant, stages, graph_profile, tmp_path):
    plan = plan_by_hand(graph_profile, variant, stages, 4)
    name = f"{FILE}:GraphTask"
    summary = run(plan, RunSettings(task=name, steps=STEPS), tmp_path / "run", inline=True)
    task = resolve(name).task
    losses, model = train_plainly(name, plan.mini_batch, STEPS)
    assert_trained_as(tmp_path / "run", (losses, model))
    for report, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert report.peak.total <= predicted.memory_bytes
    # Evaluation: 60 samples in micro-batches of 2, in evaluation mode, on the final weights.
    model.eval()
    test = task.data("test")
    tokens, masks = test.tokens, test.masks
    with torch.no_grad():
        output = model(tokens, masks)
    wanted = task.loss(output, {"words": tokens.flip(1)}).item()
    assert summary.epochs[-1].test["loss"] == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("variant", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("placement", [(), (0, 0, 0)])
def test_gradients_that_are_views_of_one_are_added_apart(variant, placement, tmp_path):
    """Micro-batches of one sample: neither two parameters', nor one's and what goes to the stage
    before, may be one memory when those of the next one come."""
    name = f"{TESTS / 'tasks/variety_tasks.py'}:ShiftsTask"
    plan = plan_by_hand(profiled(name, (1, 8)), variant, 3, 8, placement=placement)
    run(plan, RunSettings(task=name, steps=3, evaluate=False), tmp_path, inline=True)
    assert_trained_as(tmp_path, train_plainly(name, plan.mini_batch, 3))


@pytest.mark.parametrize("variant", ["gpipe", "pipedream"])
def test_gradients_that_stages_of_a_device_share_are_added_apart(variant, tmp_path):
    """What stage 1 hands over for two tensors is one memory; stage 2 has more for one of them."""
    name = f"{TESTS / 'tasks/variety_tasks.py'}:SumOfBothTask"
    cut = [["one", "two"], ["sum"], ["last", "skip"]]
    plan = plan_by_hand(profiled(name, (8,)), variant, 3, 1, cut=cut, placement=(0, 0, 0))
    run(plan, RunSettings(task=name, steps=1, evaluate=False), tmp_path, inline=True)
    assert_trained_as(tmp_path, train_plainly(name, plan.mini_batch, 1))


@pytest.mark.parametrize(
    ("variant", "n", "placement"),
    [
        ("pipedream-2bw", 4, ()),
        ("spectrain", 1, ()),
        # Handed over, it would be the memory that updates change.
        ("pipedream", 1, (0, 0, 1)),
        ("timeprest", 4, (0, 0, 1)),
    ],
)
def test_a_parameter_that_goes_to_another_stage_is_of_the_version_that_is_used(
    variant, n, placement, tmp_path
):
    """As what is computed of it, where a layer that is kept whole gives it as it is."""
    for name in ("QueryTask", "ComputedQueryTask"):
        target = f"{TESTS / 'tasks/variety_tasks.py'}:{name}"
        profile = profiled(target, granularity="ask")
        plan = plan_by_hand(profile, variant, 3, n, placement=placement)
        settings = RunSettings(task=target, steps=6, evaluate=False)
        run(plan, settings, tmp_path / name, inline=True)
    assert_same_weights(tmp_path / "QueryTask", tmp_path / "ComputedQueryTask", atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["timeprest", "v-timeprest", "pipedream"])
def test_asynchronous_systems_train_a_graph(variant, graph_profile, tmp_path):
    plan = plan_by_hand(graph_profile, variant, 4, 1 if variant == "pipedream" else 4)
    settings = RunSettings(task=f"{FILE}:GraphTask", epochs=6)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    assert summary.epochs[-1].train_loss < summary.epochs[0].train_loss
    peaks = [(r.peak.total, p) for r, p in zip(summary.stages, plan.predicted.stages, strict=True)]
    for measured, predicted in peaks:
        assert measured <= predicted.memory_bytes


def test_evaluation_drops_nothing_out(dropout_profile, tmp_path):
    """Both kinds of dropout are off in evaluation, though one was traced in training mode."""
    plan = plan_by_hand(dropout_profile, "gpipe", 3, 4)
    name = f"{FILE}:DropoutTask"
    settings = RunSettings(task=name, steps=2)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    task = resolve(name).task
    model = task.model()
    model.load_state_dict(load_weights(tmp_path / "run"))
    model.eval()
    test = task.data("test")
    with torch.no_grad():
        wanted = task.loss(model(test.tokens, test.masks), {"words": test.tokens.flip(1)})
    assert summary.epochs[-1].test["loss"] == pytest.approx(wanted.item(), abs=1e-10)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_equal_inline_with_dropout_and_skips(dropout_profile, tmp_path):
    """Three processes draw the same dropout masks as the inline run, and send the same graph."""
    plan = plan_by_hand(dropout_profile, "timeprest", 3, 4)
    check_processes(plan, RunSettings(task=f"{FILE}:DropoutTask", epochs=2), tmp_path)


class NoTestData(GraphTask):
    """Training data alone."""

    def data(self, split):
        if split == "test":
            raise OSError("no test data here")
        return super().data(split)


def test_missing_test_data_is_one_line(graph_profile, tmp_path):
    """Whatever the user's data raises names the hook, the split and the place."""
    plan = plan_by_hand(graph_profile, "gpipe", 2, 4)
    settings = RunSettings(task=f"{__file__}:NoTestData", steps=1)
    with pytest.raises(TargetError, match=r"data\('test'\) failed: .*OSError: no test data here"):
        run(plan, settings, tmp_path / "run", inline=True)
