"""Losses and metrics that are (sum, weight): what is asked of them, and what evaluation tells."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.alike import assert_same_weights, check_processes
from helpers.plans import plan_by_hand, profiled, with_times
from mlp_task import MLPTask, TiedShort, WeightedTask
from timeprest.profiles.errors import RunError, TargetError
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.task import read_figure, read_loss
from timeprest.runtime.prepare.loss import LossKind, kind_of_loss
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage.summed_losses import MiniBatchMeans
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Ragged(WeightedTask):
    """Its test samples don't fill the last micro-batch."""

    def data(self, split):
        data = super().data(split)
        return data if split == "train" else torch.utils.data.Subset(data, range(11))


class NothingCounts(WeightedTask):
    """Nor does anything in the second mini-batch of 8."""

    calls = 0
    empty = (3, 4)

    def loss(self, output, target):
        self.calls += 1
        total, weight = super().loss(output, target)
        return (total * 0, weight * 0) if self.calls in self.empty else (total, weight)


class FourthIsEmpty(NothingCounts):
    """The same in the fourth one."""

    empty = (7, 8)


class ThirdIsEmpty(NothingCounts):
    """In the first of the second two."""

    empty = (5, 6)


class FirstIsEmpty(NothingCounts):
    """In the very first one."""

    empty = (1, 2)


class TwiceOnALaterStage(TiedShort):
    """Its last two layers have the same weight; mini-batches have unlike ones."""

    TIES: ClassVar = {"l3.weight": "l2.weight"}

    @staticmethod
    def counts(y):
        return (y > 0.2) * (y * 0 + 1)


class Fickle(WeightedTask):
    """Gives a mean the first time, which is before a run."""

    def __init__(self):
        self.asked = []

    def loss(self, output, target):
        total, weight = super().loss(output, target)
        self.asked.append(output)
        return (total, weight) if len(self.asked) > 1 else total / weight


class Learned(WeightedTask):
    """What a sample counts is computed from the result."""

    constant = False

    def loss(self, output, target):
        weight = output.sigmoid().mean(1)
        weight = weight.detach() if self.constant else weight
        return ((output - target).square().mean(1) * weight).sum(), weight.sum()


class Constant(Learned):
    """The same as numbers."""

    constant = True


class Counted(MLPTask):
    """What counts is a part of the result that has no gradient, though it is of floats."""

    def model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = MLPTask().model()

            def forward(self, x):
                return self.net(x), (x[:, 0] > 0).double()

        return Net()

    def loss(self, output, target):
        found, counts = output
        return ((found - target).square().mean(1) * counts).sum(), counts.sum()


def here(name):
    return f"{Path(__file__)}:{name}"


def test_evaluation_tells_means_over_all_that_counts(mlp_profile, tmp_path):
    """And perplexity of the mean loss: micro-batches of 2 samples have others."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 4)
    summary = run(plan, RunSettings(task=here("Ragged"), steps=2), tmp_path / "run", inline=True)
    task = resolve(here("Ragged")).task
    model = task.model()
    model.load_state_dict(load_weights(tmp_path / "run"))
    x, y = torch.utils.data.default_collate(list(task.data("test")))
    counts = task.counts(y)
    with torch.no_grad():
        error = model(x) - y
    loss = ((counts * error**2).sum() / counts.sum()).item()
    assert summary.epochs[-1].test == pytest.approx(
        {
            "loss": loss,
            "error": ((counts * error.abs()).sum() / counts.sum()).item(),
            "perplexity": math.exp(loss),
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("variant", ["gpipe", "timeprest"])
def test_a_mini_batch_in_which_nothing_counts(variant, mlp_profile, tmp_path):
    """Ends the run; or it has no gradient, and no part in the epoch's mean loss."""
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2)
    asked = {"task": here("NothingCounts"), "evaluate": False}
    with pytest.raises(RunError, match=r"weights of mini-batch 1's loss sum up to 0: nothing"):
        run(plan, RunSettings(steps=3, **asked), tmp_path / "stop", inline=True)
    how = RunSettings(steps=3, on_nan="warn", **asked)
    summary = run(plan, how, tmp_path / "warn", inline=True)
    assert summary.stages[-1].not_finite == [1]
    assert math.isfinite(summary.epochs[-1].train_loss)
    assert all(weight.isfinite().all() for weight in load_weights(tmp_path / "warn").values())


