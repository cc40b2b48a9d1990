"""tp-run --check: a pipelined run against the same training in one process, on many models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache, partial

import msgspec
import pytest
import torch
import variety_tasks
from click.testing import CliRunner
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled
from safetensors.torch import save_file
from timeprest.cli.run import main
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.autograd.dropout import HeldStatistics, WithoutDropout
from timeprest.profiles.errors import TargetError, TaskWarning, UserError
from timeprest.profiles.files import write_file
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage import optimizer
from timeprest.runtime.stage.summed_losses import MiniBatchMeans
from timeprest.runtime.verify import check as checking
from timeprest.runtime.verify.check import HELD, INLINE, ONE_BY_ONE, WHOLE, check
from timeprest.runtime.verify.compare import TrainingResults, compare, weight_spread

FILE = TESTS / "tasks/variety_tasks.py"
ORDERS = [("gpipe", 2), ("gpipe", 4), ("pipedream-flush", 3), ("zb-h1", 3)]
MODELS = ["ResNetTask", "GPTTask", "SkipsTask", "MaskedTask", "FrozenTask"]

profile_of = cache(profiled)


def plan_for(name, variant, stages, n, **more):
    return plan_by_hand(profile_of(f"{FILE}:{name}"), variant, stages, n, **more)


def settings_for(name, **more):
    return RunSettings(task=f"{FILE}:{name}", **more)


@pytest.mark.choice(10)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages"), ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_flush_systems_train_every_model_as_one_process_does(name, stages, variant):
    report = check(plan_for(name, variant, stages, 4), settings_for(name), inline=True)
    assert report.verdict == "same"
    assert report.tolerance == 1e-10
    assert report.mini_batches == 3
    whole, *held, one_by_one = report.against
    assert (whole.what, one_by_one.what) == (WHOLE, ONE_BY_ONE)
    # A batch norm over micro-batches is another one than over mini-batches.
    assert whole.counts == (name != "ResNetTask")
    assert [one.what for one in held if one.counts] == [HELD] * (name == "ResNetTask")
    assert whole.same == whole.counts
    assert all(d.absolute < 1e-14 for d in one_by_one.differences)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("name", "by"),
    [("OwnBackwardTask", "fx"), ("CountedTask", "export"), ("WrittenTask", "export")],
)
def test_what_a_trace_hardly_sees_is_trained_too(name, by):
    """A custom backward, what a checkpoint computes, buffers that the forward writes, a tensor that
    gets its gradient after it was made."""
    plan = plan_for(name, "pipedream-flush", 3, 4)
    assert plan.profile.front_end == by
    one_by_one = check(plan, settings_for(name), inline=True).against[-1]
    assert one_by_one.same
    assert all(d.absolute < 1e-14 for d in one_by_one.differences)
    spread = weight_spread({"calls": torch.tensor(3)}, {"calls": torch.tensor(12)})
    assert not spread, "a count is right or wrong"


def test_what_a_models_own_train_leaves_in_evaluation_mode_stays_there(tmp_path):
    plan, settings = plan_for("FrozenNormTask", "gpipe", 3, 4), settings_for("FrozenNormTask")
    assert plan.profile.front_end == "fx"
    report = check(plan, settings, inline=True)
    assert report.verdict == "same"
    assert all(d.absolute < 1e-14 for other in report.against for d in other.differences)
    # Also when an evaluation has been in between.
    run(plan, msgspec.structs.replace(settings, epochs=2), tmp_path / "run", inline=True)
    weights = load_weights(tmp_path / "run")
    assert weights["norm.num_batches_tracked"] == 0
    assert (weights["norm.running_mean"] == 0.25).all()


@pytest.mark.parametrize("how", [{"tied": "split"}, {"tied": "split", "replicas": (2, 1)}])
def test_copies_of_a_weight_are_treated_as_it_is(how):
    """By its hooks and by attributes that the optimizer reads."""
    plan = plan_for("TreatedTask", "gpipe", 2, 4, **how)
    report = check(plan, settings_for("TreatedTask"), inline=True)
    assert report.verdict == "same"
    assert all(d.absolute < 1e-14 for other in report.against for d in other.differences)


@pytest.mark.parametrize(
    ("name", "whole", "why"),
    [
        ("ExtraStateTask", "2", "'2._extra_state' is no tensor but dict .get_extra_state.: check"),
        ("ComplexTask", "2", "'2.phase' is of torch.complex128, which checkpoints can't hold"),
        ("SlopeTask", "layer", "the forward or the loss takes gradients itself .torch.autograd"),
    ],
)
def test_what_stages_cant_have_is_refused_in_a_line(name, whole, why, tmp_path):
    profile = profiled(f"{FILE}:{name}", granularity=whole)
    plan = plan_by_hand(profile, "gpipe", 2, 4)
    with pytest.raises(TargetError, match=why):
        run(plan, settings_for(name, evaluate=False), tmp_path / "run", inline=True)


@pytest.mark.choice(15)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", [n for n, v in VARIANTS.items() if not v.flushes])
def test_the_other_systems_train_every_model(variant, name, tmp_path):
    plan = plan_for(name, variant, 4, 4)
    summary = run(plan, settings_for(name, steps=3, evaluate=False), tmp_path / "run", inline=True)
    assert 0 < summary.epochs[-1].train_loss < 10


def test_notes_say_what_legitimately_differs():
    report = check(plan_for("ResNetTask", "gpipe", 2, 4), settings_for("ResNetTask"), inline=True)
    (note,) = report.notes
    assert "over 2 samples, a micro-batch, not over the mini-batch's 8" in note
    report = check(plan_for("GPTTask", "gpipe", 2, 4), settings_for("GPTTask"), inline=True)
    (note,) = report.notes
    assert "dropout is switched off" in note


def test_one_micro_batch_needs_one_comparison():
    report = check(plan_for("ResNetTask", "gpipe", 3, 1), settings_for("ResNetTask"), inline=True)
    (whole,) = report.against
    assert whole.what == WHOLE
    assert whole.counts
    assert report.verdict == "same"
    assert not report.notes


def test_a_loss_that_is_no_mean_over_samples_is_named():
    """Words aren't spread evenly over micro-batches: no pipeline can know their number."""
    plan = plan_for("WordMeanTask", "gpipe", 2, 4)
    report = check(plan, settings_for("WordMeanTask"), inline=True)
    whole, one_by_one = report.against
    assert report.verdict == "differs"
    assert not whole.same
    assert one_by_one.same
    assert "it is a mean over something else than samples" in report.notes[0]


