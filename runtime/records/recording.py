"""The recording of a run, operation by operation, made of its workers' logs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...planner.plan import Plan
from ...planner.recordings.predicted import predicted
from ...planner.recordings.recording import (
    Activity,
    MemoryPoint,
    Message,
    Recording,
    Span,
    lanes_of,
    shifted,
)
from ...planner.systems.operations import FORWARD, UPDATE, Op, parse_op
from ...profiles.errors import FileError, ScheduleError
from ...profiles.files import raw_lines
from ..prepare.workers import Replica, Worker, all_replicas, workers_of
from ..settings import STEADY
from .operation_log import WARM, record_named
from .run_dir import RunDir
from .status import read_statuses

# Clocks of several hosts, aligned by the messages between them ----------------------------------
# Processes on one host share a clock that only goes forward. Between hosts, what is known is that
# no message arrived before it was sent: the least delay seen in one direction and the least in
# the other differ by twice the clocks' difference, where the way takes as long there as back.


def offsets(
    hosts: Iterable[Hashable], delays: Iterable[tuple[Hashable, Hashable, float]]
) -> Mapping[Hashable, float]:
    """Seconds to add to each host's clock, so that it goes with the first one's.

    Args:
        delays: of each message from one host to another, by how many seconds its arrival there is
            later than its sending here, each by its own host's clock.

    Hosts that no messages lead to keep their own.
    """
    least: dict[tuple[Hashable, Hashable], float] = {}
    for source, target, seconds in delays:
        if source != target:
            known = least.get((source, target), seconds)
            least[source, target] = min(known, seconds)
    every = list(dict.fromkeys(hosts))
    found: dict[Hashable, float] = {}
    for start in every:
        if start in found:
            continue
        found[start] = 0.0
        reached = [start]
        for here in reached:
            for there in every:
                ahead = _ahead(least.get((here, there)), least.get((there, here)))
                if there not in found and ahead is not None:
                    found[there] = found[here] - ahead
                    reached.append(there)
    return found


def _ahead(there: float | None, back: float | None) -> float | None:
    """By how much the other clock is ahead, from the least delays in both directions."""
    if there is not None and back is not None:
        return (there - back) / 2
    if there is not None:
        return there
    return None if back is None else -back


# A run and its plan as recordings ---------------------------------------------------------------

_LoggedMessage = tuple[int, str, int, float]
"""The other replica's number, the tensor, bytes, and when."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log (`operation_log`)."""

    op: str
    version: int
    forward_version: int | None = None
    begin_s: float
    start_s: float
    end_s: float
    sent_s: float
    compute_s: float
    communication_s: float
    loading_s: float
    held: tuple[int, ...] | None = None
    left: tuple[int, ...]
    received: tuple[_LoggedMessage, ...] = ()
    sent: tuple[_LoggedMessage, ...] = ()


class _Key(NamedTuple):
    """Which message. `source`, `target`: the replicas' numbers."""

    source: int
    target: int
    tensor: str
    backward: bool
    mini_batch: int
    micro_batch: int | None


class _Logged(NamedTuple):
    replica: Replica
    op: Op
    line: Line


_Ends = Mapping[_Key, tuple[int, float, float]]
"""Of messages at one end: bytes, when it was sent or received, and when its operation ended."""

_Logs = Mapping[int, Sequence[_Logged]]
"""By rank, what the worker ran of all its stages, in its sequence."""


def measured(run_dir: str | Path, mini_batches: tuple[int, int] | None = None) -> Recording | None:
    """The recording of a run, be it over or not; None where no operations have been written down.

    Args:
        mini_batches: the first, and the one after the last; by default what was recorded of the
            pipeline as it ran steadily, or the first ones that were.

    Raises FileError where the directory holds no run, or a log is broken.
    """
    where = RunDir(run_dir)
    plan, settings = where.read()
    workers = workers_of(plan)
    logs: _Logs = {worker.rank: _read_all(where, worker) for worker in workers}
    count = record_named(settings.record).count or record_named(STEADY).count
    chosen = mini_batches or _steady(logs, count)
    logs = {rank: _cut(lines, *chosen) for rank, lines in logs.items()}
    if not any(logs.values()):
        return None
    statuses = read_statuses(where.statuses)
    hosts = {
        worker.rank: statuses[worker.rank].host if worker.rank in statuses else ""
        for worker in workers
    }
    return _recording(plan, logs, hosts)


