"""A host that runs ahead of its device, here a device of which the CPU plays the part: marks get
through late, in drawn moments."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers.alike import assert_same_weights
from helpers.plans import plan_by_hand, with_times
from tasks.mlp_task import MLPTask
from timeprest.profiles.errors import RunError
from timeprest.runtime.prepare import clock as clocks
from timeprest.runtime.prepare.clock import AHEAD, StreamClock, UnderWay
from timeprest.runtime.records.progress import Losses, read_losses, read_progress
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage import gradients, notes, summed_losses
from timeprest.runtime.weights import staleness


class Ticks(StreamClock):
    """Every mark is a millisecond after the one before."""

    def __init__(self, device=None):
        self.made = 0

    def mark(self):
        self.made += 1
        return self.made

    def time_s(self, mark):
        return mark / 1000


class Late(Ticks):
    """The same, with a device that gets through at drawn moments, or when it is waited for."""

    late = True
    every: ClassVar = []

    def __init__(self, device=None):
        super().__init__()
        self.reached = 0
        self._draw = random.Random(len(self.every))
        self.every.append(self)

    def through(self, mark):
        self.reached = min(self.made, self.reached + self._draw.choice([0, 0, 0, 1, 5, 30]))
        return mark <= self.reached

    def wait(self, mark):
        self.reached = max(self.reached, mark)

    def time_s(self, mark):
        assert mark <= self.reached
        return super().time_s(mark)


class LateNumber:
    def __init__(self, tensor):
        self._value = tensor.detach().clone()

    def __float__(self):
        return float(self._value)


@pytest.fixture
def late(monkeypatch):
    """From now on all clocks are late. Returns how many were under way after each operation."""
    counts = []
    add = UnderWay.add

    def counted(self, mark, note, within):
        add(self, mark, note, within)
        counts.append(len(self))

    monkeypatch.setattr(Late, "every", [])
    monkeypatch.setattr(notes, "clock_of", Late)
    monkeypatch.setattr(UnderWay, "add", counted)
    for module in (gradients, summed_losses, staleness):
        monkeypatch.setattr(module, "number", LateNumber)
    return counts


CASES = [
    ("timeprest", {}, {}),
    ("timeprest", {}, {"clip_norm": 0.5, "checkpoint_every": 2}),
    ("timeprest", {"replicas": [1, 2, 1]}, {}),
    ("gpipe", {}, {"clip_norm": 0.5, "on_nan": "skip"}),
    ("gpipe", {"recompute": (True, False, False)}, {}),
    ("zb-h1", {}, {"on_nan": "warn"}),
    ("spectrain", {}, {"on_nan": "skip"}),
    ("pipedream-2bw", {"update_every": 2}, {}),
    ("timeprest", {"placement": (0, 1, 0)}, {}),
]


@pytest.mark.choice(4)
@pytest.mark.parametrize(("variant", "options", "more"), CASES)
def test_figures_are_those_of_who_waits(
    variant, options, more, late, monkeypatch, mlp_profile, mlp_target, tmp_path
):
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, 4, **options)
    settings = RunSettings(task=mlp_target, steps=6, log="tensorboard", log_operations=True, **more)
    run(plan, settings, tmp_path / "late", inline=True)
    assert max(late) == AHEAD
    assert sum(late) > len(late)
    monkeypatch.setattr(notes, "clock_of", Ticks)
    run(plan, settings, tmp_path / "waits", inline=True)
    found, wanted = (lines_of(tmp_path / name) for name in ("late", "waits"))
    assert found.keys() == wanted.keys()
    assert len(found) >= 3 + 2 * 3
    for name, lines in wanted.items():
        assert found[name] == lines, name
    assert_same_weights(tmp_path / "late", tmp_path / "waits")


def lines_of(where):
    """All that a run says of its operations, epochs and mini-batches."""
    found = {
        str(path.relative_to(where)): [json.loads(line) for line in path.read_text().splitlines()]
        for folder in ("operations", "stages")
        for path in sorted(where.rglob(f"*{folder}*/*.jsonl"))
    }
    lines = [line for line in read_progress(where / "metrics.jsonl") if isinstance(line, Losses)]
    found["losses"] = read_losses(where / "metrics.jsonl")
    found["figures"] = [figures for line in lines for figures in line.figures]
    assert len(found["figures"]) == len(found["losses"]) == 6
    reports = [json.loads(path.read_text()) for path in sorted(where.rglob("*report*.json"))]
    for report in reports:
        report.pop("rss_peak_bytes", None)
    found["reports"] = reports
    return found


class BadLoss(MLPTask):
    """NaN from the 10th micro-batch on, in the gradients too; and then the optimizer fails."""

    calls = 0

    def loss(self, output, target):
        self.calls += 1
        return super().loss(output, target) * (float("nan") if self.calls >= 10 else 1.0)

    def optimizer(self, parameters):
        parameters = list(parameters)

        class Fails(torch.optim.SGD):
            def step(self):
                if any(p.grad.isnan().any() for p in parameters):
                    raise ValueError("this is no gradient")
                super().step()

        return Fails(parameters, lr=0.01)


@pytest.mark.parametrize("fails", [True, False])
def test_what_isnt_finite_is_named_though_it_is_found_late(
    fails, late, monkeypatch, mlp_profile, tmp_path
):
    """Also where what came of it fails before that."""
    if not fails:
        monkeypatch.setattr(BadLoss, "optimizer", MLPTask.optimizer)
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(
        task=f"{Path(__file__)}:BadLoss", steps=6, checkpoint_every=3, evaluate=False
    )
    message = r"stage 1, at 1F2\.\d: the loss of mini-batch 2 is nan: stopped before anything of it"
    with pytest.raises(RunError, match=message):
        run(plan, settings, tmp_path, inline=True)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_numbers_are_read_once_they_are_through():
    done = []
    clock = Late()
    under_way = UnderWay(clock)
    clock.through = lambda mark: mark <= clock.reached
    for k in range(10):
        under_way.add(clock.mark(), lambda k=k: done.append(k))
        assert done == list(range(max(k + 1 - AHEAD, 0)))
    clock.reached = 9
    under_way.note(AHEAD)
    assert done == list(range(9))
    under_way.note()
    assert done == list(range(10))
    assert not under_way


def test_of_what_failed_late_the_first_is_told():
    def fails(what):
        raise RunError(what)

    clock = Late()
    clock.through = lambda mark: True
    under_way = UnderWay(clock)
    under_way._waiting.extend(
        (clock.mark(), lambda what=what: fails(what), nullcontext) for what in ("one", "other")
    )
    with pytest.raises(RunError, match="one"):
        under_way.note()
    under_way.blame()


def test_who_looks_for_a_cause_waits_for_no_device(monkeypatch):
    """It may be what hangs."""
    monkeypatch.setattr(clocks, "_BLAMED_S", 0.05)
    clock = Late()
    clock.through = lambda mark: False
    clock.wait = lambda mark: pytest.fail("waits")
    under_way = UnderWay(clock)
    under_way.add(clock.mark(), lambda: pytest.fail("it isn't through"))
    under_way.blame()
    assert len(under_way) == 1


def test_times_between_events_follow_the_hosts_clock(monkeypatch):
    """Though CUDA tells them in float32: over hours they'd be off by a quarter of a millisecond."""

    class Event:
        now_s = 0.0

        def __init__(self, **_):
            pass

        def record(self, _=None):
            Event.now_s += 0.3
            self.at_s = Event.now_s

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return float(torch.tensor((other.at_s - self.at_s) * 1e3, dtype=torch.float32))

    class Stream:
        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: 1000.0 + Event.now_s)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **more: empty(*args, **more))
    clock = clocks.CudaStreamClock(torch.device("cuda", 0))
    clock.start()
    for _ in range(40_000):
        mark = clock.mark()
        found = clock.time_s(mark)
    assert found == pytest.approx(1000.0 + Event.now_s, abs=1e-5)


def test_on_the_cpu_an_operation_is_done_when_it_returns():
    clock = clocks.clock_of(torch.device("cpu"))
    done = []
    UnderWay(clock).add(clock.mark(), lambda: done.append(1))
    assert done == [1]
    assert clock.mark() <= clock.now()
    assert clocks.number(torch.tensor(0.5)) == 0.5
