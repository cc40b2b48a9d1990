"""tp-plan's commands, in this process: what they print, write and refuse."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from helpers.output.commands import called
from timeprest.planner.plan import read_plan
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import write_file

call = partial(called, "tp-plan")

ONE_BY_ONE = ("--stages-per-device", 1, "--replicas", "off")
"""Whoever has a plan so has one where more is allowed, too."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a profile of eight equal layers."""
    write_file(tmp_path / "profile.json", chain(8, parameters=1000, saved=100))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.choice(0)
def test_every_system_is_planned_and_compared(folder):
    text = call("solve", "profile.json", "--variant", "all", "--devices", 2, "-o", "p.json")
    for name in VARIANTS:
        assert name in text
        assert read_plan(folder / f"p.{name}.json").variant == name
    assert "Pareto front" in text
    assert max(map(len, text.splitlines())) <= 100
    found = json.loads(call("solve", "profile.json", "--variant", "all", "--json"))
    assert set(found["plans"]) == set(VARIANTS)
    assert found["failed"] == {}


def test_fronts_of_several_systems_are_for_a_study(folder):
    """Of those that stash, too: what is late is the gradient."""
    words = ("solve", "profile.json", "--devices", 3, "--stages", 3)
    systems = "timeprest,pipedream,gpipe"
    text = call(*words, "--front", "--variant", systems, "-o", "f.json")
    delays = {}
    for path in sorted(folder.glob("f.*.json")):
        plan = read_plan(path)
        assert path.name in text
        assert path.name.startswith(f"f.{plan.variant}.")
        delays.setdefault(plan.variant, []).append(plan.predicted.delay)
    assert delays["gpipe"] == [0]
    assert delays["pipedream"] == sorted(delays["pipedream"])
    assert 0 < delays["pipedream"][-1] == 2
    assert len(delays["pipedream"]) == 3
    assert "next: tp-run study f.*.json --budget 2h" in text


def test_plans_of_a_front_are_numbered_from_the_least_stale_on(folder):
    words = ("solve", "profile.json", "--devices", 3, "--stages", 3, "--micro-batches", 2)
    text = call(*words, "--front", "-o", "f.json")
    paths = sorted(folder.glob("f*.json"))
    plans = [read_plan(path) for path in paths]
    assert [path.name for path in paths] == [f"f.{k}.json" for k in range(1, len(plans) + 1)]
    differences = [plan.predicted.version_difference for plan in plans]
    periods = [plan.predicted.period_s for plan in plans]
    assert differences == sorted(set(differences))
    assert differences[0] == 0 < differences[-1]
    assert periods == sorted(set(periods), reverse=True)
    for path in paths:
        assert path.name in text
    alone = json.loads(call(*words, "--json"))
    assert alone["predicted"]["period_s"] == periods[-1]
    found = json.loads(call(*words, "--front", "--json", "--max-difference", 0))["front"]
    assert [plan["predicted"]["period_s"] for plan in found] == periods[:1]
    one = call("solve", "profile.json", "--variant", "gpipe", "--front", "-o", "g.json")
    assert [path.name for path in folder.glob("g*.json")] == ["g.1.json"]
    assert "no plan of it is faster with a delay" in one
    text = call("solve", "profile.json", "--what-if", "memory=2x", "--front", code=2)
    assert "--front: is of the cluster as it is; leave out --what-if" in text


def test_what_changes_would_bring(folder):
    """As if each had been asked for by itself; the plan written is that without them."""
    words = ("solve", "profile.json", "--devices", 2, "--bandwidth", "1MB/s", "--memory", "1MiB")
    asked = json.loads(call(*words, "--json"))
    changes = ("devices=4,bandwidth=1000x", "memory=1KiB")
    given = [word for change in changes for word in ("--what-if", change)]
    found = json.loads(call(*words, *given, "--json"))
    wanted = "solve profile.json --devices 4 --bandwidth 1GB/s --memory 1MiB --json"
    wanted = json.loads(call(*wanted.split()))
    for plan in (asked, found["plan"], wanted, found["what_if"][changes[0]]):
        plan["solver"].pop("seconds")
    assert found["plan"] == asked
    assert found["what_if"] == {changes[0]: wanted}
    assert wanted["predicted"]["samples_per_s"] > asked["predicted"]["samples_per_s"]
    assert "no plan fits" in found["failed"][changes[1]]
    text = call(*words, *given)
    assert "memory=1KiB: no plan fits" in text
    assert read_plan(folder / "plan.json").predicted.period_s == asked["predicted"]["period_s"]
    row = next(line.split() for line in text.splitlines() if line.startswith(changes[0]))
    ratio = wanted["predicted"]["samples_per_s"] / asked["predicted"]["samples_per_s"]
    assert f"{ratio:.2f}" in row
    assert "goes with one system" in call(*words, "--variant", "all", *given, code=2)
    # What was asked for can't be there; the plan is written all the same.
    found = json.loads(call(*words, "--stages", 2, "--what-if", "devices=1", "--json"))
    assert found["failed"] == {"devices=1": "--stages 2: the cluster has only 1 devices"}
    assert len(found["plan"]["stages"]) == 2


