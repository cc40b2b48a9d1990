"""Data from loaders and streams: which samples, in which sequence, loaded by whom, and how it ends
when they fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from data_tasks import Flow, Listed, Loaded, Rows42
from helpers.alike import assert_same_training, assert_same_weights, check_processes
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import check_resumed
from timeprest.planner.search.answer.recheck import recheck
from timeprest.profiles.errors import RunError, TargetError, TaskWarning, UserError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.batches import Batches
from timeprest.profiles.tasks.loaders import as_ours, died, why
from timeprest.profiles.tasks.loading import loading_s_per_sample
from timeprest.profiles.tasks.parts import ALL, INPUTS
from timeprest.profiles.tasks.prefetch import Ahead
from timeprest.profiles.tasks.samples import few, first_batch, pick, size_of, some_samples
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.progress import read_epochs, read_losses
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.check import check
from torch.multiprocessing import reductions
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

FILE = TESTS / "tasks/data_tasks.py"


def trained(plan, name, where, **how):
    """The folder of an inline run."""
    settings = RunSettings(task=f"{FILE}:{name}", **{"epochs": 2, "timeout_s": 20, **how})
    run(plan, settings, where, inline=True)
    assert not [t for t in threading.enumerate() if t.name == "loading"]
    return where


@pytest.fixture
def plan(mlp_profile):
    return plan_by_hand(mlp_profile, "timeprest", 3, 2)


def batches(name, epoch, count=5):
    """What a worker takes of an epoch, in micro-batches of 4."""
    samples = Samples(resolve(f"{FILE}:{name}").task, "train", 4, seed=3, mini_batch=8)
    try:
        taken = [samples.take(epoch, range(k, k + 4)) for k in range(0, 8 * count, 4)]
    finally:
        samples.close()
    return torch.cat([inputs[0] for inputs, _ in taken]), torch.cat([target for _, target in taken])


# Which samples ------------------------------------------------------------------------------------


def test_a_shuffled_loader_gives_every_sample_once_and_other_epochs_otherwise():
    own = Rows42(Loaded(), "train")
    x, y = batches("Loaded", 0)
    rows = [(own.x == row).all(1).nonzero().item() for row in x]
    assert len(set(rows)) == 40
    assert torch.equal(y, own.y[rows])
    assert not torch.equal(batches("Loaded", 1)[0], x)
    # Whoever loads them, and however often.
    for name in ("Loaded", "LoadedByWorkers", "LoadedAndKept"):
        assert torch.equal(batches(name, 0)[0], x)


def test_noise_is_the_same_for_all_workers_and_others_draws_stay_as_they_are():
    torch.manual_seed(7)
    x, _ = batches("LoadedNoisy", 1)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(batches("LoadedNoisyByWorkers", 1)[0], x)


def test_a_stream_comes_as_it_flows():
    own = Rows42(Loaded(), "train")
    assert torch.equal(batches("Stream", 0)[0], own.x[:40])
    # Two workers in turn, each with batches of its share.
    x, _ = batches("StreamByWorkers", 0, 4)
    assert torch.equal(x[:16], torch.cat([own.x[0:16:2], own.x[1:16:2]]))


def test_batches_that_the_data_set_makes():
    own = Rows42(Loaded(), "train")
    x, _ = batches("BatchesOfEightAtOnce", 0)
    assert torch.equal(x, torch.cat([own.x[8 * k : 8 * k + 8] for k in (3, 1, 4, 0, 2)]))


def test_any_batch_can_be_the_first():
    """As for a run that goes on in mid-epoch."""
    for name in ("LoadedNoisy", "LoadedByWorkers", "Stream"):
        whole, _ = batches(name, 1)
        samples = Samples(resolve(f"{FILE}:{name}").task, "train", 8, seed=3)
        assert torch.equal(samples.take(1, range(24, 32))[0][0], whole[24:32])
        # And of those just had, once more.
        assert torch.equal(samples.take(1, range(32, 40))[0][0], whole[32:40])
        assert torch.equal(samples.take(1, range(24, 32))[0][0], whole[24:32])
        assert torch.equal(samples.take(1, range(8, 16))[0][0], whole[8:16])
        samples.close()


@pytest.mark.parametrize("name", ["NoisyStreamKept", "KeptByEpoch"])
def test_an_epoch_doesnt_hang_on_those_before(name):
    first, _ = batches(name, 1, 1)
    samples = Samples(resolve(f"{FILE}:{name}").task, "train", 8, seed=3)
    samples.take(0, range(8))
    assert torch.equal(samples.take(1, range(8))[0][0], first)
    samples.close()


@pytest.mark.parametrize("name", ["KeptByEpoch", "ChosenByEpoch"])
@pytest.mark.parametrize("parts", [ALL, {INPUTS}])
def test_data_are_told_of_the_epoch_whoever_chooses_and_whatever_is_read(name, parts):
    task = resolve(f"{FILE}:{name}").task
    own = Rows42(task, "train")
    samples = Samples(task, "train", 8, seed=3, parts=frozenset(parts))
    for epoch in (0, 2):
        (x,), _ = samples.take(epoch, range(8))
        told = {tuple(row) for row in (own.x + epoch).tolist()}
        assert told >= {tuple(row) for row in x.tolist()}
    samples.close()


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (DataLoader(range(10), batch_size=4), 10),
        (DataLoader(range(10), batch_size=4, drop_last=True), 8),
        (DataLoader(range(10), batch_sampler=BatchSampler(range(7), 3, drop_last=True)), 6),
        (DataLoader(range(10), sampler=RandomSampler(range(10), num_samples=5)), 5),
        (DataLoader(range(10), batch_sampler=[[1, 2], [3]]), 3),
        (DataLoader(range(10), batch_size=None), 80),
    ],
)
def test_how_many_samples_there_are(loader, size):
    assert size_of(loader, "train", 8) == size


class Uneven(BatchSampler):
    """Says what size its batches have, and makes smaller ones."""

    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5])


def test_a_samplers_own_batches_count_as_what_is_in_them():
    rows = TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))
    loader = DataLoader(rows, batch_sampler=Uneven(range(8), 3, drop_last=False))
    assert size_of(loader, "train", 3) == 6
    samples = Samples(SimpleNamespace(data=lambda split: loader), "test", 2, seed=0)
    found = [samples.evaluation(k) for k in range(samples.evaluations)]
    assert [real for _, _, real in found] == [2, 1, 1, 2]
    assert torch.equal(torch.cat([target for _, target, _ in found]), torch.arange(6))


class Drawing(Uneven):
    """Draws its batches by generators of its own."""

    def __init__(self):
        super().__init__(range(6), 3, drop_last=False)
        self.drawn, self.generator = random.Random(3), torch.Generator().manual_seed(1)

    def __iter__(self):
        rows = torch.randperm(6, generator=self.generator).tolist()
        yield from (rows[: (k := self.drawn.randint(2, 3))], rows[k:])


def test_a_sampler_is_as_it_was_when_its_samples_are_counted_and_looked_at():
    sampler, rows = Drawing(), [(torch.zeros(1), torch.zeros(1))] * 6
    loader = DataLoader(rows, batch_sampler=sampler)
    assert size_of(loader, "train", 3) == 6
    first_batch(loader, "train", 3)
    assert list(sampler) == list(Drawing())


def test_a_sampler_may_choose_lists_for_data_that_take_them():
    """As torch's documentation has it where data make batches themselves."""

    class Together:
        def __getitem__(self, chosen):
            return torch.tensor(chosen)[:, None], torch.tensor(chosen)

    sampler = BatchSampler(range(10), 4, drop_last=False)
    loader = DataLoader(Together(), batch_size=None, sampler=sampler)
    assert size_of(loader, "train", 4) == 10
    assert some_samples(loader, "train", 3)[1].tolist() == [0, 1, 2]


