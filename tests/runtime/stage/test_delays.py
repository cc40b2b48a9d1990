"""What stages make of their delays, against the oracle: rescheduled rates, raised momenta, weights
corrected by their mean change."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.against_oracle import delays_of, train
from helpers.alike import assert_same_weights, run_replicated
from helpers.paths import TESTS
from helpers.plans import ALL, plan_by_hand, with_times
from helpers.processes.stopped_runs import check_resumed
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import TargetError, TaskWarning, UserError
from timeprest.runtime.checkpoint.checkpoint import settings_checksum
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings, settings_of
from timeprest.runtime.stage.optimizer import _scaled
from timeprest.runtime.weights.delays import Rescheduling, delay_of, raise_momentum

ASYNCHRONOUS = [name for name in ALL if not VARIANTS[name].flushes]
BOTH = {"lr_rescheduling": 7, "stagewise_momentum": True}
BOTH_OFF = {"lr_rescheduling": 0, "stagewise_momentum": False}


def plan_of(profile, variant, stages, n, **how):
    n = max(n, VARIANTS[variant].least_micro_batches(stages))
    return plan_by_hand(with_times(profile), variant, stages, n, **how)


# By default ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "updates"), [(12, 3), (3, 1)])
def test_pipemare_reschedules_unless_told_otherwise(
    steps, updates, mlp_profile, mlp_target, tmp_path
):
    """By a quarter of the run's updates, and one at least, where a delay is long enough to matter;
    nobody else."""
    plan = plan_of(mlp_profile, "pipemare", 4, 1)
    assert max(delay_of(plan, s) for s in range(4)) > 1
    weights = {}
    for name, asked in {
        "own": {},
        "said": {"lr_rescheduling": updates},
        "none": BOTH_OFF,
    }.items():
        settings = settings_of(plan, {"task": mlp_target, "steps": steps, **asked})
        run(plan, settings, tmp_path / name, inline=True)
        weights[name] = load_weights(tmp_path / name)
    assert_same_weights(weights["own"], weights["said"])
    assert any(not torch.equal(weights["own"][n], weights["none"][n]) for n in weights["own"])
    for name in set(ASYNCHRONOUS) - {"pipemare"}:
        assert settings_of(plan_of(mlp_profile, name, 2, 2), {}).lr_rescheduling == 0, name


def test_a_study_gives_each_system_its_own_rates(mlp_profile, mlp_target, tmp_path):
    """Those of pipemare aren't `timeprest`'s, whichever comes first."""
    plans = [plan_of(mlp_profile, name, 4, 1) for name in ("timeprest", "pipemare")]
    settings = settings_of(plans[1], {"task": mlp_target, "steps": 12})
    for plan, without in zip(plans, (True, False), strict=True):
        run(plan, settings, tmp_path / plan.variant, inline=True)
        off = msgspec.structs.replace(settings, lr_rescheduling=0)
        run(plan, off, tmp_path / f"{plan.variant}-off", inline=True)
        as_run, as_off = (load_weights(tmp_path / f"{plan.variant}{s}") for s in ("", "-off"))
        assert all(torch.equal(as_run[name], as_off[name]) for name in as_run) is without


# Against the oracle ----------------------------------------------------------------------------


@pytest.mark.choice(14)
@pytest.mark.parametrize("variant", ASYNCHRONOUS)
@pytest.mark.parametrize("option", BOTH)
def test_each_alone(option, variant, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, variant, 4, 2)
    assert [delay_of(plan, s) for s in range(4)] == delays_of(plan)
    train(plan, mlp_target, "momentum", tmp_path / "run", **{option: BOTH[option]})


@pytest.mark.choice(20)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "stages", "n", "optimizer"),
    [
        (name, stages, n, optimizer)
        for name in ASYNCHRONOUS
        for stages, optimizer in ((2, "adamw"), (4, "momentum"), (4, "adamw"))
        for n in ((1,) if VARIANTS[name].whole_mini_batches else (2, 4))
        if n >= VARIANTS[name].least_micro_batches(stages)
    ],
)
def test_both_at_once(variant, stages, n, optimizer, mlp_profile, mlp_target, tmp_path):
    """With a warm-up and a rate that falls: predictions go by the rate to come."""
    plan = plan_of(mlp_profile, variant, stages, n)
    more = {"lr_schedule": "linear", "warmup": 4, **BOTH}
    train(plan, mlp_target, optimizer, tmp_path / "run", **more)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("variant", ["pipemare", "timeprest", "pipeoptim"])
def test_several_stages_on_a_device(variant, placement, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, variant, 4, 2, placement=placement, update_every=2)
    train(plan, mlp_target, "momentum", tmp_path / "run", **BOTH)


@pytest.mark.parametrize("how", [{"discrepancy_correction": False}, {"discrepancy_decay": 0.5}])
def test_corrections_as_asked(how, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, "pipemare", 4, 1)
    summary = train(plan, mlp_target, "momentum", tmp_path / "run", **how)
    weights = plan.predicted.stages[0].parameter_bytes
    corrects = how.get("discrepancy_correction", True)
    assert summary.stages[0].peak.versions_bytes == (2 * weights if corrects else 0)


@pytest.mark.parametrize("n", [1, 2])
def test_recomputation_keeps_the_forwards_weights(n, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, "pipemare", 3, n, recompute=(True, True, False))
    summary = train(plan, mlp_target, "momentum", tmp_path / "run")
    for report, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert report.peak.total <= predicted.memory_bytes


@pytest.mark.choice(0)
@pytest.mark.processes
def test_in_processes(mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, "pipemare", 3, 2)
    train(plan, mlp_target, "adam", tmp_path / "processes", inline=False, **BOTH)
    train(plan, mlp_target, "adam", tmp_path / "inline", **BOTH)
    assert_same_weights(tmp_path / "processes", tmp_path / "inline")


def test_replicas_correct_alike(mlp_profile, mlp_target, tmp_path):
    """As one worker does that follows their schedule."""
    plan = plan_of(mlp_profile, "pipemare", 2, 4, replicas=(2, 2))
    alone = plan_of(mlp_profile, "pipemare", 2, 4)
    settings = RunSettings(task=mlp_target, steps=12, evaluate=False, lr_rescheduling=5)
    run_replicated(plan, alone, settings, tmp_path)
    assert delays_of(plan) == delays_of(alone) == [1, 0]


def test_runs_go_on_bit_for_bit(mlp_profile, mlp_target, tmp_path):
    """With the mean change, and the updates so far."""
    plan = plan_of(mlp_profile, "pipemare", 3, 1)
    settings = RunSettings(task=mlp_target, steps=12, checkpoint_every=4, evaluate=False, **BOTH)
    check_resumed(plan, settings, tmp_path, 9, 12)


# Rules -----------------------------------------------------------------------------------------


def test_rescheduling():
    """d^(min(t/T, 1) − 1): one d-th at first, the square root half-way, then all of it."""
    four = Rescheduling(4, 10)
    assert [four.rate(t) for t in (0, 5, 10, 11)] == pytest.approx([0.25, 0.5, 1, 1])
    assert {Rescheduling(d, 10).rate(0) for d in (0, 1)} == {1.0}
    assert Rescheduling(4, 0).rate(0) == 1.0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    with _scaled(optimizer, four.rate(0)):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert optimizer.param_groups[0]["lr"] == 0.8


def test_raised_momentum():
    parameters = [torch.zeros(1, requires_grad=True)]
    for delay, wanted in ((0, 0.9), (2, 0.945), (4, 0.99), (9, 0.99)):
        sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        adam = torch.optim.NAdam(parameters, betas=(0.9, 0.99))
        for optimizer in (sgd, adam):
            raise_momentum(optimizer, delay, 4)
        assert sgd.param_groups[0]["momentum"] == pytest.approx(wanted)
        assert adam.param_groups[0]["betas"] == pytest.approx((wanted, 0.99))


def test_rates_are_recorded_as_they_were(mlp_profile, mlp_target, tmp_path):
    """Of the last stage's last update: at all stages the version difference is 3."""
    plan = plan_of(mlp_profile, "pipedream-unstashed", 4, 1)
    settings = RunSettings(
        task=mlp_target,
        steps=5,
        optimizer=OptimizerChoice(name="sgd", lr=0.08),
        lr_rescheduling=8,
        evaluate=False,
    )
    summary = run(plan, settings, tmp_path / "run", inline=True)
    assert summary.epochs[-1].lr == pytest.approx(0.08 * 3**-0.5)


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", BOTH)
def test_flushes_leave_no_delay(option, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, "gpipe", 2, 2)
    settings = RunSettings(task=mlp_target, steps=2, **{option: BOTH[option]})
    with pytest.raises(UserError, match=r"^--\S+: gpipe flushes .* leave it out$"):
        run(plan, settings, tmp_path / "run", inline=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("Epochs", {"optimizer": {"name": "sgd", "lr": 0.1}}, "SGD without momentum; it is there"),
        ("Adagrad", {}, "the optimizer is Adagrad; it is there"),
        ("CyclingMomentum", {}, "a OneCycleLR, sets the momentum itself"),
    ],
)
def test_momentum_that_cannot_be_raised(name, more, message, mlp_profile, tmp_path):
    plan = plan_of(mlp_profile, "pipedream", 2, 1)
    asked = {"task": f"{TESTS / 'tasks/hook_tasks.py'}:{name}", "steps": 3, **more}
    settings = msgspec.convert({**asked, "stagewise_momentum": True}, RunSettings)
    with pytest.raises(TargetError, match=message) as error:
        run(plan, settings, tmp_path / "run", inline=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


# Checkpoints of before -------------------------------------------------------------------------


def test_settings_of_before_have_the_checksum_they_had():
    """Their checkpoints are gone on with: a setting that is new is marked `later`."""
    sgd = OptimizerChoice(name="sgd", lr=0.1)
    chosen = settings_checksum(RunSettings(task="digits", optimizer=sgd))
    assert chosen == "46c17e9177c957168e911e3127823bf72a4a9ad2776e35a82509891815786fd2"
    settings = RunSettings(task="digits", seed=3, decay_rate=2)
    wanted = "572c5c49211cf2c29f3a0e3472deb63e8b0bc0e30499e23d2c373fed711f6c59"
    assert settings_checksum(settings) == wanted
    longer = msgspec.structs.replace(settings, epochs=7, timeout_s=5.0, grown_at=(3,))
    assert settings_checksum(longer) == wanted
    changed = msgspec.structs.replace(settings, lr_rescheduling=5)
    assert settings_checksum(changed) != wanted


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"decay": "linear"}, "--decay, --lambda: are of i-timeprest, and do nothing in timeprest"),
        ({"lr_rescheduling": 9}, "--lr-rescheduling: .* does nothing .* timeprest, .* is 1"),
        ({"discrepancy_decay": 0.2}, "--discrepancy-decay.*: are of pipemare"),
        ({"keep_checkpoints": 5, "checkpoint_every": 0}, "there are none with --checkpoint-every"),
        ({"deferred_batch_norm": True}, "--deferred-batch-norm: does nothing in this model"),
        ({"transport": "gloo"}, "--transport: nothing is sent with --inline"),
        ({"lr_schedule": "linear", "warmup": 9}, "--warmup 9: the run has 3 updates"),
    ],
)
def test_what_does_nothing_is_said(how, line, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, "timeprest", 2, 2)
    settings = RunSettings(task=mlp_target, steps=3, evaluate=False, **how)
    with pytest.warns(TaskWarning, match=line):
        run(plan, settings, tmp_path, inline=True)
