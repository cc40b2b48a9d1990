"""Weight versions: backwards on any version through the hooks, and how many copies there are."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.systems.hooks import BackwardRun, ForwardRun
from timeprest.planner.systems.operations import BACKWARD, FORWARD, Op
from timeprest.profiles.errors import TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import LiveBytes
from timeprest.profiles.target import resolve
from timeprest.runtime.communication.all_reduce import LocalAllReduce, Pool
from timeprest.runtime.communication.channel import LocalChannels, Mailbox
from timeprest.runtime.prepare.devices import CPU
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.runner import StageRunner
from timeprest.runtime.weights.policy import BackwardPass, WeightPolicies
from timeprest.runtime.weights.staleness import Sample, StalenessMeter
from timeprest.runtime.weights.stash import WeightVersions
from torch import nn
from torch.utils.checkpoint import checkpoint


class Everything(nn.Module):
    """One of each kind of layer whose backward needs its weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.gru(self.norm(x))[0]
        x = torch.tanh(self.batch_norm(self.conv(x.transpose(1, 2))))
        return self.linear(x.transpose(1, 2)).square().mean()


def test_backward_after_an_update_in_place_runs_for_every_kind_of_layer():
    torch.manual_seed(0)
    model = Everything().double()
    weights = WeightVersions(list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 11, (4, 5))
    with weights.forward(weights.at(0)):
        loss = model(tokens)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    weights.advance(set())
    with weights.backward(weights.at(1)):
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_backward_uses_the_version_it_is_told():
    """Linear: the gradient of the input is g·W, and W may be any version."""
    weight = nn.Parameter(torch.tensor([[2.0]]))
    weights = WeightVersions([weight])
    x = torch.tensor([[1.0]], requires_grad=True)
    grads = {}
    for version in (0, 1):
        with weights.forward(weights.at(weights.latest)):
            y = nn.functional.linear(x, weight)
        weights.keep_latest()
        with torch.no_grad():
            weight.add_(3.0)
        weights.advance({0, 1})
        used = 0 if version == 0 else weights.latest
        with weights.backward(weights.at(used)):
            (grads[version],) = torch.autograd.grad(y.sum(), x)
    assert grads[0].item() == 2.0
    assert grads[1].item() == 8.0


def test_what_has_gone_with_its_graph_is_not_kept():
    weight = nn.Parameter(torch.ones(1, 3))
    weights = WeightVersions([weight])
    x, other = torch.ones(2, 3), torch.ones(5, 3)
    with weights.forward(None):
        cut_off = nn.functional.linear(other, weight).exp().detach()
        y = nn.functional.linear(x, weight) + cut_off.sum()
    assert y.requires_grad
    assert list(weights.saved.values()) == [x.nbytes]


@pytest.mark.parametrize(
    "seen",
    [
        lambda w: w.conj(),
        lambda w: w.real,
        lambda w: w.imag,
        lambda w: w.conj().imag,
        lambda w: torch.view_as_complex(torch.view_as_real(w)[1:]),
    ],
)
def test_complex_weights_are_found_again_however_they_are_seen(seen):
    """Linear: the gradient of the input follows the weights of the backward."""
    weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
    weights = WeightVersions([weight])
    grads = []
    for versions in (weights, None):
        x = torch.tensor([0.5 + 1.0j], requires_grad=True)
        with nullcontext() if versions is None else versions.forward(None):
            y = (x * seen(weight)).sum()
        if versions is not None:
            with torch.no_grad():
                weight.mul_(1.0 + 2.0j)
        with nullcontext() if versions is None else versions.backward(None):
            grads.append(torch.autograd.grad(y.real, x)[0])
    assert grads[0].item() == grads[1].item() != 0


def test_a_backward_on_what_was_changed_since_is_refused():
    """torch itself doesn't look, where there are hooks."""
    weights, mean = WeightVersions([]), torch.ones(2)
    x = torch.ones(2, requires_grad=True)
    with weights.forward(None):
        y = x * mean
    mean.mul_(0.5)
    with weights.backward(None), pytest.raises(TargetError, match=r"\[2\] is changed in place"):
        y.sum().backward()


