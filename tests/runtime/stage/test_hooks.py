"""Hooks of a stage: their order, what they keep, and what it takes to add one."""

from __future__ import annotations

from contextlib import contextmanager

import msgspec
import pytest
import torch
from helpers.against_oracle import train
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import check_resumed
from timeprest.planner.recordings.recording import MEMORY_KINDS
from timeprest.planner.systems.hooks import HOOKS, HookChain, StageHooks, overrides
from timeprest.runtime.checkpoint.worker_state import capture, known_parameters, pack, restore
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.metrics import EpochSums
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage import features
from timeprest.runtime.stage.memory import MemoryAccount
from timeprest.runtime.stage.stage import Stage
from timeprest.runtime.weights.prediction import LAST
from timeprest.runtime.weights.stash import WeightVersions
from torch import nn


class Told(StageHooks):
    """Notes what it is called for."""

    def __init__(self, told):
        self.told = told

    def begin(self, first, mini_batches):
        self.told.append(("begin", first, mini_batches))

    @contextmanager
    def forward(self, run):
        self.told.append(("forward", *run.op[1:], run.version, run.latest, run.real, run.size))
        yield
        self.told.append(("end of forward",))

    def after_forward(self, op):
        self.told.append(("after_forward", *op[1:]))

    def before_backward(self, op):
        self.told.append(("before_backward", *op[1:]))

    def backward(self, run):
        self.told.append(("backward", run.difference, run.version, run.latest, run.first))

    def after_backward(self, op):
        self.told.append(("after_backward", *op[1:]))

    def due(self, mini_batch):
        self.told.append(("due", mini_batch))

    def before_update(self):
        self.told.append(("before_update",))

    def rate(self, update):
        self.told.append(("rate", update))
        return 1.0

    def after_update(self):
        self.told.append(("after_update",))


def test_the_order_of_calls(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """Of one stage, whose micro-batches are forwarded one after another."""
    told = []
    monkeypatch.setattr(features, "FEATURES", (*features.FEATURES, lambda stage: Told(told)))
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 1, 2)
    run(plan, RunSettings(task=mlp_target, steps=2, evaluate=False), tmp_path / "run", inline=True)
    each = [
        [
            *(("forward", b, 0, b, b, 4, 4), ("end of forward",), ("after_forward", b, 0)),
            *(("forward", b, 1, b, b, 4, 4), ("end of forward",), ("after_forward", b, 1)),
            *(("before_backward", b, None), ("backward", 0, b, b, True)),
            *(("after_backward", b, None), ("due", b), ("before_update",), ("rate", b)),
            ("after_update",),
        ]
        for b in range(2)
    ]
    assert told == [("begin", 0, 2), *each[0], *each[1]]


def test_hooks_that_change_nothing_leave_runs_as_they_are(
    mlp_profile, mlp_target, tmp_path, monkeypatch
):
    monkeypatch.setattr(features, "FEATURES", (*features.FEATURES, lambda stage: Told([])))
    train(plan_by_hand(with_times(mlp_profile), "pipemare", 3, 2), mlp_target, "adam", tmp_path)


def test_a_chain_calls_those_that_do_something():
    class Half(StageHooks):
        """A rate alone."""

        def rate(self, update):
            return 0.5

    chain = HookChain([Half(), StageHooks(), Half()])
    assert [name for name in HOOKS if overrides(chain.hooks[0], name)] == ["rate"]
    assert {name: len(calls) for name, calls in chain.calls.items() if calls} == {"rate": 2}
    assert chain.rate(0) == 0.25
    assert HookChain([]).rate(3) == 1.0


def test_contexts_of_a_chain_end_in_reverse():
    told = []

    class Around(StageHooks):
        def __init__(self, name):
            self.name = name

        @contextmanager
        def recompute(self, op):
            told.append(self.name)
            try:
                yield
            finally:
                told.append(f"end of {self.name}")

    chain = HookChain([Around("second")])
    chain.insert(Around("first"))
    with pytest.raises(KeyError), chain.recompute(None):
        raise KeyError
    assert told == ["first", "second", "end of second", "end of first"]


class Lagging(StageHooks):
    """Scales the rate by how far weights are from their moving average."""

    def __init__(self, stage):
        self.mean = {p: p.detach().clone() for p in stage.updated}
        self.kept = {"mean of weights": self.mean}

    def after_update(self):
        for p, mean in self.mean.items():
            mean.lerp_(p.detach(), 0.25)

    def rate(self, update):
        far = sum(float((p.detach() - mean).norm()) for p, mean in self.mean.items())
        return 1 / (1 + far)


@pytest.mark.parametrize("variant", ["timeprest", "spectrain"])
def test_a_feature_with_state_of_its_own_is_one_object(
    variant, mlp_profile, mlp_target, tmp_path, monkeypatch
):
    """Its bytes count, and runs go on with it bit for bit."""
    monkeypatch.setattr(features, "FEATURES", (*features.FEATURES, Lagging))
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2 if variant == "timeprest" else 1)
    choice = OptimizerChoice(name="sgd", lr=0.05)
    more = {"checkpoint_every": 4, "evaluate": False, "optimizer": choice}
    check_resumed(plan, RunSettings(task=mlp_target, steps=12, **more), tmp_path)


def test_checkpoints_of_before_had_gradients_for_predictions(mlp_profile, mlp_target):
    """Apart from what other hooks keep."""
    plan = plan_by_hand(with_times(mlp_profile), "spectrain", 2, 1)
    choice = OptimizerChoice(name="sgd", lr=0.05)
    prepared = prepare(plan, RunSettings(task=mlp_target, steps=12, optimizer=choice))
    one, other = (Stage(prepared, prepared.replicas[0]) for _ in range(2))
    kept, found = (dict(stage.hooks.states())[LAST] for stage in (one, other))
    kept |= {p: torch.rand_like(p.detach()) for p in one.updated}
    state, tensors = capture(one, torch.get_rng_state(), EpochSums(), {})
    names = known_parameters(one)
    for name in names:
        del tensors[f"drift/{LAST}/{name}"]
    before = pack({name: kept[p] for name, p in names.items()}, tensors, "last gradients")
    restore(other, msgspec.structs.replace(state, last_gradients=before), tensors)
    assert all(torch.equal(found[p], kept[p]) for p in one.updated)


def test_what_hooks_keep_counts_with_the_versions():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))]

    class Keeping(StageHooks):
        kept = {"mean": {p: torch.zeros_like(p) for p in parameters}}  # noqa: RUF012

    weights = WeightVersions(parameters)
    account = MemoryAccount(weights, hooks=HookChain([Keeping(), Keeping()]))
    account.note()
    assert account.last[MEMORY_KINDS.index("versions")] == 2 * 4 * (3 + 5)
