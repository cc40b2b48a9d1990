"""What tp-plan show and compare print of plans of every kind, in every width."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise

import msgspec
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand
from helpers.drawn.pipelines import ALL
from helpers.drawn.plans import evaluated
from helpers.output.commands import called
from helpers.output.schedules import schedule_text
from helpers.output.width import byte_counts, check_fits
from helpers.plans import REPORT, chain_plan, plan_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.cli.tables.layout import device_range, first_to_last, shortened
from timeprest.cli.tables.plan import proof
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.cluster.headroom import Headroom
from timeprest.planner.evaluate import make_plan
from timeprest.planner.plan import pipeline_of, read_plan
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.placement import numbered_devices, pattern_of
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import write_file
from timeprest.profiles.units import format_bytes, format_rate, format_seconds, short_bytes

call = partial(called, "tp-plan")


def long_names(count):
    """A chain of layers with the names of a large model."""
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "mlp.activation.gelu_new")
    names = [f"transformer.blocks.{k // 4}.{parts[k % 4]}" for k in range(count)]
    sizes = [7_340_033 * (1 + k % 3) for k in range(count)]
    pairs = zip(names, sizes, strict=True)
    layers = [(name, nbytes, 1e-3, 2e-3, 54_321, []) for name, nbytes in pairs]
    edges = [(a, b, f"t{k}", 16_384) for k, (a, b) in enumerate(pairwise(names))]
    edges.append((names[-1], "output", "last", 4))
    return profile_by_hand(layers, edges, sizes=(1, 2, 4, 8, 16))


CHAIN = long_names(16)
LARGE = long_names(128)


def with_limit(plan, limit):
    devices = tuple(
        msgspec.structs.replace(device, memory_bytes=limit) for device in plan.cluster.devices
    )
    return msgspec.structs.replace(
        plan, cluster=msgspec.structs.replace(plan.cluster, devices=devices)
    )


@st.composite
def drawn_plans(draw):
    variant = VARIANTS[draw(st.sampled_from(ALL))]
    stages = draw(st.integers(1, 6))
    replicas = [draw(st.sampled_from([1, 1, 2, 4])) for _ in range(stages)]
    n = 1 if variant.whole_mini_batches else draw(st.sampled_from([4, 8, 16]))
    n = max(n, 8) if variant.micro_batch_per_stage else n
    again = [draw(st.booleans()) and not variant.recompute_refusal for _ in range(stages)]
    plan = plan_by_hand(
        CHAIN, variant.name, stages, n, mini_batch=16, replicas=replicas, recompute=again
    )
    # None, too little, and plenty.
    return with_limit(plan, draw(st.sampled_from([None, 10**7, 10**9])))


@given(drawn_plans(), st.sampled_from([100, 80, 60]))
@settings(max_examples=25)
def test_every_plan_fits_every_width(tmp_path_factory, plan, width):
    folder = tmp_path_factory.mktemp("shown")
    write_file(folder / "plan.json", plan)
    text = call("show", folder / "plan.json", "--timeline", "--operations", 8, width=width)
    check_fits(text, width, byte_counts(plan))
    for word in ("period", "samples/s", "one device", "memory", "staleness", "no lower bound"):
        assert word in text
    assert len(re.findall(r"^stage +\|0 s", text, re.M)) in (1, 2)
    other = plan_by_hand(CHAIN, "gpipe", 2, 4, mini_batch=16)
    write_file(folder / "other.json", other)
    text = call("compare", folder / "plan.json", folder / "other.json", width=width)
    check_fits(text, width, [*byte_counts(plan), *byte_counts(other)])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """64 stages; and 64 on 4,096 devices."""
    folder = tmp_path_factory.mktemp("large")
    lone = plan_by_hand(LARGE, "pipedream", 64, 1, mini_batch=16)
    many = plan_by_hand(LARGE, "gpipe", 64, 64, mini_batch=64, replicas=[64] * 64)
    write_file(folder / "lone.json", with_limit(lone, 10**9))
    write_file(folder / "many.json", many)
    return folder


@given(evaluated(placed=True), st.sampled_from([100, 80, 60]), st.sampled_from([None, 300, 10**6]))
@settings(max_examples=25)
def test_devices_with_several_stages_have_rows(tmp_path_factory, drawn, width, limit):
    folder = tmp_path_factory.mktemp("placed")
    plan = with_limit(make_plan(*drawn, REPORT), limit)
    write_file(folder / "plan.json", plan)
    text = call("show", folder / "plan.json", "--timeline", "--operations", 8, width=width)
    # Such small layers don't pay for their transfers: warnings are lines as long as they are.
    text = re.sub(r"^\S+: warning: .*$", "", text, flags=re.M)
    check_fits(text, width, [*byte_counts(plan), *(d.memory_bytes for d in plan.predicted.devices)])
    flat = " ".join(text.split())
    assert f"placement {pattern(plan)}: {len(plan.stages)} stages on " in flat
    for device in plan.predicted.devices:
        stages = ", ".join(map(str, device.stages))
        assert re.search(rf"^\S+( … \S+|, \S+)?( \(2\))? +{stages} ", text, re.M)
        assert short_bytes(device.memory_bytes) in text
    write_file(folder / "other.json", plan_by_hand(CHAIN, "gpipe", 2, 4, mini_batch=16))
    text = call("compare", folder / "plan.json", folder / "other.json", width=width)
    assert re.search(rf"^placement +≠ +{pattern(plan)} +straight", text, re.M)
    text = call("simulate", folder / "plan.json", width=width)
    assert "of the stage's device" in " ".join(text.split())
    assert re.search("^stage +device +operations +first start", text, re.M)
    found = json.loads(call("simulate", folder / "plan.json", "--mini-batches", 2, "--json"))
    pipeline = pipeline_of(plan)
    assert "\n".join(map(" ".join, found["devices"])) == schedule_text(make_schedule(pipeline, 2))


def pattern(plan):
    return pattern_of(numbered_devices([s.devices for s in plan.stages]), len(plan.stages))


def test_an_edited_placement_is_shown_and_checked(tmp_path, monkeypatch):
    """People may put a stage on another's device: shown as was predicted, until it is checked."""
    monkeypatch.chdir(tmp_path)
    profile = chain(6)
    write_file("profile.json", profile)
    plan = with_limit(plan_by_hand(profile, "gpipe", 3, 4), 10**6)
    stages = [*plan.stages[:2], msgspec.structs.replace(plan.stages[2], devices=(0,))]
    write_file("edited.json", msgspec.structs.replace(plan, stages=tuple(stages)))
    text = call("show", "edited.json")
    assert "placement  v: 3 stages on 2 devices" in text
    assert "edited.json: edited since it was made" in text
    text = call("check", "edited.json", "--profile", "profile.json", "-o", "fresh.json")
    device = read_plan("fresh.json").predicted.device_of(0)
    held = format_bytes(device.memory_bytes)
    assert f"changed: stages 0, 2 on one device, its memory {held}" in text
    assert "the plan is what its profile says" in call(
        "check", "fresh.json", "--profile", "profile.json"
    )
    small = with_limit(read_plan("fresh.json"), device.memory_bytes - 1)
    write_file("small.json", small)
    text = call("check", "small.json", "--profile", "profile.json", code=2)
    assert text.count("stages 0, 2 are 1 B over the limit of their device 'device0'") == 1


