"""What concerns the whole model, done by stages: clipping, schedules, parameter groups."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from helpers.alike import assert_same_weights
from helpers.drawn.pipelines import ALL
from helpers.paths import ROOT
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import assert_same, run_and_stop
from mlp_task import MLPTask
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.recordings.recording import MEMORY_KINDS
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.orders import parse_order
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import RunError, TargetError, UserError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.hooks import RunLength, task_scheduler
from timeprest.runtime.checkpoint.learning_rate import go_on
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.memory import MemoryAccount
from timeprest.runtime.stage.optimizer import (
    Scheduler,
    _nesterov,
    check_choice,
    check_updates,
    clip,
    hook_warnings,
    learning_rate_factor,
    make_optimizer,
    own_part,
    squared_norm,
    total_norm,
)
from timeprest.runtime.verify.trial import try_plan
from timeprest.runtime.weights.outside import context_at
from timeprest.runtime.weights.prediction import Predictor
from timeprest.runtime.weights.stash import WeightVersions
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from whole_model_tasks import Hooked, NotingSGD

TASKS = "whole_model_tasks"
"""Imported by name, so that what it notes is in the module that is imported here."""

STEPS = 8
CLIP = 0.1


def train(target, make=None, *, mini_batch=8, **how):
    """As `train_plainly`."""
    return train_plainly(target, mini_batch, STEPS, make, **how)


def settings_of(task, **options):
    return RunSettings(task=task, steps=STEPS, evaluate=False, **options)


# Predictions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.01),
    ],
)
@pytest.mark.parametrize("variant", ["spectrain", "pipeoptim"])
def test_what_maximizes_the_negated_loss_predicts_the_same(
    variant, make, mlp_profile, tmp_path, monkeypatch
):
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, 1)
    for sign in (1, -1):
        loss = partial(lambda sign, found, wanted: sign * ((found - wanted) ** 2).mean(), sign)
        monkeypatch.setattr(MLPTask, "loss", staticmethod(loss))
        monkeypatch.setattr(MLPTask, "optimizer", staticmethod(partial(make, maximize=sign < 0)))
        run(plan, settings_of("mlp_task:MLPTask"), tmp_path / f"{sign}", inline=True)
    assert_same_weights(tmp_path / "1", tmp_path / "-1")


def test_the_greatest_second_moments_are_predicted_by_where_steps_go_by_them():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.Adam([p], lr=0.1, betas=(0.5, 0.5), eps=0.0, amsgrad=True)
    for grad in (8.0, 1.0):
        p.grad = torch.full_like(p, grad)
        optimizer.step()
    found = {p: torch.empty_like(p)}
    Predictor("optimizer-step", optimizer).forward_weights(3, found)
    # First moment 4 → 2.5 of 1 − 0.5², second 32 → 16.5, of which 32 stays the greatest.
    step = (2.5 / 0.75) / math.sqrt(32 / 0.75)
    assert torch.allclose(found[p], p.detach() - 3 * 0.1 * step, rtol=0, atol=1e-12)


# Clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [name for name in ALL if VARIANTS[name].flushes])
@pytest.mark.parametrize(("stages", "n"), [(1, 2), (3, 1), (3, 4), (7, 3)])
def test_clipping_in_flush_systems_is_that_of_one_process(
    variant, stages, n, mlp_profile, mlp_target, tmp_path
):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    run(plan, settings_of(mlp_target, clip_norm=CLIP), tmp_path / "run", inline=True)
    clipped = train(mlp_target, clip_norm=CLIP)
    assert abs(clipped[0][-1] - train(mlp_target)[0][-1]) > 1e-3
    assert_trained_as(tmp_path / "run", clipped)


def test_stages_of_one_worker_clip_together_wherever_their_updates_are(
    mlp_profile, mlp_target, tmp_path
):
    """In an order that is given, each comes at once after its stage's last backward."""
    order = parse_order("0F0.0 0F0.1 1F0.0 1F0.1 1B0.0 1B0.1 0B0.0 0B0.1")
    cluster = uniform_cluster(1)
    plan = solve(with_times(mlp_profile), cluster, "gpipe", order=order, mini_batch=8)
    run(plan, settings_of(mlp_target, clip_norm=CLIP), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train(mlp_target, clip_norm=CLIP))


