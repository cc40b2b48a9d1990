"""A plan's recording against the planner's own figures and rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from helpers.drawn.cases import examples
from helpers.drawn.plans import evaluated
from helpers.plans import ALL, REPORT, chain_plan, lone_stages
from hypothesis import given, settings
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate, make_plan
from timeprest.planner.plan import pipeline_of
from timeprest.planner.question import Question
from timeprest.planner.recordings.predicted import predicted
from timeprest.planner.recordings.recording import stages_text, window
from timeprest.planner.schedules.schedules import is_patterned, make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.simulator.timeline import simulate
from timeprest.planner.systems.operations import Op
from timeprest.planner.systems.variants import VARIANTS

DRAWN = evaluated() | evaluated(placed=True)


@settings(max_examples=examples(60))
@given(DRAWN)
def test_a_recording_is_the_simulated_order(drawn):
    """What runs, when, on which replica: the simulator's; messages before what needs them."""
    asked, found = drawn
    plan = make_plan(asked, found, REPORT)
    recording = predicted(plan, 5)
    assert predicted(plan, 5, memory_too=False) == replace(recording, memory=())
    pipeline = pipeline_of(plan)
    schedule = make_schedule(pipeline, 5)
    timeline = simulate(pipeline, schedule)
    lanes = iter(range(len(recording.lanes)))
    devices = zip(pipeline.stages_of, schedule.on_devices(), timeline.lanes, strict=True)
    for stages, ops, events_of in devices:
        for j in range(pipeline.replicas(stages[0])):
            k = next(lanes)
            assert (recording.lanes[k].stages, recording.lanes[k].replica) == (stages, j)
            row = [span for span in recording.spans if span.lane == k]
            assert all(b.start_s >= a.end_s * (1 - 1e-12) for a, b in pairwise(row))
            mine = [(m.stage, Op(m.kind, m.mini_batch, m.micro_batch)) for m in row]
            assert mine == [place for place in ops if place in {*mine}]
            for s in stages:
                own = [m for m in row if m.stage == s]
                events = [event for event in events_of[j] if event.stage == s]
                assert [op for stage, op in mine if stage == s] == [e.op for e in events]
                assert [m.start_s for m in own] == [e.start_s for e in events]
    assert next(lanes, None) is None
    spans = {(s.lane, s.stage, s.kind, s.mini_batch, s.micro_batch): s for s in recording.spans}
    for m in recording.messages:
        kind = "B" if m.backward else "F"
        assert m.source != m.target
        assert m.sent_s <= m.start_s <= m.end_s
        made = spans[m.source, m.source_stage, kind, m.mini_batch, m.micro_batch]
        used = spans[m.target, m.target_stage, kind, m.mini_batch, m.micro_batch]
        assert m.sent_s == made.end_s
        assert m.end_s <= used.start_s
        assert m.nbytes > 0
        assert m.tensor


@given(DRAWN)
def test_all_bytes_that_cross_are_in_messages(drawn):
    """Of devices: what a stage hands to another of its device is none."""
    asked, found = drawn
    plan = make_plan(asked, found, REPORT)
    recording = predicted(plan, 2)
    crossed = Counter()
    for m in recording.messages:
        crossed[m.source_stage, m.target_stage] += m.nbytes
    expected = Counter()
    for edge in plan.edges:
        if plan.stages[edge.source].devices == plan.stages[edge.target].devices:
            continue
        expected[edge.source, edge.target] += 2 * plan.micro_batches * edge.bytes_per_micro_batch
        if edge.needs_grad:
            back = 2 * plan.micro_batches * edge.bytes_per_micro_batch
            expected[edge.target, edge.source] += back
    assert crossed == expected


@given(DRAWN)
def test_memory_over_time_peaks_at_the_plans_figure(drawn):
    asked, found = drawn
    plan = make_plan(asked, found, REPORT)
    settled = is_patterned(found.pipeline) or steady_state(found.pipeline).cycle
    recording = predicted(plan, 4 * max(found.limits) + 4 * asked.update_every)
    for stages in dict.fromkeys(lane.stages for lane in recording.lanes):
        device = plan.predicted.device_of(stages[0])
        peaks = []
        for k, lane in enumerate(recording.lanes):
            if lane.stages != stages:
                continue
            points = [p for p in recording.memory if p.lane == k]
            assert [p.at_s for p in points] == sorted(p.at_s for p in points)
            peaks.append(max(points, key=lambda p: sum(p.nbytes)).nbytes)
        # Of replicas, that of the one which holds most is predicted; of those with several stages,
        # what each stage's fullest would hold together. Where nothing repeats, there may be more in
        # flight than was seen.
        if not settled or (len(stages) > 1 and len(peaks) > 1):
            assert max(map(sum, peaks)) <= device.memory_bytes
            continue
        assert max(map(sum, peaks)) == device.memory_bytes
        assert msgspec.structs.astuple(device.memory) in {
            p.nbytes for p in recording.memory if recording.lanes[p.lane].stages == stages
        }


