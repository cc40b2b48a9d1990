"""Why a mini-batch isn't what its micro-batches are together: told before a run, and by a check."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import batch_norm_tasks
import msgspec
import pytest
import torch
import variety_tasks
from batch_norm_tasks import Moving
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled
from timeprest.profiles.errors import TaskWarning, TraceError
from timeprest.profiles.measuring.request import ProfileRequest
from timeprest.profiles.tasks.loss_parts import loss_in_parts
from timeprest.profiles.tracing.random_states import seed_everywhere
from timeprest.runtime.prepare import prepare as prepare_module
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.profile import measured
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.causes import (
    hooks_of,
    why_not_one_by_one,
    why_not_whole,
    without_hooks,
)
from timeprest.runtime.verify.check import HELD, ONE_BY_ONE, WHOLE, check
from timeprest.runtime.verify.dry_run import dry_run

FILE = TESTS / "tasks/batch_norm_tasks.py"


def plan_for(name, variant="gpipe", n=4, file=FILE, **more):
    sizes = (1, 2, 4, 8) if "Alone" in name else (2, 4, 8)
    return plan_by_hand(profiled(f"{file}:{name}", sizes), variant, 2, n, **more)


def checked(name, **more):
    settings = RunSettings(task=f"{FILE}:{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TaskWarning)
        return check(plan_for(name, **more), settings, inline=True)


def test_batch_norms_alone_are_no_other_training():
    report = checked("Apart")
    assert report.verdict == "same"
    whole, held, one_by_one = report.against
    assert (whole.what, held.what, one_by_one.what) == (WHOLE, HELD, ONE_BY_ONE)
    assert not whole.counts
    assert held.counts
    assert held.same
    assert len(report.notes) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Contrastive", "loss can't be taken apart in 'a' and 'b': .* compares samples with each"),
        ("ContrastiveAlone", "loss can't be taken apart in 'a' and 'b': of 8 samples together"),
        ("BalancedInLoss", "loss can't be taken apart in 'scores': .* what they have in common"),
        ("Summed", "loss can't be taken apart in 'scores': .* it seems to be a sum, and must be a"),
        ("Counting", "loss can't be taken apart: .* may return .sum, weight. instead"),
        ("Balanced", "'balance' of the model's result has nothing of each sample"),
        ("Clamped", "hooks .'first.weight'. make the difference: .* of a micro-batch"),
        ("Centered", "the forward, ahead of 'score' .Linear., mixes the samples of a batch"),
        ("Spectral", "buffers make the difference, which each forward changes and goes by"),
        ("WeightAndSpectral", "buffers make the difference, which each forward changes"),
    ],
)
def test_what_takes_samples_together_differs_and_is_named(name, why):
    """However many batch norms there are."""
    report = checked(name)
    assert report.verdict == "differs"
    assert sum(bool(re.search(why, note)) for note in report.notes) == 1, report.notes


@pytest.mark.parametrize(
    ("name", "variant", "n", "more", "told"),
    [
        ("Contrastive", "gpipe", 4, {}, True),
        ("ContrastiveAlone", "timeprest", 8, {}, True),
        ("Contrastive", "gpipe", 1, {}, False),
        ("Contrastive", "pipedream", 1, {"replicas": (1, 2)}, True),
        ("Contrastive", "pipedream", 1, {"replicas": (2, 1)}, False),
        ("BalancedInLoss", "gpipe", 2, {}, True),
        ("Counting", "gpipe", 4, {}, True),
        ("Apart", "gpipe", 4, {}, False),
        ("Balanced", "gpipe", 4, {}, True),
        ("Centered", "gpipe", 4, {}, True),
        ("Centered", "gpipe", 1, {}, False),
        ("Centered", "pipedream", 1, {"replicas": (2, 1)}, True),
        ("Noisy", "gpipe", 4, {}, False),
        ("Moving", "gpipe", 4, {}, False),
        ("Annealed", "gpipe", 4, {}, True),
        ("Spectral", "gpipe", 4, {}, False),
    ],
)
def test_what_cant_be_taken_apart_is_told_before_the_run(
    name, variant, n, more, told, tmp_path, recwarn
):
    plan = plan_for(name, variant, n, **more)
    settings = RunSettings(task=f"{FILE}:{name}", steps=1, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    words = "can't be taken apart|has nothing of each sample|mixes the samples|same samples again"
    lines = [str(w.message) for w in recwarn if issubclass(w.category, TaskWarning)]
    lines = [line for line in lines if re.search(words, line)]
    assert len(lines) == told
    dry = dry_run(plan, settings, tmp_path / "dry").warnings
    assert len([line for line in dry if re.search(words, line)]) == told
    if name == "Counting":
        assert "(sum, weight)" in lines[0]


@pytest.mark.parametrize(("n", "told"), [(1, 0), (2, 0), (4, 1), (8, 1)])
def test_a_loss_that_fails_on_micro_batches_is_told_and_one_that_fails_on_fewer_isnt(n, told):
    plan = plan_for("ContrastiveAlone", n=n)
    lines = prepare(plan, RunSettings(task=f"{FILE}:InFours")).cautions
    assert len(lines) == told
    for line in lines:
        assert re.search(f"takes 8 samples together, and fails on their {n} parts", line)


@pytest.mark.parametrize(
    ("name", "n", "ragged", "told"),
    [
        ("Traced", 1, "pad", 1),
        ("Traced", 2, "pad", 1),
        ("Traced", 2, "drop", 0),
        ("Apart", 2, "pad", 0),
        ("Apart", 3, "drop", 1),
        ("CentredAlone", 3, "drop", 1),
        ("ContrastiveAlone", 3, "drop", 0),
    ],
)
def test_copies_that_batch_norms_and_mixing_layers_see_are_told(name, n, ragged, told):
    """Of 21 samples in `Traced`, 24 in others; mini-batches have 8."""
    settings = RunSettings(task=f"{FILE}:{name}", ragged=ragged)
    lines = prepare(plan_for(name, n=n), settings).cautions
    assert len([line for line in lines if "are filled up with copies of a sample" in line]) == told
    assert any("mixes the samples" in line for line in lines) == (name == "CentredAlone")


@pytest.mark.processes
@pytest.mark.slow
def test_two_runs_of_a_loss_that_cant_be_taken_apart_are_the_same_and_say_so(recwarn):
    """Of a system that doesn't flush."""
    plan, settings = plan_for("Contrastive", "timeprest"), RunSettings(task=f"{FILE}:Contrastive")
    report = check(plan, settings)
    assert report.verdict == "same"
    assert "can't be taken apart" in report.notes[0]
    assert len([w for w in recwarn if "can't be taken apart" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("warned", "said"), [("the loss is apart", "the loss is apart"), ("", "either the loss")]
)
def test_a_cause_that_a_run_has_warned_of_is_named(warned, said):
    prepared = prepare(plan_for("Apart"), RunSettings(task=f"{FILE}:Apart"))
    prepared = replace(prepared, cautions=(warned,) if warned else ())
    (line,) = why_not_whole(prepared, 1.0, lambda _trial: False)
    assert said in line


def test_what_stages_dont_do_is_named():
    """By what it hangs on: hooks, or a mode that a check has on."""
    prepared = prepare(plan_for("Clamped"), RunSettings(task=f"{FILE}:Clamped"))
    model = prepared.task.model()
    asked, wanted = [], [1]

    def same_within(context):
        with context(model):
            asked.append((hooks_of(model), torch.are_deterministic_algorithms_enabled()))
        return wanted[0] == len(asked)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for same, why in ((1, "hooks .'first.weight'. make"), (2, "asks whether .* deterministic")):
            asked.clear()
            wanted[0] = same
            (line,) = why_not_one_by_one(prepared, same_within)
            assert re.search(why, line)
        assert asked == [([], True), (["first.weight"], False)]
        wanted[0] = 0
        assert not why_not_one_by_one(prepared, same_within)
        assert not why_not_one_by_one(prepared, lambda context: 1 / 0)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert hooks_of(model) == ["first.weight"]


def test_hooks_of_torch_make_weights_and_stay():
    model = batch_norm_tasks.WeightAndSpectral().model()
    x = torch.randn(4, 6, dtype=torch.float64)
    model.a.register_forward_hook(lambda module, given, found: found + 1)
    assert hooks_of(model) == ["a"]
    before = model(x)["a"].detach()
    with torch.no_grad():
        model.first.weight_g.mul_(2)
    with without_hooks(model):
        model(x)["a"].sum().backward()
    assert model.first.weight_g.grad is not None
    with torch.no_grad():
        model.first.weight_g.div_(2)
    assert torch.equal(model(x)["a"], before)


def test_a_result_of_as_many_rows_by_chance_is_no_samples():
    """A weight of 8 rows, whatever the samples are."""
    file = TESTS / "tasks/variety_tasks.py"
    plan = plan_for("ReturningTask", n=2, file=file)
    settings = RunSettings(task=f"{file}:ReturningTask")
    assert variety_tasks.ReturningTask().model()(torch.randn(4, 6).double())[1].shape[0] % 4 == 0
    assert not prepare(plan, settings).cautions
    assert check(plan, settings, inline=True).verdict == "same"


def test_a_look_at_the_forward_moves_nothing_that_is_drawn(tmp_path, monkeypatch):
    plan, settings = plan_for("Augmented"), RunSettings(task=f"{FILE}:Augmented", epochs=1)
    found = []
    for asked in (True, False):
        if not asked:
            monkeypatch.setattr(prepare_module, "why_mixed", lambda *_: "")
        seed_everywhere(0)
        run(plan, settings, tmp_path / str(asked), inline=True)
        found.append(load_weights(tmp_path / str(asked)))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_trial_leaves_nothing_in_the_loss():
    task, scores = Moving(), torch.randn(4, 3, dtype=torch.float64)
    given = {"scores": scores, "a": scores, "b": scores}
    found = loss_in_parts(task, given, torch.tensor([0, 1, 2, 0]), 4, (2, 2))
    assert found.same
    assert not task.seen.any()


def test_weights_are_told_where_all_losses_are_alike():
    """As with a head that begins at 0."""

    class Task:
        def loss(self, output, target):
            weight = torch.tensor([1.0, 2.0, 3.0])
            return torch.nn.functional.cross_entropy(output, target, weight=weight)

    target = torch.tensor([0, 1, 2, 0, 1, 2])
    found = loss_in_parts(Task(), torch.zeros(6, 3), target, 6, (2, 2, 2))
    assert (found.same, found.weighs) == (False, True)


@pytest.mark.parametrize(
    ("ignored", "sizes"), [((0, 1, 4), (2, 2, 2, 2)), ((10, 11, 12, 13), (8, 8))]
)
def test_samples_in_which_nothing_counts_tell_that_something_else_does(ignored, sizes):
    class Task:
        def loss(self, output, target):
            return torch.nn.functional.cross_entropy(output, target)

    n = sum(sizes)
    scores = torch.randn(n, 3, generator=torch.Generator().manual_seed(4))
    target = torch.arange(n) % 3
    target[list(ignored)] = -100
    found = loss_in_parts(Task(), scores, target, n, sizes)
    assert (found.same, found.weighs) == (False, True)


def test_float32_rounds_no_loss_apart():
    """Nor do losses that take no float64."""

    class Task:
        def loss(self, output, target):
            return torch.nn.functional.cross_entropy(output, target, weight=torch.ones(50))

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        output = 30 * torch.randn(64, 50, generator=generator).to(dtype)
        if dtype == torch.bfloat16:
            Task.loss = lambda self, output, target: torch.nn.functional.cross_entropy(
                output.bfloat16(), target
            )
        target = torch.randint(0, 50, (64,), generator=generator)
        assert loss_in_parts(Task(), output, target, 64, (21, 43)).same


def test_settings_of_the_check_are_those_of_the_run():
    """Deferred batch norms are held, too."""
    plan = plan_for("Contrastive")
    settings = RunSettings(task=f"{FILE}:Contrastive", deferred_batch_norm=True)
    settings = msgspec.structs.replace(settings, ragged="pad")
    with pytest.warns(TaskWarning, match="can't be taken apart"):
        assert check(plan, settings, inline=True).verdict == "differs"


@pytest.mark.parametrize(
    ("name", "lines"), [("Centered", 1), ("Balanced", 1), ("Contrastive", 0), ("Apart", 0)]
)
def test_a_forward_that_mixes_samples_is_told_with_the_profile(name, lines, recwarn):
    measured(f"{FILE}:{name}", ProfileRequest(f"{FILE}:{name}", batch_size=8, seconds=0).read())
    told = [str(w.message) for w in recwarn if "--micro-batches 1" in str(w.message)]
    assert len(told) == lines


@pytest.mark.parametrize(("name", "odd"), [("Auxiliary", "'a', 'b'"), ("Rescaled", None)])
def test_a_model_that_does_something_else_in_evaluation_mode_is_told_with_the_profile(name, odd):
    """And refused by a run that evaluates."""
    why = "has other layers in evaluation mode than in training mode.*train with --no-evaluate"
    with pytest.warns(TaskWarning, match=why) as found:
        plan = plan_for(name)
    assert odd is None or odd in str(found[0].message)
    settings = RunSettings(task=f"{FILE}:{name}")
    with pytest.raises(TraceError, match=why):
        prepare(plan, settings)
    prepare(plan, msgspec.structs.replace(settings, evaluate=False))
