"""What the two parts of a backward cost: measured, computed, assumed; and what plans make of it."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from helpers.by_hand.profiles import chain, profile_by_hand
from helpers.models.small import ZOO
from helpers.plans import lone_stages
from timeprest.cli.plan import main
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.stage_costs import at, unmeasured_weight_parts
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import PlanError
from timeprest.profiles.files import read_file, write_file
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.profile import Profile
from timeprest.profiles.target import resolve


@pytest.fixture(scope="module")
def computed():
    """A perceptron on the roofline: 64 samples are 16 kB in each layer of width 64."""
    platform = platform_of("meta", "t4")
    target = resolve("mlp:width=64,inputs=12")
    return measure(target, batch_size=64, micro_batch_sizes=[8, 64], platform=platform)


def test_computed_parts(computed):
    linear = [layer for layer in computed.layers if layer.parameter_bytes]
    assert len(linear) > 2
    assert not unmeasured_weight_parts(computed)
    for layer in computed.layers:
        for m in layer.measurements:
            if layer is linear[0]:
                # Nothing goes back from the first layer, so nothing has to wait between parts.
                assert (m.backward_input_s, m.postponed_bytes) == (0.0, 0)
            elif layer.parameter_bytes:
                # One product of two, and a sum for the bias.
                assert 0.2 * m.backward_s < m.backward_input_s < 0.8 * m.backward_s
            else:
                assert (m.backward_input_s, m.postponed_bytes) == (m.backward_s, 0)
    assert linear[1].measurements[-1].postponed_bytes == 64 * 64 * 4
    assert [m.backward_input_s for m in computed.loss] == [m.backward_s for m in computed.loss]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_measured_parts(name):
    found = measure(resolve(ZOO[name]), batch_size=4, micro_batch_sizes=[2, 4], seconds=0)
    assert not unmeasured_weight_parts(found)
    waiting = 0
    for layer in found.layers:
        for m in layer.measurements:
            assert 0 <= m.backward_input_s <= m.backward_s
            waiting += m.postponed_bytes
    assert waiting > 0


def without_parts(profile):
    """As files were before there were parts."""
    fields = json.loads(msgspec.json.encode(profile))
    for layer in fields["layers"]:
        for measured in layer["measurements"]:
            del measured["backward_input_s"], measured["postponed_bytes"]
            del measured["backward_weight_s"], measured["saved_tensors"]
    return fields


def test_older_files_are_read(computed, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(without_parts(computed)))
    old = read_file(path, Profile)
    assert all(m.backward_input_s is None for layer in old.layers for m in layer.measurements)
    write_file(path, old)
    assert read_file(path, Profile) == old


def question(profile, variant="zb-h1", devices=2):
    return Question(profile, uniform_cluster(devices), variant, profile.batch_size, 1.0)


def stages_of(profile, variant="zb-h1"):
    names = [layer.name for layer in profile.layers]
    asked = question(profile, variant)
    return evaluate(asked, lone_stages([names[:4], names[4:]], [1, 1]), 4)


def test_half_is_assumed_of_layers_with_weights():
    """Each layer's backward takes 2 ms; of the first stage, which sends nothing back, all waits."""
    layers = list(chain(8).layers)
    layers[5] = msgspec.structs.replace(layers[5], parameter_bytes=0)
    profile = msgspec.structs.replace(chain(8), layers=tuple(layers))
    assert "n5" not in unmeasured_weight_parts(profile)
    assert len(unmeasured_weight_parts(profile)) == 7
    found = stages_of(profile)
    assert [p.weight_s for p in found.prediction.stages] == pytest.approx([8e-3, 3e-3])
    assert [p.backward_s for p in found.prediction.stages] == pytest.approx([8e-3, 8e-3])
    assert [p.weight_s for p in stages_of(profile, "gpipe").prediction.stages] == [0, 0]
    # Gradients wait: those that came to stage 0; of stage 1's outputs, 16, 16 and 4 bytes.
    waiting = [
        p.memory.activations_bytes - p.micro_batches_kept * 4 * 10 for p in found.prediction.stages
    ]
    assert waiting[0] > 0
    assert waiting[0] % 16 == 0
    assert waiting[1] > 0
    assert waiting[1] % (2 * 16 + 4) == 0


def test_a_tensor_has_one_gradient_whoever_uses_it():
    """Those of two stages are added before the first stage keeps it."""
    layers = [(f"n{k}", 100, 1e-3, 2e-3, 10, ()) for k in range(3)]
    edges = [("n0", "n1", "a", 16), ("n0", "n2", "a", 16), ("n1", "n2", "b", 16)]
    profile = profile_by_hand(layers, [*edges, ("n2", "output", "c", 4)])
    stages = lone_stages([["n0"], ["n1"], ["n2"]], [1, 1, 1])
    first = evaluate(question(profile, devices=3), stages, 4).prediction.stages[0]
    assert first.holds.postponed == 16