@pytest.mark.parametrize("width", [100, 60])
def test_look_alike_stages_share_rows(large, width):
    for name in ("lone.json", "many.json"):
        text = call("show", large / name, "--operations", 0, width=width)
        check_fits(text, width)
        assert "-v: each" in " ".join(text.split())
        rows = [line for line in text.splitlines() if re.match(r"\d+(–\d+)? .*…", line)]
        assert 2 <= len(rows) <= 16
        assert rows[0].startswith("0")
        assert re.match(r"(\d+–)?63 ", rows[-1])
    text = call("show", large / "lone.json", "--operations", 0, "-v", width=width)
    check_fits(text, width)
    for s in range(64):
        assert re.search(rf"^{s} ", text, re.M)


def test_of_many_lanes_some_are_drawn(large):
    text = call("show", large / "many.json", "--timeline", "--mini-batches", 1, width=80)
    check_fits(text, 80)
    assert "32 of 4096 lanes (-v: all)" in " ".join(text.split())
    drawn = re.findall(r"^(\d+)\.0 +\S", text, re.M)
    assert len(drawn) == 32
    assert (drawn[0], drawn[-1]) == ("0", "63")


def test_comparing_large_plans_fits(large):
    text = call("compare", large / "lone.json", large / "many.json", width=80)
    check_fits(text, 80)
    assert "56 more stages differ (-v)" in text
    text = call("compare", *[large / "lone.json"] * 4, large / "many.json", width=80)
    check_fits(text, 80)
    assert "5 plans; all have" in text


