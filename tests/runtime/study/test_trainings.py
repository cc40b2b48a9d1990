"""Studies train: the same as tp-run, the same again after a kill, and what diverges is told."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace

import batch_norm_tasks
import hook_tasks
import msgspec
import numpy as np
import psutil
import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from mlp_task import MLPTask
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.simulator.timeline import simulate
from timeprest.profiles.errors import RunError, TaskWarning, UserError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.options import option_fields, read_field
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import RunDir, load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.study.choices import StudyChoices
from timeprest.runtime.study.figures.study import PLAIN, Budget, Curve, write_study
from timeprest.runtime.study.trainings import worker
from timeprest.runtime.study.trainings.choosing import Choosing
from timeprest.runtime.study.trainings.conduct import conduct, prospect
from timeprest.runtime.study.trainings.delayed import DelayedTraining
from timeprest.runtime.study.trainings.training import train_one
from timeprest.runtime.study.trainings.work import Asked, Finished
from timeprest.runtime.training.plain import PlainTraining

SGD = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)


def read_cures(texts):
    field = option_fields(StudyChoices)["cures"]
    return read_field(field, texts, field.flag)


@pytest.fixture(scope="module")
def profile(mlp_profile):
    return with_times(mlp_profile)


@pytest.fixture(scope="module")
def plans(profile):
    return [plan_by_hand(profile, name, 3, 2) for name in ("timeprest", "v-timeprest", "gpipe")]


def due(plans, target, optimizer=SGD, steps=24, **choices):
    settings = RunSettings(task=target, steps=steps, optimizer=optimizer, timeout_s=60)
    chosen = {"seeds": 2, "tune": 3, "longer": 1.25, "eval_every": 10, **choices}
    return prospect(
        plans, [f"{plan.variant}.json" for plan in plans], settings, StudyChoices(**chosen)
    )


def bytes_of(study, path):
    write_study(path, study)
    return path.read_bytes()


def silent(what, done, total):
    assert 0 <= done <= total


def test_a_plan_trains_as_tp_run_does(plans, mlp_target, tmp_path):
    """Loss for loss; and it is evaluated on the weights that the run ends with."""
    asked = due(plans[:1], mlp_target, steps=90, longer=1.0)
    (k,) = (k for k, arm in enumerate(asked.work.arms) if arm.kind == "pipeline")
    found = train_one(asked.work, Asked(arm=k, rate=0.05, warmup=0, seed=3, length=90))
    settings = RunSettings(task=mlp_target, steps=90, optimizer=SGD, seed=3, checkpoint_every=0)
    run(plans[0], settings, tmp_path / "run", inline=True)
    losses = read_losses(RunDir(tmp_path / "run").metrics)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    target = resolve(mlp_target)
    model = target.model(0)
    model.load_state_dict(load_weights(tmp_path / "run"))
    x, y = target.task.data("test").tensors
    with torch.no_grad():
        end = float(target.task.loss(model(x), y))
    assert found.tests[-1].mini_batches == 90
    assert found.tests[-1].figures["loss"] == pytest.approx(end, rel=1e-4)


def test_what_filling_an_epochs_pipeline_adds_to_times_is_told(plans, mlp_target):
    over = []
    for plan in plans:
        pipeline = pipeline_of(plan)
        stages = simulate(pipeline, make_schedule(pipeline, 8)).stages
        over.append(max(ops[-1].end_s for ops in stages) / (8 * plan.predicted.period_s))
    assert over[0] > 1.05 > over[2]
    with pytest.warns(TaskWarning, match=f"every 8 .*: timeprest, v-.* {over[0]:.2f} times"):
        due(plans, mlp_target, steps=8, longer=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        due(plans[2:], mlp_target, steps=8, longer=1.0)
        due(plans, mlp_target, steps=75)


def test_delays_are_the_plans_that_have_them(profile, mlp_target, tmp_path):
    """Rates and momenta by version difference: as tp-run, and not in plain training."""
    plan = plan_by_hand(profile, "pipemare", 3, 1)
    delays = {"lr_rescheduling": 9, "stagewise_momentum": True}
    how = {"task": mlp_target, "steps": 24, "optimizer": SGD}
    found = {}
    for name, more in (("with", delays), ("without", {})):
        settings = RunSettings(**how, **more)
        chosen = StudyChoices(seeds=2, tune=3, longer=1.0, eval_every=0)
        asked = prospect([plan], ["plan.json"], settings, chosen)
        assert asked.question.training.items() >= more.items()
        for k, arm in enumerate(asked.work.arms):
            training = Asked(arm=k, rate=0.05, warmup=0, seed=0, length=24)
            found[name, arm.kind] = train_one(asked.work, training).losses
    assert found["with", "plain"] == found["without", "plain"]
    run(plan, RunSettings(**how, **delays), tmp_path / "run", inline=True)
    losses = read_losses(RunDir(tmp_path / "run").metrics)
    assert found["with", "pipeline"] == pytest.approx(losses, rel=1e-5)
    assert found["without", "pipeline"] != pytest.approx(losses, rel=1e-5)


def test_a_cure_is_an_arm_beside_its_plan(profile, mlp_target, tmp_path):
    """It trains as a study under its settings does, and without it as before; of what it changes
    nothing in, there is none."""
    plans = [plan_by_hand(profile, name, 3, 2) for name in ("timeprest", "i-timeprest", "gpipe")]
    fading = read_cures(("lr-rescheduling=9", "decay=inverse,lambda=0.5,no-discrepancy-correction"))
    with pytest.raises(UserError, match=r"--cure decay=inv.*: changes nothing .*are of pipemare"):
        due(plans, mlp_target, cures=fading)
    cures = read_cures(("lr-rescheduling=9,stagewise-momentum", "decay=inverse,lambda=0.5"))
    asked, bare = (due(plans, mlp_target, tune=1, **more) for more in ({"cures": cures}, {}))
    first, second = (cure.text for cure in cures)
    named = [f"timeprest with {first}", f"i-timeprest with {first}", f"i-timeprest with {second}"]
    names = [plan.name for plan in asked.plans]
    assert names == [
        *("timeprest", named[0], "i-timeprest", *named[1:], "gpipe"),
    ]
    assert [arm.name for arm in asked.work.arms] == [PLAIN, *names[:-1]]
    of_bare = {arm.name: k for k, arm in enumerate(bare.work.arms)}
    under = RunSettings(task=mlp_target, steps=24, optimizer=SGD, timeout_s=60, **cures[0].settings)
    chosen = StudyChoices(seeds=2, tune=1, longer=1.25, eval_every=10)
    alone = prospect(plans, ["plan.json"] * 3, under, chosen)
    for k, arm in enumerate(asked.work.arms):
        training = Asked(arm=k, rate=0.05, warmup=0, seed=0, length=24)
        path = Finished(tmp_path, asked.work).path(training)
        if arm.name in of_bare:
            same, work = of_bare[arm.name], bare.work
        elif arm.name.endswith(first):
            same, work = of_bare[arm.name.partition(" with ")[0]], alone.work
        else:
            continue
        assert Finished(tmp_path, work).path(msgspec.structs.replace(training, arm=same)) == path
    found = conduct(asked, tmp_path, 1, silent)
    assert [plan.cure or "" for plan in found.plans] == ["", first, "", first, second, ""]
    assert found.arm("timeprest").curves != found.arm(named[0]).curves


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("clip-norm=1", "give NAME or NAME=VALUE, of lr-rescheduling, "),
        ("stagewise-momentum=1", "stagewise-momentum has no value; leave =1 out"),
        ("lr-rescheduling", "give lr-rescheduling a number"),
        ("lambda=-1", "--cure lambda -1.0: give a number from 0"),
        ("decay=slow", "give decay one of exponential, inverse, linear"),
        ("lambda=1, lambda=2", "--cure lambda=1,lambda=2: says something twice"),
    ],
)
def test_what_is_no_cure_is_said(given, why):
    with pytest.raises(UserError) as refused:
        read_cures((given,))
    assert why in str(refused.value)


def test_evaluations_change_nothing(plans, mlp_target):
    asked = Asked(arm=1, rate=0.05, warmup=0, seed=0, length=30)
    often, never = (train_one(due(plans[:1], mlp_target, eval_every=k).work, asked) for k in (1, 0))
    assert often.losses == never.losses
    assert [point.mini_batches for point in often.tests] == list(range(1, 31))


def test_a_uniform_delay_follows_its_recurrence(mlp_target, plans):
    """Of the first layer's weights, written out: W(t+1) = W(t) − η·g(W(max(0, t − D)))."""
    plain = OptimizerChoice(name="sgd", lr=0.1)
    settings = RunSettings(task=mlp_target, steps=12, optimizer=plain)
    prepared = prepare(plans[0], settings)
    training = DelayedTraining(prepared, 3)
    training.train()
    target = resolve(mlp_target)
    model = target.model(0)
    data = PlainTraining(prepared, by_micro_batch=False)
    versions = [[p.detach().clone() for p in model.parameters()]]
    for t in range(12):
        for p, old in zip(model.parameters(), versions[max(0, t - 3)], strict=True):
            p.data = old.clone()
            p.grad = None
        x, y = data._take(prepared.segments[0], range(8 * t, 8 * t + 8), 8)
        target.task.loss(model(*x), y).backward()
        latest = zip(versions[-1], model.parameters(), strict=True)
        versions.append([w - 0.1 * p.grad for w, p in latest])
    for found, wanted in zip(training.model.parameters(), versions[-1], strict=True):
        assert np.abs((found.detach() - wanted).numpy()).max() < 1e-14


