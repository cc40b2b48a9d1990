"""Parameters that several layers use: kept together, or split over stages with copies."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from click.testing import CliRunner
from helpers.by_hand.profiles import profile_by_hand
from helpers.plans import REPORT, lone_stages
from timeprest.cli.plan import main
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.tied_parameters import bound_groups, copied_bytes, exchange_s
from timeprest.planner.evaluate import evaluate, make_plan
from timeprest.planner.plan import check_against_profile, check_plan, pipeline_of
from timeprest.planner.question import Question
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import FileError, InfeasibleError, PlanError
from timeprest.profiles.files import write_file
from timeprest.profiles.profile import SharedParameters, check_profile

NAMES = ("embed", "a", "b", "head")
BYTES = 4000


def tied_profile(tied=(("embed", "head"),), shared=(("embed", "head"),)):
    layers = [(name, BYTES if name == "embed" else 100, 1e-3, 2e-3, 10, []) for name in NAMES]
    ends = [*NAMES[1:], "output"]
    edges = [(a, b, f"t_{a}", 16) for a, b in zip(NAMES, ends, strict=True)]
    found = tuple(SharedParameters(layers=group, parameter_bytes=BYTES) for group in shared)
    return msgspec.structs.replace(profile_by_hand(layers, edges, tied=tied), shared=found)


def cut(stages):
    return {2: [NAMES[:2], NAMES[2:]], 3: [NAMES[:1], NAMES[1:3], NAMES[3:]]}[stages]


def plan_of(profile, stages=2, cluster=None):
    cluster = cluster or uniform_cluster(stages)
    question = Question(profile, cluster, "gpipe", 4, 1.0, tied="split")
    found = evaluate(question, lone_stages(cut(stages), [1] * stages), 4)
    return make_plan(question, found, REPORT)


def test_groups_that_can_be_split():
    free = tied_profile()
    assert bound_groups(free, "together") == (("embed", "head"),)
    assert bound_groups(free, "split") == ()
    # A group that shares a buffer too, and one that only overlaps, stay.
    mixed = tied_profile(tied=(("embed", "head"), ("a", "b")))
    assert bound_groups(mixed, "split") == (("a", "b"),)
    with pytest.raises(FileError, match="shared: 'a', 'b' aren't a group of `tied`"):
        check_profile(tied_profile(shared=(("a", "b"),)))


def test_every_copy_counts():
    """Weights, gradients and optimizer state of the head's copy, on its own stage."""
    profile = tied_profile()
    assert copied_bytes(profile.shared, ("b", "head")) == BYTES
    for names in (("embed", "head"), ("a", "b")):
        assert copied_bytes(profile.shared, names) == 0
    first, last = plan_of(profile).predicted.stages
    assert first.parameter_bytes == BYTES + 100
    assert last.parameter_bytes == BYTES + 200
    assert last.memory.weights_bytes == last.memory.optimizer_bytes == BYTES + 200
    assert last.memory.gradients_bytes == BYTES + 200


def test_the_exchange_counts_in_the_period():
    profile = tied_profile()
    slow = uniform_cluster(3, bandwidth="4kB/s", latency="0s")
    seconds = slow.all_reduce_s((0, 2), BYTES)
    assert seconds == pytest.approx(1.0)
    assert exchange_s(profile, slow, cut(3), [(0,), (1,), (2,)]) == (seconds, 0.0, seconds)
    plan = plan_of(profile, 3, slow)
    assert [stage.all_reduce_s for stage in plan.predicted.stages] == [seconds, 0.0, seconds]
    assert pipeline_of(plan).update_op_s(0) == pytest.approx(seconds)
    free = plan_of(tied_profile(tied=(), shared=()), 3, slow)
    longer = plan.predicted.period_s - free.predicted.period_s
    # The first stage's update is the last: all of the exchange comes on top.
    assert longer == pytest.approx(seconds)


def test_solving_splits_only_where_asked():
    profile, cluster = tied_profile(), uniform_cluster(4)
    together = solve(profile, cluster, "gpipe", stages=1)
    assert together.tied == "together"
    with pytest.raises(PlanError, match=r"at most .*'embed', 'head' share parameters"):
        solve(profile, cluster, "gpipe", stages=2)
    for variant in (name for name, v in VARIANTS.items() if v.flushes):
        split = solve(profile, cluster, variant, stages=4, tied="split")
        assert split.tied == "split"
        assert len(split.stages) == 4
        assert recheck(split, profile).changes == ()
    assert solve(profile, cluster, "gpipe", tied="split").solver.bound_s > 0


