"""Recordings as Chrome-trace JSON, for Perfetto and chrome://tracing.

A process for each rank; on it threads for computing, communication and waiting, arrows for
messages, and a counter of the memory held, by kind. Operations of ranks with several stages begin
with the stage's number. Where there are several recordings, each has
processes of its own on the same axis.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ... import __version__
from ...planner.recordings.recording import MEMORY_KINDS, Message, Recording, Span
from ...profiles.files import write_bytes
from ..errors import printable
from ..options.values import FileName

Event = dict[str, Any]

COMPUTE, COMMUNICATION, WAITING = 1, 2, 3
"""Threads of each process."""

_THREADS = {COMPUTE: "compute", COMMUNICATION: "communication", WAITING: "waiting"}
_MORE = 10
"""Where messages overlap, further threads of communication are numbered from here on."""

_CATEGORIES = {"F": "forward", "B": "backward", "W": "weight gradients", "U": "update"}
_COLOURS = {
    "F": "thread_state_running",
    "B": "good",
    "W": "thread_state_iowait",
    "U": "generic_work",
}
_PLACES = {"load": COMPUTE, "wait": WAITING, "send": COMMUNICATION, "sum": COMMUNICATION}


def trace(recordings: Sequence[tuple[str, Recording]]) -> dict[str, Any]:
    """The trace of recordings as plain data. Each has a name that tells it from the others; that of
    one alone may be empty."""
    events: list[Event] = []
    first = flow = 0
    for name, recording in recordings:
        events += _names(name, recording, first)
        events += _spans(recording, first)
        events += _besides(recording, first)
        events += _memory(recording, first)
        arrows = list(_flows(recording, first, flow))
        events += arrows
        flow += len(arrows) // 2
        first += len(recording.lanes)
    # By time, as some readers want it; at one time as the recording has it.
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    return {
        # First, so that a file is known by its head (`profiles.files`).
        "otherData": {
            "made_by": f"timeprest {__version__}",
            "period_s": {name or each.source: each.period_s for name, each in recordings},
        },
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def write_trace(path: str | Path, recordings: Sequence[tuple[str, Recording]]) -> None:
    """Write the trace. Raises FileError."""
    write_bytes(Path(path), msgspec.json.encode(trace(recordings)) + b"\n")


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond; what is rounded alike stays in its sequence."""
    return round(seconds * 1e6, 3)


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float, **more: Any) -> Event:
    start = _us(start_s)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": start,
        "dur": round(max(_us(end_s) - start, 0.0), 3),
        **more,
    }


def _names(name: str, recording: Recording, first: int) -> Iterator[Event]:
    for k, lane in enumerate(recording.lanes):
        pid = first + k
        label = f"{lane.name} (rank {k})"
        name = printable(name)
        yield from _named("process", pid, 0, f"{name}: {label}" if name else label, pid)
        for tid, thread in _THREADS.items():
            yield from _named("thread", pid, tid, thread, tid)


def _named(what: str, pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    common = {"ph": "M", "pid": pid, "tid": tid}
    yield {**common, "name": f"{what}_name", "args": {"name": name}}
    yield {**common, "name": f"{what}_sort_index", "args": {"sort_index": order}}


def _spans(recording: Recording, first: int) -> Iterator[Event]:
    for span in recording.spans:
        args: dict[str, Any] = {"mini_batch": span.mini_batch}
        if len(recording.lanes[span.lane].stages) > 1:
            args["stage"] = span.stage
        if span.micro_batch is not None:
            args["micro_batch"] = span.micro_batch
        if span.version is not None:
            args["version"] = span.version
            if span.forward_version is not None:
                args["forward_version"] = span.forward_version
                args["version_difference"] = span.version - span.forward_version
        yield _slice(
            first + span.lane,
            COMPUTE,
            recording.name(span),
            span.start_s,
            span.end_s,
            cat=_CATEGORIES[span.kind],
            cname=_COLOURS[span.kind],
            args=args,
        )


def _besides(recording: Recording, first: int) -> Iterator[Event]:
    """What isn't computing: as it was measured; of a prediction the messages, and the gaps."""
    for a in recording.activities:
        yield _slice(
            first + a.lane, _PLACES[a.kind], f"{a.kind} {a.name}", a.start_s, a.end_s, cat=a.kind
        )
    if recording.activities:
        return
    last: dict[int, Span] = {}
    for span in recording.spans:
        before = last.get(span.lane)
        if before is not None and span.start_s > before.end_s:
            yield _slice(
                first + span.lane,
                WAITING,
                f"wait {recording.name(span)}",
                before.end_s,
                span.start_s,
                cat="wait",
            )
        last[span.lane] = span
    for lane, tracks in _tracks(recording.messages).items():
        for k, messages in enumerate(tracks):
            tid = _MORE + k if k else COMMUNICATION
            if k:
                yield from _named("thread", first + lane, tid, f"communication {k + 1}", tid)
            for m in messages:
                yield _slice(
                    first + lane,
                    tid,
                    f"send {m.tensor}",
                    m.start_s,
                    m.end_s,
                    cat="send",
                    args=_message(m),
                )


def _tracks(messages: Iterable[Message]) -> dict[int, list[list[Message]]]:
    """Messages of each sending lane, in rows without overlaps."""
    found: dict[int, list[list[Message]]] = defaultdict(list)
    free: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for m in sorted(messages, key=lambda m: m.start_s):
        heap, rows = free[m.source], found[m.source]
        if heap and _us(heap[0][0]) <= _us(m.start_s):
            _, row = heapq.heappop(heap)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(m)
        heapq.heappush(heap, (m.end_s, row))
    return found


def _message(m: Message) -> dict[str, Any]:
    return {"tensor": m.tensor, "bytes": m.nbytes, "mini_batch": m.mini_batch}


def _flows(recording: Recording, first: int, flow: int) -> Iterator[Event]:
    """An arrow for each message, from the operation that made it to the one that needs it."""
    places = {(s.lane, s.stage, s.kind, s.mini_batch, s.micro_batch): s for s in recording.spans}
    for m in recording.messages:
        kind = "B" if m.backward else "F"
        made = places.get((m.source, m.source_stage, kind, m.mini_batch, m.micro_batch))
        used = places.get((m.target, m.target_stage, kind, m.mini_batch, m.micro_batch))
        if made is None or used is None:
            continue
        common = {
            "name": "gradient" if m.backward else "activation",
            "cat": "message",
            "id": flow,
            "tid": COMPUTE,
        }
        flow += 1
        # An arrow ends in the slice that its time lies in.
        inside = max(_us(made.start_s), round(_us(made.end_s) - 0.001, 3))
        target = max(_us(used.start_s), inside)
        yield {"ph": "s", "pid": first + m.source, "ts": inside, "args": _message(m), **common}
        yield {"ph": "f", "bp": "e", "pid": first + m.target, "ts": target, **common}


def _memory(recording: Recording, first: int) -> Iterator[Event]:
    for point in recording.memory:
        args: Mapping[str, int] = dict(zip(MEMORY_KINDS, point.nbytes, strict=True))
        yield {
            "ph": "C",
            "pid": first + point.lane,
            "tid": 0,
            "name": "memory, bytes",
            "ts": max(_us(point.at_s), 0.0),
            "args": args,
        }


# tp-plan show --trace -----------------------------------------------------------------------------

trace_option = click.option(
    "--trace",
    "trace_path",
    type=FileName(),
    help="Write the predicted order as a Chrome trace, for Perfetto and chrome://tracing.",
)
