"""Mini-batches that micro-batches don't divide, and epochs that mini-batches don't."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from helpers.alike import assert_same_weights, check_processes, run_replicated
from helpers.drawn.pipelines import ALL
from helpers.oracle import SGD, Oracle
from helpers.output.schedules import schedule_text
from helpers.paths import TESTS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, profiled
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import RunError, TargetError
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.data import (
    Segment,
    check_result,
    part_of,
    real_part,
    real_samples,
    segments,
)
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.weights.in_place import unchanged

FILE = TESTS / "tasks/data_tasks.py"
EPOCHS = 2


def profile_of(name, batch_size=8):
    return profiled(f"{FILE}:{name}", (1, 2, 4, batch_size))


@pytest.fixture(scope="module")
def few_profile():
    return profile_of("FewSamples")


class DrawnPairs:
    """Task whose samples draw one number, which is the input and the target."""

    def data(self, split):
        class Pairs(torch.utils.data.Dataset):
            def __len__(self):
                return 10

            def __getitem__(self, k):
                drawn = torch.rand(1)
                return drawn, drawn

        return Pairs()


@pytest.mark.parametrize("real", [0, 1, 3])
def test_what_is_filled_up_is_drawn_once(real):
    samples = Samples(DrawnPairs(), "train", 4, seed=0)
    (drawn,), target = samples.take(0, range(real))
    assert drawn.shape == (4, 1)
    assert torch.equal(drawn[real:], drawn[:1].expand(4 - real, 1))
    assert target is None if not real else torch.equal(target, drawn[:real])
    (drawn,), target, left = samples.evaluation(2)
    assert torch.equal(target, drawn[:left])


def train_in_whole_mini_batches(name, mini_batch, *, last):
    """Losses and model of a plain loop over the epochs."""
    size = len(resolve(f"{FILE}:{name}").task.data("train"))
    each = -(-size // mini_batch) if last else size // mini_batch
    return train_plainly(f"{FILE}:{name}", mini_batch, EPOCHS * each, last=last)


@pytest.mark.parametrize(
    ("name", "ragged", "told"),
    [
        ("Unshuffled", "drop", 1),
        ("Unshuffled", "pad", 0),
        ("UnshuffledWithoutRest", "drop", 0),
        ("FewSamples", "drop", 0),
    ],
)
def test_samples_that_no_epoch_has_are_told(name, ragged, told, few_profile, recwarn):
    settings = RunSettings(task=f"{FILE}:{name}", ragged=ragged)
    prepare(plan_by_hand(few_profile, "gpipe", 2, 2, mini_batch=8), settings)
    lines = [str(w.message) for w in recwarn if "never trained on" in str(w.message)]
    assert len(lines) == told
    assert all("the last 5 of 21 training samples" in line for line in lines)


@pytest.mark.choice(12)
@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in ALL if VARIANTS[name].flushes])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    ("n", "mini_batch", "ragged"),
    [
        (3, 8, "drop"),  # 3, 3 and 2 samples
        (3, 7, "error"),  # three mini-batches exactly
        (4, 8, "pad"),  # the last mini-batch has 5: 2, 1, 1 and 1
        (8, 8, "pad"),  # and here three micro-batches have none
        (3, 5, "pad"),  # the last has 1
    ],
)
def test_flush_systems_equal_plain_training(
    variant, stages, n, mini_batch, ragged, few_profile, tmp_path
):
    plan = plan_by_hand(few_profile, variant, stages, n, mini_batch=mini_batch)
    settings = RunSettings(task=f"{FILE}:FewSamples", epochs=EPOCHS, ragged=ragged)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    last = ragged == "pad"
    losses, model = train_in_whole_mini_batches("FewSamples", mini_batch, last=last)
    assert_trained_as(tmp_path / "run", (losses, model))
    each = len(losses) // EPOCHS
    used = 21 if last else each * mini_batch
    sizes = [min(mini_batch, used - b * mini_batch) for b in range(each)]
    for epoch, record in enumerate(summary.epochs):
        mine = losses[epoch * each : (epoch + 1) * each]
        mean = sum(size * loss for size, loss in zip(sizes, mine, strict=True)) / used
        assert record.train_loss == pytest.approx(mean, abs=1e-10)
        assert record.samples_per_s * record.seconds == pytest.approx(used)


def train_with_everything(name, mini_batch, steps, *, reading="ours"):
    """--update-every 2 --ragged pad --clip-norm 0.3 --lr-schedule linear --warmup 3, in a loop that
    anyone would write; or otherwise read in one point.

    An epoch's mini-batches are taken two by two, what is left at its end alone. The gradient is the
    mean of their means; it is clipped; the rate goes by the number of the update.
    """
    task = resolve(f"{FILE}:{name}").task
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.utils.data.default_collate(list(task.data("train")))
    each = -(-len(x) // mini_batch)
    mini_batches = []
    for epoch in range(-(-steps // each)):
        shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        mini_batches.append(list(shuffled.split(mini_batch))[: steps - epoch * each])
    if reading == "goes on over epochs' ends":
        mini_batches = [[b for epoch in mini_batches for b in epoch]]
    together = [epoch[k : k + 2] for epoch in mini_batches for k in range(0, len(epoch), 2)]
    for update, chosen in enumerate(together):
        samples = sum(map(len, chosen))
        for b in chosen:
            by_sample = reading == "a mean over all samples"
            share = len(b) / samples if by_sample else 1 / len(chosen)
            (share * task.loss(model(x[b]), y[b])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        done = 2 * update if reading == "warm-up of mini-batches" else update
        after = (update - 3) / (len(together) - 3)
        optimizer.param_groups[0]["lr"] = 0.05 * ((done + 1) / 3 if done < 3 else 1 - after)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("variant", [name for name in ALL if VARIANTS[name].flushes])
# Of 21 samples: 5, 5, 5, 5 and 1, which is alone in its update; 6, 6, 6 and 3, which isn't.
@pytest.mark.parametrize(("mini_batch", "steps", "n"), [(5, 14, 3), (6, 14, 4)])
def test_everything_at_once_is_a_plain_loop(variant, mini_batch, steps, n, few_profile, tmp_path):
    """Each option alone agrees with most loops; together they show how each is read."""
    plan = plan_by_hand(few_profile, variant, 2, n, mini_batch=mini_batch, update_every=2)
    settings = RunSettings(
        task=f"{FILE}:FewSamples",
        steps=steps,
        optimizer=OptimizerChoice(name="sgd", lr=0.05, momentum=0.9),
        ragged="pad",
        clip_norm=0.3,
        lr_schedule="linear",
        warmup=3,
        evaluate=False,
    )
    run(plan, settings, tmp_path / "run", inline=True)
    state = load_weights(tmp_path / "run")

    def apart(reading):
        model = train_with_everything("FewSamples", mini_batch, steps, reading=reading)
        return max((state[key] - w).abs().max() for key, w in model.state_dict().items())

    assert apart("ours") < 1e-14
    alone = -(-21 // mini_batch) % 2
    assert apart("goes on over epochs' ends" if alone else "a mean over all samples") > 1e-3
    assert apart("warm-up of mini-batches") > 1e-3


@pytest.mark.parametrize(("name", "n"), [("FewTokens", 3), ("FlatTask", 3), ("FlatTask", 4)])
def test_results_of_other_forms(name, n, tmp_path):
    """A dict; a row for each step of each sample. In training as in evaluation."""
    plan = plan_by_hand(profile_of(name), "gpipe", 2, n)
    settings = RunSettings(task=f"{FILE}:{name}", epochs=EPOCHS, ragged="pad")
    summary = run(plan, settings, tmp_path / "run", inline=True)
    losses, model = train_in_whole_mini_batches(name, 8, last=True)
    assert_trained_as(tmp_path / "run", (losses, model))
    task = resolve(f"{FILE}:{name}").task
    inputs, target = Samples(task, "test", len(task.data("test")), seed=0).evaluation(0)[:2]
    model.eval()
    with torch.no_grad():
        output = model(*inputs)
    found = summary.epochs[-1].test
    assert found["loss"] == pytest.approx(task.loss(output, target).item(), abs=1e-10)
    accuracy = task.metrics(output, target)["accuracy"].item()
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-10)


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (3, {}, r"up to 3 samples.* shape \[3, 3, 5\].*--micro-batches that divide"),
        (4, {"ragged": "pad"}, r"up to 2 samples.* shape \[3, 2, 5\].*--ragged drop"),
        (4, {}, r"up to 2 samples.* shape \[3, 2, 5\].*--no-evaluate"),
    ],
)
def test_a_result_that_cant_be_cut_is_refused(n, options, message, tmp_path):
    """Time first; and with micro-batches of 3 samples, that there are 3 steps is chance."""
    plan = plan_by_hand(profile_of("TimeFirst"), "gpipe", 2, n)
    name = f"{FILE}:TimeFirst"
    with pytest.raises(TargetError, match=message):
        run(plan, RunSettings(task=name, **options), tmp_path / "run", inline=True)
    assert not (tmp_path / "run").exists()


def test_nothing_is_refused_where_nothing_is_padded(tmp_path):
    plan = plan_by_hand(profile_of("TimeFirst"), "gpipe", 2, 4)
    settings = RunSettings(task=f"{FILE}:TimeFirst", evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    assert len(read_losses(tmp_path / "run" / "metrics.jsonl")) == 2


def test_test_data_in_batches_of_whole_micro_batches_are_evaluated(tmp_path):
    plan = plan_by_hand(profile_of("TimeFirst"), "gpipe", 2, 4)
    settings = RunSettings(task=f"{FILE}:TimeFirstLoaded", epochs=1)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    task = resolve(settings.task).task
    inputs, target = task.data("test").dataset[:]
    model = task.model()
    model.load_state_dict(load_weights(tmp_path / "run"))
    loss = task.loss(model(inputs), target).item()
    assert summary.epochs[-1].test["loss"] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("variant", ["timeprest", "v-timeprest"])
def test_one_stage_is_plain_training_in_any_system(variant, few_profile, tmp_path):
    plan = plan_by_hand(few_profile, variant, 1, 3)
    settings = RunSettings(task=f"{FILE}:FewSamples", epochs=EPOCHS, ragged="pad")
    run(plan, settings, tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_in_whole_mini_batches("FewSamples", 8, last=True))


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize(
    "variant", ["timeprest", "v-timeprest", "i-timeprest", "pipedream-2bw", "gpipe"]
)
def test_every_system_equals_the_oracle(variant, n, few_profile, tmp_path):
    """An epoch of mini-batches of 8, 8 and 5 samples, in 3 micro-batches or 8."""
    plan = plan_by_hand(few_profile, variant, 3, n)
    target = f"{FILE}:FewSamples"
    choice = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)
    settings = RunSettings(task=target, ragged="pad", optimizer=choice, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    task = resolve(target).task
    torch.manual_seed(0)
    weights = {name: w.numpy().copy() for name, w in task.model().state_dict().items()}
    samples = Samples(task, "train", 1, seed=0)
    (segment,) = segments(plan, settings, samples.size)

    def batch(positions):
        found = [samples.take(0, range(k, k + 1)) for k in positions]
        x = [inputs[0].numpy() for inputs, _ in found]
        y = [wanted.numpy() for _, wanted in found]
        return np.concatenate([*x, np.zeros((0, 5))]), np.concatenate([*y, np.zeros((0, 3))])

    batches = [[batch(real_samples(segment, b, i)) for i in range(n)] for b in range(3)]
    assert [sum(len(x) for x, _ in micros) for micros in batches] == [8, 8, 5]
    stages = [list(stage.nodes) for stage in plan.stages]
    oracle = Oracle(variant, stages, weights, partial(SGD, 0.05, 0.9), batches)
    oracle.run(schedule_text(make_schedule(pipeline_of(plan), 3)))
    state = load_weights(tmp_path / "run")
    for name, weight in oracle.weights().items():
        np.testing.assert_allclose(state[name], weight, rtol=0, atol=1e-10)
    losses = read_losses(tmp_path / "run" / "metrics.jsonl")
    np.testing.assert_allclose(losses, [oracle.losses[b] for b in range(3)], rtol=0, atol=1e-10)


@pytest.mark.parametrize("together", [2, 3])
def test_an_update_after_several_mini_batches(together, few_profile, tmp_path):
    """Its gradient is the mean of theirs, whatever their sizes: 8, 8 and 5 samples."""
    plan = plan_by_hand(few_profile, "gpipe", 3, 3)
    plan = msgspec.structs.replace(plan, update_every=together)
    target = f"{FILE}:FewSamples"
    settings = RunSettings(task=target, epochs=EPOCHS, ragged="pad", evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    task = resolve(target).task
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    samples = Samples(task, "train", 8, seed=0)
    for epoch in range(EPOCHS):
        for first in range(0, 3, together):
            numbers = range(first, min(first + together, 3))
            optimizer.zero_grad()
            for b in numbers:
                positions = range(8 * b, min(8 * b + 8, 21))
                inputs, wanted = samples.take(epoch, positions)
                loss = task.loss(model(inputs[0][: len(positions)]), wanted)
                (loss / len(numbers)).backward()
            optimizer.step()
    assert_same_weights(tmp_path / "run", model.state_dict(), atol=1e-10)


@pytest.mark.parametrize(
    ("variant", "n", "mini_batch"),
    [
        ("gpipe", 4, 7),  # every mini-batch is uneven
        ("timeprest", 4, 8),  # the last mini-batch has 5
        ("pipedream", 1, 8),
        ("pipedream", 1, 10),  # it has 1: one replica of two has none
    ],
)
def test_replicas_pad_alike(variant, n, mini_batch, few_profile, tmp_path):
    profile = profile_of("FewSamples", batch_size=10) if mini_batch > 8 else few_profile
    plan, alone = (
        plan_by_hand(profile, variant, 2, n, mini_batch=mini_batch, replicas=replicas)
        for replicas in ((2, 1), None)
    )
    settings = RunSettings(task=f"{FILE}:FewSamples", epochs=EPOCHS, ragged="pad")
    found, wanted = run_replicated(plan, alone, settings, tmp_path)
    for mine, other in zip(found.epochs, wanted.epochs, strict=True):
        assert mine.train_loss == pytest.approx(other.train_loss, abs=1e-10)


def test_recomputed_stages_pad_alike(few_profile, tmp_path):
    plan = plan_by_hand(few_profile, "gpipe", 3, 8)
    stages = tuple(msgspec.structs.replace(stage, recompute=True) for stage in plan.stages)
    plan = msgspec.structs.replace(plan, stages=stages)
    settings = RunSettings(task=f"{FILE}:FewSamples", epochs=EPOCHS, ragged="pad")
    run(plan, settings, tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_in_whole_mini_batches("FewSamples", 8, last=True))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_equal_inline(few_profile, tmp_path):
    plan = plan_by_hand(few_profile, "timeprest", 2, 3)
    settings = RunSettings(task=f"{FILE}:FewSamples", epochs=EPOCHS, ragged="pad")
    check_processes(plan, settings, tmp_path, 1e-10)


def test_too_few_samples(few_profile):
    plan = plan_by_hand(few_profile, "gpipe", 2, 4)
    with pytest.raises(TargetError, match=r"5 of 21 training samples.*--ragged drop"):
        segments(plan, RunSettings(task="t", ragged="error"), 21)
    with pytest.raises(TargetError, match=r"7 training samples don't fill.*--ragged pad"):
        segments(plan, RunSettings(task="t"), 7)
    (only,) = segments(plan, RunSettings(task="t", ragged="pad"), 7)
    assert (only.mini_batches, only.samples) == (1, 7)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_every_sample_has_one_place(samples, mini_batch, n):
    n = min(n, mini_batch)
    count = -(-samples // mini_batch)
    segment = Segment(0, 0, count, samples, mini_batch, n)
    seen = []
    for b in range(count):
        real = [len(real_samples(segment, b, i)) for i in range(n)]
        parts = [part_of(segment, b, each, -(-mini_batch // n)) for each in real]
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert max(part.real for part in parts) - min(part.real for part in parts) <= 1
        assert all(part.real <= part.size == -(-mini_batch // n) for part in parts)
        for i in range(n):
            seen += real_samples(segment, b, i)
    assert seen == list(range(samples))


def test_padding_alone_leaves_buffers_that_a_forward_replaces():
    module = torch.nn.BatchNorm1d(2)
    mean = module.running_mean
    with unchanged(module):
        module.running_mean = mean + 1
        mean.sub_(1)
    assert module.running_mean is mean
    assert mean.tolist() == [0.0, 0.0]


def test_shapes_of_results():
    check_result([(4, 3), (8,)], [(5, 3), (10,)], 4, 5, "")
    for shapes, others in (([()], [()]), ([(6, 4)], [(6, 5)]), ([(8, 2)], [(8, 2)])):
        with pytest.raises(TargetError, match="say no more"):
            check_result(shapes, others, 4, 5, "say no more")


def test_what_is_real_of_a_result():
    rows = torch.arange(12.0).reshape(12, 1)
    found = real_part({"a": rows[:4], "b": [rows, None, 3]}, 3, 4, "")
    assert found["a"].tolist() == rows[:3].tolist()
    assert found["b"][0].tolist() == rows[:9].tolist()
    assert found["b"][1:] == [None, 3]
    for tensor in (torch.tensor(1.0), rows[:6], rows[:0]):
        with pytest.raises(RunError, match="say no more"):
            real_part(tensor, 3, 4, "say no more")
    with pytest.raises(RunError, match=r"object.*say no more"):
        real_part(object(), 3, 4, "say no more")