def test_an_evaluation_refuses_batches_without_some_of_their_samples():
    loader = DataLoader(
        range(6), batch_size=3, collate_fn=lambda rows: 2 * (torch.tensor(rows[1:]),)
    )
    samples = Samples(SimpleNamespace(data=lambda split: loader), "test", 3, seed=0)
    with pytest.raises(TargetError, match=r"'test'.: batch 1 has 2 samples, and is to be of 3: "):
        samples.evaluation(0)


def test_a_few_samples_of_anything():
    for name in ("Loaded", "Stream", "BatchesOfEightAtOnce", "StreamByWorkers"):
        given = resolve(f"{FILE}:{name}").task.data("test")
        call, target = some_samples(given, "test", 11)
        assert call.tensors[0].shape == (11, 5)
        assert target.shape == (11, 3)
        task = type("Few", (), {"data": lambda self, split, g=given: few(g, split, 3)})()
        samples = Samples(task, "test", 2, seed=0, mini_batch=8)
        assert 1 <= samples.evaluations <= 4
        samples.close()


def test_rows_of_a_nest():
    batch = {"x": torch.arange(6), "names": list("abcdef"), "n": 6, "t": torch.tensor(2.0)}
    part = pick(batch, slice(2, 6, 2), 6)
    assert part["x"].tolist() == [2, 4]
    assert part["names"] == ["c", "e"]
    assert (part["n"], part["t"].item()) == (6, 2.0)
    with pytest.raises(TargetError, match=r"batch of 6 samples holds a tensor of shape \[3\]"):
        pick({"odd": torch.zeros(3)}, slice(0, 2), 6)


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor
    names: tuple[str, ...]
    scale: float | None = None


