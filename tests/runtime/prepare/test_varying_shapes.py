"""Mini-batches that differ in shape: what trains on them is what would without a pipeline."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.against_oracle import ask_oracle, settings_of, train
from helpers.alike import check_processes
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled
from helpers.processes.stopped_runs import check_resumed
from timeprest.cli.tables.run import summary_lines
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import RunError, TraceError
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import check_other, trace
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage.micro_batch import input_shapes
from timeprest.runtime.verify.check import check

FILE = TESTS / "tasks/shape_tasks.py"


def profile_of(name, **how):
    return profiled(f"{FILE}:{name}", **how)


@pytest.fixture(scope="module")
def varying():
    return profile_of("Varying")


@pytest.fixture(scope="module")
def unpadded():
    return profile_of("Unpadded")


def test_a_profile_has_the_largest_mini_batch(varying):
    found = varying.varying
    assert (found.least, found.profiled, found.most) == (((2, 5),), ((5, 5),), ((5, 5),))
    assert varying.inputs[0].shape == (5, 5)
    assert found.batches == 5


@pytest.mark.parametrize(
    ("variant", "n"),
    [
        ("gpipe", 2),
        ("zb-h1", 4),
        ("pipedream", 1),
        ("pipedream-2bw", 4),
        ("spectrain", 1),
        ("timeprest", 2),
        ("v-timeprest", 4),
        ("i-timeprest", 2),
    ],
)
def test_a_run_equals_the_oracle(variant, n, varying, tmp_path):
    plan = plan_by_hand(varying, variant, 3, n)
    train(plan, f"{FILE}:Varying", "momentum", tmp_path)


@pytest.mark.parametrize(("front_end", "recompute"), [("fx", ()), ("export", (True,) * 3)])
def test_flush_runs_are_plain_training(front_end, recompute):
    profile = profile_of("Unpadded", front_end=front_end)
    plan = plan_by_hand(profile, "gpipe", 3, 2, recompute=recompute)
    settings = RunSettings(task=f"{FILE}:Unpadded", steps=6)
    assert check(plan, settings, inline=True).verdict == "same"


@pytest.mark.parametrize(
    ("variant", "stages", "n", "how"),
    [
        ("gpipe", 2, 4, {"replicas": [1, 2]}),
        ("interleaved-1f1b", 4, 4, {"placement": (0, 1, 0, 1)}),
    ],
)
def test_replicas_and_several_stages_follow(variant, stages, n, how, unpadded):
    plan = plan_by_hand(unpadded, variant, stages, n, **how)
    settings = RunSettings(task=f"{FILE}:Unpadded", steps=4)
    assert check(plan, settings, inline=True).verdict == "same"


def test_replicas_may_share_samples(varying, tmp_path):
    plan = plan_by_hand(varying, "timeprest", 2, 2, replicas=[1, 2])
    settings = settings_of(f"{FILE}:Varying", "momentum")
    run(plan, settings, tmp_path, inline=True)
    wanted = ask_oracle(plan, settings, "momentum").losses
    assert read_losses(tmp_path / "metrics.jsonl") == pytest.approx(wanted, abs=1e-10)


def test_sizes_cross_cuts(unpadded, tmp_path):
    plan = plan_by_hand(unpadded, "timeprest", 4, 2)
    sent = {edge.tensor for edge in plan.edges}
    assert "a_v2" in sent, "what the second axis is long"
    settings = RunSettings(task=f"{FILE}:Unpadded", steps=6)
    summary = run(plan, settings, tmp_path / "four", inline=True)
    assert summary.epochs[-1].test


def test_a_stopped_run_goes_on(varying, tmp_path):
    plan, task = plan_by_hand(varying, "timeprest", 3, 2), f"{FILE}:Varying"
    check_resumed(
        plan, RunSettings(task=task, steps=12, checkpoint_every=3, timeout_s=20), tmp_path
    )


def test_a_data_set_may_collate_its_mini_batches_itself(tmp_path):
    profile = profile_of("CollatedTask", batches=6)
    assert profile.varying.least == ((4,), (4, 5))
    plan = plan_by_hand(profile, "gpipe", 2, 4)
    assert check(plan, RunSettings(task=f"{FILE}:CollatedTask"), inline=True).verdict == "same"
    summary = run(plan, RunSettings(task=f"{FILE}:CollatedTask", epochs=1), tmp_path, inline=True)
    assert summary.epochs[0].test["loss"] > 0


def test_larger_mini_batches_than_profiled_are_told_of(varying, tmp_path):
    plan = plan_by_hand(varying, "timeprest", 2, 2)
    summary = run(plan, RunSettings(task=f"{FILE}:Grown", epochs=1), tmp_path, inline=True)
    first, last = summary.stages
    assert not first.beyond_profile
    assert last.beyond_profile
    shown = " ".join(str(line) for line in summary_lines(plan, summary))
    assert f"the first of them mini-batch {last.beyond_profile[0]}: memory may be more" in shown


def test_a_plan_of_one_shape_says_what_to_do(mlp_profile, tmp_path):
    plan = plan_by_hand(mlp_profile, "gpipe", 2, 2)
    with pytest.raises(RunError, match=r"agreed was \[4, 5, 6\].* more --batches"):
        run(plan, RunSettings(task=f"{FILE}:Varying", epochs=1), tmp_path, inline=True)


def test_layers_stay_together_whose_shapes_depend_on_values():
    """What they send each other fits no message; the rest is cut as ever."""
    profile = profile_of("ByMask")
    bound = {name for group in profile.tied for name in group}
    assert {"t0.b", "t0.c"} <= bound
    assert not {"t1", "l2", "t2", "l3"} & bound
    assert "have shapes that depend on values" in profile.assumptions[-1]
    whole = profile_of("ByMask", granularity="t0")
    assert not whole.tied
    settings = RunSettings(task=f"{FILE}:ByMask", steps=4, evaluate=False)
    for found in (profile, whole):
        plan = solve(found, uniform_cluster(3), "gpipe", stages=3, micro_batches=2)
        assert check(plan, settings, inline=True).verdict == "same"


def test_a_shape_that_depends_on_values_says_what_to_do(tmp_path):
    """Where the profile doesn't know of it, as of a model that fits nowhere."""
    settings = RunSettings(task=f"{FILE}:ByMask", steps=4, evaluate=False)
    profile = msgspec.structs.replace(profile_of("ByMask"), tied=())
    plan = plan_by_hand(profile, "gpipe", 5, 2)
    with pytest.raises(
        RunError, match=r"this shape depends on values.*--granularity NAME"
    ) as error:
        run(plan, settings, tmp_path / "run", inline=True)
    assert "--batches" not in str(error.value)