def test_forward_on_an_older_version_leaves_the_latest_in_place():
    weight = nn.Parameter(torch.tensor([[2.0]]))
    weights = WeightVersions([weight])
    weights.keep_latest()
    with torch.no_grad():
        weight.mul_(10)
    weights.advance({0})
    x = torch.tensor([[1.0]])
    with weights.forward(weights.at(0)):
        assert nn.functional.linear(x, weight).item() == 2.0
    assert nn.functional.linear(x, weight).item() == 20.0
    assert weights.held == 2
    weights.drop(set())
    assert weights.held == 1
    assert weights.older_bytes == 0


def test_layers_that_a_backward_calls_again_run_on_its_weights():
    """Or not at all, where the forward ran on others."""
    layer = nn.Linear(1, 1, bias=False)
    weights = WeightVersions([layer.weight])
    x = torch.ones(1, 1, requires_grad=True)

    def outputs():
        with weights.forward(weights.at(0)):
            return checkpoint(lambda x: torch.exp(layer(x)), x, use_reentrant=False)

    y = outputs()
    (wanted,) = torch.autograd.grad(y, x, retain_graph=True)
    weights.keep_latest()
    with torch.no_grad():
        layer.weight.add_(3.0)
    weights.advance({0})
    with weights.backward(weights.at(0)):
        (found,) = torch.autograd.grad(outputs(), x)
    torch.testing.assert_close(found, wanted)
    refused = pytest.raises(TargetError, match="a Linear is called inside a backward")
    with weights.backward(None, same=False), refused:
        outputs().backward()


def test_weights_between_versions():
    weights = WeightVersions([nn.Parameter(torch.zeros(1))])
    weights.keep_latest()
    with torch.no_grad():
        weights.parameters[0].add_(2.0)
    weights.advance({0})
    for reuse in (False, True):
        (made,) = weights.between(0, 0.5, reuse=reuse)
        assert made.tolist() == [1.0]


def test_no_graph_holds_an_older_version():
    """A forward runs on an older version; when that is dropped, its memory goes at once."""
    layer = nn.Linear(64, 64, bias=False)
    with LiveBytes() as live:
        weights = WeightVersions(list(layer.parameters()))
        weights.keep_latest()
        weights.advance({0})
        x = torch.randn(1, 64, requires_grad=True)
        with weights.forward(weights.at(0)):
            y = layer(x)
        before = live.live
        weights.drop(set())
        assert before - live.live == 64 * 64 * 4
    with weights.backward(weights.at(1)):
        y.sum().backward()
    assert layer.weight.grad is not None


class _Copies(LiveBytes):
    """Follows the live storages; `now`: how many, by their size in bytes."""

    def __init__(self):
        super().__init__()
        self.now = Counter()
        self._followed = {}

    def _note_storage(self, storage, count):
        new = storage._cdata not in self._known
        super()._note_storage(storage, count)
        if new and count:
            key, nbytes = storage._cdata, storage.nbytes()
            self.now[nbytes] += 1
            self._followed[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))

    def _gone(self, key, nbytes):
        del self._followed[key]
        self.now[nbytes] -= 1


@pytest.fixture(scope="module")
def profile_of_elevens(mlp_target):
    """Micro-batches of 11 and 44: no activation is as large as one of the weights."""
    target = resolve(mlp_target)
    return measure(target, batch_size=44, micro_batch_sizes=[11, 44], seconds=0)