@pytest.mark.parametrize("replicas", [(2,), (2, 1), (1, 4), (2, 2, 1)])
def test_replicas_clip_as_one(replicas, mlp_profile, mlp_target, tmp_path):
    """The norm counts each stage once."""
    plan = plan_by_hand(
        with_times(mlp_profile), "pipedream-flush", len(replicas), 4, replicas=replicas
    )
    run(plan, settings_of(mlp_target, clip_norm=CLIP), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train(mlp_target, clip_norm=CLIP))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_clip_decay_and_schedule(mlp_profile, mlp_target, tmp_path):
    """Everything at once, in three processes, two of them replicas."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2, mini_batch=7, replicas=(2, 1))
    settings = settings_of(
        mlp_target,
        optimizer=OptimizerChoice(name="adamw", lr=0.05, weight_decay=0.3, betas=(0.8, 0.95)),
        decay_only="matrices",
        lr_schedule="cosine",
        warmup=3,
        clip_norm=CLIP,
    )
    summary = run(plan, settings, tmp_path / "run")

    def make(named):
        groups = [
            {"params": [p for _, p in named if p.dim() > 1]},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.3, betas=(0.8, 0.95))

    def schedule(optimizer):
        shares = [1 / 3, 2 / 3, 1]
        shares += [(1 + math.cos(math.pi * k / (STEPS - 3))) / 2 for k in range(STEPS - 3)]
        return LambdaLR(optimizer, lambda update: [*shares, 0][update])

    trained = train(mlp_target, make, clip_norm=CLIP, schedule=schedule, mini_batch=7)
    assert_trained_as(tmp_path / "run", trained)
    last = (1 + math.cos(math.pi * 4 / 5)) / 2
    assert summary.epochs[-1].lr == pytest.approx(0.05 * last)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "n"), [("timeprest", 4), ("pipedream", 1)])
def test_asynchronous_stages_clip_their_own_parts(variant, n, mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, n)
    target = f"{TASKS}:Noting"
    sizes = [42, 76, 15]  # l0; l1 and l2; l3
    for norm, bites in ((CLIP, True), (1e6, False)):
        NotingSGD.notes.clear()
        settings = settings_of(target, clip_norm=norm, checkpoint_every=0)
        run(plan, settings, tmp_path / f"{norm}", inline=True)
        assert len(NotingSGD.notes) == 3 * STEPS
        assert sorted({size for _, size, _ in NotingSGD.notes}) == sorted(sizes)
        full = 0
        for found, size, _ in NotingSGD.notes:
            part = norm * math.sqrt(size / sum(sizes))
            assert found <= part * (1 + 1e-9)
            full += found > part * (1 - 1e-3)
        assert (full > 0) == bites
    one = plan_by_hand(with_times(mlp_profile), variant, 1, n)
    run(one, settings_of(target, clip_norm=CLIP), tmp_path / "one", inline=True)
    assert_trained_as(tmp_path / "one", train(target, clip_norm=CLIP))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, float("nan")])
def test_one_stage_clips_as_torch_does(scale, late):
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (
        [torch.nn.Parameter(torch.zeros(3, k, dtype=torch.float64)) for k in (1, 4, 0)]
        for _ in range(2)
    )
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        a.grad = scale * torch.randn(a.shape, generator=generator, dtype=torch.float64)
        b.grad = a.grad.clone()
    clip(mine, total_norm(mine) if late else math.sqrt(squared_norm(mine)), 0.5)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0, equal_nan=True)
    assert mine[2].grad is None
    assert squared_norm(mine[2:]) == 0


def test_parts_make_the_whole():
    parts = [own_part(2.0, own, 100) for own in (1, 30, 69)]
    assert math.hypot(*parts) == pytest.approx(2.0)
    assert own_part(2.0, 0, 0) == 2.0


# Parameter groups --------------------------------------------------------------------------


def grouped(named):
    """Grouped's groups of the whole model, written out."""
    named = dict(named)
    biases = [p for name, p in named.items() if "bias" in name]
    return NotingSGD(
        [
            {"params": biases, "lr": 0.2, "weight_decay": 0.0},
            {"params": [named["l0.weight"]], "momentum": 0.0},
            {"params": [named[f"l{k}.weight"] for k in (1, 2, 3)]},
        ],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.3,
    )


@pytest.mark.parametrize("stages", [1, 3, 7])
def test_groups_by_name(stages, mlp_profile, tmp_path):
    """They keep their places on all stages but those of activations alone."""
    target = f"{TASKS}:Grouped"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", stages, 2)
    NotingSGD.notes.clear()
    run(plan, settings_of(target), tmp_path / "run", inline=True)
    counts = {groups for _, _, groups in NotingSGD.notes}
    assert counts == {3}
    assert_trained_as(tmp_path / "run", train(target, grouped))