def test_so_does_one_of_micro_batches_that_differ_in_it(tmp_path):
    """Forwards go, as each message says its shape; a mini-batch's gradients are one message."""
    settings = RunSettings(task=f"{FILE}:VaryingByMask", steps=1, evaluate=False)
    profile = msgspec.structs.replace(profile_of("VaryingByMask"), tied=())
    run(plan_by_hand(profile, "gpipe", 5, 2), settings, tmp_path / "apart", inline=True)
    says = r"'t0_b' has shapes \[\d+, 7\] and \[\d+, 7\] in micro-.*on values.*--granularity NAME"
    with pytest.raises(RunError, match=says):
        run(plan_by_hand(profile, "timeprest", 5, 2), settings, tmp_path / "run", inline=True)


def test_a_model_of_one_length_is_refused():
    with pytest.raises(TraceError, match=r"fixes the batch size, or another that varies"):
        profile_of("Fixed")
    model, call = resolve(f"{FILE}:Fixed").model(), Call((torch.zeros(2, 4, 5).double(),), (None,))
    baked = trace(model, "m", call, front_end="export-static")
    longer = call.with_tensors([torch.zeros(2, 5, 5).double()])
    with pytest.raises(TraceError, match=r"doesn't hold for inputs of \[2, 5, 5\]"):
        check_other(model, "m", baked, longer)
    with pytest.raises(TraceError, match="one graph for each micro-batch size takes one"):
        profile_of("Varying", front_end="export-static")


def test_a_graph_of_free_lengths_is_found_again(tmp_path):
    """A profile of torch.export's graph, whose fingerprint mustn't hang on lengths."""
    profile = profile_of("Unpadded", front_end="export")
    assert profile.varying.free == ((1,), (1,))
    again = profile_of("Unpadded", front_end="export", batches=3)
    assert again.fingerprint == profile.fingerprint


@pytest.mark.processes
@pytest.mark.parametrize(("name", "transport"), [("Grown", "shm"), ("Unpadded", "gloo")])
def test_processes_are_the_inline_run(name, transport, varying, unpadded, tmp_path):
    """Also where messages are larger than any that was profiled, and numbers."""
    profile = varying if name == "Grown" else unpadded
    plan = plan_by_hand(profile, "timeprest", 2, 2)
    settings = RunSettings(task=f"{FILE}:{name}", epochs=2, transport=transport, timeout_s=20)
    _, summary = check_processes(plan, settings, tmp_path)
    assert summary.stages[0].transport == {"shm": "shared memory"}.get(transport, transport)


def test_what_a_forward_keeps_goes_by_the_numbers_it_gets():
    """A size makes what depends on it larger, though it is as long itself."""
    specs = {
        "h": ValueSpec("h", "tensor", (2, 4), torch.float32, True),
        "n": ValueSpec("n", "size", (2,), torch.int64, False, (2, 4)),
    }

    def shapes(n, h=(2, 4)):
        values = {"x": torch.zeros(3), "h": torch.zeros(h), "n": torch.tensor(n)}
        return input_shapes(("x", "h", "n"), values, specs)

    assert shapes((2, 4)) == shapes((2, 4))
    assert len({shapes((2, 4)), shapes((2, 8)), shapes((2, 4), (2, 8))}) == 3