def test_a_uniform_delay_of_none_is_plain_training(mlp_target, plans):
    prepared = prepare(plans[0], RunSettings(task=mlp_target, steps=80, optimizer=SGD))
    runs = DelayedTraining(prepared, 0), PlainTraining(prepared, by_micro_batch=False)
    for each in runs:
        each.train()
    assert runs[0].losses == runs[1].losses


def test_a_study_has_an_arm_for_what_differs(plans, profile, mlp_target):
    """Systems that flush are plain training; plans that train the same share an arm."""
    more = [
        plan_by_hand(profile, "pipedream-flush", 2, 4),
        msgspec.structs.replace(plans[0], solver=plans[1].solver),
        plan_by_hand(profile, "timeprest", 3, 4),
    ]
    found = due([*plans, *more], mlp_target, uniform_delay=True)
    names = [arm.name for arm in found.work.arms]
    assert len(names) == len(set(names)) == 6
    assert names[0] == PLAIN
    arms = [plan.arm for plan in found.plans]
    assert arms[2] == arms[3] == PLAIN
    assert arms[0] == arms[4] != arms[5]
    # With one mini-batch in flight no gradient is late.
    stages = tuple(msgspec.structs.replace(stage, delay=0) for stage in plans[0].predicted.stages)
    predicted = msgspec.structs.replace(plans[0].predicted, stages=stages)
    in_time = msgspec.structs.replace(plans[0], predicted=predicted)
    assert [plan.arm for plan in due([in_time], mlp_target).plans] == [PLAIN]
    assert names[-2:] == ["uniform delay of 1", "uniform delay of 2"]


