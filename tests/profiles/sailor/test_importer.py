"""Sailor's profiles: what is taken of them, and what is wrong with one is said."""

from __future__ import annotations

import json

import pytest
import timeprest
from click.testing import CliRunner
from helpers.paths import published
from timeprest.cli.profile import main
from timeprest.planner.costs.stage_costs import Costs
from timeprest.profiles.errors import FileError, TargetError
from timeprest.profiles.imported.reader import import_profile, is_foreign

LAYERS = ("0", "1", "2", "3")
FLOATS = {"0": (500, 10, 12), "1": (100, 10, 400), "2": (100, 10, 400), "3": (300, 90, 95)}
"""Of parameters, of the output, and kept; on each rank a degree's part of the first."""


def times(size, degree):
    """A block takes 2 ms and 0.5 ms a sample; the update 1 ms and 1 µs a parameter of a rank."""
    ms = (2 + size / 2) / degree
    update_s = 1e-3 + 1e-6 * sum(FLOATS[k][0] for k in LAYERS) / degree
    return {k: [ms * 1e-3, 2e-3 * ms, update_s] for k in LAYERS}


def facts(degree):
    return {
        k: {
            "params_floats": FLOATS[k][0] // degree,
            "act_output_floats": FLOATS[k][1],
            "act_mem_floats": FLOATS[k][2],
            "params_bytes": 1,
        }
        for k in LAYERS
    }


def write(folder, profiles=None, info=None):
    """A file of theirs: a model "m" on a GPU "g" and another one, with the facts beside it."""
    if profiles is None:
        measured = {str(m): {str(t): times(m, t) for t in (1, 2)} for m in (8, 1, 2)}
        profiles = {"m": {"g": measured, "other": {"4": {"2": times(4, 2)}}}}
    path = folder / "profiles.json"
    path.write_text(json.dumps(profiles))
    info = {"m": {"1": facts(1), "2": facts(2)}} if info is None else info
    (folder / "llm_info.json").write_text(json.dumps(info))
    return path


def test_every_size_has_its_own_seconds(tmp_path):
    path = write(tmp_path)
    assert is_foreign(path)
    profile = import_profile(path, gpu="g", tp=1)
    assert (profile.batch_size, profile.micro_batch_sizes) == (8, (1, 2, 8))
    for m in profile.layers[1].measurements:
        assert m.forward_s == pytest.approx((2 + m.micro_batch / 2) * 1e-3)
        assert m.backward_s == pytest.approx(2 * m.forward_s)
        assert m.saved_bytes == 4 * 400 * m.micro_batch
    assert [(e.producer, e.consumer) for e in profile.edges] == [
        *(("0", "1"), ("1", "2"), ("2", "3"), ("3", "output"))
    ]
    # A size between lies on the line.
    assert Costs(profile).stage(("1",), 4, False).forward_s == pytest.approx(4e-3)
    assert [layer.kind for layer in profile.layers] == ["embedding", "block", "block", "head"]


def test_a_group_has_the_bytes_of_all_its_ranks(tmp_path):
    profile = timeprest.profile(str(write(tmp_path)), gpu="g", tp=2)
    layer = profile.layers[1]
    assert layer.parameter_bytes == 4 * 100
    assert layer.measurements[0].saved_bytes == 2 * 4 * 400
    assert profile.edges[1].bytes_per_sample == 2 * 4 * 10
    assert "tensor-parallel group of 2 ranks" in " ".join(profile.assumptions)


def test_the_update_is_of_a_model_of_two_blocks(tmp_path):
    """And degrees tell what of it doesn't depend on parameters."""
    deep = {"m": {d: {**facts(int(d)), "9": facts(int(d))["3"]} for d in "12"}}
    deep["m"]["2"]["4"] = deep["m"]["1"]["4"] = facts(1)["1"]  # a block more, which wasn't timed
    measured = {}
    for m in (1, 2):
        measured[str(m)] = {
            d: {**times(m, int(d)), "4": times(m, 1)["1"], "9": times(m, int(d))["3"]} for d in "12"
        }
        for d, layers in measured[str(m)].items():
            del layers["3"], deep["m"][d]["3"]
            deep["m"][d]["3"] = facts(int(d))["2"]
            layers["3"] = times(m, int(d))["2"]
    path = write(tmp_path, {"m": {"g": measured}}, deep)
    for degree in (1, 2):
        optimizer = import_profile(path, tp=degree).optimizer
        assert optimizer.update_fixed_s == pytest.approx(1e-3)
        assert optimizer.update_s_per_byte == pytest.approx(1e-6 / 4 / degree)


def test_several_gpus_are_kinds_of_devices(tmp_path):
    slow = {k: [3 * t[0], 5 * t[1], 2 * t[2]] for k, t in times(1, 2).items()}
    slower = {k: [2 * t[0], 2 * t[1], t[2]] for k, t in slow.items()}
    measured = {str(m): {"2": times(m, 2)} for m in (1, 2, 8)}
    path = write(tmp_path, {"m": {"g": measured, "h": {"1": {"2": slow}, "2": {"2": slower}}}})
    profile = import_profile(path, gpu="g,h")
    assert [kind.name for kind in profile.kinds] == ["g", "h"]
    own, other = profile.kinds
    for k, layer in enumerate(profile.layers):
        assert own.forward_s[k] == tuple(m.forward_s for m in layer.measurements)
        assert own.backward_s[k] == tuple(m.backward_s for m in layer.measurements)
    assert other.backward_s[1][:2] == pytest.approx([slow["1"][1], slower["1"][1]])
    # Beyond what was measured on it.
    assert other.forward_s[1][2] == pytest.approx(slow["1"][0] * 8)
    said = " ".join(profile.assumptions)
    assert "On h nothing was measured for 8 samples" in said
    assert "Devices are g, h: a cluster says which by kind" in said
    assert other.update_s_per_byte > own.update_s_per_byte
    with pytest.raises(TargetError, match="--gpu i: isn't there; there are g, h"):
        import_profile(path, gpu="g,i")