def test_memory_limits_see_the_copies():
    """Weights, gradient and state of 4000 bytes each fit on both stages, or nothing does."""
    profile = tied_profile()
    with pytest.raises(InfeasibleError):
        solve(profile, uniform_cluster(2, memory="9000B"), "gpipe", stages=2, tied="split")
    roomy = solve(profile, uniform_cluster(2, memory="20kB"), "gpipe", stages=2, tied="split")
    assert all(12_000 <= stage.memory_bytes <= 20_000 for stage in roomy.predicted.stages)


@pytest.mark.parametrize("variant", [name for name, v in VARIANTS.items() if not v.flushes])
def test_systems_that_dont_flush_refuse(variant):
    message = f"tied: {variant} updates each stage at a time of its own"
    with pytest.raises(PlanError, match=message):
        solve(tied_profile(), uniform_cluster(2), variant, tied="split")


def test_plans_are_checked():
    profile = tied_profile()
    plan = plan_of(profile)
    check_against_profile(plan, profile)
    together = msgspec.structs.replace(plan, tied="together")
    with pytest.raises(PlanError, match=r"must be on one stage.*with \"tied\": \"split\""):
        check_against_profile(together, profile)
    edited = msgspec.structs.replace(plan, variant="timeprest")
    with pytest.raises(PlanError, match="plan: tied: timeprest updates"):
        check_plan(edited)


# On one device ------------------------------------------------------------------------------


def placed(profile, placement, variant="timeprest", tied="together", n=4):
    """A layer for each stage."""
    cluster = uniform_cluster(max(placement) + 1)
    question = Question(profile, cluster, variant, 4, 1.0, tied=tied)
    stages = tuple(
        msgspec.structs.replace(stage, devices=(d,))
        for stage, d in zip(
            lone_stages([[name] for name in NAMES], [1] * 4), placement, strict=True
        )
    )
    return make_plan(question, evaluate(question, stages, n), REPORT)


def test_stages_of_one_device_have_them_once():
    """No copy, nothing to sum, in any system."""
    profile = tied_profile()
    plan = placed(profile, (0, 1, 1, 0))
    check_against_profile(plan, profile)
    assert [stage.all_reduce_s for stage in plan.predicted.stages] == [0] * 4
    assert [stage.parameter_bytes for stage in plan.predicted.stages] == [BYTES, 100, 100, 100]
    first, second = plan.predicted.devices
    assert first.memory.weights_bytes == first.memory.optimizer_bytes == BYTES + 100
    ((tie,), other) = first.ties, second.ties
    assert (tie.stages, tie.holds.parameters, other) == ((0, 3), BYTES, ())
    assert recheck(plan, profile).changes == ()
    # In plans without any, nothing is said of them.
    free = placed(tied_profile(tied=(), shared=()), (0, 1, 1, 0))
    assert b'"ties"' not in msgspec.json.encode(free)
    apart = placed(profile, (0, 1, 0, 1))
    with pytest.raises(PlanError, match=r"'embed', 'head' must be on one stage, or on stages of"):
        check_against_profile(apart, profile)
    check_against_profile(placed(profile, (0, 1, 0, 1), "gpipe", "split"), profile)


def test_what_changes_in_place_stays_on_one_stage():
    profile = tied_profile(shared=())
    with pytest.raises(PlanError, match=r"'embed', 'head' must be on one stage: they share"):
        check_against_profile(placed(profile, (0, 1, 1, 0)), profile)


@pytest.mark.parametrize("tied", ["together", "split"])
def test_one_stage_has_to_wait_for_the_others_gradients(tied):
    """Else neither's backward of a mini-batch is always the last."""
    profile = tied_profile()
    edges = tuple(
        msgspec.structs.replace(edge, needs_grad=edge.producer != "a") for edge in profile.edges
    )
    profile = msgspec.structs.replace(profile, edges=edges)
    plan = placed(profile, (0, 1, 1, 0), "gpipe", tied)
    with pytest.raises(PlanError, match="no gradient comes back from one to the other"):
        check_against_profile(plan, profile)