def test_a_system_without_a_plan_is_named_beside_the_others(folder):
    micro = ("--micro-batches", 2, "--stages", 2)
    text = call("solve", "profile.json", "--variant", "gpipe,pipedream", *micro, "-o", "p.json")
    assert "pipedream: --micro-batches 2: pipedream runs whole mini-batches" in text
    assert (folder / "p.gpipe.json").exists()
    assert not (folder / "p.pipedream.json").exists()
    call("solve", "profile.json", "--variant", "all", "--memory", "1kB", code=2)


def test_replicas_recomputation_and_machines_are_shown(folder):
    options = ["--replicas", "auto", "--stages", 1, "--micro-batches", 4, "--recompute", "on"]
    links = ["--per-machine", 1, "--between-bandwidth", "1GB/s", "--between-latency", "1ms"]
    text = call("solve", "profile.json", *options, *links, "--variant", "gpipe")
    assert "↻" in text
    assert "next: tp-run plan.json" in text
    named = call("solve", "profile.json", *options, *links, "--variant", "gpipe", "-o", "a b.json")
    assert "wrote a b.json; next: tp-run 'a b.json'" in " ".join(named.split())
    plan = read_plan(folder / "plan.json")
    assert plan.stages[0].devices == (0, 1)
    assert plan.stages[0].recompute
    assert plan.cluster.between_machines.latency_s == 1e-3
    checked = call("check", "plan.json", "--profile", "profile.json")
    assert "the plan is what its profile says" in checked


def test_layers_to_compute_again_are_edited_and_shown(folder):
    call("solve", "profile.json", "--stages", 2, "--variant", "gpipe", "--micro-batches", 4)
    plan = json.loads((folder / "plan.json").read_text())
    plan["stages"][0]["recompute"] = plan["stages"][0]["nodes"][:2]
    (folder / "edited.json").write_text(json.dumps(plan))
    call("check", "edited.json", "--profile", "profile.json", "-o", "edited.json")
    assert "↻ 2 " in call("show", "edited.json")
    assert "2 layers" in call("compare", "plan.json", "edited.json")
    plan["stages"][0]["recompute"] = ["nothing"]
    (folder / "edited.json").write_text(json.dumps(plan))
    text = call("show", "edited.json", code=2)
    assert "edited.json: stages[0].recompute: stage 0 has no layer 'nothing'" in text


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan.update(mini_batch=8),
        lambda plan: plan.update(mini_batch=8) or plan["solver"].pop("checksum"),
        lambda plan: plan["cluster"]["devices"][0].update(memory_bytes=2**31),
        lambda plan: plan["cluster"]["network"].update(latency_s=0.5),
        lambda plan: plan["stages"][0].update(recompute=True),
        lambda plan: plan["stages"][1]["nodes"].insert(0, plan["stages"][0]["nodes"].pop()),
        lambda plan: plan.update(micro_batches=2),
        lambda plan: plan["predicted"].update(speedup=9.0),
        # A proof that there isn't: whatever the search found, this isn't what it said.
        lambda plan: plan["solver"].update(bound_s=0.5, optimal=True, gap=0.0),
    ],
)
def test_an_edited_plan_is_shown_as_that(edit, folder):
    call("solve", "profile.json", "--stages", 2, "--variant", "gpipe", "--micro-batches", 4)
    plan = json.loads((folder / "plan.json").read_text())
    edit(plan)
    (folder / "b.json").write_text(json.dumps(plan))
    line = "b.json: edited since it was made: tp-plan check b.json --profile PROFILE says what it "
    for words in (["show"], ["compare", "plan.json"]):
        assert call(*words, "b.json").count(line) == 1
        assert "edited" not in call(*words, "plan.json")
        assert "edited" not in call(*words, "b.json", "--json")
    call("check", "b.json", "--profile", "profile.json", "-o", "b.json")
    assert "edited" not in call("show", "b.json")


