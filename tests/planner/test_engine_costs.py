"""Plans in other engines' runs: DeepSpeed's instructions replayed one by one, bytes by hand."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from helpers.output.commands import called
from helpers.plans import chain_plan, plan_by_hand
from timeprest.planner.engine_costs import ENGINE_COSTS, EngineCosts, on_engine, with_receives
from timeprest.planner.engine_runs import beyond_memory, run_by
from timeprest.planner.plan import check_plan, pipeline_of
from timeprest.planner.recordings.predicted import predicted
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.simulator.pipeline import Link, Pipeline, Route
from timeprest.planner.simulator.timeline import simulate
from timeprest.planner.systems.operations import FORWARD, UPDATE
from timeprest.planner.systems.variants import variant_named
from timeprest.profiles.errors import PlanError
from timeprest.profiles.files import write_file
from timeprest.profiles.units import format_bytes

FORWARDS_S = (1.0, 2.5, 0.75, 1.5)
BACKWARDS_S = (2.0, 1.25, 3.0, 2.25)
MESSAGES_S = (0.5, 1.75, 0.25)


def pipeline_by_hand(stages: int, micro_batches: int, replicas: int = 1) -> Pipeline:
    """Of stages and links that all differ; replicas are alike, each pair with wires of its own."""
    links = tuple(
        Link(
            *(s, s + 1, MESSAGES_S[s], MESSAGES_S[s] / 2, 0.0),
            routes=tuple(
                Route(j, j, MESSAGES_S[s], MESSAGES_S[s] / 2, 0.0, (s, j, "on"), (s, j, "back"))
                for j in range(replicas)
            ),
        )
        for s in range(stages - 1)
    )
    return Pipeline(
        variant=variant_named("pipedream-flush"),
        micro_batches=micro_batches * replicas,
        forward_s=FORWARDS_S[:stages],
        backward_s=BACKWARDS_S[:stages],
        update_s=(0.0,) * stages,
        links=links,
        limits=(1,) * stages,
        paces=((1.0,) * replicas,) * stages if replicas > 1 else (),
    )


def instructions(s: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """DeepSpeed's TrainSchedule for a stage: what it receives, sends and computes, in sequence."""
    found, before = list[tuple[str, int]](), -1

    def there(number: int) -> bool:
        return 0 <= number < micro_batches

    for step in range(2 * (micro_batches + stages - 1)):
        forward = (step - s) % 2 == 0
        now = (step - s) // 2 if forward else (step + s + 1) // 2 - stages
        if forward:
            found += [("send gradient", before)] if there(before) and s else []
            found += [("receive activation", now)] if there(now) and s else []
        elif s < stages - 1:
            found += [("receive gradient", now)] if there(now) else []
            found += [("send activation", before)] if there(before) else []
        found += [("forward" if forward else "backward", now)] if there(now) else []
        before = now
    return found