@pytest.mark.choice(0)
def test_a_study_ends_the_same_however_it_was_stopped(plans, mlp_target, tmp_path):
    asked = due(plans, mlp_target, uniform_delay=True)
    whole = conduct(asked, tmp_path / "whole", 1, silent)
    seen = [0]

    def stop(what, done, total):
        seen[0] += 1
        if seen[0] % 151 == 0:
            raise KeyboardInterrupt

    for _ in range(100):
        try:
            again = conduct(asked, tmp_path / "stopped", 1, stop)
            break
        except KeyboardInterrupt:
            pass
    assert seen[0] > 3 * 151
    assert bytes_of(again, tmp_path / "a.json") == bytes_of(whole, tmp_path / "b.json")
    # Everything is done: it is read alone.
    folder = tmp_path / "stopped"
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    conduct(asked, folder, 1, silent)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    for arm in whole.arms:
        assert len({curve.rate for curve in arm.curves}) == 3
        assert [curve.seed for curve in arm.finals()] == [0, 1]


@pytest.mark.slow
def test_a_study_with_a_budget_ends_the_same_however_it_was_stopped(plans, mlp_target, tmp_path):
    asked = due(plans, mlp_target, steps=24, budget=Budget(trainings=14), eval_every=0)
    lines = []
    whole = conduct(asked, tmp_path / "whole", 1, silent, say=lines.append)
    assert whole.dropped
    assert "dropped for now: " in lines[0]
    seen = [0]

    def stop(what, done, total):
        silent(what, done, total)
        seen[0] += 1
        if seen[0] % 97 == 0:
            raise KeyboardInterrupt

    again = None
    while again is None:
        with suppress(KeyboardInterrupt):
            again = conduct(asked, tmp_path / "stopped", 1, stop)
    assert seen[0] > 3 * 97
    assert bytes_of(again, tmp_path / "a.json") == bytes_of(whole, tmp_path / "b.json")
    assert len(list((tmp_path / "stopped").iterdir())) == len(list((tmp_path / "whole").iterdir()))