@pytest.mark.parametrize(
    ("task", "update_every"), [("FourthIsEmpty", 1), ("FourthIsEmpty", 2), ("ThirdIsEmpty", 2)]
)
@pytest.mark.parametrize("variant", ["gpipe", "timeprest", "pipedream-2bw"])
def test_with_skip_all_stages_leave_its_update_out(
    variant, task, update_every, mlp_profile, tmp_path
):
    """Momentum would move the weights without a gradient, too."""
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2, update_every=update_every)
    for steps in (4 - update_every, 4):
        how = RunSettings(task=here(task), steps=steps, on_nan="skip", evaluate=False)
        run(plan, how, tmp_path / str(steps), inline=True)
    assert_same_weights(tmp_path / "4", tmp_path / str(4 - update_every))


@pytest.mark.parametrize("update_every", [1, 2])
@pytest.mark.parametrize("variant", ["gpipe", "timeprest"])
def test_the_next_update_is_made_again(variant, update_every, mlp_profile, tmp_path):
    """One is left out, and no more of them."""
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2, update_every=update_every)
    first = resolve(here("FirstIsEmpty")).model(0).state_dict()
    for updates in (1, 2):
        steps = updates * update_every
        how = RunSettings(task=here("FirstIsEmpty"), steps=steps, on_nan="skip", evaluate=False)
        run(plan, how, tmp_path / str(steps), inline=True)
        ends = load_weights(tmp_path / str(steps))
        assert all(torch.equal(ends[name], w) == (updates == 1) for name, w in first.items())


def test_gradients_that_wait_for_the_next_mini_batchs():
    """They are counted while they wait; where nothing counts in the next one, they are all."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    means = MiniBatchMeans([p])
    p.grad = torch.ones_like(p)
    means.settle(4.0, 3)
    means.set_aside()
    assert p.grad is None
    assert means.aside_bytes == 24
    p.grad = torch.full_like(p, 6.0)
    means.settle(1.0, 3)
    assert means.aside_bytes == 0
    assert torch.allclose(p.grad, torch.full_like(p, 1 / 12 + 2), rtol=0, atol=1e-15)
    means.set_aside()
    assert means.aside_bytes == 24
    # A branch that was left out.
    means.settle(2.0, 3)
    assert means.aside_bytes == 0
    assert torch.allclose(p.grad, torch.full_like(p, 1 / 12 + 2), rtol=0, atol=1e-15)


def test_split_backwards_of_a_weight_that_is_used_twice(tmp_path):
    """It gets its gradient in the first part, which mustn't meet those of the mini-batch before."""
    target = here("TwiceOnALaterStage")
    profile = profiled(target, (4, 8))
    settings = RunSettings(task=target, steps=4, evaluate=False)
    for variant in ("zb-h1", "pipedream-flush"):
        plan = plan_by_hand(profile, variant, 2, 2, update_every=2)
        run(plan, settings, tmp_path / variant, inline=True)
    assert_same_weights(tmp_path / "pipedream-flush", tmp_path / "zb-h1", atol=1e-12)


@pytest.fixture(scope="module")
def frozen_target(mlp_target):
    return mlp_target.replace("MLPTask", "Frozen")


@pytest.fixture(scope="module")
def frozen_profile(frozen_target):
    return profiled(frozen_target)


@pytest.mark.parametrize("update_every", [1, 2])
@pytest.mark.parametrize(
    ("variant", "micro_batches", "placement", "replicas"),
    [
        ("timeprest", 2, (0, 1, 2), [2, 1, 2]),
        ("timeprest", 2, (0, 1, 0, 1), None),
        ("v-timeprest", 2, (0, 1, 1, 0), None),
        ("pipedream", 1, (0, 1, 2), [1, 2, 1]),
        ("interleaved-1f1b", 2, (0, 1, 0, 1), None),
    ],
)
def test_stages_that_no_gradients_come_to_need_no_weights(
    variant,
    micro_batches,
    placement,
    replicas,
    update_every,
    frozen_target,
    frozen_profile,
    tmp_path,
):
    """Their updates may come before the last stage's forward. The mean is the same."""
    plan = plan_by_hand(
        frozen_profile,
        variant,
        len(placement),
        micro_batches,
        update_every=update_every,
        placement=placement,
        replicas=replicas,
    )
    for loss in ("", "Sum"):
        how = RunSettings(task=frozen_target + loss, steps=4, evaluate=False, clip_norm=1.0)
        run(plan, how, tmp_path / f"Mean{loss}", inline=True)
    assert_same_weights(tmp_path / "MeanSum", tmp_path / "Mean", atol=1e-12)