def replayed(stages: int, micro_batches: int) -> dict[tuple[int, str, int], float]:
    """When each stage begins each forward and backward, where sends don't wait."""
    programs = [instructions(s, stages, micro_batches) for s in range(stages)]
    at, free, arrives, wire = [0] * stages, [0.0] * stages, dict[object, float](), {}
    begun: dict[tuple[int, str, int], float] = {}
    while any(k < len(mine) for k, mine in zip(at, programs, strict=True)):
        for s, mine in enumerate(programs):
            while at[s] < len(mine):
                what, number = mine[at[s]]
                verb, _, noun = what.partition(" ")
                if verb == "send":
                    link = s if noun == "activation" else s - 1
                    took = MESSAGES_S[link] / (1 if noun == "activation" else 2)
                    wire[link, noun] = max(free[s], wire.get((link, noun), 0.0)) + took
                    arrives[link, noun, number] = wire[link, noun]
                elif verb == "receive":
                    came = arrives.get((s - 1 if noun == "activation" else s, noun, number))
                    if came is None:
                        break
                    free[s] = max(free[s], came)
                else:
                    begun[s, what, number] = free[s]
                    free[s] += (FORWARDS_S if what == "forward" else BACKWARDS_S)[s]
                at[s] += 1
    return begun


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [*itertools.product((2, 3, 4), (1, 2, 5, 9)), (1, 3)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_deepspeeds_order_is_that_of_its_instructions(stages, micro_batches, shared):
    pipeline = on_engine(pipeline_by_hand(stages, micro_batches), ENGINE_COSTS["deepspeed"])
    if shared and stages > 1:
        # Messages that take no time, but share a wire: the simulator goes by time then.
        spare = Link(0, 1, 0.0, 0.0, 0.0, False, (Route(0, 0, 0.0, 0.0, 0.0, "spare", "spare"),))
        pipeline = replace(pipeline, links=(*pipeline.links, spare, spare))
    timeline = simulate(pipeline, make_schedule(pipeline, 1))
    found = {
        (s, "forward" if event.op.kind == FORWARD else "backward", event.op.micro_batch): (
            event.start_s
        )
        for s, events in enumerate(timeline.stages)
        for event in events
        if event.op.kind != UPDATE
    }
    assert found == pytest.approx(replayed(stages, micro_batches), rel=1e-6)


@pytest.mark.parametrize("micro_batches", [2, 5])
def test_each_replica_has_its_own_late_sends(micro_batches):
    engine = ENGINE_COSTS["deepspeed"]
    one, three = (
        steady_state(on_engine(pipeline_by_hand(4, micro_batches, r), engine)) for r in (1, 3)
    )
    assert three.period_s == pytest.approx(one.period_s, rel=1e-9)
    assert one.period_s > steady_state(pipeline_by_hand(4, micro_batches)).period_s


def test_what_blocks_devices_takes_longer():
    ours = pipeline_by_hand(3, 6)
    blocked = on_engine(ours, ENGINE_COSTS["torch"])
    assert not any(route.overlaps for link in blocked.links for route in link.all_routes)
    assert steady_state(blocked).period_s > steady_state(ours).period_s
    gpipe = replace(ours, variant=variant_named("gpipe"))
    assert on_engine(gpipe, ENGINE_COSTS["torch"]) == gpipe


def test_receiving_is_work_of_the_device():
    ours = pipeline_by_hand(2, 3)
    busier = with_receives(ours, [(0.0, 4.0), (8.0, 0.0)], 2.0)
    assert busier.forward_s == (1.0, 6.5)
    assert busier.backward_s == (4.0, 1.25)


def test_every_figure_of_the_table_has_its_source():
    named = {f.name for f in fields(EngineCosts)} - {"title", "sources"}
    plain = EngineCosts("")
    for engine in ENGINE_COSTS.values():
        said = {n for n in named if getattr(engine, n) != getattr(plain, n)}
        assert said == set(engine.sources)


def test_bytes_besides_are_those_of_the_table():
    plan = chain_plan("pipedream-flush")
    ours = plan.predicted.stages

    def kept(engine):
        """By stage; what else the account has is as it was."""
        found = run_by(plan, engine).predicted.stages
        for stage, own in zip(found, ours, strict=True):
            assert stage.memory.total == stage.memory_bytes
            assert stage.memory_bytes - own.memory_bytes == stage.memory.engine_bytes
            assert stage.holds.engine == stage.memory.engine_bytes
        return [stage.memory.engine_bytes for stage in found]

    assert kept("megatron") == [0] * len(ours)
    assert kept("deepspeed") == [2 * stage.parameter_bytes for stage in ours]
    # A buffer for each micro-batch that comes, and for each gradient.
    came = [0] * len(ours)
    for edge in plan.edges:
        came[edge.target] += edge.bytes_per_micro_batch * plan.micro_batches
        came[edge.source] += edge.needs_grad * edge.bytes_per_micro_batch * plan.micro_batches
    assert kept("torch") == [
        max(nbytes - stage.memory.boundary_bytes, 0)
        for nbytes, stage in zip(came, ours, strict=True)
    ]


def test_devices_of_several_stages_keep_the_sum():
    plan = run_by(planned(placement=[0, 1, 0]), "torch")
    (first, _) = plan.predicted.devices
    kept = [stage.memory.engine_bytes for stage in plan.predicted.stages]
    assert first.memory.engine_bytes == kept[0] + kept[2] > 0
    assert first.memory_bytes == first.memory.total


def test_pictures_are_of_the_engines_run():
    plan = chain_plan("pipedream-flush")
    there = run_by(plan, "deepspeed")
    assert pipeline_of(there).late == (2, 1, 0)
    assert pipeline_of(plan).late == ()
    recording = predicted(there)
    assert recording.end_s > predicted(plan).end_s
    peaks = [max(sum(p.nbytes) for p in recording.memory if p.lane == k) for k in range(3)]
    assert peaks == [stage.memory_bytes for stage in there.predicted.stages]


def test_what_an_engine_runs_is_no_plan_for_other_commands():
    there = run_by(chain_plan("pipedream-flush"), "torch")
    with pytest.raises(PlanError, match=r"plan: engine: .*; give the plan it was made of"):
        check_plan(there)


def test_plans_that_an_engine_cant_run_are_refused():
    with pytest.raises(PlanError, match="DeepSpeed can't run this plan: timeprest never flushes"):
        run_by(chain_plan("timeprest"), "deepspeed")
    with pytest.raises(PlanError, match="it has no schedule like gpipe's"):
        run_by(chain_plan("gpipe"), "deepspeed")
    assert run_by(chain_plan("gpipe"), "torch").predicted.period_s > 0
    with pytest.raises(PlanError, match="as many replicas"):
        run_by(planned(replicas=[1, 2]), "torch")
    with pytest.raises(PlanError, match="several stages"):
        run_by(planned(placement=[0, 1, 0]), "deepspeed")


def planned(**how):
    stages = len(next(iter(how.values())))
    return plan_by_hand(chain(6), "pipedream-flush", stages, 4, **how)


def test_simulate_and_export_say_what_runs_cost_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = chain_plan("pipedream-flush")
    write_file("plan.json", plan)
    said = " ".join(called("tp-plan", "simulate", "plan.json", "--engine", "deepspeed").split())
    assert "in DeepSpeed: " in said
    assert "longer than with tp-run" in said
    slow = ("--engine", "deepspeed", "--receive", "1KB/s")
    assert "in DeepSpeed: " in called("tp-plan", "simulate", "plan.json", *slow)
    said = called("tp-plan", "export", "plan.json", "--to", "deepspeed", "-o", "out")
    assert "in DeepSpeed: " in said
    said = called("tp-plan", "simulate", "plan.json", "--receive", "1KB/s", code=2)
    assert said.endswith(": --receive: goes with --engine\n")
    said = called("tp-plan", "simulate", "plan.json", *slow[:3], "fast", code=2)
    assert said.count("\n") == 1
    write_file("other.json", chain_plan("timeprest"))
    said = called("tp-plan", "simulate", "other.json", "--engine", "megatron", code=2)
    assert ": Megatron-Core can't run this plan: timeprest never flushes" in said


def test_tables_and_pages_have_what_an_engine_keeps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file("plan.json", chain_plan("pipedream-flush"))
    there = ("--engine", "deepspeed")
    for words in (
        ("simulate", "plan.json", *there),
        ("show", "plan.json", *there, "--html", "page.html", "--operations", "0"),
        ("export", "plan.json", "--to", "deepspeed", "-o", "out"),
    ):
        said = called("tp-plan", *words)
        assert re.search(r"^stage .* boundary engine$", said, re.MULTILINE)
        assert len(re.findall(r"^\d .* 200 B$", said, re.MULTILINE)) == 3
        assert len(re.findall("^in DeepSpeed: ", said, re.MULTILINE)) == 1
    assert '"engine_bytes":200' in Path("page.html").read_text(encoding="utf-8")
    assert "engine" not in called("tp-plan", "show", "plan.json")
    said = json.loads(called("tp-plan", "show", "plan.json", *there, "--json"))
    assert said["engine"] == "deepspeed"
    Path("there.json").write_text(json.dumps(said), encoding="utf-8")
    said = called("tp-plan", "show", "there.json", code=2)
    assert ": there.json: engine: it says what a run in DeepSpeed costs" in said


def test_a_plan_that_does_not_fit_elsewhere_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = chain_plan("pipedream-flush")
    held = max(plan.predicted.device_of(s).memory_bytes for s in range(len(plan.stages)))
    changed = msgspec.structs.replace
    devices = tuple(changed(d, memory_bytes=held) for d in plan.cluster.devices)
    plan = changed(plan, cluster=changed(plan.cluster, devices=devices))
    write_file("plan.json", plan)
    said = called("tp-plan", "simulate", "plan.json", "--engine", "deepspeed")
    found = run_by(plan, "deepspeed")
    s, more = beyond_memory(found)
    most = max(stage.memory_bytes for stage in found.predicted.stages)
    assert more == most - held
    assert f"warning: in DeepSpeed stage {s} needs {format_bytes(most)}" in said
    assert "--headroom" in said
    assert "warning" not in called("tp-plan", "simulate", "plan.json", "--engine", "megatron")