@pytest.mark.parametrize("variant", [name for name in ALL if VARIANTS[name].flushes])
@pytest.mark.parametrize(
    ("n", "more"), [(3, {}), (4, {"replicas": (1, 2)}), (2, {"update_every": 2})]
)
def test_a_loss_that_counts_words_is_one_of_whole_mini_batches(variant, n, more):
    """A sum and a number of words: how they are spread over micro-batches means nothing."""
    plan = plan_for("WordSumTask", variant, 2, n, **more)
    report = check(plan, settings_for("WordSumTask", clip_norm=0.1, steps=4), inline=True)
    assert report.verdict == "same"
    assert all(each.same for each in report.against)
    assert not report.notes


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (MiniBatchMeans, "settle", lambda own, self, weight, n: own(self, 2 * weight, n)),
        (optimizer, "step_optimizer", lambda own, optimizer: [own(optimizer), own(optimizer)]),
    ],
)
def test_plain_training_has_no_part_in_what_stages_do_wrong(where, name, wrong, monkeypatch):
    """Of weighted losses and of updates: the other side is a loop of the user's own."""
    own = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *given: wrong(own, *given))
    plan = plan_for("WordSumTask", "gpipe", 2, 4)
    assert check(plan, settings_for("WordSumTask"), inline=True).verdict == "differs"


@pytest.mark.slow
def test_a_hugging_face_model_with_ignored_labels_is_trained_as_one_process_does():
    pytest.importorskip("transformers")
    name = "hf:llama,length=8,num_hidden_layers=1"
    plan = plan_by_hand(profiled(name), "pipedream-flush", 2, 4)
    report = check(plan, RunSettings(task=name), inline=True)
    assert report.verdict == "same"


