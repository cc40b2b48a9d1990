"""Error messages of a failed run: which worker, where it was, who waited, and who says so."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ...profiles.errors import TimeprestError
from ..communication.channel import PeerError
from ..records.status import WorkerStatus

if TYPE_CHECKING:
    from .store import Membership

Statuses = Mapping[int, WorkerStatus]
"""By rank; those that are out of reach are missing."""


def line_of_all(membership: Membership, error: TimeprestError) -> str | None:
    """What to say of a failure here; None: another worker says what there is to say. Raises
    RuntimeError where the store is gone."""
    membership.fail()
    message = str(error)
    if isinstance(error, PeerError):
        message = _blamed(membership, message)
    else:
        rank = membership.launched.rank
        message += circumstances(settled(membership.known, rank), rank)
    return message if membership.reports() else None


def line_alone(membership: Membership, error: TimeprestError) -> str:
    """As `line_of_all`, by the status files of this host alone: the store can't be reached."""
    here, rank = membership.in_files(), membership.launched.rank
    if isinstance(error, PeerError):
        return blame(here, rank, str(error), stopped_ranks(here))
    return f"{error}{circumstances(here, rank)}"


def line_when_asked(membership: Membership, how: str) -> str | None:
    """What to say where this worker is asked to end, mostly because another has died. `how`: it is
    asked. Returns and raises as `line_of_all`."""
    membership.fail()
    if membership.store.add("told", 0):
        return None
    gone = [r for r, s in membership.here(membership.known()).items() if is_gone(s.pid)]
    if gone:
        statuses = settled(membership.known, gone[0])
        label, around = statuses[gone[0]].label, circumstances(statuses, gone[0])
        how = f"{label} has died; {membership.launched.by} says how{around}"
    return how if membership.reports() else None


def _blamed(membership: Membership, message: str) -> str:
    """Wait up to `GRACE_S` for another worker to report; then `blame` by statuses and beats."""
    before, end = membership.beats(), time.monotonic() + GRACE_S
    while time.monotonic() < end and not membership.store.add("told", 0):
        time.sleep(_LOOK_S)
    statuses = membership.known()
    here, after = membership.here(statuses), membership.beats()
    silent = [
        rank
        for rank, beat in before.items()
        # Of this host's workers, more is known than that.
        if after[rank] == beat
        and rank not in here
        and not membership.store.check([f"failing/{rank}"])
    ]
    gone = [rank for rank, status in here.items() if is_gone(status.pid)]
    rank = membership.launched.rank
    return blame(statuses, rank, message, stopped_ranks(here), silent or gone)


def blame(
    statuses: Statuses,
    complaining: int,
    message: str,
    stopped: frozenset[int],
    silent: Sequence[int] = (),
) -> str:
    """The error message of a run whose workers only waited in vain.

    Args:
        complaining: who did so first; `message`: what it said.
        stopped: ranks whose processes stand still.
        silent: ranks that no longer tell what they are at, so that their statuses are old.
    """
    # One that stands still is the cause even where its last words are that it waits itself.
    certain = [*silent, *sorted(stopped)]
    rank = certain[0] if certain else culprit(statuses, complaining)
    if rank is None or rank == complaining:
        return message + who_waited(statuses, complaining)
    status = statuses.get(rank)
    how = "is stopped (SIGSTOP)" if rank in stopped else "doesn't answer"
    if message.endswith("it is gone"):
        how = "is gone"
    name = status.label if status is not None else f"rank {rank}"
    others = {r: s for r, s in statuses.items() if r != complaining}
    where = where_it_was(status, "last heard of: " if silent else "")
    return f"{name} {how}{where}; {message}{who_waited(others, rank)}"


def circumstances(statuses: Statuses, rank: int) -> str:
    """Where a worker was that failed, and who waited; nothing where it hadn't begun."""
    where = where_it_was(statuses.get(rank))
    return where and where + who_waited(statuses, rank)