@pytest.mark.parametrize("name", ["GroupSchedule", "GroupCycle", "GroupByDepth"])
def test_schedules_by_group(name, mlp_profile, tmp_path):
    """A group has the same rates on whatever stage its parameters are, as without a pipeline; also
    after a resume, and in what is told of the first group's."""
    target = f"{TASKS}:{name}"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    summary = run(plan, settings_of(target), tmp_path / "run", inline=True)
    task = resolve(target).task

    def schedule(optimizer):
        return task_scheduler(task, optimizer, RunLength(STEPS, STEPS))

    groups = task.parameter_groups
    plain = train(target, lambda n: task.optimizer(groups(n)), schedule=schedule)
    assert_trained_as(tmp_path / "run", plain)
    some = settings_of(target, checkpoint_every=3)
    run_and_stop(plan, some, tmp_path / "stopped", at=4)
    resumed = resume(tmp_path / "stopped", inline=True)
    assert_same(tmp_path / "run", tmp_path / "stopped", STEPS)
    assert resumed.epochs[-1].lr == summary.epochs[-1].lr


def test_a_profile_has_the_tasks_groups():
    """So its schedule by group can be made, and the smallest layer's parameters go by their
    places, too."""
    found = measure(resolve(f"{TASKS}:GroupSchedule"), batch_size=8, seconds=0)
    assert found.optimizer.name == "NotingSGD"


def test_other_groups_on_other_stages_are_said(mlp_profile):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    (line,) = hook_warnings(prepare(plan, settings_of(f"{TASKS}:GroupsOfItsOwn")))
    assert "has 2 parameter groups on one stage and 4 on another: a schedule" in line


def test_an_optimizer_that_takes_no_empty_groups(mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    message = r"optimizer failed: .*an empty group \(group 2 of the parameters has nothing on stage"
    with pytest.raises(TargetError, match=message):
        run(plan, settings_of(f"{TASKS}:FullGroupsAlone"), tmp_path / "run", inline=True)
    assert not (tmp_path / "run").exists()


def test_groups_serve_a_named_optimizer_too(mlp_profile, tmp_path):
    target = f"{TASKS}:Grouped"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    choice = OptimizerChoice(name="sgd", lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.2)
    run(plan, settings_of(target, optimizer=choice), tmp_path / "run", inline=True)

    def make(named):
        named = dict(named)
        groups = resolve(target).task.parameter_groups(named.items())
        # Nesterov's needs momentum in each group.
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.2)

    assert_trained_as(tmp_path / "run", train(target, make))


@pytest.mark.parametrize("named", [True, False])
def test_decay_of_matrices_alone(named, mlp_profile, tmp_path):
    """With the optimizer named, and with the task's own and its groups."""
    target = f"{TASKS}:Grouped"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    options = {"optimizer": OptimizerChoice(name="adam", lr=0.05, weight_decay=0.5)}
    settings = settings_of(target, decay_only="matrices", **(options if named else {}))
    run(plan, settings, tmp_path / "run", inline=True)

    def make(named_parameters):
        # Of its groups only the one of biases has vectors, and it has no decay anyway.
        groups = resolve(target).task.parameter_groups(named_parameters)
        if not named:
            return resolve(target).task.optimizer(groups)
        return torch.optim.Adam(groups, lr=0.05, weight_decay=0.5)

    assert_trained_as(tmp_path / "run", train(target, make))


def test_decay_of_matrices_in_a_task_without_groups(mlp_target):
    settings = RunSettings(task=mlp_target, decay_only="matrices")
    task = resolve(mlp_target).task
    optimizer = make_optimizer(task, settings, task.model().named_parameters())
    shapes = [{p.dim() for p in group["params"]} for group in optimizer.param_groups]
    assert shapes == [{2}, {1}]
    assert optimizer.param_groups[1]["weight_decay"] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", r"'l0\.bias' is in no group.*requires_grad=False"),
        ("Twice", r"'l0\.bias' is in two groups"),
        ("Strange", "isn't one of the parameters"),
        ("NoParams", r"parameter_groups failed: .*Error"),
        ("NoScheduler", "scheduler gave None"),
        ("Concealed", r"return it from the task's scheduler\(optimizer\)"),
    ],
)
def test_bad_groups_and_schedulers_are_one_line(name, message, mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    with pytest.raises((TargetError, RunError), match=message):
        run(plan, settings_of(f"{TASKS}:{name}"), tmp_path / "run", inline=True)


# Optimizers and schedules ------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [{"decay_only": "matrices"}, {"optimizer": OptimizerChoice(name="muon", lr=0.1)}]
)
def test_a_schedule_by_group_of_groups_that_an_option_splits(option, mlp_profile):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 1, 2)
    with pytest.raises(TargetError, match=r"lr_lambdas.* \(--\S+ \S+ makes several groups of each"):
        check_updates(prepare(plan, settings_of(f"{TASKS}:GroupSchedule", **option)))