def test_ctrl_c_ends_the_searches_for_all_systems(folder, monkeypatch):
    """What was found is shown and written."""
    module, begun = import_module("timeprest.planner.search.planning"), []
    solve = module.best_plan

    def stopped(profile, cluster, **asked):
        plan = solve(profile, cluster, **asked)
        begun.append(plan.variant)
        stopped = {1: None, 2: "interrupted"}[len(begun)]
        replace = msgspec.structs.replace
        return replace(plan, solver=replace(plan.solver, stopped=stopped))

    monkeypatch.setattr(module, "best_plan", stopped)
    text = call("solve", "profile.json", "--variant", "all", "-o", "p.json")
    assert len(begun) == 2
    assert {path.name for path in folder.glob("p.*.json")} == {f"p.{name}.json" for name in begun}
    assert "not looked at: interrupted" in text
    begun.clear()
    more = ("--what-if", "bandwidth=2x", "--what-if", "bandwidth=4x", "--what-if", "memory=1GiB")
    found = json.loads(call("solve", "profile.json", *more, "--json"))
    assert len(found["what_if"]) == 1
    assert set(found["failed"].values()) == {"not looked at: interrupted"}


def test_pins_and_limits_of_the_search(folder):
    call("solve", "profile.json", "--pin", "n6=0", "--devices", 3)
    assert "n6" in read_plan(folder / "plan.json").stages[0].nodes
    assert "NAME=STAGE" in call("solve", "profile.json", "--pin", "n6", code=2)
    assert "no layer of this name" in call("solve", "profile.json", "--pin", "x=0", code=2)
    assert "stages at most" in call("solve", "profile.json", "--pin", "n1=7", code=2)
    text = call("solve", "profile.json", "--pin", "n6=0", "--pin", "n6=1", code=2)
    assert "--pin n6=0, --pin n6=1: a layer is on one stage; leave one out" in text
    call("solve", "profile.json", "--pin", "n6=0", "--pin", "n6=0", "--devices", 3)
    for system in ("timeprest", "interleaved-1f1b"):
        pinned = ("--pin", "n7=0", "--stages", 2, "--variant", system)
        text = call("solve", "profile.json", *pinned, "--devices", 2, code=2)
        assert "the graph can't be cut as asked with --pin n7=0: no stage may be empty" in text


def test_devices_that_get_none_of_the_stages_asked_for_are_named(folder):
    options = ("--devices", 2, "--variant", "interleaved-1f1b", "--stages")
    said = "2 stages, 2 on each device, take 1 of 2 devices; --stages 4 takes all"
    assert said in call("solve", "profile.json", *options, 2)
    assert " takes all" not in call("solve", "profile.json", *options, 4)


def test_the_sizes_that_were_measured_are_named(folder):
    names = "layer,forward (ms),backward (ms),parameter bytes,activation bytes"
    (folder / "costs.csv").write_text(f"{names}\nn0,1,2,8,8\nn1,1,2,8,8\n")
    called("tp-profile", "costs.csv", "--batch-size", 8, "-o", "one.json")
    assert "it has 8 samples;" in call("solve", "one.json", "--micro-batches", 2, code=2)


def test_a_table_of_costs_is_no_profile_yet(folder):
    (folder / "costs.csv").write_text("layer,forward (ms)\nn0,1\n")
    text = call("solve", "costs.csv", code=2)
    made = "a table becomes a profile by tp-profile costs.csv --batch-size N -o FILE"
    assert text.endswith(f": costs.csv: {made}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--between-latency", "1ms"], "--per-machine"),
        (["--memory", "1kB"], "What would do: "),
        (["--micro-batches", 5], "only 4 samples"),
        (["--variant", "zigzag"], "unknown system"),
        (["--variant", "1F1B"], "unknown system '1F1B'; pipedream-flush is this one's name here"),
    ],
)
def test_bad_requests_are_one_line(options, message, folder):
    text = call("solve", "profile.json", *options, code=2)
    assert message in text
    assert len(text.strip().splitlines()) == 1
    assert not (folder / "plan.json").exists()


def test_what_would_do_does(folder):
    """The memory and the number of devices that the refusal names are enough, and needed."""
    text = call("solve", "profile.json", "--memory", "12kB", "--devices", 2, code=2)
    words = text.split("What would do: ")[1]
    memory = int(words.split(" bytes")[0])
    count = int(words.split(", or ")[1].split(" such devices")[0])
    call("solve", "profile.json", "--memory", memory, "--devices", 2, *ONE_BY_ONE)
    call("solve", "profile.json", "--memory", memory - 1, "--devices", 2, code=2)
    call("solve", "profile.json", "--memory", "12kB", "--devices", count, *ONE_BY_ONE)
    call("solve", "profile.json", "--memory", "12kB", "--devices", count - 1, code=2)