def run(*words):
    found = CliRunner().invoke(main, [str(word) for word in words])
    return found.exit_code, found.output.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "x"], "--model x: isn't there; there are m"),
        ([], "has g, other; choose one with --gpu"),
        (["--gpu", "h"], "--gpu h: isn't there; there are g, other"),
        (["--gpu", "g"], "g: has 1, 2; choose one with --tp"),
        (["--gpu", "g", "--tp", "4"], "--tp 4: isn't there; there are 1, 2"),
        (["--gpu", "other", "--facts", "nothing.json"], "nothing.json: no such file"),
        (["--gpu", "other", "--batch-size", "2", "--micro-batch-sizes", "3"], "3 is more than"),
        (["--gpu", "other", "--edges", "e.csv"], "has its own"),
    ],
)
def test_what_there_is_is_said_in_a_line(tmp_path, words, message):
    code, said = run(write(tmp_path), *words, "-o", tmp_path / "p.json")
    assert (code, len(said.splitlines())) == (2, 1)
    assert message in said
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("profiles", "info", "message"),
    [
        ([], None, r"profiles\.json: expected an object of model → GPU"),
        (
            {"nodes": [], "maxDevices": 3},
            None,
            r"profiles\.json: expected Sailor's .*--plugin FILE",
        ),
        ({"m": {"g": 3}}, None, r"profiles\.json: m: g: expected an object"),
        ({"m": {"g": {"a": {}}}}, None, r"m: g: 'a': expected a whole number from 1"),
        ({"m": {"g": {"1": {"1": {"0": [1, 2]}}}}}, None, r"1: 1: layer 0: give seconds of"),
        ({"m": {"g": {"1": {"1": {"0": [1, 2, -1]}}}}}, None, r"1: 1: layer 0: give seconds of"),
        (None, {"n": {}}, r"llm_info\.json: has no m; it has n"),
        (None, {"m": {"1": facts(1)}}, r"llm_info\.json: m: has no degree 2; it has 1"),
        (None, {"m": {"2": {"0": facts(2)["0"]}}}, r"m, degree 2: has no layer '1'"),
        (None, {"m": {"2": {"0": {}}}}, r"llm_info\.json: m: Object missing required field"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, profiles, info, message):
    path = write(tmp_path, profiles, info)
    gpu = "other" if profiles is None else None
    with pytest.raises(FileError, match=message):
        import_profile(path, gpu=gpu)


def test_options_are_those_of_the_format(tmp_path):
    path = write(tmp_path)
    with pytest.raises(TargetError, match=r"layers: .* has no such option; it has model, gpu, tp"):
        timeprest.profile(str(path), layers=3)
    assert run("digits", "--gpu", "g")[0] == 2
    assert "--gpu GPU[,GPU…]" in run("--help")[1]


def test_options_of_a_plugins_importer_are_found_too(tmp_path, plugins_forgotten):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import dataclasses\n"
        "from typing import Annotated\n"
        "from timeprest.profiles.errors import TargetError\n"
        "from timeprest.profiles.options import Option\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Mine:\n"
        "    colour: Annotated[str, Option('Mine')] = 'red'\n"
        "    def __call__(self, where, batch_size, sizes):\n"
        "        raise TargetError(f'{where} in {self.colour}')\n"
        "IMPORTERS = {'.mine': Mine}\n"
    )
    code, said = run("x.mine", "--plugin", plugin, "--colour", "green")
    assert (code, said.endswith("x.mine in green")) == (2, True)
    assert "--colour TEXT" in run("--help", "--plugin", plugin)[1]


def test_their_own_files(tmp_path):
    path = published("sailor/profiles_tmp.json")
    profile = import_profile(path, model="OPT-350", gpu="GH-96", tp=4)
    assert profile.micro_batch_sizes == (1, 2, 4, 8, 16, 32, 64, 128)
    assert len(profile.layers) == 26
    # 24 blocks, embedding and head: about 410 million parameters, Adam's step at 2.5 TB/s a rank.
    nbytes = sum(layer.parameter_bytes for layer in profile.layers)
    assert nbytes / 4 == pytest.approx(410e6, rel=0.05)
    assert 0.4e-12 < profile.optimizer.update_s_per_byte * 4 / 4 < 0.8e-12
    eight = profile.layers[5].measurements[3]
    one = profile.layers[5].measurements[0]
    assert eight.forward_s < 2 * one.forward_s


def test_what_no_profile_can_hold_is_refused(tmp_path):
    huge = {k: {**of, "params_floats": 2**41} for k, of in facts(1).items()}
    path = write(tmp_path, {"m": {"g": {"1": {"4096": times(1, 1)}}}}, {"m": {"4096": huge}})
    code, said = run(path, "-o", tmp_path / "p.json")
    assert (code, "0: costs too much" in said, (tmp_path / "p.json").exists()) == (2, True, False)