@pytest.mark.parametrize("variant", ["timeprest", "pipedream-2bw", "spectrain", "zb-v", "gpipe"])
def test_a_v_is_found(variant):
    """The best there is, with first and last layer on one device."""
    profile, cluster = tied_profile(), uniform_cluster(2)
    plan = solve(profile, cluster, variant, stages_per_device=2, placement="v")
    assert plan.solver.optimal
    assert plan.tied == "together"
    assert plan.stages[0].devices == plan.stages[-1].devices
    assert recheck(plan, profile).changes == ()
    free = tied_profile(tied=(), shared=())
    other = solve(free, cluster, variant, stages_per_device=2, placement="v")
    assert plan.predicted.period_s == pytest.approx(other.predicted.period_s)
    if VARIANTS[variant].placement == "any":
        assert solve(profile, cluster, variant, stages_per_device=None).stages == plan.stages


def test_a_loop_cannot_share_them():
    message = r"layers that share parameters must be on one device \('embed', 'head'\)"
    with pytest.raises(InfeasibleError, match=message):
        solve(tied_profile(), uniform_cluster(2), stages=4, stages_per_device=2, placement="loop")


def test_the_command(tmp_path):
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    write_file(path, tied_profile())
    solve_it = ["solve", str(path), "-o", str(out), "--devices", "2", "--stages", "2"]
    done = CliRunner().invoke(main, [*solve_it, "--variant", "gpipe", "--tied", "split"])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["tied"] == "split"
    done = CliRunner().invoke(main, [*solve_it, "--tied", "split"])
    assert done.exit_code == 2
    (line,) = done.output.strip().splitlines()
    assert re.search("tied: timeprest .*: pipedream-flush, .*gpipe", line)


def test_what_ties_keep_together_names_the_ways_out(tmp_path):
    """Each of them is tried."""
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    write_file(path, tied_profile())
    solve_it = ["solve", str(path), "-o", str(out), "--devices", "2"]
    done = CliRunner().invoke(main, [*solve_it, "--stages", "2"])
    assert done.exit_code == 2
    (line,) = done.output.strip().splitlines()
    assert "--stages 2: the model can be cut into 1 stage at most" in line
    assert "layers 'embed', 'head' share parameters and stay on one stage" in line
    systems = re.search(r"--tied split .*\(--variant (.*?)\)", line)[1].split(", ")
    assert systems == [name for name, v in VARIANTS.items() if v.flushes]
    for variant in (name for name in systems if VARIANTS[name].placement == "any"):
        words = [*solve_it, "--stages", "2", "--variant", variant, "-q"]
        done = CliRunner().invoke(main, [*words, "--tied", "together"])
        assert "; --tied split gives copies to several stages, 4 at most; or" in done.output
        assert CliRunner().invoke(main, [*words, "--tied", "split"]).exit_code == 0
        assert CliRunner().invoke(main, words).exit_code == 0
    write_file(path, tied_profile(tied=(), shared=()))
    assert CliRunner().invoke(main, [*solve_it, "--stages", "2", "-q"]).exit_code == 0
    # What is changed in place can't be split.
    write_file(path, tied_profile(shared=()))
    done = CliRunner().invoke(main, [*solve_it, "--stages", "2"])
    assert "layers 'embed', 'head' stay on one stage" in done.output
    assert "--tied" not in done.output


def test_a_plan_that_ties_made_one_stage_says_so(tmp_path):
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    write_file(path, tied_profile())
    words = ["solve", str(path), "-o", str(out), "--devices", "2"]
    said = "1 stage at most: layers 'embed', 'head' share parameters"
    solved = CliRunner().invoke(main, words).output
    checked = CliRunner().invoke(main, ["check", str(out), "--profile", str(path)]).output
    every = CliRunner().invoke(main, [*words, "--variant", "timeprest,pipedream"]).output
    for text in (solved, checked, every):
        assert said in " ".join(text.split())
    # Not where it's by choice, or where there is but one device.
    for more in (["--stages", "1"], ["--tied", "split", "--variant", "gpipe"], ["--devices", "1"]):
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == 0
        assert "share parameters" not in done.output
    short = CliRunner().invoke(main, [*words, "--memory", "1kB"])
    assert "Layers 'embed', 'head' share parameters and stay on one stage" in short.output
