"""Whether the machine is ours alone: processor time that went to others, and that was stolen.

Reads /proc/stat; where there is none, nothing is known and every run counts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
MOST = 0.06
"""Share of the processors' time that a run may have lost to others."""
PATIENCE_S = 60.0
"""Longest wait for a quiet moment."""


@dataclass(frozen=True)
class Moment:
    """Seconds of processor time, all processors together, and the clock."""

    busy_s: float
    stolen_s: float
    own_s: float
    at_s: float

    @classmethod
    def now(cls) -> Moment:
        """Own time is this process's, and of its children those that have ended."""
        tick = 1 / os.sysconf("SC_CLK_TCK")
        fields = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, *_ = fields
        # Interrupts are left out: messages cause them, those of our own too.
        busy = user + nice + system
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        stolen = fields[7] if len(fields) > 7 else 0
        return cls(busy * tick, stolen * tick, own, time.monotonic())


class Watch:
    """Looks on from its making until it is asked."""

    def __init__(self) -> None:
        self._begin = Moment.now() if STAT.exists() else None

    def foreign_share(self) -> float:
        """Share of the processors' time so far that others had; all own children have ended."""
        if self._begin is None:
            return 0.0
        end, begin = Moment.now(), self._begin
        foreign = (end.busy_s - begin.busy_s) - (end.own_s - begin.own_s)
        stolen = end.stolen_s - begin.stolen_s
        seconds = (end.at_s - begin.at_s) * (os.cpu_count() or 1)
        return max(foreign, 0.0) / seconds + stolen / seconds if seconds else 0.0


def wait_for_quiet(most: float) -> float:
    """Wait until others have no more than that share of the processors' time, or patience ends.

    Returns the last share seen.
    """
    begin = time.monotonic()
    while True:
        watch = Watch()
        time.sleep(0.5)
        share = watch.foreign_share()
        if share <= most or time.monotonic() - begin > PATIENCE_S:
            return share
