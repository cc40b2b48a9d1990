"""--on-nan: a loss or gradients that aren't finite end the run, or are counted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.alike import assert_same_weights
from helpers.plans import plan_by_hand, with_times
from mlp_task import MLPTask
from timeprest.profiles.errors import RunError
from timeprest.runtime.prepare.workers import all_replicas
from timeprest.runtime.records.progress import Observer, Tail, read_epochs, read_losses
from timeprest.runtime.records.run_dir import RunDir, load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage.gradients import NotFinite, finite_gradients, finiteness


class BadLoss(MLPTask):
    """Its loss is NaN from its 10th micro-batch on; the gradients stay as they are."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        good = super().loss(output, target)
        return good + (math.nan if self.calls >= 10 else 0.0)


class BadGradient(MLPTask):
    """The loss is finite; its derivative isn't."""

    def loss(self, output, target):
        return super().loss(output, target) + (output - output.detach()).abs().sum().sqrt()


def made(name, mlp_profile, stages=2):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", stages, 4)
    return plan, f"{Path(__file__)}:{name}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_isnt_finite_is_found(bad):
    tensors = [torch.randn(1000), torch.randn(3, dtype=torch.float64), torch.ones(7).half()]
    assert finiteness(tensors)()
    for tensor in tensors:
        before = tensor[2].clone()
        tensor[2] = bad
        assert not finiteness(tensors)()
        tensor[2] = before
    tensors[0][:2] = torch.tensor([math.inf, -math.inf])
    assert not finiteness(tensors)()


def test_large_numbers_whose_sum_overflows_are_finite():
    assert finiteness([torch.full((100,), 3e38), torch.full((100,), 6e4).half()])()
    whole = torch.full((3,), 1 + 2j)
    assert finiteness([whole])()
    whole[1] = complex(0.0, float("nan"))
    assert not finiteness([torch.ones(2), whole])()


def test_mini_batches_are_kept_once_and_in_their_sequence():
    found = NotFinite("warn")
    found.check_loss(5, math.nan)
    assert not found.check_gradients(5, lambda: False)
    found.nothing_counts(3)
    found.check_loss(4, math.inf)
    found.check_loss(6, 0.5)
    assert found.mini_batches == [3, 4, 5]


def test_a_loss_that_isnt_finite_stops_the_run(mlp_profile, tmp_path):
    plan, task = made("BadLoss", mlp_profile)
    message = r"stage 1, at 1F2\.1: the loss of mini-batch 2 is nan: stopped"
    with pytest.raises(RunError, match=message):
        run(plan, RunSettings(task=task, steps=6, evaluate=False), tmp_path, inline=True)


def test_gradients_that_arent_finite_stop_the_run(mlp_profile, tmp_path):
    plan, task = made("BadGradient", mlp_profile)
    message = r"stage 1, at 1U0: gradients of mini-batch 0 aren't finite: stopped"
    with pytest.raises(RunError, match=message):
        run(plan, RunSettings(task=task, steps=6, evaluate=False), tmp_path, inline=True)
    assert not (tmp_path / "weights").exists()


def test_with_warn_the_run_goes_on_and_says_where(mlp_profile, tmp_path):
    plan, task = made("BadLoss", mlp_profile)
    settings = RunSettings(task=task, steps=4, on_nan="warn")
    records = []

    class Keep(Observer):
        def epoch(self, record):
            records.append(record)

    tail = Tail(tmp_path / "metrics.jsonl", Keep())
    summary = run(plan, settings, tmp_path, inline=True)
    # NaN plus a constant has the constant's gradients: only the last stage sees it.
    assert [report.not_finite for report in summary.stages] == [[], [2, 3]]
    losses = read_losses(tmp_path / "metrics.jsonl")
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True]
    # NaN is null in JSON; what reads it back finds NaN again.
    reports = RunDir(tmp_path).read_reports(all_replicas(plan))
    assert [r.not_finite for r in reports] == [r.not_finite for r in summary.stages]
    # A run that goes on from there knows of them.
    summary = resume(tmp_path, steps=5, inline=True)
    assert [report.not_finite for report in summary.stages] == [[], [2, 3]]
    tail.poll()
    assert math.isnan(records[0].train_loss)
    assert math.isnan(records[0].test["loss"])
    assert json.loads((tmp_path / "summary.json").read_text())["epochs"][0]["train_loss"] is None
    assert load_weights(tmp_path)