def test_a_model_of_many_kinds_of_tensors_is_one(tmp_path):
    """Skips over a stage, several tensors at a cut, integers, booleans, and no gradients."""
    plan = plan_for("MaskedTask", "gpipe", 4, 4)
    assert any(edge.target - edge.source > 1 for edge in plan.edges)
    assert sum(not edge.needs_grad for edge in plan.edges) > 1
    assert max(sum(e.source == s for e in plan.edges) for s in range(3)) > 1
    # The loss doesn't depend on this layer: it must not even decay.
    settings = settings_for("MaskedTask", steps=3, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    state = load_weights(tmp_path / "run")
    before = resolve(settings.task).model(0).state_dict()
    assert torch.equal(state["unused.weight"], before["unused.weight"])
    assert not torch.equal(state["first.weight"], before["first.weight"])


def test_a_wrong_optimizer_is_found(monkeypatch):
    """Gradients of the first mini-batch are the same, later ones and weights aren't."""
    made = checking.PlainTraining.__init__

    def other(self, *arguments, **named):
        made(self, *arguments, **named)
        self.optimizer.param_groups[0]["lr"] *= 1.001

    monkeypatch.setattr(checking.PlainTraining, "__init__", other)
    report = check(plan_for("SkipsTask", "gpipe", 2, 4), settings_for("SkipsTask"), inline=True)
    assert report.verdict == "differs"
    loss, gradient, weight = report.against[-1].differences
    assert not loss.same
    assert gradient.mini_batch == 2
    assert weight.name in variety_tasks.Skips().state_dict()
    assert weight.absolute > weight.allowed


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ([-INFINITE, 1.0], [-INFINITE, 1.0], True),
        ([-INFINITE, 1.0], [-INFINITE, 1.1], False),
        ([1.0, 1.0], [INFINITE, 1.0], False),
        ([float("nan"), 1.0], [1.0, 1.0], False),
        ([1 + 2j], [1 + 2j], True),
        ([1 + 2j], [1 + 3j], False),
    ],
)
def test_infinite_and_complex_numbers_differ_where_they_do(found, wanted, same):
    """A mask's infinity is no measure of its other numbers."""
    found, wanted = torch.tensor(found), torch.tensor(wanted)
    losses = [], []
    if not found.is_complex():
        losses = found.tolist(), wanted.tolist()
    mine, others = (
        TrainingResults(figures, [], {"mask": state}, [])
        for figures, state in zip(losses, (found, wanted), strict=True)
    )
    loss, _, weight = compare(mine, others, 1e-4)
    assert weight.same == same
    assert loss.same == same or not losses[0]
    assert math.isfinite(weight.relative) or not math.isfinite(weight.absolute)
    spread = weight_spread({"mask": found}, {"mask": wanted})["mask"]
    assert (spread == 0) == same


def test_everything_that_settings_change_is_done_on_both_sides():
    """Uneven micro-batches, a last mini-batch that isn't full, averaging, clipping, a schedule."""
    plan = msgspec.structs.replace(plan_for("SkipsTask", "gpipe", 3, 3), update_every=2)
    assert plan.micro_batch == 3
    more = {"ragged": "pad", "clip_norm": 0.1, "lr_schedule": "linear", "warmup": 1}
    # Of a file for runs: a check evaluates nothing.
    more["eval_every"] = 2
    choice = OptimizerChoice(name="adamw", lr=0.01, weight_decay=0.1)
    settings = settings_for("SkipsTask", steps=7, optimizer=choice, decay_only="matrices", **more)
    report = check(plan, settings, inline=True)
    assert report.verdict == "same"
    assert report.against[-1].differences[1].absolute < 1e-14


def test_deferred_batch_norms_are_deferred_on_both_sides():
    settings = settings_for("ResNetTask", deferred_batch_norm=True)
    report = check(plan_for("ResNetTask", "gpipe", 2, 4), settings, inline=True)
    assert report.verdict == "same"


def test_replicas_have_running_statistics_of_their_own():
    plan = plan_for("ResNetTask", "gpipe", 3, 4, replicas=[1, 2, 1])
    report = check(plan, settings_for("ResNetTask"), inline=True)
    assert report.verdict == "same"
    assert any("replica 0's samples" in note for note in report.notes)
    assert all(d.absolute < 1e-14 for d in report.against[-1].differences)


