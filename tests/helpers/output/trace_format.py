"""The trace-event format's rules, as far as the traces use it: what breaks one is an error here.

After "Trace Event Format" (Google, 2016): required fields of each phase, slices of one thread that
nest properly, flows that begin once and end once inside slices, counters with numbers.
"""

from __future__ import annotations

from collections import defaultdict
from math import isfinite

NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts"},
}
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}
ROUNDING_US = 0.0015


def check_trace(trace):
    """Returns the slices, by (pid, tid)."""
    assert isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices, flows = defaultdict(list), defaultdict(list)
    named, used = set(), set()
    for event in trace["traceEvents"]:
        phase = event["ph"]
        assert NEEDED[phase] <= set(event), event
        assert isinstance(event["pid"], int)
        if phase != "M":
            assert isfinite(event["ts"])
            assert event["ts"] >= 0
            used.add(event["pid"])
        if phase == "X":
            assert isfinite(event["dur"])
            assert event["dur"] >= 0
            assert event["name"]
            slices[event["pid"], event["tid"]].append(event)
        elif phase == "M":
            field, kind = METADATA[event["name"]]
            assert isinstance(event["args"][field], kind)
            named.add((event["pid"], event["tid"], event["name"]))
        elif phase == "C":
            assert event["args"]
            assert all(type(v) in (int, float) and isfinite(v) for v in event["args"].values())
        else:
            flows[event["cat"], event["id"]].append(event)
    for pid in used:
        assert (pid, 0, "process_name") in named
    for (pid, tid), mine in slices.items():
        assert (pid, tid, "thread_name") in named
        check_nesting(mine)
    for ends in flows.values():
        check_flow(ends, slices)
    return slices


def check_nesting(slices):
    """Two slices of a thread lie one after the other, or one in the other."""
    open_until = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + ROUNDING_US:
            open_until.pop()
        if open_until:
            assert end <= open_until[-1] + ROUNDING_US, event
        open_until.append(end)


def check_flow(ends, slices):
    """An arrow goes from a slice to a slice, not back in time."""
    first, last = sorted(ends, key=lambda e: e["ph"], reverse=True)
    assert (first["ph"], last["ph"], last["bp"]) == ("s", "f", "e")
    assert first["name"] == last["name"]
    assert first["ts"] <= last["ts"] + ROUNDING_US
    for end in ends:
        assert any(
            s["ts"] - ROUNDING_US <= end["ts"] <= s["ts"] + s["dur"] + ROUNDING_US
            for s in slices[end["pid"], end["tid"]]
        ), end
