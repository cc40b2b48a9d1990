"""Runs with parameters that several stages use: copies on devices, one on each device."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from helpers.against_oracle import STEPS, train
from helpers.alike import assert_same_weights, run_replicated
from helpers.paths import TESTS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, profiled
from helpers.processes.stopped_runs import check_resumed
from mlp_task import MLPTask
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from timeprest.planner.plan import check_against_profile
from timeprest.planner.recordings.predicted import predicted
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import PlanError, TargetError
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.pieces import cut
from timeprest.runtime.checkpoint.export import export
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.prepare.tied_parameters import check_memory, give_copies
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.recording import measured
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.verify.check import check
from torch import nn

FILE = TESTS / "tasks/variety_tasks.py"
ORDERS = [(v, s) for v in ("gpipe", "pipedream-flush") for s in (2, 3, 4)] + [("zb-h1", 3)]
TASKS = ["TiedTask", "TiedByCallTask"]

profile_of = cache(profiled)


def plan_for(name, variant, stages, replicas=None):
    """Even cuts into `stages`, each on one device, or on as many as `replicas` say."""
    profile = profile_of(f"{FILE}:{name}")
    return plan_by_hand(profile, variant, stages, 4, replicas=replicas, tied="split")


def settings_for(name, **more):
    return RunSettings(task=f"{FILE}:{name}", steps=4, **more)


def copies_of(run_dir, stages, name="wte.weight"):
    """The shared weight as each stage that uses it has it at the end."""
    files = [load_file(run_dir / "weights" / f"stage{s}.safetensors") for s in range(stages)]
    return [file[name] for file in files if name in file]


@pytest.mark.choice(8)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages"), ORDERS)
@pytest.mark.parametrize("name", TASKS)
def test_copies_train_as_one_parameter_does(name, stages, variant, tmp_path):
    """Losses, gradients and weights to 1e-10, and copies bit by bit."""
    plan = plan_for(name, variant, stages)
    report = check(plan, settings_for(name), inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert report.tolerance == 1e-10
    assert all(d.absolute < 1e-10 for against in report.against for d in against.differences)
    copies = copies_of(tmp_path / "run", stages)
    assert len(copies) == 2
    assert torch.equal(*copies)
    if name == "TiedTask":
        assert torch.equal(*copies_of(tmp_path / "run", stages, "head.weight"))


# Memory in common -------------------------------------------------------------------------------


def two_views(one, two):
    net = nn.Module()
    net.one, net.two = nn.Parameter(one), nn.Parameter(two)
    return net


def test_parameters_lie_side_by_side_and_in_no_other_tensor():
    flat = torch.zeros(4, 6)
    check_memory([two_views(*flat.chunk(2)), two_views(*torch.zeros(4, 6).chunk(2, dim=1))])
    beside = two_views(torch.zeros(2), flat[1:])
    beside.register_buffer("flat", flat)
    with pytest.raises(TargetError, match="model's two, flat have memory in common"):
        check_memory([beside])
    with pytest.raises(TargetError, match="model's one, two have memory in common"):
        check_memory([two_views(flat[:3], flat[1:])])
    tied = two_views(flat, flat)
    check_memory([tied])
    tied.two.requires_grad_(False)
    with pytest.raises(TargetError, match="model's one, two have memory in common"):
        check_memory([tied])
    tied.two.requires_grad_(True)
    tied.flat = flat
    with pytest.raises(TargetError, match="model's flat, one, two have memory in common"):
        check_memory([tied])
    check_memory([tied.requires_grad_(False)])


class ReadsFlat(MLPTask):
    """What its parameters are views of goes into the result."""

    def model(self):
        class Net(nn.Sequential):
            def forward(self, x):
                return super().forward(x) + self.flat.mean()

        net = Net(*super().model())
        net.flat = nn.utils.parameters_to_vector(net.parameters()).detach()
        nn.utils.vector_to_parameters(net.flat, net.parameters())
        return net


def test_a_forward_that_reads_what_parameters_are_views_of_is_refused(tmp_path):
    name = f"{__file__}:ReadsFlat"
    plan = plan_by_hand(profiled(name, (4, 8)), "timeprest", 1, 2)
    with pytest.raises(TargetError, match=r"model's flat, 0.weight, .* have memory in common"):
        run(plan, RunSettings(task=name, steps=1), tmp_path / "run", inline=True)


# Runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 2])
def test_an_exported_tie_is_written_once(every, tmp_path):
    """From final weights and from a checkpoint; safetensors' own loader puts it back."""
    settings = settings_for("TiedTask", checkpoint_every=every)
    summary = run(plan_for("TiedTask", "gpipe", 3), settings, tmp_path / "run", inline=True)
    path = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", path).tied == {"head.weight": "wte.weight"}
    with safe_open(path, framework="pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata()["head.weight"] == "wte.weight"
        assert file.metadata()["format"] == "pt"
    task = resolve(f"{FILE}:TiedTask").task
    models = [task.model() for _ in range(3)]
    for model in models:
        # What is loaded has to be seen.
        torch.nn.init.zeros_(model.wte.weight)
    assert load_model(models[0], path) == (set(), [])
    missing, unexpected = models[1].load_state_dict(load_file(path), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        models[2].load_state_dict(load_file(path))
    trained = copies_of(tmp_path / "run", 3)[0]
    for model in models[:2]:
        assert model.head.weight is model.wte.weight
        assert torch.equal(model.wte.weight, trained)
    # Our own reader takes it for the whole model.
    start = settings_for("TiedTask", start_from=str(path), evaluate=True)
    again = run(plan_for("TiedTask", "gpipe", 2), start, tmp_path / "again", inline=True)
    assert again.epochs[0].train_loss < summary.epochs[0].train_loss


def test_a_copy_that_misses_gradients_is_found(monkeypatch):
    """The check would see it: without the sum, each copy steps by its own part."""
    from timeprest.runtime.stage.gradients import StageGradients

    monkeypatch.setattr(StageGradients, "start_sums", lambda self, losses: [])
    report = check(plan_for("TiedTask", "gpipe", 2), settings_for("TiedTask"), inline=True)
    assert report.verdict == "differs"
    assert report.against[1].differences[1].name == "wte.weight"


def test_clipping_counts_a_copy_once():
    settings = settings_for("TiedTask", clip_norm=0.05)
    report = check(plan_for("TiedTask", "gpipe", 3), settings, inline=True)
    assert report.verdict == "same"


def test_replicas_of_stages_with_copies(tmp_path):
    """Two workers of the first stage and two of the last: one sum over the four."""
    plan = plan_for("TiedTask", "gpipe", 3, [2, 1, 2])
    settings = settings_for("TiedTask", clip_norm=0.5)
    report = check(plan, settings, inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert torch.equal(*copies_of(tmp_path / "run", 3))


def test_groups_know_copies_by_one_name(tmp_path):
    """Weight decay for the embedding by its name alone: its copy in the head has it too."""
    plan = plan_for("TiedTask", "gpipe", 2)
    settings = settings_for("DecayedEmbeddingTask")
    report = check(plan, settings, inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert torch.equal(*copies_of(tmp_path / "run", 2))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_copies_in_processes(tmp_path):
    plan = plan_for("TiedByCallTask", "pipedream-flush", 3, [1, 1, 2])
    choice = OptimizerChoice(name="sgd", lr=0.1, momentum=0.9)
    settings = settings_for("TiedByCallTask", optimizer=choice)
    report = check(plan, settings, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert torch.equal(*copies_of(tmp_path / "run", 3))


def test_plans_that_keep_them_together_are_refused_when_cut():
    plan = msgspec.structs.replace(plan_for("TiedTask", "gpipe", 2), tied="together")
    with pytest.raises(PlanError, match="'wte', 'head' share parameters and must be on one stage"):
        prepare(plan, settings_for("TiedTask"))


def test_a_parameter_that_is_returned_is_a_copy_for_systems_that_flush(tmp_path):
    settings = settings_for("ReturningTask")
    assert check(plan_for("ReturningTask", "gpipe", 3), settings, inline=True).verdict == "same"
    plan = msgspec.structs.replace(plan_for("ReturningTask", "gpipe", 3), variant="pipedream-2bw")
    with pytest.raises(
        PlanError, match=r"down1.weight of stage 0 is used on stage 2 too, as where"
    ):
        prepare(plan, settings)


@pytest.mark.choice(2)
@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["fx", "export"])
@pytest.mark.parametrize("name", TASKS)
def test_copies_are_a_stages_own(name, front_end):
    """In both modes, and nothing of the user's model changes hands."""
    target = resolve(f"{FILE}:{name}")
    model = target.model(0)
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    modes = []
    for training in (True, False):
        model.train(training)
        traced = trace(model, "model", target.call(4)[0], front_end=front_end)
        n = len(traced.layers)
        groups = [list(range(3)), list(range(3, n - 2)), list(range(n - 2, n))]
        modes.append([piece.module for piece in cut(traced, groups)])
    stages = list(zip(*modes, strict=True))
    (tied,) = give_copies(stages).copied
    assert tied.stages == (0, 2)
    held = [[{id(p) for p in module.parameters()} for module in both] for both in stages]
    assert all(train == evaluate for train, evaluate in held)
    assert not held[0][0] & held[2][0]
    first, last = (tied.of(s, stages[s][0])[0] for s in tied.stages)
    assert first is not last
    assert torch.equal(first, last)
    assert last.requires_grad
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after == before


# On one device ------------------------------------------------------------------------------

V, SHORT_V, LOOP = (0, 1, 1, 0), (0, 1, 0), (0, 1, 0, 1)
FLUSH = [name for name, variant in VARIANTS.items() if variant.flushes]


def placed_plan(name, variant, placement, n=4, file="mlp_task.py", **more):
    """Even cuts of a task's model, laid on devices."""
    target = f"{TESTS / 'tasks' / file}:{name}"
    profile, stages = profile_of(target), len(placement) or 2
    plan = plan_by_hand(profile, variant, stages, n, placement=placement, **more)
    check_against_profile(plan, profile)
    return target, plan


def layouts(variant):
    """Models with ties and placements that put their stages on one device."""
    every = [("TiedV", V), ("TiedV", SHORT_V), ("TiedLoop", LOOP)]
    kind = VARIANTS[variant].placement
    return every if kind == "any" else every[2:] if kind == "loop" else every[:1]


def cases():
    for name, variant in VARIANTS.items():
        for task, placement in layouts(name):
            counts = (2, 4) if placement == V else (4,)
            several = {max(n, variant.least_micro_batches(len(placement))) for n in counts}
            for n in [1] if variant.whole_mini_batches else sorted(several):
                yield name, task, placement, n


@pytest.mark.choice(18)
@pytest.mark.parametrize(("variant", "task", "placement", "n"), [*cases()])
def test_inline_equals_the_oracle(variant, task, placement, n, tmp_path):
    target, plan = placed_plan(task, variant, placement, n)
    summary = train(plan, target, "momentum", tmp_path / "run")
    for report in summary.stages:
        assert report.peak.total <= plan.predicted.device_of(report.stage).memory_bytes
    assert summary.mini_batches == STEPS


@pytest.mark.choice(8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_at_once(variant, tmp_path):
    """Weighted losses, updates after two mini-batches, an epoch's rest, clipping, a warm-up."""
    (_, placement), *_ = layouts(variant)
    how = {"update_every": 2, "file": "mlp_task.py"}
    if not VARIANTS[variant].recompute_refusal:
        how["recompute"] = (True, False, True, True)[: len(placement)]
    name = "TiedShort" if placement == V else "TiedShortLoop"
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    target, plan = placed_plan(name, variant, placement, n, **how)
    more = {"clip_norm": 0.3, "lr_schedule": "linear", "warmup": 4, "ragged": "pad"}
    train(plan, target, "adam", tmp_path / "run", **more)


@pytest.mark.parametrize("variant", FLUSH)
def test_systems_that_flush_are_plain_training(variant, tmp_path):
    (name, placement), *_ = layouts(variant)
    target, plan = placed_plan(name, variant, placement)
    run(plan, RunSettings(task=target, steps=6, evaluate=False), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_plainly(target, plan.mini_batch, 6))


@pytest.mark.choice(8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_on_its_device_once(variant, tmp_path):
    """Weights, gradients, optimizer state and versions, of the plan, of the run and over time."""
    (name, placement), *_ = layouts(variant)
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    target, plan = placed_plan(name, variant, placement, n)
    summary = train(plan, target, "momentum", tmp_path / "run")
    model = sum(p.nbytes for p in resolve(target).task.model().parameters())
    devices = plan.predicted.devices
    assert sum(d.memory.weights_bytes for d in devices) == model
    assert sum(d.memory.optimizer_bytes for d in devices) == model
    assert sum(stage.parameter_bytes for stage in plan.predicted.stages) == model
    assert [tie.stages for d in devices for tie in d.ties] == [d.stages for d in devices]
    for device in devices:
        peak = summary.stages[device.stages[0]].peak
        assert peak.weights_bytes == device.memory.weights_bytes
        assert peak.total <= device.accounted.total
    over_time = [
        [point.nbytes for point in found.memory if point.lane == lane]
        for found in (predicted(plan, STEPS), measured(tmp_path / "run", (0, STEPS)))
        for lane in range(len(devices))
    ]
    # At their most, weights, versions, gradients and optimizer state are exact: the first kinds.
    most = [tuple(max(kinds) for kinds in zip(*points, strict=True))[:4] for points in over_time]
    for planned, held in zip(most[: len(devices)], most[len(devices) :], strict=True):
        if VARIANTS[variant].backward_weights == "corrected":
            # Counted on stages without a delay, too.
            assert planned[1] >= held[1]
            planned = (planned[0], held[1], *planned[2:])
        assert planned == held


def test_gradients_of_later_mini_batches_wait_apart(tmp_path):
    """The last stage is two mini-batches ahead of the first one's backward."""
    target, plan = placed_plan("TiedV", "pipedream", V, 1)
    (tie,) = plan.predicted.devices[0].ties
    summary = train(plan, target, "sgd", tmp_path / "run")
    account = [p.nbytes[2] for p in predicted(plan, STEPS).memory if p.lane == 0]
    own = sum(plan.predicted.stages[s].holds.parameters for s in (0, 3))
    assert max(account) > own + tie.holds.parameters
    assert summary.stages[0].peak.gradients_bytes <= max(account)


@pytest.mark.parametrize(
    ("variant", "replicas"), [("timeprest", (2, 2)), ("pipedream", (2, 1)), ("zb-v", (2, 2))]
)
def test_replicated_stages_share_it_on_each_device(variant, replicas, tmp_path):
    """The run is that of one worker for each device, by the same schedule."""
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    target, plan = placed_plan("TiedV", variant, V, n, replicas=replicas)
    _, alone = placed_plan("TiedV", variant, V, n)
    settings = RunSettings(task=target, steps=6, clip_norm=0.3, evaluate=False)
    run_replicated(plan, alone, settings, tmp_path)


@pytest.mark.parametrize("variant", ["timeprest-stashed", "spectrain", "zb-v"])
def test_runs_go_on_bit_for_bit(variant, tmp_path):
    """It is in the checkpoint once, in the file of the stage that updates it."""
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    target, plan = placed_plan("TiedShort", variant, V, n)
    settings = RunSettings(task=target, epochs=3, steps=None, checkpoint_every=4)
    check_resumed(plan, settings, tmp_path, 14, 15)
    files = {
        path.stem: set(load_file(path))
        for path in (tmp_path / "whole" / "checkpoints" / "00000015" / "weights").iterdir()
    }
    assert files["stage3"] == {"l3.bias"}
    assert files["stage0"] == {"l0.weight", "l3.weight", "l0.bias"}


def test_a_checkpoint_starts_a_run_under_another_placement(tmp_path):
    """On one device, on two with copies, or on one stage: gpipe is plain training everywhere."""
    target, plan = placed_plan("TiedV", "gpipe", V)
    choice = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)
    settings = RunSettings(task=target, steps=6, optimizer=choice, evaluate=False)
    run(plan, settings, tmp_path / "first", inline=True)
    settings = msgspec.structs.replace(settings, start_from=str(tmp_path / "first"))
    others = [
        placed_plan("TiedV", "gpipe", SHORT_V)[1],
        placed_plan("TiedV", "gpipe", (), tied="split")[1],
        placed_plan("TiedV", "gpipe", LOOP, tied="split")[1],
        placed_plan("TiedV", "gpipe", (0,))[1],
    ]
    for k, other in enumerate([plan, *others]):
        run(other, settings, tmp_path / str(k), inline=True)
        assert_same_weights(tmp_path / str(k), tmp_path / "0", atol=1e-10)


def test_on_one_device_and_over_devices_at_once(tmp_path):
    """Stages 0 and 2 on one device, stage 1 on another: two copies, one of them for two stages."""
    target, plan = placed_plan("TiedAll", "pipedream-flush", SHORT_V, tied="split")
    settings = RunSettings(task=target, clip_norm=0.05)
    report = check(plan, settings, inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    files = [load_file(path) for path in sorted((tmp_path / "run" / "weights").iterdir())]
    assert ["l0.weight" in file for file in files] == [True, True, False]
    assert torch.equal(files[0]["l0.weight"], files[1]["l0.weight"])


@pytest.mark.choice("TiedByCall")
@pytest.mark.parametrize("name", ["TiedTask", "TiedByCallTask"])
def test_a_language_model_in_a_v(name, tmp_path):
    """Its head is the embedding. With one mini-batch in flight, it is training on one device."""
    target, plan = placed_plan(
        name, "timeprest", SHORT_V, file="variety_tasks.py", limits=(1, 1, 1)
    )
    settings = RunSettings(task=target, steps=6, evaluate=False, dropout=False)
    _, alone = placed_plan(name, "gpipe", (0,), file="variety_tasks.py")
    for where, one in (("v", plan), ("alone", alone)):
        run(one, settings, tmp_path / where, inline=True)
    assert_same_weights(tmp_path / "v", tmp_path / "alone", atol=1e-10)
    target, plan = placed_plan(name, "timeprest", V, file="variety_tasks.py")
    settings = RunSettings(task=target, steps=30, evaluate=False)
    run(plan, settings, tmp_path / "several", inline=True)
    found = read_losses(tmp_path / "several" / "metrics.jsonl")
    assert np.mean(found[-5:]) < np.mean(found[:5])
    state = load_weights(tmp_path / "several")
    if name == "TiedTask":
        assert torch.equal(state["head.weight"], state["wte.weight"])
    exported = export(tmp_path / "several", tmp_path / "model.safetensors").tied
    assert exported == ({"head.weight": "wte.weight"} if name == "TiedTask" else {})


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("variant", "name", "placement"),
    [("i-timeprest", "TiedV", V), ("pipedream-2bw", "TiedLoop", LOOP), ("zb-v", "TiedV", V)],
)
def test_processes_are_the_inline_run(variant, name, placement, tmp_path):
    target, plan = placed_plan(name, variant, placement)
    train(plan, target, "momentum", tmp_path / "processes", inline=False)
    train(plan, target, "momentum", tmp_path / "inline")
    found, wanted = (load_weights(tmp_path / where) for where in ("processes", "inline"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_the_check_of_a_language_model_in_a_v():
    target, plan = placed_plan("TiedTask", "timeprest", V, file="variety_tasks.py")
    assert check(plan, RunSettings(task=target)).verdict == "same"