def test_rows_of_containers_with_as_many_entries_as_there_are_samples():
    x, one = torch.arange(2), slice(0, 1)
    ((a, b), (c, d)) = pick(((x, x + 2), (x + 4, x + 6)), one, 2)
    assert [t.tolist() for t in (a, b, c, d)] == [[0], [2], [4], [6]]
    found = pick([Boxes(x, ("a", "b"))] * 3, one, 2)
    assert [(each.corners.tolist(), each.names) for each in found] == [([0], ("a",))] * 3
    assert pick(x.numpy() + 5, torch.tensor([1]), 2).tolist() == [6]
    # Of each sample whatever it has.
    assert pick([("a", "b", "c"), ("d",)], one, 2) == [("a", "b", "c")]
    assert pick([{"name": "a"}, {"name": "b"}], slice(1, 2), 2) == [{"name": "b"}]
    assert pick(list(x), one, 2) == [x[0]]
    assert pick([("a",)], one, 1) == [("a",)]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([("a", "b"), ("c", "d")], "holds a list of 2, each with 2"),
        ([{"x": torch.zeros(2, 4)}] * 2, "holds a list of 2, each with 2"),
        ({"a", "b"}, "holds a set, which can't be cut"),
        (SimpleNamespace(x=torch.zeros(2)), "holds a SimpleNamespace, which can't be cut"),
    ],
)
def test_rows_that_nobody_can_tell(odd, words):
    with pytest.raises(TargetError, match=words):
        pick({"odd": odd}, slice(0, 1), 2)


# Training -----------------------------------------------------------------------------------------


def test_a_thread_that_loads_ahead_changes_nothing(plan, tmp_path):
    """The same samples in memory, taken when they are asked for."""
    in_memory = run(
        plan,
        RunSettings(task=f"{TESTS / 'tasks/mlp_task.py'}:ShortEpochs", epochs=2),
        tmp_path / "memory",
        inline=True,
    )
    found = trained(plan, "Listed", tmp_path / "listed")
    assert read_losses(found / "metrics.jsonl") == read_losses(tmp_path / "memory/metrics.jsonl")
    assert_same_weights(found, tmp_path / "memory")
    # Its test data are fewer.
    assert len(read_epochs(found / "metrics.jsonl")) == len(in_memory.epochs)
    assert isinstance(Listed().data("train"), Rows42)


@pytest.mark.parametrize(
    ("one", "others"),
    [("Loaded", ["LoadedByWorkers", "LoadedAndKept"]), ("LoadedNoisy", ["LoadedNoisyByWorkers"])],
)
def test_how_many_workers_load_changes_nothing(one, others, plan, tmp_path):
    first = trained(plan, one, tmp_path / one)
    assert len(read_losses(first / "metrics.jsonl")) == 10
    for name in others:
        assert_same_training(trained(plan, name, tmp_path / name), first)