def test_memory_against_the_limit(tmp_path):
    plan = plan_by_hand(CHAIN, "gpipe", 2, 4, mini_batch=16)
    most = max(stage.memory_bytes for stage in plan.predicted.stages)
    write_file(tmp_path / "plan.json", with_limit(plan, 2 * most))
    text = call("show", tmp_path / "plan.json")
    assert f"50% of its limit of {format_bytes(2 * most)}" in text
    bars = re.findall(r"[wvgoabs]+·+", text)
    assert len(bars) == 2
    # Its bar is half full; weights, gradients and optimizer state are of equal size.
    fullest = max(bars, key=lambda bar: -bar.count("·"))
    assert abs(fullest.count("·") - len(fullest) / 2) <= 1
    assert fullest.count("w") > 0
    assert abs(fullest.count("w") - fullest.count("o")) <= 1
    write_file(tmp_path / "plan.json", with_limit(plan, most - 1024))
    text = call("show", tmp_path / "plan.json")
    assert "1.0 KiB over its limit" in text
    assert "!" in text


def test_what_is_kept_free_stands_at_the_end_of_the_bar(tmp_path):
    plan = plan_by_hand(CHAIN, "gpipe", 2, 4, mini_batch=16)
    most = max(stage.memory_bytes for stage in plan.predicted.stages)
    limited = with_limit(plan, 2 * most).cluster.with_headroom(Headroom(share=0.25))
    write_file(tmp_path / "plan.json", msgspec.structs.replace(plan, cluster=limited))
    text = call("show", tmp_path / "plan.json")
    free = format_bytes(limited.devices[0].free_bytes)
    assert f"50% of its limit of {format_bytes(2 * most)}, {free} kept free" in text
    bars = re.findall(r"[wvgoabs]+·+x+", text)
    assert len(bars) == 2
    for bar in bars:
        assert abs(bar.count("x") - len(bar) / 4) <= 1
    assert "x kept free" in " ".join(text.split())
    tight = with_limit(plan, most).cluster.with_headroom(Headroom(nbytes=1024))
    write_file(tmp_path / "plan.json", msgspec.structs.replace(plan, cluster=tight))
    text = call("show", tmp_path / "plan.json")
    assert f"1.0 KiB over its limit of {format_bytes(most)}, 1.0 KiB kept free" in text
    assert "100%!" in text


def test_what_would_avoid_several_sequences_is_said_of_nf1b_alone(tmp_path):
    """Other systems have several by their own rule, whatever the micro-batches."""
    for variant, n, said in (
        ("timeprest", 2, "; N ≥ S − 1 = 3 micro-batches would avoid it"),
        ("timeprest", 4, "; N ≥ S − 1 avoids it with unit times"),
        ("pipedream-2bw", 4, None),
        ("pipemare", 2, None),
        ("pipemare", 4, None),
    ):
        plan = chain_plan(variant, 4, n)
        write_file(tmp_path / "plan.json", plan)
        v = plan.predicted.sequence_distance
        (line,) = re.findall(r"^sequences +(.+?) *$", call("show", tmp_path / "plan.json"), re.M)
        assert line.startswith(f"{v} of updates side by side (v = {v})")
        assert said in line if said else line.endswith(f"(v = {v})"), line