@pytest.mark.parametrize("variant", ALL)
def test_versions_are_those_of_the_table(variant):
    recording = predicted(chain_plan(variant), 8)
    system = VARIANTS[variant]
    latest: dict[int, int] = {}
    for span in recording.spans:
        now = latest.setdefault(span.lane, 0)
        if span.kind == "U":
            assert span.version == now + 1
            latest[span.lane] = span.version
        elif span.kind == "B":
            assert span.forward_version is not None
            if system.backward_weights == "forward":
                assert span.version == span.forward_version
            else:
                assert span.version == now
        else:
            assert span.forward_version is None
            assert span.version <= now
    differences = [
        max(s.version - s.forward_version for s in recording.spans if s.lane == k and s.kind == "B")
        for k in range(3)
    ]
    assert differences == [p.version_difference for p in chain_plan(variant).predicted.stages]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_window_is_a_part_of_the_whole(replicas):
    plan = chain_plan("timeprest", replicas=replicas)
    whole = predicted(plan, 9)
    part = predicted(plan, 3, first=4, more=2)
    assert part == window(whole, 4, 7)
    assert part.spans[0].name == "F4.0"
    assert min(s.start_s for s in part.spans) == 0
    # On every lane, all that runs between is in it.
    for k in range(len(whole.lanes)):
        row = [s.name for s in whole.spans if s.lane == k]
        mine = [s.name for s in part.spans if s.lane == k]
        start = row.index(mine[0])
        assert row[start : start + len(mine)] == mine
        assert mine[0].startswith("F4")
        assert mine[-1] == "U6"


def test_lanes_have_names():
    assert [lane.name for lane in predicted(chain_plan("gpipe"), 1).lanes] == [
        "stage 0",
        "stage 1",
        "stage 2",
    ]
    assert [lane.name for lane in predicted(chain_plan("gpipe", replicas=2), 1).lanes][:3] == [
        "stage 0 replica 0",
        "stage 0 replica 1",
        "stage 1 replica 0",
    ]
    placed = chain_plan("gpipe", placement=(0, 1, 0), replicas=2)
    assert [lane.name for lane in predicted(placed, 1).lanes] == [
        "device 0: stages 0, 2 replica 0",
        "device 1: stages 0, 2 replica 1",
        "device 2: stage 1 replica 0",
        "device 3: stage 1 replica 1",
    ]
    assert stages_text(range(0, 12, 2)) == "stages 0, 2 … 10"


def test_a_large_plan_is_bounded_by_itself():
    """64 stages, 256 micro-batches: a few mini-batches, some ten thousand operations."""
    asked = Question(chain(64, 100), uniform_cluster(64), "v-timeprest", 256 * 4, 1.0)
    found = lone_stages([[f"n{s}"] for s in range(64)], [2] * 63 + [1])
    plan = make_plan(asked, evaluate(asked, found, 256), REPORT)
    recording = predicted(plan)
    assert 30_000 < len(recording.spans) < 70_000
    assert len(recording.lanes) == 64


@pytest.mark.parametrize(("n", "placement"), [(2, (0, 1, 1, 0)), (4, (0, 1, 0, 1))])
def test_what_a_replica_holds_follows_what_others_run(n, placement):
    """Another one's forward may be the last that uses a weight version, here and there."""
    plan = chain_plan("timeprest", n=n, placement=placement, replicas=2)
    recording = predicted(plan, 20)
    for k, lane in enumerate(recording.lanes):
        peak = max(sum(p.nbytes) for p in recording.memory if p.lane == k)
        assert peak <= plan.predicted.device_of(lane.stages[0]).memory_bytes


@pytest.mark.parametrize("variant", ["timeprest", "pipedream", "pipedream-flush"])
def test_replicas_of_a_device_share_its_stages(variant):
    """Each lane runs its own part of all stages of its device; memory is the sum over them."""
    plan = chain_plan(variant, placement=(0, 1, 0), replicas=2)
    recording = predicted(plan, 6)
    assert [(lane.stages, lane.replica) for lane in recording.lanes] == [
        ((0, 2), 0),
        ((0, 2), 1),
        ((1,), 0),
        ((1,), 1),
    ]
    forwards = Counter((s.lane, s.stage) for s in recording.spans if s.kind == "F")
    each = 6 * max(plan.micro_batches // 2, 1)
    assert forwards == dict.fromkeys([(0, 0), (0, 2), (1, 0), (1, 2), (2, 1), (3, 1)], each)
    # Between stages of a device nothing is sent.
    assert all(
        recording.lanes[m.source].stages != recording.lanes[m.target].stages
        for m in recording.messages
    )
    for k, lane in enumerate(recording.lanes):
        peak = max(sum(p.nbytes) for p in recording.memory if p.lane == k)
        assert peak <= plan.predicted.device_of(lane.stages[0]).memory_bytes