def test_a_rung_has_a_schedule_of_its_own_length(plans, mlp_target):
    """Its warm-up is as much shorter; and it is evaluated as often where that is the target."""
    settings = RunSettings(
        task=mlp_target, steps=80, optimizer=SGD, lr_schedule="linear", timeout_s=60
    )
    chosen = StudyChoices(
        seeds=2, tune=3, longer=1.0, warmups=(16,), metric="test loss", budget=Budget(trainings=14)
    )
    asked = prospect(plans, ["plan.json"] * 3, settings, chosen)
    wanted = Choosing(asked.question, asked.work.arms, [], {}.get).due()
    assert {(each.length, each.warmup) for each in wanted} == {(10, 2)}
    short = train_one(asked.work, wanted[0])
    own = msgspec.structs.replace(settings, steps=10)
    chosen = replace(chosen, warmups=(2,), budget=None)
    alone = prospect(plans, ["plan.json"] * 3, own, chosen)
    assert short.losses == train_one(alone.work, wanted[0]).losses
    assert len(short.tests) == 10


@pytest.mark.choice(0)
@pytest.mark.processes
def test_processes_give_the_same_study_and_a_dead_one_is_named(plans, mlp_target, tmp_path):
    asked = due(plans, mlp_target, tune=1)
    whole = conduct(asked, tmp_path / "whole", 1, silent)
    killed = []

    def kill(what, done, total):
        every = psutil.Process().children(recursive=True) if done > 30 and not killed else []
        for child in every:
            # One may have ended by itself.
            with suppress(psutil.Error):
                if not killed and worker.__name__ in child.cmdline():
                    killed.append(child)
                    child.kill()

    with pytest.raises(RunError, match=r"seed \d: its process was killed by SIGKILL"):
        conduct(asked, tmp_path / "parts", 2, kill)
    again = conduct(asked, tmp_path / "parts", 2, silent)
    assert bytes_of(again, tmp_path / "a.json") == bytes_of(whole, tmp_path / "b.json")


def test_a_rate_that_diverges_is_recorded(plans, mlp_target, tmp_path):
    wild = msgspec.structs.replace(SGD, lr=8.0)
    found = conduct(due(plans[:1], mlp_target, wild, tune=5, factor=8.0), tmp_path, 1, silent)
    for arm in found.arms:
        diverged = {curve.rate for curve in arm.curves if curve.diverged_at is not None}
        assert {8.0, 64.0} <= diverged
        assert arm.rate < 8
        # The grid has moved down beyond where it began.
        assert min(curve.rate for curve in arm.curves) == pytest.approx(0.015625, rel=1e-3)
        assert arm.finals()[0].diverged_at is None


def test_a_seed_that_diverges_has_no_part_in_the_target(plans, mlp_target, tmp_path):
    asked = due(plans[:1], mlp_target, tune=1, eval_every=0)
    length, known = asked.question.length, {}
    for seed, (losses, diverged_at) in enumerate((([3.0, 1.0], None), ([3.0, 9.0], length))):
        training = Asked(arm=0, rate=SGD.lr, warmup=0, seed=seed, length=length)
        curve = Curve(
            seed=seed,
            rate=SGD.lr,
            warmup=0,
            length=length,
            phase="final",
            window=length // 2,
            losses=losses,
            diverged_at=diverged_at,
        )
        known[training] = curve
    choosing = Choosing(asked.question, asked.work.arms, [], known.get)
    choosing.due()
    assert choosing.target() <= 3