@pytest.mark.processes
@pytest.mark.slow
def test_nor_do_they_in_processes(frozen_target, frozen_profile, tmp_path):
    plan = plan_by_hand(frozen_profile, "timeprest", 4, 2, placement=(0, 1, 0, 1))
    how = RunSettings(task=frozen_target + "Sum", steps=4, evaluate=False)
    check_processes(plan, how, tmp_path)


def test_a_loss_that_is_now_this_and_now_that_is_refused(mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    with pytest.raises(TargetError, match=r"gives \(sum, weight\), and gave a mean when it was"):
        run(plan, RunSettings(task=here("Fickle"), steps=1), tmp_path / "run", inline=True)


class Reads(WeightedTask):
    """Looks at a number, which a fake tensor hasn't."""

    def loss(self, output, target):
        total, weight = super().loss(output, target)
        return total, weight.item()


@pytest.mark.parametrize("task", [WeightedTask(), Reads(), MLPTask()])
@pytest.mark.parametrize("fake", [False, True])
def test_a_loss_is_asked_before_a_run_which_it_gives(task, fake):
    """Of large models, nothing is computed for that; random numbers stay where they are."""
    with FakeTensorMode() if fake else nullcontext():
        result = torch.empty(4, 3, dtype=torch.float64)
    target = torch.randn(4, 3, dtype=torch.float64)
    before = torch.get_rng_state()
    kind = kind_of_loss(task, result, target)
    assert kind == LossKind(weighted=isinstance(task, WeightedTask))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_weight_with_a_gradient_is_refused_at_profile_and_run(mlp_profile, tmp_path):
    """Its gradient would be left out; a part of a result that has none may be one."""
    with pytest.raises(TargetError, match=r"a weight that has a gradient .*weight.detach"):
        profiled(here("Learned"))
    for task in ("Constant", "Counted"):
        plan = plan_by_hand(profiled(here(task), (4, 8)), "gpipe", 2, 2)
        run(plan, RunSettings(task=here(task), steps=1), tmp_path / task, inline=True)
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    with pytest.raises(TargetError, match="a weight that has a gradient"):
        run(plan, RunSettings(task=here("Learned"), steps=1), tmp_path / "run", inline=True)
    assert not (tmp_path / "run").exists()
    read_loss((torch.ones(()), torch.ones(())))
    with pytest.raises(TargetError, match="a weight that has a gradient"):
        read_loss((torch.ones(()), torch.ones((), requires_grad=True)))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.ones(2), "one number"),
        (3.0, "one number"),
        ((torch.ones(2), 1), "one number"),
        ((torch.ones(()), 1, 1), "a tuple of 3"),
        ((torch.ones(()), torch.ones(2)), "its weight must be one number"),
        ((torch.ones(()), "8"), "its weight must be one number"),
        ((torch.ones(()), -1), "its weight is -1, and must be"),
        ((torch.ones(()), math.nan), "its weight is nan, and must be"),
    ],
)
def test_what_a_loss_may_not_be(found, message):
    with pytest.raises(TargetError, match=message):
        read_loss(found)


def test_what_a_metric_may_be():
    assert read_figure("a", 0.5, 4) == (2.0, 4)
    assert read_figure("a", torch.tensor(0.5), 4) == (2.0, 4)
    assert read_figure("a", (torch.tensor(3), torch.tensor(6)), 4) == (3, 6)
    assert read_figure("a", (np.float32(0.5), np.int64(6)), 4) == (0.5, 6)
    for bad in ((1, -1), (1, None, 2), torch.ones(2), "x", (torch.ones(2), 1)):
        with pytest.raises(TargetError, match="the task's metric 'a'"):
            read_figure("a", bad, 4)
