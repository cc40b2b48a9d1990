"""Stages that need inputs or targets alone read nothing else, and train to the same weights."""

from __future__ import annotations

import pytest
import torch
from data_tasks import READ, Album, OwnBatches, ShuffledAlbum
from helpers.alike import assert_same_training
from helpers.plans import plan_by_hand
from helpers.processes.stopped_runs import check_resumed
from timeprest.profiles.errors import TargetError
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.parts import ALL, INPUTS, TARGET, Parts, fetch_parts, only
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.check import check
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

ONE = {INPUTS: Parts({INPUTS}), TARGET: Parts({TARGET})}


@pytest.fixture
def plan(mlp_profile):
    return plan_by_hand(mlp_profile, "timeprest", 3, 2)


@pytest.fixture(autouse=True)
def nothing_was_read():
    READ.clear()


def trained(plan, task, where):
    """The folder of an inline run."""
    run(plan, RunSettings(task=task, epochs=2, timeout_s=20), where, inline=True)
    return where


# What is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divided", "whole", "samples"),
    [("data_tasks:Album", "data_tasks:Listed", 42), ("ShuffledAlbum", "Undivided", 41)],
)
def test_stages_read_what_they_need_and_train_to_the_same_weights(
    divided, whole, samples, plan, tmp_path
):
    divided, whole = (name if ":" in name else f"data_tasks:{name}" for name in (divided, whole))
    found = trained(plan, divided, tmp_path / "divided")
    read = dict(READ)
    assert not read.get((INPUTS, TARGET), 0)
    assert not read.get((TARGET, INPUTS), 0)
    # In two epochs of training and testing, what is compared before counted too.
    assert 2 * (40 + samples) <= read[INPUTS, INPUTS] <= 2 * (40 + samples) + 4 * 16
    # The model is traced with some, and its loss and its forward asked of 8 each whether they can
    # be taken apart. Who takes inputs looks once at whole samples: two mini-batches of 8 of each
    # split at most.
    assert 0 < read["inputs+target", INPUTS] <= 16 + 16 + 8 + 8 + 8
    assert_same_training(found, trained(plan, whole, tmp_path / "whole"))


def test_a_stage_that_needs_both_reads_both(mlp_profile, tmp_path):
    trained(plan_by_hand(mlp_profile, "gpipe", 1, 2), "data_tasks:Album", tmp_path / "run")
    assert set(READ) == {("inputs+target", INPUTS), ("inputs+target", TARGET)}


def test_tensors_in_memory_are_taken_as_needed():
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    given = ConcatDataset([TensorDataset(x, y), Subset(TensorDataset(x, y), [4, 1])])
    for part, column in ((INPUTS, 0), (TARGET, 1)):
        found = only(given, ONE[part], sorted)
        assert len(found) == 8
        assert torch.equal(found[7][column], given[7][column])
        assert found.datasets[0].tensors[1 - column].numel() == 0
        inputs, target, _ = fetch_parts(found, [2, 7], sorted, ONE[part])
        assert (len(inputs), target is None) == ((1, True) if part == INPUTS else (0, False))
    assert only(given, ALL, sorted) is None


def test_a_class_made_of_subset_is_read_whole():
    class Halved(Subset):
        def __getitem__(self, k):
            x, y = super().__getitem__(k)
            return x / 2, y

        def __getitems__(self, indices):
            return [self[k] for k in indices]

    given = Halved(Album().data("train"), range(6))
    for part in ONE.values():
        assert only(given, part, sorted) is None
        assert only(ConcatDataset([given, given]), part, sorted) is None


def test_columns_of_a_set_of_dicts():
    class Table(Dataset):
        column_names, format = ["image", "label", "name"], {"type": "torch"}

        def select_columns(self, names):
            return names

    assert only(Table(), ONE[INPUTS], ["image"]) == ["image"]
    # The whole row is the target; and an input that isn't there is the model's to miss.
    assert only(Table(), ONE[TARGET], ["image"]) is None
    assert only(Table(), ONE[INPUTS], ["images"]) is None
    Table.format = {"type": "custom"}
    assert only(Table(), ONE[INPUTS], ["image"]) is None