@pytest.mark.choice("timeprest-1", "gpipe", "2bw")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "n", "copies"),
    [
        ("v-timeprest", 4, [1, 1, 1, 1]),
        ("timeprest", 1, [1, 2, 3, 4]),
        ("timeprest-stashed", 1, [4, 4, 4, 4]),
        ("pipedream-unstashed", 1, [1, 2, 3, 4]),
        ("gpipe", 4, [1, 1, 1, 1]),
        ("pipedream", 1, [4, 3, 2, 1]),
        ("pipedream-vertical-sync", 1, [4, 4, 4, 4]),
        ("pipedream-2bw", 4, [2, 2, 2, 2]),
        ("i-timeprest", 1, [4, 4, 4, 4]),
    ],
)
def test_copies_of_the_weights_counted_in_bytes(
    variant, n, copies, profile_of_elevens, mlp_target, tmp_path
):
    """Every storage as large as a stage's first weight is counted, whoever holds it.

    Plain SGD has no state of that size, and gradients are gone after each update; so at those
    moments what is left are weights: exactly the copies that the system may hold.
    """
    plan = plan_by_hand(with_times(profile_of_elevens), variant, 4, n, mini_batch=44)
    settings = RunSettings(
        task=mlp_target,
        steps=12,
        optimizer=OptimizerChoice(name="sgd", lr=0.01),
        evaluate=False,
        distances=False,
    )
    sizes = {0: 5 * 7 * 8, 1: 7 * 6 * 8, 2: 6 * 4 * 8, 3: 4 * 3 * 8}
    with _Copies() as live:
        prepared = prepare(plan, settings)
        mailbox = Mailbox()
        pool = Pool({})
        runners = [
            StageRunner(prepared, k, LocalChannels(k, mailbox), LocalAllReduce(k, pool), device=CPU)
            for k in range(4)
        ]
        # What tracing has left in circles goes at some moment.
        gc.collect()
        begin = live.now.copy()
        counted = _train_counting(prepared, runners, live, sizes)
    for s, nbytes in sizes.items():
        # What tracing and the model itself hold besides doesn't change during the run.
        start, seen = begin[nbytes], counted[s]
        assert start >= 1
        assert max(seen) - start + 1 == copies[s]
        assert min(seen) - start + 1 == 1
        assert runners[s].stage.meter.seen.versions_held == copies[s]
        # Only what was counted on top of the latest weights is accounted as older versions.
        peak = runners[s].stage.account.peak
        assert peak is not None
        whole = sum(p.numel() * 8 for p in runners[s].stage.piece.module.parameters())
        assert peak.weights_bytes == whole
        assert peak.versions_bytes <= (copies[s] - 1) * whole


def _train_counting(prepared, runners, live, sizes):
    """Run inline; after every operation that leaves its stage no gradient, count the stage's."""
    from timeprest.planner.simulator.timeline import simulate

    segment = prepared.segments[0]
    order = make_schedule(prepared.pipeline, segment.mini_batches)
    for runner in runners:
        runner.begin(segment, order)
    seen = {s: [] for s in sizes}
    for s, k in simulate(prepared.pipeline, order).sequence:
        runners[s].run(order[s][k])
        gradients = any(p.grad is not None for p in runners[s].stage.piece.module.parameters())
        if order[s][k].kind != BACKWARD and not gradients:
            seen[s].append(live.now[sizes[s]])
    return seen


@pytest.mark.parametrize(
    ("variant", "n"),
    [
        ("i-timeprest", 4),
        ("i-timeprest", 1),
        ("spectrain", 1),
        ("pipeoptim", 1),
        ("pipemare", 2),
        ("timeprest", 4),
    ],
)
def test_plans_count_copies_that_weights_are_made_in(variant, n, mlp_profile, mlp_target, tmp_path):
    """Where stages hold most: older versions, and scratch copies to mix or predict in."""
    plan = plan_by_hand(with_times(mlp_profile), variant, 4, n)
    choice = OptimizerChoice(name="sgd", lr=0.01, momentum=0.9)
    settings = RunSettings(task=mlp_target, steps=14, optimizer=choice, evaluate=False)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    found = [report.peak.versions_bytes for report in summary.stages]
    assert found == [p.accounted_memory.versions_bytes for p in plan.predicted.stages]


class _ByVersions:
    """Weights that are told which versions micro-batches used, and notes the last use of each."""

    def __init__(self, versions):
        self.versions, self.lasts = versions, []

    def used(self, op, micro_batch):
        return self.versions[micro_batch]

    def backward(self, op, version, mine, *, last):
        self.lasts.append((version, last))
        return BackwardPass(mine, version, None)


