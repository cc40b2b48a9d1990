"""Batches as tuples, nests of tuples and dicts, and dicts alone: the same training of all."""

from __future__ import annotations

import pytest
import torch
from helpers.alike import assert_same_weights
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled
from timeprest.profiles.errors import TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.samples import read_batch
from timeprest.profiles.tracing.front_ends import trace
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.check import check
from torch.utils.data import default_collate

FILE = TESTS / "tasks/data_tasks.py"
STEPS = 7
"""More than an epoch of 40 samples in mini-batches of 8."""


@pytest.fixture(scope="module")
def profiles():
    return {name: profiled(f"{FILE}:{name}") for name in ("TupleTask", "NestedTask", "DictTask")}


def trained(name, profile, variant, where):
    plan = plan_by_hand(profile, variant, 3, 4)
    settings = RunSettings(task=f"{FILE}:{name}", steps=STEPS)
    summary = run(plan, settings, where, inline=True)
    return read_losses(where / "metrics.jsonl"), load_weights(where), summary.epochs[-1].test


def plain_losses(call):
    """A loop as anyone would write it over the tuples, in the shuffles of two epochs."""
    task = resolve(f"{FILE}:TupleTask").task
    torch.manual_seed(0)
    model, data = task.model(), task.data("train")
    optimizer = task.optimizer(model.parameters())
    losses = []
    for b in range(STEPS):
        epoch, k = divmod(b, 5)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch)).tolist()
        inputs, target = default_collate([data[i] for i in order[8 * k : 8 * k + 8]])
        optimizer.zero_grad()
        loss = task.loss(call(model, inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["TupleTask", "NestedTask", "DictTask"])
def test_flush_training_is_a_plain_loop(name, profiles, tmp_path):
    losses, _, _ = trained(name, profiles[name], "gpipe", tmp_path / "run")
    assert losses == pytest.approx(plain_losses(lambda m, inputs: m(*inputs)), abs=1e-10)


@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw"])
def test_the_form_of_batches_changes_nothing(variant, profiles, tmp_path):
    found = [trained(name, profile, variant, tmp_path / name) for name, profile in profiles.items()]
    first, *others = found
    for other in others:
        assert other[0] == first[0]
        assert other[2] == pytest.approx(first[2])
        assert_same_weights(other[1], first[1])


@pytest.mark.parametrize("front_end", ["fx", "export"])
def test_each_front_end_takes_a_nest_apart(front_end):
    target = resolve(f"{FILE}:NestedTask")
    call, _ = target.call(2)
    traced = trace(target.model(), target.name, call, front_end=front_end)
    labels = ["words", "extra_mask", "extra_point_0", "extra_point_1"]
    assert [node.target for node in traced.inputs] == labels
    made, found = target.call(5)[0], target.model()
    if front_end == "fx":
        torch.testing.assert_close(traced.module(*made.tensors), made.of(found))


def test_a_check_holds_a_nest_against_plain_training(profiles):
    plan = plan_by_hand(profiles["NestedTask"], "pipedream-flush", 2, 2)
    settings = RunSettings(task=f"{FILE}:NestedTask", steps=2)
    assert check(plan, settings, inline=True).verdict == "same"


def test_stages_load_what_they_take(profiles):
    """Of a nest, too: the words belong to the first stage and the point to the last."""
    plan = plan_by_hand(profiles["NestedTask"], "gpipe", 3, 2)
    prepared = prepare(plan, RunSettings(task=f"{FILE}:NestedTask"))
    own = [set(p.inputs) & set(prepared.model.inputs) for p in prepared.model.pieces]
    assert own[0] >= {"words", "extra_mask"}
    assert "extra_point_0" in own[-1] | own[-2]
    assert "words" not in own[-1]


def test_labels_tell_alike_names_apart():
    x = torch.zeros(2)
    call, _ = read_batch((({"b_c": x, "b": {"c": x + 1}}, x + 2), x))
    assert len(set(call.labels(["a"]))) == 3
    (nest, last), named = call.arguments(call.tensors)
    assert torch.equal(nest["b"]["c"], x + 1)
    assert torch.equal(last, x + 2)
    assert not named


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OtherNames", r"samples are dicts of ids and label, and the model's forward takes far, "),
        ("TextInside", r"inputs of a sample must be tensors, or tuples, lists and dicts of"),
    ],
)
def test_what_a_batch_cannot_be(name, message):
    with pytest.raises(TargetError, match=message):
        measure(resolve(f"{FILE}:{name}"), batch_size=8, seconds=0)


def test_a_dict_without_an_argument_of_the_first_ones_is_refused():
    with pytest.raises(TargetError, match=r"a batch has no 'mask', which the first ones had; it"):
        read_batch({"words": torch.zeros(2)}, ("mask", "words"))