def test_autocast_has_its_own_tolerance():
    settings = settings_for("SkipsTask", autocast="bfloat16")
    report = check(plan_for("SkipsTask", "gpipe", 2, 4), settings, inline=True)
    assert report.verdict == "same"
    assert (report.dtype, report.tolerance) == ("bfloat16", 5e-2)


@pytest.mark.parametrize(
    ("target", "cudnn", "matmul", "rounds"),
    [
        ("digits", True, False, True),
        ("digits", False, False, False),
        ("mlp", True, False, False),
        ("mlp", False, True, True),
    ],
)
def test_gpus_may_round_float32_to_tf32(target, cudnn, matmul, rounds, monkeypatch):
    """Where torch lets them: by default in convolutions alone."""
    monkeypatch.setattr(checking, "device_kind", lambda plan, settings: "cuda")
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    plan = plan_by_hand(profiled(target, (8,)), "gpipe", 2, 1)
    try:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
        report = check(plan, RunSettings(task=target), inline=True)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    wanted = ("float32 (TF32)", 1e-2) if rounds else ("float32", 1e-4)
    assert (report.dtype, report.tolerance) == wanted


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_found_and_switched_off(training):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout1d(0.3)
            self.recur = torch.nn.LSTM(4, 4, 2, dropout=0.2)
            self.attend = torch.nn.MultiheadAttention(4, 2, dropout=0.1)

        def forward(self, x):
            x = self.recur(self.drop(x))[0]
            x = torch.dropout(self.attend(x, x, x)[0], 0.5, self.training)
            return torch.nn.functional.dropout(x, training=self.training)

    model = Model().train(training)
    x = torch.randn(2, 3, 4)
    watch = WithoutDropout()
    state = torch.get_rng_state()
    with watch:
        assert torch.equal(model(x), model(x))
    assert torch.equal(state, torch.get_rng_state())
    assert watch.traits.drops == training
    assert not watch.traits.mixes
    assert torch.equal(model(x), model(x)) != training


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "back",
    [
        torch.Tensor.backward,
        torch.autograd.backward,
        lambda loss: loss.backward(torch.ones(()), retain_graph=True),
        lambda loss: torch.autograd.backward([loss], grad_tensors=[torch.ones(())]),
    ],
)
def test_dropout_is_switched_off_where_a_checkpoint_computes_again(back, reentrant):
    x, found = torch.randn(8, 16, requires_grad=True), []
    for p in (0.5, 0.0):
        dropped = partial(torch.nn.functional.dropout, p=p)
        with WithoutDropout(), HeldStatistics():
            y = torch.utils.checkpoint.checkpoint(
                lambda x, drop=dropped: torch.tanh(drop(x)) ** 2, x, use_reentrant=reentrant
            )
            back(y.sum())
        found.append(x.grad)
        x.grad = None
    assert torch.equal(*found)


def test_inline_checks_are_for_systems_that_flush():
    plan = plan_for("SkipsTask", "timeprest", 2, 4)
    with pytest.raises(UserError, match="leave --inline out"):
        check(plan, settings_for("SkipsTask"), inline=True)


