"""Traces: they follow the format, and say what the recording says."""

from __future__ import annotations

import json

import pytest
from helpers.drawn.plans import evaluated
from helpers.output.trace_format import check_trace
from helpers.plans import ALL, REPORT, chain_plan
from hypothesis import given, settings
from timeprest.cli.pictures.chrome_trace import COMPUTE, trace, write_trace
from timeprest.planner.evaluate import make_plan
from timeprest.planner.recordings.lane_times import lane_times
from timeprest.planner.recordings.predicted import predicted
from timeprest.planner.recordings.recording import MEMORY_KINDS


@given(evaluated() | evaluated(placed=True))
@settings(max_examples=30)
def test_traces_of_drawn_plans_follow_the_format(drawn):
    asked, found = drawn
    recording = predicted(make_plan(asked, found, REPORT), 3)
    slices = check_trace(trace([("", recording)]))
    for lane, times in enumerate(lane_times(recording)):
        total_us = sum(event["dur"] for event in slices[lane, COMPUTE])
        assert total_us == pytest.approx(times.compute_s * 1e6, abs=1e-3 * len(recording.spans))


@pytest.mark.parametrize("variant", ALL)
def test_every_operation_and_message_is_in_the_trace(variant, tmp_path):
    recording = predicted(chain_plan(variant), 3)
    path = tmp_path / "trace.json"
    write_trace(path, [("", recording)])
    found = json.loads(path.read_bytes())
    slices = check_trace(found)
    for k, lane in enumerate(recording.lanes):
        spans = [span for span in recording.spans if span.lane == k]
        assert [e["name"] for e in slices[k, COMPUTE]] == [span.name for span in spans]
        assert [e["args"].get("version") for e in slices[k, COMPUTE]] == [s.version for s in spans]
        (name,) = (
            e["args"]["name"]
            for e in found["traceEvents"]
            if e["ph"] == "M" and e["pid"] == k and e["name"] == "process_name"
        )
        assert name == f"{lane.name} (rank {k})"
    starts = [e for e in found["traceEvents"] if e["ph"] == "s"]
    assert len(starts) == len(recording.messages)
    assert sum(e["args"]["bytes"] for e in starts) == sum(m.nbytes for m in recording.messages)
    counters = [e for e in found["traceEvents"] if e["ph"] == "C"]
    assert len(counters) == len(recording.memory)
    assert all(tuple(e["args"]) == MEMORY_KINDS for e in counters)


def test_ranks_with_several_stages_say_the_stage():
    recording = predicted(chain_plan("timeprest", placement=(0, 1, 0)), 3)
    found = trace([("", recording)])
    slices = check_trace(found)
    for k, stages in enumerate([(0, 2), (1,)]):
        spans = [span for span in recording.spans if span.lane == k]
        staged = len(stages) > 1
        wanted = [f"{span.stage}{span.name}" if staged else span.name for span in spans]
        assert [e["name"] for e in slices[k, COMPUTE]] == wanted
        told = [e["args"].get("stage") for e in slices[k, COMPUTE]]
        assert told == [span.stage if staged else None for span in spans]
    # An arrow for each message: from the stage that made it to the one that it is for.
    ends = {e["id"]: e for e in found["traceEvents"] if e["ph"] == "f"}
    arrows = [(e, ends[e["id"]]) for e in found["traceEvents"] if e["ph"] == "s"]
    assert len(arrows) == len(recording.messages)
    for start, end in arrows:
        assert start["pid"] != end["pid"]
        (made,) = (
            e["name"]
            for e in slices[start["pid"], COMPUTE]
            if e["ts"] <= start["ts"] <= e["ts"] + e["dur"] and e["name"][-1:].isdigit()
            if start["ts"] >= e["ts"] + e["dur"] - 0.002
        )
        assert ("F" if start["name"] == "activation" else "B") in made


def test_two_recordings_stand_beside_each_other():
    one, other = predicted(chain_plan("gpipe"), 2), predicted(chain_plan("timeprest"), 2)
    found = trace([("first", one), ("second", other)])
    check_trace(found)
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert names[0] == "first: stage 0 (rank 0)"
    assert names[3] == "second: stage 0 (rank 0)"
    assert len({e["pid"] for e in found["traceEvents"]}) == 6
    flows = [e["id"] for e in found["traceEvents"] if e["ph"] == "s"]
    assert len(set(flows)) == len(flows) == len(one.messages) + len(other.messages)