def test_an_accuracy_that_evaluations_dont_have_is_no_target(plans, mlp_target, tmp_path):
    """Said after the first training, and not after all of them."""
    asked = due(plans[:1], f"{__file__}:OtherName", metric="accuracy")
    with pytest.raises(UserError, match="have no 'accuracy' to have for a target, but hits, loss"):
        conduct(asked, tmp_path, 1, silent)
    assert len(list(tmp_path.iterdir())) == 1


class OtherName(MLPTask):
    """Its accuracy has another name."""

    def metrics(self, output, target):
        return {"hits": (output.sign() == target.sign()).double().mean()}


def test_a_task_with_an_optimizer_of_its_own_has_its_rate_scaled(plans, mlp_target, tmp_path):
    own = due(plans[:1], mlp_target, None, tune=1)
    assert own.question.rate_of == "times the task's own"
    named = due(plans[:1], mlp_target, msgspec.structs.replace(SGD, lr=0.1), tune=1)
    for arm in (0, 1):
        twice = Asked(arm=arm, rate=2.0, warmup=0, seed=0, length=20)
        same = msgspec.structs.replace(twice, rate=0.1)
        assert train_one(own.work, twice).losses == train_one(named.work, same).losses


@pytest.mark.parametrize("optimizer", [SGD, None])
def test_rates_that_the_tasks_scheduler_sets_arent_tuned(optimizer, plans):
    cycled, scaled = (f"{hook_tasks.__file__}:{name}" for name in ("AskedCycle", "Epochs"))
    with pytest.raises(UserError, match="a OneCycleLR, sets the learning rates whatever"):
        due(plans[:1], cycled, optimizer)
    due(plans[:1], cycled, optimizer, tune=1)
    due(plans[:1], scaled, optimizer)