@pytest.mark.choice(0)
@pytest.mark.slow
def test_a_tied_parameter_has_one_name_whatever_its_piece_calls_it():
    """torch.export's graphs know an embedding by the name of the head that shares its weight."""
    target = resolve(f"{FILE}:TiedTask")
    names = {}
    for front_end in ("fx", "export"):
        profile = profiled(replace(target, front_end=front_end))
        plan = plan_by_hand(profile, "gpipe", 3, 4, tied="split")
        prepared = prepare(plan, settings_for("TiedTask"))
        names[front_end] = dict(prepared.model.pieces[0].module.named_parameters()).keys()
        assert check(plan, settings_for("TiedTask"), inline=True).verdict == "same"
    assert "wte.weight" in names["fx"]
    assert "wte.weight" not in names["export"]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_against_one_process(tmp_path, monkeypatch):
    """The command: text, exit code, and nothing left behind."""
    monkeypatch.chdir(tmp_path)
    write_file("plan.json", plan_for("GPTTask", "pipedream-flush", 3, 4))
    done = CliRunner().invoke(main, ["plan.json", "--check"])
    assert done.exit_code == 0, done.output
    assert "micro-batches one by one" in done.output
    assert "same: whole mini-batches and micro-batches one by one in one process" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_asynchronous_processes_against_the_inline_run(tmp_path, recwarn):
    """With dropout: processes and inline run draw the same."""
    plan = plan_for("GPTTask", "timeprest", 3, 4)
    settings = settings_for("GPTTask", transport="gloo")
    report = check(plan, settings, run_dir=tmp_path / "kept")
    assert not [w for w in recwarn if issubclass(w.category, TaskWarning)]
    assert report.verdict == "same"
    assert not report.notes
    (inline,) = report.against
    assert inline.what == INLINE
    assert (tmp_path / "kept" / "gradients" / "stage0" / "2.safetensors").exists()


@pytest.mark.parametrize("again", [False, ("inside",)])
def test_conjugates_are_what_they_are(again):
    """Of a weight, and of what a layer makes that is computed again."""
    plan = plan_for("TurnedTask", "gpipe", 2, 4, recompute=(again, False), cut=CUT_TURNED)
    one_by_one = check(plan, settings_for("TurnedTask"), inline=True).against[-1]
    assert all(d.absolute == 0 for d in one_by_one.differences)


CUT_TURNED = [("first", "inside", "between"), ("last",)]


def test_what_rounding_alone_has_moved_is_not_compared():
    """Of zeros that replicas' sums make something else than nothing, it is all that there is."""
    plan = plan_for("ShiftedTask", "gpipe", 2, 4, replicas=(2, 1))
    report = check(plan, settings_for("ShiftedTask"), inline=True)
    assert report.verdict == "same"
    weight = report.against[-1].differences[2]
    assert weight.name != "between.bias"
    assert 0 < weight.absolute < 1e-14


def test_rounding_may_be_all_that_some_numbers_of_a_gradient_are(tmp_path):
    """Of a bias for queries, keys and values those of the keys, which Adam moves all the same."""

    def trained(rounding, weights):
        folder = tmp_path / str(rounding)
        folder.mkdir(exist_ok=True)
        save_file({"bias": torch.tensor([0.5, rounding])}, folder / "0.safetensors")
        return TrainingResults([1.0], [folder], {"bias": torch.tensor(weights)}, [0])

    wanted = trained(3e-9, [0.25, 0.5])
    assert compare(trained(-1e-9, [0.25, -0.5]), wanted, 1e-4)[2].same
    assert not compare(trained(-1e-9, [0.75, 0.5]), wanted, 1e-4)[2].same


def test_differences_end_with_code_1_and_as_json(tmp_path):
    path = tmp_path / "plan.json"
    write_file(path, plan_for("WordMeanTask", "gpipe", 2, 4))
    done = CliRunner().invoke(main, [str(path), "--check", "--inline", "--json", "--steps", "2"])
    assert done.exit_code == 1
    assert "warning: the task's loss can't be taken apart" in done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "differs"
    assert report["mini_batches"] == 2
    assert {d["what"] for d in report["against"][0]["differences"]} == {
        "loss",
        "gradient",
        "weight",
    }
    done = CliRunner().invoke(main, [str(path), "--check", "--epochs", "2"])
    assert done.exit_code == 2
    assert "--check, --epochs" in done.output


@pytest.mark.slow
def test_compiled_stages_are_held_against_some_that_arent(monkeypatch):
    """What the compiler makes of later weights, the compiled inline run would have, too."""
    asked, train = [], checking.run

    def inline(plan, settings, path, **more):
        asked.append((more["inline"], settings.compile))
        plainly = msgspec.structs.replace(settings, compile=False)
        return train(plan, plainly, path, **{**more, "inline": True})

    monkeypatch.setattr(checking, "run", inline)
    plan = plan_for("ResNetTask", "timeprest", 2, 4)
    assert check(plan, settings_for("ResNetTask", compile=True)).verdict == "same"
    assert asked == [(False, True), (True, False)]