@pytest.mark.parametrize(
    ("name", "stages"), [("Stepped", 1), ("Stepped", 3), ("MadeTogether", 3), ("SharedRate", 3)]
)
def test_a_tasks_own_scheduler(name, stages, mlp_profile, tmp_path):
    target = f"{TASKS}:Stepped"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", stages, 2)
    settings = settings_of(f"{TASKS}:{name}")
    assert not try_plan(prepare(plan, settings))
    summary = run(plan, settings, tmp_path / "run", inline=True)
    task = resolve(target).task
    assert_trained_as(tmp_path / "run", train(target, schedule=task.scheduler))
    # The last of eight updates is the second after the second halving.
    assert summary.epochs[-1].lr == 0.05 / 4


def test_a_named_schedule_takes_the_place_of_the_tasks(mlp_profile, tmp_path):
    target = f"{TASKS}:Stepped"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    settings = settings_of(target, lr_schedule="linear", warmup=2)
    run(plan, settings, tmp_path / "run", inline=True)
    shares = [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    found = train(target, schedule=lambda o: LambdaLR(o, lambda update: shares[update]))
    assert_trained_as(tmp_path / "run", found)


def test_schedules_over_epochs(mlp_profile, tmp_path):
    """The whole run's updates count: the learning rate falls over all epochs."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    settings = RunSettings(
        task="data_tasks:FewSamples", epochs=2, lr_schedule="linear", evaluate=False
    )
    summary = run(plan, settings, tmp_path / "run", inline=True)
    assert [record.lr for record in summary.epochs] == pytest.approx([0.05 * 0.75, 0.05 * 0.25])


def test_factors():
    assert [learning_rate_factor("constant", 4, 6, k) for k in range(6)] == [
        0.25,
        0.5,
        0.75,
        1,
        1,
        1,
    ]
    assert [learning_rate_factor("linear", 0, 4, k) for k in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert [learning_rate_factor("cosine", 0, 2, k) for k in range(4)] == pytest.approx(
        [1, 0.5, 0, 0]
    )
    assert learning_rate_factor("linear", 9, 4, 3) == 4 / 9


def test_factors_are_those_of_the_docs():
    text = (ROOT / "docs" / "training.md").read_text().partition("that is\n  the rate times ")[2]
    rising, *shapes = re.findall("`([^`]+)`", text)[:4]
    for shape, falling in zip(("constant", "linear", "cosine"), shapes, strict=True):
        for i in range(9):
            names = {"i": i, "K": 3, "T": 9, "cos": math.cos, "pi": math.pi}
            factor = eval(rising if i < 3 else falling, names)
            assert learning_rate_factor(shape, 3, 9, i) == pytest.approx(factor)


def test_updates_are_counted_with_those_of_fewer_mini_batches(mlp_profile, mlp_target):
    """12 mini-batches: two updates of 5, and one of 2."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2, update_every=5)
    prepared = prepare(plan, RunSettings(task=mlp_target, steps=12, evaluate=False))
    assert context_at(prepared, 1).updates == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "lion"}, "--optimizer: unknown 'lion'"),
        ({"name": "adam", "momentum": 0.9}, "--momentum: adam"),
        ({"name": "sgd", "nesterov": True}, "--nesterov: goes with"),
        ({"name": "adamw", "nesterov": True}, "--nesterov: goes with"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "--betas: sgd has none"),
    ],
)
def test_options_of_another_optimizer_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        check_choice(OptimizerChoice(lr=0.1, **options))