def test_a_proof_says_where_devices_were_taken_as_listed_alone():
    """Where unequal ones have several stages, other sequences aren't looked at."""
    cluster = uniform_cluster(2, "1GB", bandwidth="1TB/s", latency="0s")
    slow = msgspec.structs.replace(cluster.devices[1], speed=0.5)
    unequal = msgspec.structs.replace(cluster, devices=(cluster.devices[0], slow))
    for system, devices, said in (
        ("zb-v", cluster, "proven optimal"),
        ("zb-v", unequal, "proven optimal, devices as listed"),
        ("gpipe", unequal, "proven optimal"),
    ):
        plan = solve(chain(4), devices, system, stages_per_device=1 + (system == "zb-v"))
        assert plan.solver.optimal
        assert proof(plan).split("; ")[0].removeprefix("with tp-run ") == said


def test_what_compare_marks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [layer.name for layer in chain(6).layers]
    write_file("a.json", plan_by_hand(chain(6), "gpipe", 2, 4))
    write_file("b.json", plan_by_hand(chain(6), "gpipe", 2, 4, cut=[names[:2], names[2:]]))
    text = call("compare", "a.json", "b.json")
    check_fits(text, 100)
    (period,) = [line for line in text.splitlines() if line.startswith("period ")]
    assert period.split()[1] == "≠"
    # The even cut is the faster one, and stands first.
    assert period.index("*") < len(period) - 2
    (system,) = [line for line in text.splitlines() if line.startswith("system ")]
    assert "≠" not in system
    assert "a → b: 1 layer is on another stage" in text
    assert "stage 0 → 1: n2" in text
    found = json.loads(call("compare", "a.json", "b.json", "--json"))
    assert found["moved"] == [{"from": "a", "to": "b", "layers": ["n2"], "source": 0, "target": 1}]
    assert found["best"]["period_s"] == ["a"]
    assert "period_s" in found["differs"]
    assert "variant" not in found["differs"]
    assert found["plans"]["a"]["stages_in_detail"][0]["nodes"] == names[:3]
    assert found["warnings"] == []


def test_most_memory_and_most_of_a_limit_may_be_of_two_stages(tmp_path, monkeypatch):
    """The smaller of two devices may be the fuller one."""
    monkeypatch.chdir(tmp_path)
    plan = plan_by_hand(chain(6), "gpipe", 2, 4)
    most, least = sorted((s.memory_bytes for s in plan.predicted.stages), reverse=True)
    limited = with_limit(plan, 4 * most)
    at = next(k for k, s in enumerate(plan.predicted.stages) if s.memory_bytes == least)
    devices = list(limited.cluster.devices)
    devices[at] = msgspec.structs.replace(devices[at], memory_bytes=2 * least)
    cluster = msgspec.structs.replace(limited.cluster, devices=tuple(devices))
    write_file("a.json", msgspec.structs.replace(limited, cluster=cluster))
    write_file("b.json", plan)
    text = call("compare", "a.json", "b.json")
    check_fits(text, 100)
    (share,) = re.findall(r"^most of a limit .*?(\d+%)", text, re.M)
    assert share == "50%"
    assert "most of a limit: maybe of another stage than most memory" in " ".join(text.split())
    write_file("a.json", plan)
    assert "most of a limit:" not in call("compare", "a.json", "b.json")


def test_plans_of_different_models_are_compared_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file("a.json", plan_by_hand(chain(6), "gpipe", 2, 4))
    other = msgspec.structs.replace(chain(6), fingerprint="1" * 32, target="another")
    write_file("b.json", plan_by_hand(other, "timeprest", 3, 4, mini_batch=4))
    text = call("compare", "a.json", "b.json")
    check_fits(text, 100)
    assert "warning: a and b are for different models: by-hand, another" in text
    assert "mini-batches of 8 and 4" in text
    assert "another stage" not in text
    assert "second plan" in call("compare", "a.json", code=2)