def test_streams_train_and_evaluate_alike_with_and_without_a_length(plan, tmp_path):
    known = trained(plan, "Stream", tmp_path / "known", steps=5)
    assert_same_training(trained(plan, "EndlessStream", tmp_path / "endless", steps=5), known)


def test_a_flush_run_on_a_loader_is_plain_training(mlp_profile):
    plan = plan_by_hand(mlp_profile, "pipedream-flush", 2, 4)
    settings = RunSettings(task=f"{FILE}:LoadedNoisy", steps=6)
    assert check(plan, settings, inline=True).verdict == "same"


@pytest.mark.parametrize("how", [{"replicas": (2, 1)}, {"micro_batches": 3}])
def test_parts_of_batches_and_the_last_one_filled_up(how, mlp_profile):
    """42 samples: the sixth batch has 2, and some micro-batches none."""
    plan = plan_by_hand(mlp_profile, "gpipe", 2, **{"micro_batches": 4, **how})
    settings = RunSettings(task=f"{FILE}:Stream", steps=7, ragged="pad")
    assert check(plan, settings, inline=True).verdict == "same"


@pytest.mark.parametrize("name", ["LoadedNoisy", "LoadedByWorkers", "EndlessStream"])
def test_a_run_goes_on_with_the_samples_that_it_would_have_had(name, plan, tmp_path):
    """Stopped in mid-epoch, behind the checkpoint before."""
    steps = 5 if name == "EndlessStream" else 9
    settings = RunSettings(
        task=f"{FILE}:{name}", steps=steps, checkpoint_every=3, evaluate=False, timeout_s=20
    )
    check_resumed(plan, settings, tmp_path, at=steps - 1, last=steps)


@pytest.mark.processes
def test_processes_load_what_one_process_does(mlp_profile, tmp_path):
    plan = plan_by_hand(mlp_profile, "timeprest", 2, 2)
    settings = RunSettings(task=f"{FILE}:LoadedNoisyByWorkers", epochs=2, timeout_s=20)
    check_processes(plan, settings, tmp_path)
    for name in ("LoadedFailingByWorkers", "FailingSample"):
        settings = RunSettings(task=f"{FILE}:{name}", epochs=1, timeout_s=20)
        with pytest.raises(UserError, match=MISTAKES[name]):
            run(plan, settings, tmp_path / name)


# What it costs ------------------------------------------------------------------------------------


def test_loading_is_measured_where_samples_are_not_in_memory():
    def task(name):
        return resolve(f"{FILE}:{name}").task

    assert loading_s_per_sample(task("FewSamples").data("train").dataset, 8) is None
    # A sleep is never too short, but the first of them may be over.
    assert 1e-3 < loading_s_per_sample(task("Slow").data("train"), 8, seconds=0.1) < 1
    assert 2e-3 <= loading_s_per_sample(task("Slow").samples("train"), 8, seconds=0.1) < 1
    # A stream that says no length may be over soon: six mini-batches, or one.
    assert loading_s_per_sample(task("EndlessStream").data("train"), 8) > 0
    assert loading_s_per_sample(task("EndlessStream").data("train"), 42) is None
    # What was loaded ahead while nobody asked comes sooner.
    assert loading_s_per_sample(task("Slow").data("train"), 8, seconds=0) > 5e-4


def test_profiling_in_other_batches_than_the_loaders_is_told():
    # 40 samples in five batches of 8: there are no twelve of 3.
    with pytest.warns(TaskWarning, match="makes batches of 8 samples.*--mini-batch 8"):
        profile = measure(
            resolve(f"{FILE}:LoadedByWorkers"), batch_size=3, micro_batch_sizes=[3], seconds=0
        )
    assert profile.loading_s_per_sample > 0
    with pytest.warns(TaskWarning, match=r"has 42 samples, which don't fill a mini-batch of 64"):
        measure(resolve(f"{FILE}:Listed"), batch_size=64, micro_batch_sizes=[64], seconds=0)
    # Those are what it takes by itself, whatever sizes are measured.
    profile = measure(resolve(f"{FILE}:LoadedByWorkers"), micro_batch_sizes=[2, 4], seconds=0)
    assert (profile.batch_size, profile.micro_batch_sizes) == (8, (2, 4))