def test_warm_up_needs_a_schedule(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    with pytest.raises(UserError, match="--warmup: goes with"):
        run(plan, settings_of(mlp_target, warmup=2), tmp_path / "run", inline=True)


# Nesterov momentum with a discounted gradient --------------------------------------------------


def test_state_that_comes_with_a_later_gradient_counts():
    """Of a layer that the first mini-batches don't go through."""
    first, later = parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))]
    optimizer = torch.optim.Adam(parameters)
    account = MemoryAccount(WeightVersions(parameters), optimizer=optimizer)
    for p, numbers in ((first, 3), (later, 3 + 5)):
        p.grad = torch.ones_like(p)
        optimizer.step()
        account.note()
        assert account.last[MEMORY_KINDS.index("optimizer")] == 2 * 4 * numbers


def test_a_scheduler_may_set_the_rate_of_a_discounted_gradient():
    p = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = _nesterov(torch.optim.SGD([p], lr=0.1, momentum=0.5))
    weight, momentum = 1.0, 0.0
    for rate, factor in ((0.1, 0.5), (0.4, 0.8), (0.2, 0.8)):
        optimizer.param_groups[0].update(lr=rate, momentum=factor)
        p.grad = torch.tensor([2.0], dtype=torch.float64)
        optimizer.step()
        momentum = factor * momentum + 2.0
        weight -= rate * (1 - factor) * (2.0 + factor * momentum)
        assert p.item() == pytest.approx(weight, rel=1e-12)
        assert optimizer.param_groups[0]["lr"] == rate


def test_what_adam_was_asked_for_is_kept_or_refused():
    class Own(torch.optim.Adam):
        """Steps in a way of its own."""

    p = [nn.Parameter(torch.ones(2))]
    assert _nesterov(torch.optim.Adam(p, maximize=True)).param_groups[0]["maximize"]
    assert not _nesterov(torch.optim.AdamW(p)).param_groups[0]["maximize"]
    with pytest.raises(TargetError, match="amsgrad"):
        _nesterov(torch.optim.Adam(p, amsgrad=True))
    with pytest.raises(TargetError, match="is Own: delay-corrected Nesterov momentum"):
        _nesterov(Own(p))


def test_a_run_that_grows_has_the_rates_of_its_length():
    """From its first update on."""

    def scheduler(updates):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        rule = partial(learning_rate_factor, "linear", 0, updates)
        return optimizer, Scheduler(LambdaLR(optimizer, rule))

    optimizer, before = scheduler(4)
    for _ in range(4):
        optimizer.step()
        before.after_update(ends_epoch=False)
    assert optimizer.param_groups[0]["lr"] == 0.0
    grown, after = scheduler(16)
    grown.param_groups[0].update(lr=0.0)
    go_on(after, before.rule.state_dict(), None)
    assert grown.param_groups[0]["lr"] == pytest.approx(0.1 * 0.75)


@pytest.mark.parametrize(
    ("variant", "n", "parts"),
    [
        ("gpipe", 4, True),
        ("gpipe", 1, False),
        ("timeprest", 4, False),
        # Micro-batches on the same weights have one backward.
        ("i-timeprest", 4, True),
    ],
)
def test_hooks_on_parameters_that_see_parts_of_gradients_get_a_warning(
    variant, n, parts, mlp_profile, tmp_path, recwarn
):
    profile = with_times(mlp_profile)
    plan = plan_by_hand(profile, variant, 2, n, mini_batch=8)
    settings = RunSettings(task=f"{TASKS}:Hooked", steps=STEPS, evaluate=False, checkpoint_every=0)
    # Before the run hooks are called, too: by what holds the graph against the model.
    prepared = prepare(plan, settings)
    before = len(Hooked.noted)
    prepare(plan, settings)
    looked = len(Hooked.noted) - before
    before = len(Hooked.noted)
    run(plan, settings, tmp_path, inline=True)
    calls = len(Hooked.noted) - before - looked
    assert calls > STEPS if parts else calls == STEPS
    lines = [line for line in hook_warnings(prepared) if line.startswith("hooks on the gradient")]
    assert len(lines) == parts
    for line in lines:
        assert "of l3.weight run for each micro-batch" in line
    assert len([w for w in recwarn if "hooks on the gradient" in str(w.message)]) == parts


def test_an_optimizer_that_was_made_to_be_looked_at_leaves_no_hooks(mlp_profile, tmp_path):
    target = f"{TASKS}:HookedByOptimizer"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 1)
    run(plan, RunSettings(task=target, steps=STEPS, evaluate=False), tmp_path, inline=True)
    assert_trained_as(tmp_path, train(target))