def counterpart(plan: Plan, found: Recording, of_epoch: int | None = None) -> Recording:
    """What the plan predicts for the mini-batches of a measured recording.

    Args:
        of_epoch: mini-batches after which the pipeline drained; None: not known.

    Raises ScheduleError for in-flight limits with which the stages wait for each other.
    """
    begin, end = mini_batches_of(found)
    within = begin % of_epoch if of_epoch else begin
    deep = max(stage.in_flight for stage in plan.stages)
    # Once the pipeline is full, all mini-batches are alike.
    first = min(within, WARM + deep)
    first -= (first - within) % plan.update_every
    first = max(first, 0)
    left = of_epoch - within - (end - begin) if of_epoch else deep
    other = predicted(plan, end - begin, first=first, more=max(min(left, deep), 0))
    skipped = begin - first
    return shifted(other, 0.0, skipped, skipped // plan.update_every)


def mini_batches_of(recording: Recording) -> tuple[int, int]:
    """The first mini-batch that a recording is of, and the one after the last. Others have
    operations in it that ran between."""
    # By lane.
    first, last = dict[int, int](), dict[int, int]()
    for span in recording.spans:
        first.setdefault(span.lane, span.mini_batch)
        last[span.lane] = span.mini_batch
    return min(first.values(), default=0), 1 + max(last.values(), default=0)


# Reading ----------------------------------------------------------------------------------------


def _read_all(where: RunDir, worker: Worker) -> list[_Logged]:
    """The logs of a worker's stages as one. Raises FileError."""
    found = [
        _Logged(replica, op, line)
        for replica in worker.replicas
        for op, line in _read(where, replica)
    ]
    if len(worker.replicas) > 1:
        found.sort(key=lambda each: each.line.begin_s)
    return found


def _read(where: RunDir, replica: Replica) -> list[tuple[Op, Line]]:
    """A replica's log; empty where there is none. Raises FileError."""
    for path in (where.operations(replica), where.recorded(replica)):
        if not os.path.lexists(path):
            continue
        decoder = msgspec.json.Decoder(Line)
        found = []
        for number, line in enumerate(raw_lines(path), start=1):
            try:
                decoded = decoder.decode(line)
                _, op = parse_op(decoded.op)
            except (ValueError, RecursionError, ScheduleError) as error:
                if _is_old(line):
                    return []
                raise FileError(f"{path}: line {number}: {error}") from None
            found.append((op, decoded))
        return found
    return []


def _is_old(line: bytes) -> bool:
    """Whether the line was written before the log had all that a recording needs."""
    try:
        found = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "op" in found and not {"begin_s", "loading_s"} <= {*found}


def _steady(logs: _Logs, count: int) -> tuple[int, int]:
    """So many mini-batches of those that all workers have run, warm ones if possible."""
    done: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, lines in logs.items():
        for each in lines:
            updated = {each.op.mini_batch} if each.op.kind == UPDATE else set()
            done[rank, each.replica.stage] |= updated
    every = sorted(set.intersection(*done.values())) if done else []
    if not every:
        return 0, 0
    first = next((b for b in every if b >= WARM and b + count - 1 in every), every[0])
    return first, min(first + count, every[-1] + 1)


def _cut(lines: Sequence[_Logged], begin: int, end: int) -> Sequence[_Logged]:
    """From the first operation of mini-batch `begin` to the last one before `end`."""
    chosen = [k for k, each in enumerate(lines) if begin <= each.op.mini_batch < end]
    return lines[chosen[0] : chosen[-1] + 1] if chosen else []


# Putting together -------------------------------------------------------------------------------


def _recording(plan: Plan, logs: _Logs, hosts: Mapping[int, str]) -> Recording:
    sent, received = _ends(logs, sent=True), _ends(logs, sent=False)
    replicas = all_replicas(plan)
    host_of = [hosts[replica.rank] for replica in replicas]
    delays = (
        (host_of[key.source], host_of[key.target], received[key][1] - at_s)
        for key, (_, at_s, _) in sent.items()
        if key in received
    )
    ahead = offsets(hosts.values(), delays)
    plus = {rank: ahead[host] for rank, host in hosts.items()}
    zero = min(lines[0].line.begin_s + plus[rank] for rank, lines in logs.items() if lines)
    spans: list[Span] = []
    activities: list[Activity] = []
    memory: list[MemoryPoint] = []
    for rank, lines in sorted(logs.items()):
        shift = plus[rank] - zero
        for replica, op, line in lines:
            times = line.start_s + shift, line.end_s + shift
            span = Span(rank, replica.stage, *op, *times, line.version, line.forward_version)
            spans.append(span)
            activities += _around(span, line, shift)
        memory += _held(rank, lines, shift)
    return Recording(
        source="measured",
        variant=plan.variant,
        lanes=lanes_of(plan),
        spans=tuple(spans),
        messages=tuple(_messages(sent, received, replicas, plus, zero)),
        memory=tuple(memory),
        period_s=_period_s(spans),
        activities=tuple(activities),
    )


def _messages(
    sent: _Ends,
    received: _Ends,
    replicas: Sequence[Replica],
    plus: Mapping[int, float],
    zero: float,
) -> Iterator[Message]:
    """Those of which both ends are logged. `plus`: seconds to add to each rank's clock, on which
    the recording begins at `zero`."""
    for key, (nbytes, at_s, made_s) in sent.items():
        if key not in received:
            continue
        source, target = replicas[key.source], replicas[key.target]
        there_s = received[key][1] + plus[target.rank] - zero
        shift = plus[source.rank] - zero
        # The call that sends may return when the message is there already.
        start_s = min(max(made_s, min(at_s, there_s - shift)) + shift, there_s)
        yield Message(
            source.rank,
            target.rank,
            source.stage,
            target.stage,
            key.tensor,
            key.mini_batch,
            key.micro_batch,
            key.backward,
            nbytes,
            min(made_s + shift, start_s),
            start_s,
            there_s,
        )


def _ends(logs: _Logs, *, sent: bool) -> _Ends:
    """What was sent, or received."""
    found = {}
    for lines in logs.values():
        for replica, op, line in lines:
            for other, tensor, nbytes, at_s in line.sent if sent else line.received:
                ends = (replica.number, other) if sent else (other, replica.number)
                key = _Key(*ends, tensor, op.kind != FORWARD, op.mini_batch, op.micro_batch)
                found[key] = nbytes, at_s, line.end_s
    return found


def _around(span: Span, line: Line, shift: float) -> Iterator[Activity]:
    begin, start, end, sent = (
        at + shift for at in (line.begin_s, line.start_s, line.end_s, line.sent_s)
    )
    if span.kind == UPDATE:
        yield Activity(span.lane, "sum", span.name, begin, start)
        return
    # Samples are loaded first.
    loaded = min(begin + line.loading_s, start)
    if loaded - begin > 1e-7:
        yield Activity(span.lane, "load", span.name, begin, loaded)
    yield Activity(span.lane, "wait", span.name, loaded, start)
    yield Activity(span.lane, "send", span.name, end, sent)


def _held(rank: int, lines: Iterable[_Logged], shift: float) -> Iterator[MemoryPoint]:
    last: tuple[int, ...] = ()
    for _, _, line in lines:
        for at_s, nbytes in ((line.start_s, line.held), (line.end_s, line.left)):
            if nbytes is not None and nbytes != last:
                last = tuple(nbytes)
                yield MemoryPoint(rank, at_s + shift, (*last, 0))


def _period_s(spans: Iterable[Span]) -> float:
    """Of a mini-batch between the first update and the last, at the slowest replica of a stage; 0
    where there is only one."""
    updates: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == UPDATE:
            updates[span.lane, span.stage].append(span)
    return max(
        (
            (own[-1].end_s - own[0].end_s) / (own[-1].mini_batch - own[0].mini_batch)
            for own in updates.values()
            if len(own) > 1
        ),
        default=0.0,
    )