def how_it_ended(code: int) -> str:
    """Of a process that can't say it itself any more, by its exit code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_words(log: Path) -> str:
    """The last line that a process printed, or the beginning of it; empty: it printed nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]


def limit_reached(words: str) -> str:
    """What it means that the system has no more threads or processes; empty: it doesn't say so."""
    said = ("start new thread", "Resource temporarily", "Cannot allocate", "no memory is left")
    if not any(each in words for each in said):
        return ""
    return "; this user's processes, threads or memory have come to a limit (ulimit -a shows them)"


GRACE_S = 2.0
"""What a worker that only waited in vain leaves to the one that knows the cause, and what a
process gets to end when it is asked to."""

SETTLE_S = 1.0
"""What the others get to come to their waits for a worker that has failed. Shorter than what they
leave it to say why (`GRACE_S`)."""

_LOOK_S = 0.05


def settled(look: Callable[[], Statuses], rank: int) -> Statuses:
    """What all are at after a worker failed, once the others wait for somebody or have ended.

    At the latest after `SETTLE_S`, and at once where that worker hadn't begun.

    Args:
        look: what is known now.
        rank: of the worker that failed.
    """
    here, end = socket.gethostname(), time.monotonic() + SETTLE_S
    while True:
        statuses = look()
        busy = any(
            not status.waits_for and not (status.host == here and is_gone(status.pid))
            for other, status in statuses.items()
            if other != rank
        )
        if not busy or not where_it_was(statuses.get(rank)) or time.monotonic() > end:
            return statuses
        time.sleep(_LOOK_S)


def is_gone(pid: int) -> bool:
    """Whether this host's process has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def stopped_ranks(statuses: Statuses) -> frozenset[int]:
    """Those whose processes, on this host, stand still."""
    found = set()
    for rank, status in statuses.items():
        try:
            if psutil.Process(status.pid).status() == psutil.STATUS_STOPPED:
                found.add(rank)
        except psutil.Error:
            continue
    return frozenset(found)


def culprit(statuses: Statuses, complaining: int) -> int | None:
    """Whom everybody waits for in the end: followed from one who waited in vain.

    None: they wait for each other, so that a message was lost.
    """
    seen, next_ranks = {complaining}, [complaining]
    found = []
    while next_ranks:
        status = statuses.get(next_ranks.pop())
        if status is None:
            continue
        if not status.waits_for:
            found.append(status)
        fresh = [rank for rank in status.waits_for if rank not in seen]
        # Nothing is known of it: it never came, or its host is out of reach.
        unknown = [rank for rank in fresh if rank not in statuses]
        if unknown:
            return unknown[0]
        seen.update(fresh)
        next_ranks += fresh
    return min(found, key=lambda s: s.since).rank if found else None


MOST_NAMED = 3
"""Workers that wait and are named in a report."""


def where_it_was(status: WorkerStatus | None, how: str = "") -> str:
    """ "; last finished 1U4, next 1F6.0", or nothing where that isn't known, or it hadn't begun.

    Args:
        how: stands before it where it may be old; that it hadn't begun is told then.
    """
    if status is None:
        return ""
    if status.at == "start":
        return how and f"; {how}nothing finished yet"
    finished = f"last finished {status.finished}" if status.finished else "nothing finished yet"
    return f"; {how}{finished}, next {status.at or 'not begun'}"


def who_waited(statuses: Statuses, but: int | None) -> str:
    """ "; waiting: stage 0 at 0B5 for stage 1", or nothing."""
    waiting = [s for s in statuses.values() if s.waits_for and s.rank != but]
    if not waiting:
        return ""
    shown = [
        f"{s.name} at {s.at or s.finished} for {_names(statuses, s.waits_for)}"
        for s in waiting[:MOST_NAMED]
    ]
    more = len(waiting) - len(shown)
    return f"; waiting: {', '.join(shown)}" + (f" and {more} more" if more else "")


def _names(statuses: Statuses, ranks: Sequence[int]) -> str:
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} others"
    known = [statuses[rank].name if rank in statuses else f"rank {rank}" for rank in ranks]
    return " and ".join(known)