def test_a_version_isnt_overwritten_while_passes_of_the_backward_need_it():
    """The stage's own weights and shared ones are updated at different times."""
    own, shared = _ByVersions([4, 4, 5, 5]), _ByVersions([2, 3, 3, 4])
    policies = WeightPolicies(own)
    policies.shared.append(shared)
    passes = policies.backwards(Op(BACKWARD, 0), range(4))
    assert [each.micro_batches for each in passes] == [(0,), (1,), (2,), (3,)]
    assert own.lasts == [(4, False), (4, True), (5, False), (5, True)]
    assert shared.lasts == [(2, True), (3, False), (3, True), (4, True)]


def test_distances_see_both_parts_of_complex_weights():
    weights = [nn.Parameter(torch.tensor([3.0 + 4.0j])), nn.Parameter(torch.tensor([12.0]))]
    assert float(Sample(weights).of(None).norm()) == 13.0


@pytest.mark.parametrize("strided", [False, True])
def test_a_sample_is_of_what_the_parameters_are_now(strided):
    """Though it keeps views of their memory: whether that is written to, or exchanged."""
    p = nn.Parameter(torch.zeros(3, 2).t() if strided else torch.zeros(2, 3))
    sample = Sample([p])
    assert sample.of(None).tolist() == [0.0] * 6
    for change in (lambda: p.data.fill_(1.0), lambda: setattr(p, "data", torch.full((2, 3), 2.0))):
        change()
        assert sample.of(None).tolist() == p.detach().double().reshape(-1).tolist() != [0.0] * 6


class Metered:
    """A weight whose backwards are metered; each mini-batch has one micro-batch."""

    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(3))
        self.versions = WeightVersions([self.weight])
        self.meter = StalenessMeter(self.versions, Sample([self.weight]), by_micro_batch=False)

    def forward(self, mini_batch):
        latest = self.versions.latest
        self.meter.forward(ForwardRun(Op(FORWARD, mini_batch, 0), latest, latest, None, 1, 1))

    def update(self, value=0.0):
        self.meter.before_update()
        self.weight.data.fill_(value)
        self.versions.advance(set())

    def backward(self, mini_batch):
        latest, seen = self.versions.latest, self.meter.seen
        before = seen.distance
        self.meter.backward(BackwardRun(Op(BACKWARD, mini_batch), 1, latest, latest, None, True))
        seen.read(seen.noted)
        return seen.distance - before


def test_distances_from_nothing_are_zero():
    metered = Metered()
    metered.forward(0)
    metered.update(1.0)
    assert metered.backward(0) == 0.0
    metered.forward(1)
    metered.update(3.0)
    assert metered.backward(1) == 2.0


def test_distances_hold_samples_of_versions_that_a_backward_will_ask_for():
    metered = Metered()
    nbytes = metered.weight.numel() * 8
    with _Copies() as samples:
        for mini_batch in range(4):
            metered.forward(mini_batch)
            metered.update()
        assert samples.now[nbytes] == 4
        for mini_batch in range(4):
            metered.backward(mini_batch)
            # The latest's, too, which a forward to come may use as an older one.
            assert samples.now[nbytes] == 4 - mini_batch


@pytest.mark.parametrize(("variant", "same"), [("pipedream", {True}), ("timeprest", {True, False})])
def test_stages_say_whose_backwards_run_on_other_weights(
    variant, same, mlp_profile, mlp_target, tmp_path, monkeypatch
):
    """There layers that a backward calls again are refused."""
    found, backward = set(), WeightVersions.backward

    def noted(self, tensors, *, same=True):
        found.add(same)
        return backward(self, tensors, same=same)

    monkeypatch.setattr(WeightVersions, "backward", noted)
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 1)
    run(plan, RunSettings(task=mlp_target, steps=4, evaluate=False), tmp_path / "run", inline=True)
    assert found == same
