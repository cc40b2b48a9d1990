"""Batch norms: statistics of micro-batches, and running ones of whole mini-batches."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.alike import assert_same_weights
from helpers.plans import plan_by_hand, profiled
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage.batch_norm import DeferredBatchNorm
from torch import nn

EPOCHS = 2
SOME_LAYERS = ("first", "second")


def run_of(name, n, stages, run_dir, variant="gpipe", *, recompute=False, **options):
    """Final parameters and buffers. `recompute`: everything, or layers by name."""
    target = f"batch_norm_tasks:{name}"
    profile = profiled(target, (1, 2, 4, 8))
    assert profile.front_end == ("export" if name == "Exported" else "fx")
    plan = plan_by_hand(profile, variant, stages, n)
    again = []
    for stage in plan.stages:
        some = isinstance(recompute, tuple)
        names = tuple(n for n in stage.nodes if n in recompute) if some else recompute
        again.append(msgspec.structs.replace(stage, recompute=names))
    plan = msgspec.structs.replace(plan, stages=tuple(again))
    settings = RunSettings(task=target, epochs=EPOCHS, **options)
    run(plan, settings, run_dir, inline=True)
    return load_weights(run_dir)


def mini_batches(name, *, last):
    """The inputs of all mini-batches; `last`: with those that aren't full."""
    samples = Samples(resolve(f"batch_norm_tasks:{name}").task, "train", 8, seed=0)
    for epoch in range(EPOCHS):
        for start in range(0, samples.size, 8):
            positions = range(start, min(start + 8, samples.size))
            if last or len(positions) == 8:
                yield samples.take(epoch, positions)[0][0][: len(positions)]


def assert_saw(found, name, inputs):
    """The first batch norm, which no weights come before, has the statistics of these inputs."""
    norm = nn.BatchNorm1d(3, momentum=resolve(f"batch_norm_tasks:{name}").task.momentum).double()
    for x in inputs:
        norm(x)
    for key, buffer in norm.named_buffers():
        torch.testing.assert_close(found[f"first.{key}"], buffer, rtol=0, atol=1e-10)


@pytest.mark.choice(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Traced", "Exported", "Mean"])
@pytest.mark.parametrize(("n", "stages", "ragged"), [(4, 1, "drop"), (3, 2, "drop"), (3, 2, "pad")])
def test_deferred_statistics_are_those_of_mini_batches(name, n, stages, ragged, tmp_path):
    """Padding isn't among them."""
    found = run_of(name, n, stages, tmp_path / "run", ragged=ragged, deferred_batch_norm=True)
    inputs = list(mini_batches(name, last=ragged == "pad"))
    assert_saw(found, name, inputs)
    assert found["second.num_batches_tracked"] == len(inputs)


def test_running_statistics_dont_change_training(tmp_path):
    """Deferred or not, weights are the same; running statistics aren't."""
    a = run_of("Traced", 4, 2, tmp_path / "a", deferred_batch_norm=True)
    b = run_of("Traced", 4, 2, tmp_path / "b")
    for key in a:
        if "running" in key or "tracked" in key:
            assert (a[key] - b[key]).abs().max() > 1e-3, key
        else:
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True, SOME_LAYERS])
@pytest.mark.parametrize("deferred", [False, True])
def test_micro_batches_of_padding_alone_count_nothing(deferred, recompute, tmp_path):
    """Of the last mini-batch, three of eight."""
    options = {"ragged": "pad", "deferred_batch_norm": deferred}
    found = run_of("Traced", 8, 1, tmp_path, recompute=recompute, **options)
    inputs = mini_batches("Traced", last=True)
    assert_saw(found, "Traced", [p for x in inputs for p in ([x] if deferred else x.split(1))])


def test_a_mini_batch_that_is_begun_is_settled_when_it_is_whole():
    """The update of the one before lands between its micro-batches."""
    norm, wanted = (nn.BatchNorm1d(3, momentum=0.1).double() for _ in range(2))
    deferred, parts = DeferredBatchNorm(norm), torch.randn(4, 2, 3, dtype=torch.float64)
    for done, (k, part) in enumerate(zip((0, 0, 1, 1), parts, strict=True)):
        with deferred.noting(k, 2, 2):
            norm(part)
        if done == 2:
            deferred.due(0)
    deferred.due(1)
    for whole in parts.view(2, 4, 3):
        wanted(whole)
    for name, buffer in wanted.named_buffers():
        torch.testing.assert_close(norm.get_buffer(name), buffer, rtol=0, atol=1e-12)


def test_one_value_has_no_variance():
    """Of a mini-batch with a single sample, beside one of padding."""
    norm = nn.BatchNorm1d(3, momentum=None)
    deferred = DeferredBatchNorm(norm)
    with deferred.noting(0, 1, 2):
        norm(torch.randn(2, 3))
    deferred.due(0)
    assert norm.running_mean.tolist() == [0.0] * 3
    assert norm.running_var.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["Traced", "Exported"])
@pytest.mark.parametrize("recompute", [True, SOME_LAYERS])
def test_what_is_computed_again_counts_once(recompute, name, tmp_path):
    a = run_of(name, 4, 2, tmp_path / "a", deferred_batch_norm=True)
    b = run_of(name, 4, 2, tmp_path / "b", deferred_batch_norm=True, recompute=recompute)
    assert_same_weights(a, b, atol=1e-12)


def test_with_one_micro_batch_nothing_is_deferred(tmp_path):
    a = run_of("Exported", 1, 2, tmp_path / "a", deferred_batch_norm=True)
    b = run_of("Exported", 1, 2, tmp_path / "b")
    assert_same_weights(a, b, atol=1e-12)


@pytest.mark.parametrize("name", ["Traced", "Mean"])
def test_an_asynchronous_system_keeps_mini_batches_apart(name, tmp_path):
    """Forwards of the next mini-batch begin before an update of the one before."""
    found = run_of(name, 2, 3, tmp_path / "run", "timeprest", deferred_batch_norm=True)
    assert_saw(found, name, mini_batches(name, last=False))


def test_what_isnt_training_is_left_alone():
    """In evaluation mode, without running statistics, and layers that aren't batch norms."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False)]
    module = nn.Sequential(*layers, nn.Linear(3, 3))
    deferred = DeferredBatchNorm(module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    x = torch.randn(4, 3)
    wanted = module(x)
    with deferred.noting(0, 4, 4):
        assert torch.equal(module(x), wanted)
    deferred.due(0)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