def test_a_plan_that_lacks_layers_is_compared_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_by_hand(chain(6), "gpipe", 2, 4)
    write_file("a.json", plan)
    first, *rest = plan.stages
    short = msgspec.structs.replace(first, nodes=first.nodes[:-1])
    write_file("b.json", msgspec.structs.replace(plan, stages=(short, *rest)))
    line = f"b lacks 1 layer of the model: {first.nodes[-1]}"
    assert f"warning: {line}" in call("compare", "a.json", "b.json")
    assert json.loads(call("compare", "b.json", "a.json", "--json"))["warnings"] == [line]
    # Measured elsewhere it lacks them, too.
    other = msgspec.structs.replace(plan.profile, threads=plan.profile.threads + 1)
    write_file("b.json", msgspec.structs.replace(plan, stages=(short, *rest), profile=other))
    assert line in json.loads(call("compare", "a.json", "b.json", "--json"))["warnings"]


def test_part_of_a_timeline(tmp_path):
    """With forwards of 1 ms and backwards of 2 ms a layer, times can be read off."""
    path = tmp_path / "plan.json"
    write_file(path, plan_by_hand(chain(4), "gpipe", 2, 2, mini_batch=2))
    options = ["--timeline", "--from-mini-batch", 3, "--mini-batches", 1]
    text = call("show", path, *options, width=60)
    check_fits(text, 60)
    lines = text.splitlines()
    at = lines.index("from mini-batch 3 on")
    first, second = lines[at + 2 : at + 4]
    assert re.fullmatch(r"0     F3\.0-+F3\.1-+·+B3\.0=+B3\.1=+U?", first)
    assert re.fullmatch(r"1     ·+F3\.0-+B3\.0=+F3\.1-+B3\.1=+U?·+|1 .*F3\.1.*", second)
    # Stage 1's forward begins when stage 0's has ended.
    assert abs(second.index("F3.0") - first.index("F3.1")) <= 1
    found = json.loads(call("show", path, *options, "--json"))
    assert [lane["name"] for lane in found["lanes"]] == ["stage 0", "stage 1"]
    spans = [span for span in found["spans"] if span["lane"] == 0 and span["mini_batch"] == 3]
    assert [span["kind"] for span in spans] == ["F", "F", "B", "B", "U"]
    assert spans[0]["end_s"] - spans[0]["start_s"] == pytest.approx(2e-3)
    assert "go with --timeline" in call("show", path, "--mini-batches", 2, code=2)
    assert "show some of the first" in call(
        "show", path, "--timeline", "--from-mini-batch", 10**9, code=2
    )


def test_names_in_little_room():
    long = "transformer.blocks.11.attention.c_attn"
    assert shortened(long, 40) == long
    assert shortened(long, 24) == "t.b.11.attention.c_attn"
    assert "11" in shortened(long, 12)
    for width in range(1, 50):
        assert len(shortened(long, width)) <= width
        assert len(first_to_last([long, "x", long], width)) <= max(width, 3)
    assert shortened("a\x1b[2J\nb", 40) == "a\\x1b[2J\\nb"
    assert device_range(["gpu8", "gpu9", "gpu10"]) == "gpu8–10 (3)"
    assert device_range(["gpu8", "gpu10", "cpu"]) == "gpu8 … cpu (3)"
    assert device_range(["gpu0", "gpu4", "gpu1", "gpu5"]) == "gpu0,4,1,5"
    assert device_range(["gpu0", "gpu1", "gpu4"]) == "gpu0–1,4 (3)"
    assert device_range([f"gpu{k}" for k in range(0, 10, 2)]) == "gpu0 … gpu8 (5)"
    assert device_range(["a", "b"]) == "a, b"


def test_amounts_have_units_and_few_digits():
    assert format_seconds(999.96e-6) == "1 ms"
    assert format_seconds(0.99999) == "1 s"
    assert format_seconds(2.5e-9) == "2.5 ns"
    assert format_seconds(999.9) == "1000 s"
    assert format_seconds(1e60) == "1e+60 s"
    assert format_bytes(1023.99 * 1024) == "1.0 MiB"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(2**60) == "1.0 EiB"
    assert short_bytes(800_000) == "781 KiB"
    assert short_bytes(70_000_000) == "66.8 MiB"
    assert format_rate(7641.2, "samples") == "7641 samples/s"
    assert format_rate(0.31234, "samples") == "0.312 samples/s"