def test_no_plan_is_faster_than_its_samples_come(mlp_profile):
    profile = with_times(mlp_profile)
    plan = plan_by_hand(profile, "timeprest", 3, 2)
    assert b"loading" not in msgspec.json.encode(plan)
    fast = with_loading(profile, plan.predicted.period_s / 16)
    other = plan_by_hand(fast, "timeprest", 3, 2).predicted
    assert other.period_s == plan.predicted.period_s
    assert not other.waits_for_samples
    slow = plan_by_hand(with_loading(profile, plan.predicted.period_s / 4), "timeprest", 3, 2)
    assert slow.predicted.waits_for_samples
    assert slow.predicted.period_s == pytest.approx(2 * plan.predicted.period_s)
    for one, stage in zip(slow.predicted.stages, plan.predicted.stages, strict=True):
        # As busy in twice the time.
        assert 1 - one.idle_share == pytest.approx((1 - stage.idle_share) / 2)
        assert one.memory_bytes == stage.memory_bytes
    # Proven, whatever the cut.
    assert slow.solver.optimal
    assert slow.solver.gap == 0
    fresh = recheck(slow, with_loading(profile, plan.predicted.period_s / 4))
    assert fresh.plan.predicted == slow.predicted
    assert not fresh.changes


def with_loading(profile, seconds):
    return msgspec.structs.replace(profile, loading_s_per_sample=seconds)


# What goes wrong ----------------------------------------------------------------------------------