def test_a_checkpoint_with_weights_that_arent_finite_is_gone_on_from(mlp_profile, tmp_path):
    """Within an epoch, whose distances between weights aren't numbers so far."""
    plan, task = made("BadGradient", mlp_profile)
    settings = RunSettings(task=task, steps=4, on_nan="warn", checkpoint_every=3)
    run(plan, settings, tmp_path, inline=True)
    summary = resume(tmp_path, at=3, inline=True)
    assert math.isnan(summary.stages[0].weight_distance)


def test_gradients_are_looked_at_before_they_are_taken():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    none = torch.nn.Parameter(torch.zeros(3))
    # Finite, although the sum of their squares isn't in this type.
    parameter.grad = torch.full((3,), 6e4, dtype=torch.float16)
    NotFinite("stop").check_gradients(0, finite_gradients([parameter, none]))
    for bad in (math.nan, math.inf):
        parameter.grad[1] = bad
        with pytest.raises(RunError, match="gradients of mini-batch 7 aren't finite"):
            NotFinite("stop").check_gradients(7, finite_gradients([none, parameter]))
        counting = NotFinite("warn")
        counting.check_gradients(7, finite_gradients([parameter]))
        counting.check_loss(7, math.inf)
        counting.check_loss(8, 1.0)
        assert counting.mini_batches == [7]


class BadOnce(MLPTask):
    """The loss of one micro-batch is infinite, and so are its gradients."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        return super().loss(output, target) * (math.inf if self.calls == 10 else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush", "timeprest", "zb-h1"])
def test_with_skip_a_bad_update_is_left_out_everywhere(variant, mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, 4)
    task = f"{Path(__file__)}:BadOnce"
    for steps in (2, 3):
        settings = RunSettings(task=task, steps=steps, on_nan="skip", evaluate=False)
        summary = run(plan, settings, tmp_path / str(steps), inline=True)
    assert all(report.not_finite == [2] for report in summary.stages)
    # The mean is of the two that count.
    metrics = RunDir(tmp_path / "3").metrics
    (epoch,), losses = read_epochs(metrics), read_losses(metrics)
    assert not math.isfinite(losses[2])
    assert epoch.train_loss == pytest.approx(sum(losses[:2]) / 2)
    assert_same_weights(tmp_path / "3", tmp_path / "2")


class BadAtFirst(MLPTask):
    """Its loss is NaN in the first micro-batch."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        return super().loss(output, target) * (math.nan if self.calls == 1 else 1.0)


def test_an_update_left_out_at_first_is_no_mistake_with_a_schedule(mlp_profile, tmp_path, recwarn):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 4)
    settings = RunSettings(
        task=f"{Path(__file__)}:BadAtFirst", steps=2, on_nan="skip", lr_schedule="linear"
    )
    summary = run(plan, settings, tmp_path / "run", inline=True)
    assert [report.not_finite for report in summary.stages] == [[0], [0]]
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_flushing_stages_agree_to_skip(mlp_profile, tmp_path):
    """Only the last stage sees it; all leave the update out."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 4)
    for steps in (2, 4):
        settings = RunSettings(
            task=f"{Path(__file__)}:BadLoss", steps=steps, on_nan="skip", evaluate=False
        )
        run(plan, settings, tmp_path / str(steps), inline=True)
    assert_same_weights(tmp_path / "4", tmp_path / "2")