def test_lower_limits_stay_within_memory(folder):
    """Fewer mini-batches in flight on stage 0 make stage 1 hold more here."""
    system = ("--variant", "pipedream-unstashed", *ONE_BY_ONE)
    call("solve", "profile.json", "--memory", "12kB", "--devices", 3, *system)
    plan = read_plan(folder / "plan.json")
    assert all(stage.memory_bytes <= 12_000 for stage in plan.predicted.stages)
    assert plan.stages[0].in_flight < 3


def test_a_plan_is_simulated(folder):
    call("solve", "profile.json", "--devices", 2, "--variant", "gpipe")
    plan = read_plan(folder / "plan.json")
    found = json.loads(call("simulate", "plan.json", "--mini-batches", 3, "--json"))
    assert found["period_s"] == pytest.approx(plan.predicted.period_s)
    assert found["stages"][0][0] == {
        "operation": "0F0.0",
        "start_s": 0.0,
        "end_s": pytest.approx(plan.predicted.stages[0].forward_s),
    }
    last = max(events[-1]["end_s"] for events in found["stages"])
    assert last == pytest.approx(3 * plan.predicted.period_s)
    assert "period" in call("simulate", "plan.json")
    assert "smaller number" in call("simulate", "plan.json", "--mini-batches", 10**8, code=2)


def test_operations_as_data_end_where_the_timeline_does(folder):
    call("solve", "profile.json", "--devices", 2)
    shown = ("--timeline", "--from-mini-batch", 4, "--mini-batches", 2, "--json")
    found = json.loads(call("show", "plan.json", *shown))
    assert {span["mini_batch"] for span in found["spans"]} == {4, 5}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--svg-width", "85mm"], "--svg-width: goes with a figure"),
        (["--svg-versions"], "--svg-versions: goes with --svg FILE"),
        (["--operations", 4, "--json"], "--operations: isn't for --json"),
    ],
)
def test_options_that_nothing_would_come_of_are_refused(words, why, folder):
    call("solve", "profile.json", "--devices", 2)
    assert why in call("show", "plan.json", *words, code=2)


def test_the_ilp_is_a_choice(folder):
    call("solve", "profile.json", "--solver", "ilp", "--devices", 2, "--micro-batches", 2)
    assert read_plan(folder / "plan.json").solver.method == "ilp"
    assert read_plan(folder / "plan.json").solver.optimal


def test_several_stages_on_each_device(folder):
    how = ["--devices", 2, "--stages-per-device", 2, "--placement", "v"]
    text = call("solve", "profile.json", *how, "-o", "placed.json")
    assert "loads: " in text
    plan = read_plan(folder / "placed.json")
    assert [stage.devices[0] for stage in plan.stages] in ([0, 1, 1, 0], [0, 1, 0])
    assert "of each device" in call("show", "placed.json")
    checked = call("check", "placed.json", "--profile", "profile.json")
    assert "the plan is what its profile says" in checked
    call("solve", "profile.json", "--stages-per-device", "auto", "-o", "auto.json")
    assert read_plan(folder / "auto.json").variant == "timeprest"
    # Of what auto leaves open, other options say what they say.
    auto = ["--stages-per-device", "auto", "--devices", 2]
    call("solve", "profile.json", *auto, "--placement", "v", "--stages", 4, "-o", "auto.json")
    devices = [stage.devices[0] for stage in read_plan(folder / "auto.json").stages]
    assert devices == [0, 1, 1, 0]
    refused = call("solve", "profile.json", "--placement", "v", code=2)
    assert "give --stages-per-device 2 or auto" in refused
    refused = call("solve", "profile.json", "--stages-per-device", "some", code=2)
    assert "--stages-per-device 'some': give auto or a whole number from 1" in refused


@pytest.mark.parametrize(
    ("system", "late"),
    [("gpipe", ""), ("pipedream-2bw", "; gradients up to 1 update late"), ("timeprest", "")],
)
def test_gradients_may_be_late_without_a_version_difference(folder, system, late):
    """As those of weights that are doubly buffered: they aren't as fresh as a flush's."""
    words = ("solve", "profile.json", "--devices", 2, "--stages", 2, "--replicas", "off")
    call(*words, "--variant", system, "-o", "p.json")
    difference = read_plan(folder / "p.json").predicted.version_difference
    shown = f"version difference up to {difference}" if difference else "no version difference"
    line = next(x for x in call("show", "p.json").splitlines() if x.startswith("staleness"))
    assert shown in line
    assert f"{late}, v = " in line
    assert late or "late" not in line