MISTAKES = {
    "WrongBatches": r"DataLoader makes batches of 6 samples, and the plan's mini-batch has 8: plan "
    r"with --mini-batch 6",
    "LoadedFailing": r"data\('train'\) failed: .*data_tasks.py:\d+: ValueError: no such picture",
    "LoadedFailingByWorkers": r"data\('train'\) failed: .*data_tasks.py:\d+: ValueError: no such",
    "FailingSample": r"data\('train'\) failed in sample 23: .*data_tasks.py:\d+: ValueError: no",
    "EndlessStream": r"data\('train'\) has no length, so an epoch has no end: .* --steps",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_data_is_one_line(name, plan, tmp_path):
    with pytest.raises(TargetError, match=MISTAKES[name]) as error:
        trained(plan, name, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not [t for t in threading.enumerate() if t.name == "loading"]


def test_profiling_blames_the_data_too():
    with pytest.raises(TargetError, match=r"data\('train'\) failed: .*data_tasks.py:\d+: ValueE"):
        measure(resolve(f"{FILE}:FailingSample"), batch_size=16, seconds=0)


def test_a_stream_that_runs_dry_says_so(plan, tmp_path):
    short = r"batch 6 of epoch 1 has 2 samples where a mini-batch has 8: there it ends: give "
    with pytest.raises(TargetError, match=short + "--steps 5 or fewer, or .* __len__"):
        trained(plan, "EndlessStream", tmp_path / "short", steps=6)
    with pytest.raises(TargetError, match=r"no batch 6 in epoch 1; give --steps 5 or fewer, or"):
        trained(plan, "EndlessWithoutRest", tmp_path / "dry", steps=6)
    trained(plan, "EndlessWithoutRest", tmp_path / "enough", steps=5)
    with pytest.raises(TargetError, match=r"ran dry: it has no batch 6 in epoch 1; have its __len"):
        batches("BatchesOfEightAtOnce", 0, 6)


@pytest.mark.parametrize("drops", [False, True])
def test_workers_that_each_have_an_end_are_named(drops):
    data = Flow(Rows42(Loaded(), "train"))
    task = SimpleNamespace(data=lambda _: DataLoader(data, 8, num_workers=2, drop_last=drops))
    samples = Samples(task, "train", 8, seed=3, mini_batch=8)
    does = "leaves out what" if drops else "ends with a batch of its own"
    wanted = (samples.take(0, range(k, k + 8)) for k in range(0, samples.size // 8 * 8, 8))
    with pytest.raises(TargetError, match=f"each of its DataLoader's 2 workers {does}.*=1 makes"):
        list(wanted)
    samples.close()


class _Endless:
    """A sampler that doesn't say how many there are."""

    def __init__(self, most=None):
        self.most = most

    def __iter__(self):
        return itertools.islice(itertools.cycle(range(40)), self.most)


def test_a_sampler_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("timeprest.profiles.tasks.loaders._ENDLESS", 100)
    data = Rows42(Loaded(), "train")

    def batches_of(**how):
        return Batches(DataLoader(data, **how), "train", seed=0, mini_batch=8)

    for size in (8, None):
        with pytest.raises(TargetError, match=r"sampler has no length, and no end within 184 sam"):
            batches_of(batch_size=size, sampler=_Endless()).batch(0, 0)
    assert batches_of(batch_size=8, sampler=_Endless(20)).sizes() == [8, 8, 4]


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset")])
def test_what_a_dead_worker_had_sent_is_no_mistake_of_the_data(error):
    """It is fetched from the worker when it is needed."""
    fetching = compile("def fetch(error):\n    raise error", reductions.__file__, "exec")
    names = {}
    exec(fetching, names)
    with pytest.raises(type(error)) as lost:
        names["fetch"](error)
    assert died(lost.value)
    assert isinstance(as_ours(lost.value, "train"), RunError)
    with pytest.raises(type(error)) as own:
        raise error.with_traceback(None)
    assert not died(own.value)


def test_a_worker_of_the_loader_that_dies_ends_the_run(plan, tmp_path):
    with pytest.raises(RunError, match=r"a worker of its DataLoader is gone: DataLoader worker"):
        trained(plan, "LoadedDying", tmp_path / "run")


class _HeldUp(DataLoader):
    """Its worker begins when the process that opened it is gone. `end`: a pipe's, which stays open
    as long as the worker lives."""

    def __init__(self, data, **how):
        super().__init__(data, num_workers=1, worker_init_fn=self.hold, **how)
        self.seen, self.end = os.pipe()

    def hold(self, _):
        opener = os.getppid()
        os.write(self.end, os.getpid().to_bytes(4, "little"))
        while os.getppid() == opener:
            time.sleep(0.01)


def _open(loader):
    os.close(loader.seen)
    batches = Batches(loader, "train", seed=0, mini_batch=8)
    batches._opened(0, 0)
    os.close(loader.end)
    time.sleep(60)


@pytest.mark.processes
@pytest.mark.parametrize("data", [Rows42(Loaded(), "train"), Flow(Rows42(Loaded(), "train"))])
def test_workers_end_with_the_process_that_opened_the_loader(data):
    loader = _HeldUp(data, batch_size=8)
    opener = multiprocessing.get_context("fork").Process(target=_open, args=(loader,))
    opener.start()
    os.close(loader.end)
    worker = int.from_bytes(os.read(loader.seen, 4), "little")
    assert worker
    opener.kill()
    opener.join()
    ended, _, _ = select.select([loader.seen], [], [], 15)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    os.close(loader.seen)
    assert ended


def test_data_that_never_come_are_given_up():
    never = threading.Event()

    def samples():
        never.wait()
        yield

    ahead = Ahead(samples())
    try:
        with pytest.raises(
            RunError, match=r"data\('train'\) gave nothing for 0.05 s; .* --timeout"
        ):
            ahead.next(0.05, "data('train')")
    finally:
        never.set()
        assert ahead.close()


def test_errors_of_workers_are_told_by_the_users_line():
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "/x/site.py", line 3, in go\n    run()\n'
        f'  File "{json.__file__}", line 7, in loads\n    decode()\nValueError: no\n'
    )
    assert why(ValueError(text)) == "/x/site.py:3: ValueError: no"
