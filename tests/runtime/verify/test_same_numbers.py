"""A check gives both sides the same random numbers, by sample and by the call that draws them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled
from timeprest.profiles.autograd.random_numbers import RandomCall, RandomCalls, SameNumbers
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.check import check


def here(name):
    return f"{TESTS / 'tasks/variety_tasks.py'}:{name}"


def plan_for(name, variant="gpipe", stages=2, n=4, by=None, **more):
    target = here(name) if by is None else replace(resolve(here(name)), front_end=by)
    return plan_by_hand(profiled(target, (2, 3, 4, 8)), variant, stages, n, **more)


@pytest.mark.choice(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("DropPath", {}),
        ("DropPath", {"stages": 3, "variant": "zb-h1"}),
        ("DropPath", {"n": 3}),
        ("DropPath", {"n": 1}),
        ("DropPath", {"replicas": (2, 1)}),
        ("DropPath", {"recompute": (True, True)}),
        ("DropPath", {"by": "export"}),
        ("VAE", {"stages": 3, "recompute": (True, False, True)}),
        ("Diffusion", {"stages": 3}),
        ("Diffusion", {"by": "export", "n": 2}),
        ("Everywhere", {"stages": 3}),
        ("Checkpointed", {}),
        ("NoisyLoss", {"stages": 3, "recompute": (False, False, True)}),
    ],
)
def test_both_sides_draw_the_same(name, how):
    """Whole mini-batches, micro-batches, stages; computed once or twice."""
    plan = plan_for(name, **how)
    report = check(plan, RunSettings(task=here(name), seed=3), inline=True)
    assert report.verdict == "same", report
    assert all(each.counts for each in report.against)
    assert [note for note in report.notes if "both sides have the same" in note]


def test_some_layers_of_a_stage_are_computed_again():
    whole = plan_for("DropPath", stages=1).stages[0].nodes
    cut = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    plan = plan_for("DropPath", recompute=(cut[0][1:3], cut[1][:2]), cut=cut)
    assert all(stage.recomputed for stage in plan.stages)
    assert check(plan, RunSettings(task=here("DropPath")), inline=True).verdict == "same"


@pytest.mark.processes
@pytest.mark.slow
def test_processes_draw_the_same():
    plan = plan_for("Diffusion", stages=3)
    report = check(plan, RunSettings(task=here("Diffusion")))
    assert report.verdict == "same"
    assert report.mode == "processes"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HiddenLoss", "loss draws random numbers by NumPy's or Python's own"),
        ("NoisySteps", "the task's optimizer draws random numbers"),
    ],
)
def test_what_is_not_seen_is_named(name, said):
    report = check(plan_for(name), RunSettings(task=here(name)), inline=True)
    assert report.verdict == "differs"
    assert said in report.notes[0]


def test_a_run_draws_as_it_did():
    """What is known of calls is for comparisons alone."""
    plan = plan_for("DropPath")
    settings = RunSettings(task=here("DropPath"), evaluate=False)
    assert prepare(plan, settings).random is None
    found = prepare(plan, msgspec.structs.replace(settings, dropout=False)).random
    assert found.calls == (RandomCall(0, 1),) * 3
    assert found.in_forward == 3
    assert sorted(k for piece in found.of_pieces for k in piece) == [0, 1, 2]


def test_numbers_are_the_samples_and_look_random():
    calls = RandomCalls((RandomCall(0), RandomCall(1, 2), RandomCall()), 3, ((0, 1, 2), (1,)))
    numbers = SameNumbers(calls, 0)

    def drawn(piece, samples, b=0):
        numbers.begin(piece, (b,), samples)
        with numbers:
            if piece == 1:
                return torch.empty(3, 2 * len(samples)).uniform_()
            return (
                torch.randn(len(samples), 500),
                torch.rand(3, 2 * len(samples)),
                torch.randint(0, 1000, (4,)),
            )

    a, b, c = drawn(None, range(8))
    for part in (range(2), range(2, 8), range(1, 8, 3)):
        x, y, z = drawn(0, part)
        assert torch.equal(x, a[part.start : part.stop : part.step])
        assert torch.equal(
            y.view(3, -1, 2), b.view(3, -1, 2)[:, part.start : part.stop : part.step]
        )
        assert torch.equal(z, c)
        assert torch.equal(drawn(1, part), y)
    others = drawn(None, range(8), b=1)
    assert not any(torch.equal(mine, other) for mine, other in zip((a, b, c), others, strict=True))
    assert abs(a.mean()) < 0.05
    assert abs(a.std() - 1) < 0.05
    assert a.unique().numel() > 0.99 * a.numel()
    assert not numbers.beyond