def test_what_wants_whole_samples_gets_them():
    for task in (OwnBatches(), type("Stream", (Album,), {"data": streamed})()):
        samples = Samples(task, "train", 4, 0, mini_batch=8, parts=ONE[TARGET])
        inputs, target = samples.take(0, range(4))
        samples.close()
        assert samples.parts == ALL
        assert (len(inputs), len(target)) == (1, 4)
    assert set(READ) == {("inputs+target", INPUTS), ("inputs+target", TARGET)}


def streamed(self, split):
    loader = DataLoader(self.samples(split), 8)

    class Own(DataLoader):
        def __iter__(self):
            return iter(loader)

    return Own(self.samples(split), 8)


def test_the_data_sets_own_collate_fn_is_given_parts():
    class Together(type(Album().data("train"))):
        def collate_fn(self, samples):
            return tuple(
                None if part[0] is None else torch.stack(part)
                for part in zip(*samples, strict=True)
            )

    for split in ("train", "test"):
        task = type("Task", (Album,), {"pictures": Together})()
        whole = Samples(task, split, 4, 0, mini_batch=8)
        for part in ONE.values():
            found = Samples(task, split, 4, 0, mini_batch=8, parts=part)
            for k in range(3):
                _same_parts(found.evaluation(k), whole.evaluation(k), part)
            found.close()
        whole.close()


def _same_parts(found, whole, parts):
    assert len(found[0]) == (INPUTS in parts)
    assert all(torch.equal(a, b) for a, b in zip(found[0], whole[0], strict=False))
    assert torch.equal(found[1], whole[1]) if TARGET in parts else found[1] is None


# Random numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["CroppedAlbum", "ShuffledCrops", "Shifted", "ShiftedAndStill"])
def test_a_sample_has_its_own_random_numbers_whatever_is_read_of_it(task, mlp_profile):
    plan = plan_by_hand(mlp_profile, "pipedream-flush", 2, 4)
    settings = RunSettings(task=f"data_tasks:{task}", steps=6)
    assert check(plan, settings, inline=True).verdict == "same"


def test_who_loads_random_samples_changes_nothing(plan, tmp_path):
    one, other = (
        trained(plan, f"data_tasks:{name}", tmp_path / name)
        for name in ("ShuffledCrops", "ShuffledCropsByWorkers")
    )
    assert_same_training(other, one)


def test_a_run_of_parts_goes_on_with_its_samples(plan, tmp_path):
    settings = RunSettings(
        task="data_tasks:Shifted", steps=9, checkpoint_every=3, evaluate=False, timeout_s=20
    )
    check_resumed(plan, settings, tmp_path, at=8, last=9)


def test_training_draws_what_it_would_without_samples_that_draw():
    samples = Samples(resolve("data_tasks:CroppedAlbum").task, "train", 4, 0, parts=ONE[INPUTS])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    samples.expect((0, range(4 * k, 4 * k + 4), 4) for k in range(4))
    taken = [samples.take(0, range(4 * k, 4 * k + 4), 4)[0][0] for k in range(4)]
    assert torch.equal(torch.rand(3), expected)
    again = samples.take(0, range(4, 8), 4)[0][0]
    assert torch.equal(again, taken[1])
    assert not torch.equal(samples.take(1, range(4, 8), 4)[0][0], again)
    samples.close()


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("OtherInputs", r"only\(...\) doesn't give for the first mini-batches of epoch 1 what"),
        ("OtherTargets", r"only\(...\) doesn't give for the first mini-batches of epoch 1 what"),
        ("Apart", r"_Apart.only\({'inputs'}\) must give a data set with a collate_fn, as it has"),
        ("Fewer", r"_Fewer.only\({'inputs'}\) must give a data set with the same 42 samples"),
    ],
)
def test_parts_of_other_samples_end_a_run(task, message, plan, tmp_path):
    with pytest.raises(TargetError, match=message) as error:
        trained(plan, f"data_tasks:{task}", tmp_path / "run")
    assert "\n" not in str(error.value)


def test_which_samples_a_loader_chose_is_known():
    samples = Samples(ShuffledAlbum(), "train", 4, 3, mini_batch=8, parts=ONE[TARGET])
    first = samples.take(1, range(4))[1]
    chosen = samples.chosen(1, range(4))
    samples.close()
    own = Album().data("train")
    rows = [int((own.y[1:42] == y).all(1).nonzero()[0]) for y in first]
    assert chosen.startswith(str(rows)[:-1])