def test_what_sends_no_gradient_on_waits_with_its_outputs():
    """As an embedding on a stage that sends others back: it has no first part to measure."""
    layers = [(f"n{k}", 100, 1e-3, 2e-3, 10, ()) for k in range(3)]
    edges = [("n0", "n2", "a", 16), ("n1", "n2", "b", 16), ("n2", "output", "c", 4)]
    profile = profile_by_hand(layers, edges)
    first, second, third = profile.layers
    none = [msgspec.structs.replace(m, postponed_bytes=0) for m in second.measurements]
    second = msgspec.structs.replace(second, measurements=tuple(none))
    profile = msgspec.structs.replace(profile, layers=(first, second, third))
    stages = lone_stages([["n0"], ["n1", "n2"]], [1, 1])
    found = evaluate(question(profile), stages, 4).prediction.stages[1]
    assert found.holds.postponed == 16 + 4


def test_measured_parts_are_planned_with():
    """A quarter is for the inputs: three quarters are postponed, between sizes too."""
    layers = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(m, backward_input_s=m.backward_s / 4, postponed_bytes=8)
                for m in layer.measurements
            ),
        )
        for layer in chain(8).layers
    )
    profile = msgspec.structs.replace(chain(8), layers=layers)
    assert stages_of(profile).prediction.stages[1].weight_s == pytest.approx(6e-3)
    between = at(layers[0].measurements, 3)
    assert between.backward_input_s == pytest.approx(between.backward_s / 4)
    assert between.postponed_bytes == 8
    mixed = (layers[0].measurements[1], chain(1).layers[0].measurements[2])
    assert at(mixed, 3).backward_input_s is None


def test_what_runs_twice_counts():
    """Of 2 ms, half is for the inputs; the rest by itself takes 1.5 ms."""
    layers = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(
                    m, backward_input_s=m.backward_s / 2, backward_weight_s=m.backward_s * 0.75
                )
                for m in layer.measurements
            ),
        )
        for layer in chain(8).layers
    )
    profile = msgspec.structs.replace(chain(8), layers=layers)
    first, second = stages_of(profile).prediction.stages
    # Four layers each; the first stage sends nothing back and splits nothing.
    assert (first.backward_s, first.weight_s) == pytest.approx((8e-3, 8e-3))
    assert (second.backward_s, second.weight_s) == pytest.approx((10e-3, 6e-3))
    whole = stages_of(profile, "gpipe").prediction.stages[1]
    assert (whole.backward_s, whole.weight_s) == pytest.approx((8e-3, 0))


def test_splitting_shortens_the_period():
    """F = B = W = 2 ms: 1F1B's bubble is (S − 1)·(F + B + W), of which two thirds go."""
    cluster = uniform_cluster(4, bandwidth="1TB/s", latency="0s")
    periods = []
    for name in ("pipedream-flush", "zb-h1"):
        plan = solve(chain(8), cluster, name, micro_batches=4, stages=4)
        assert plan.solver.optimal
        periods.append(plan.predicted.period_s)
    assert periods == pytest.approx([(4 * 6 + 3 * 6) * 1e-3, (4 * 6 + 3 * 2) * 1e-3])


def test_recomputation_is_refused_in_a_line():
    message = "zb-h1 postpones weight gradients"
    with pytest.raises(PlanError, match=f"--recompute on: {message}"):
        solve(chain(4), uniform_cluster(2), "zb-h1", recompute="on")
    assert not any(
        stage.recompute
        for stage in solve(chain(4), uniform_cluster(2), "zb-h1", recompute="auto").stages
    )
    stage = PlanStage(nodes=("n0",), devices=(0,), in_flight=1, recompute=True)
    with pytest.raises(PlanError, match=rf"stages\[0\]\.recompute: {message}"):
        evaluate(question(chain(1)), [stage], 4)


def test_commands_say_what_is_assumed(computed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path / "old.json", chain(8))
    write_file(tmp_path / "new.json", computed)

    def call(*words):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    note = "zb-h1: the profile doesn't say how much of a backward is for the weights; 50%"
    solved = call("solve", "old.json", "--variant", "zb-h1", "-v", "--bandwidth", "1TB/s")
    assert solved.count(note) == 1
    assert "8 layers" in solved
    assert "W to its weights" in solved
    assert "0W0.0" in solved
    assert note in call("check", "plan.json", "--profile", "old.json")
    assert note in call("solve", "old.json", "--variant", "all")
    assert note not in call("solve", "old.json", "--variant", "gpipe", "-v")
    assert note not in call("solve", "new.json", "--variant", "zb-h1")