class BadSample(MLPTask):
    """Its loss fails after some mini-batches."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        if self.calls == 10:
            raise ValueError("no such class")
        return super().loss(output, target)


def test_what_fails_in_plain_training_is_one_line(plans):
    work = due(plans[:1], f"{__file__}:BadSample").work
    with pytest.raises(RunError, match=r"at mini-batch \d: .*\.py:\d+: ValueError: no such class"):
        train_one(work, Asked(arm=0, rate=0.05, warmup=0, seed=0, length=20))


def test_test_samples_load_no_longer_than_a_training(plans, mlp_target, monkeypatch):
    closed = []
    monkeypatch.setattr(Samples, "close", lambda samples: closed.append(samples.split))
    train_one(due(plans[:1], mlp_target).work, Asked(arm=1, rate=0.05, warmup=0, seed=0, length=30))
    assert closed.count("test") == 1


def test_batch_norm_has_an_arm_for_each_size_of_micro_batch():
    target = f"{batch_norm_tasks.__file__}:Traced"
    found = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
    asked = due([plan_by_hand(found, "gpipe", 2, n) for n in (1, 2, 4)], target)
    assert asked.question.mixes
    assert [arm.micro_batches for arm in asked.work.arms] == [0, 2, 4]
    assert [plan.arm for plan in asked.plans] == [arm.name for arm in asked.work.arms]


def test_replicas_that_share_whole_mini_batches_have_statistics_of_their_own(tmp_path):
    target = f"{batch_norm_tasks.__file__}:Traced"
    found = measure(resolve(target), batch_size=8, micro_batch_sizes=[4, 8], seconds=0)
    plan = plan_by_hand(found, "pipedream", 1, 1, replicas=[2])
    asked = due([plan], target, steps=6, longer=1.0)
    (k,) = (k for k, arm in enumerate(asked.work.arms) if arm.name == asked.plans[0].arm)
    curve = train_one(asked.work, Asked(arm=k, rate=0.05, warmup=0, seed=0, length=6))
    settings = RunSettings(task=target, steps=6, optimizer=SGD)
    run(plan, settings, tmp_path / "run", inline=True)
    losses = read_losses(RunDir(tmp_path / "run").metrics)
    assert curve.losses == pytest.approx(losses, rel=1e-5)


def test_a_plan_without_delays_clips_by_stages_as_tp_run_does(profile, mlp_target, tmp_path):
    plan = plan_by_hand(profile, "timeprest", 3, 2, limits=(1, 1, 1))
    assert [each.arm for each in due([plan], mlp_target).plans] == [PLAIN]
    settings = RunSettings(task=mlp_target, steps=12, optimizer=SGD, clip_norm=0.05)
    chosen = StudyChoices(seeds=2, tune=3, longer=1.0, eval_every=0)
    asked = prospect([plan], ["plan.json"], settings, chosen)
    (k,) = (k for k, arm in enumerate(asked.work.arms) if arm.name == asked.plans[0].arm)
    found = train_one(asked.work, Asked(arm=k, rate=0.05, warmup=0, seed=0, length=12))
    run(plan, settings, tmp_path / "run", inline=True)
    losses = read_losses(RunDir(tmp_path / "run").metrics)
    assert found.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [("CentredAlone", "mixes the samples"), ("ContrastiveAlone", "loss can't be taken apart")],
)
def test_so_have_other_layers_and_losses_that_take_samples_together(name, said, tmp_path):
    target = f"{batch_norm_tasks.__file__}:{name}"
    found = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
    plan = plan_by_hand(found, "gpipe", 2, 4)
    with pytest.warns(TaskWarning, match=said):
        asked = due([plan], target, steps=6, longer=1.0)
    (arm,) = (k for k, arm in enumerate(asked.work.arms) if arm.micro_batches == 4)
    assert asked.plans[0].arm == asked.work.arms[arm].name
    curve = train_one(asked.work, Asked(arm=arm, rate=0.05, warmup=0, seed=0, length=6))
    settings = RunSettings(task=target, steps=6, optimizer=SGD)
    run(plan, settings, tmp_path / "run", inline=True)
    losses = read_losses(RunDir(tmp_path / "run").metrics)
    assert curve.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tune": 1, "warmups": (0, 5)}, "--tune 1: too few"),
        ({"warmups": (4,)}, "--warmup"),
        ({"metric": "test loss", "eval_every": 0}, "--eval-every 0"),
        ({"metric": "accuracy"}, "no metrics"),
    ],
)
def test_what_cant_be_studied_is_refused(plans, mlp_target, change, said):
    with pytest.raises(UserError, match=said):
        due(plans, mlp_target, **change)


def test_plans_that_cant_be_compared_are_refused(plans, mlp_target):
    smaller = msgspec.structs.replace(plans[1], mini_batch=4)
    other = msgspec.structs.replace(
        plans[1], profile=msgspec.structs.replace(plans[1].profile, fingerprint="another")
    )
    for plan, said in ((smaller, "mini-batch is 4, that of"), (other, "is for another model")):
        with pytest.raises(UserError, match=said):
            due([plans[0], plan], mlp_target)


def test_trainings_under_autocast_are_others(plans, mlp_target, tmp_path):
    """Also where it is the profile that says so."""
    under = msgspec.structs.replace(plans[0].profile, autocast="bfloat16")
    plan = msgspec.structs.replace(plans[0], profile=under)
    asked = Asked(arm=0, rate=0.05, warmup=0, seed=0, length=20)
    paths = {
        Finished(tmp_path, due([each], mlp_target).work).path(asked) for each in (plans[0], plan)
    }
    assert len(paths) == 2
    with pytest.raises(UserError, match="was profiled under another autocast than"):
        due([plan, plans[2]], mlp_target)


def test_a_damaged_training_is_named(plans, mlp_target, tmp_path):
    asked = due(plans[:1], mlp_target, tune=1, seeds=1)
    conduct(asked, tmp_path, 1, silent)
    path = min(tmp_path.iterdir())
    path.write_text(path.read_text()[:50])
    with pytest.raises(UserError, match=f"{path.name}.*remove the file"):
        conduct(asked, tmp_path, 1, silent)
