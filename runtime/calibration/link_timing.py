"""Timing messages and all-reduces of each size, in bursts, until they are known well enough."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean, median

from ...planner.cluster.link_fit import LinkPoint, error_of_median
from ...profiles.units import format_bytes
from .links import ALL_REDUCE, LinkSettings, LinkTimes, Process, Progress

BURST_S = 0.01
MAX_REPETITIONS = 50
# Of the few bursts that were possible when time is out; and before an error is trusted.
MIN_BURSTS = 7
TRUSTED_BURSTS = 15
# Of messages that take so many times the cap together, over slow links.
FEWEST_BURSTS = 3
FAR_BEYOND = 5
PROGRESS_S = 0.1


@dataclass
class TimedOperation:
    """An operation at one size, and its measured times.

    Attributes:
        pair: p for messages between processes p and p + 1, or ALL_REDUCE.
        message_bytes: size of the message, or of the tensor that is summed.
        cap_s: time that may be spent on it.
        medians: of the bursts, in seconds.
        count: repetitions so far.
        spent_s: time so far.
    """

    pair: int
    message_bytes: int
    cap_s: float
    medians: list[float] = field(default_factory=list)
    count: int = 0
    spent_s: float = 0.0

    def burst(self, process: Process) -> None:
        """Have another burst made, and note it."""
        # The first one is a single repetition: how long they take isn't known.
        expected_s = median(self.medians) if self.medians else BURST_S
        repetitions = max(1, min(MAX_REPETITIONS, int(BURST_S / max(expected_s, 1e-9))))
        begin = time.perf_counter()
        self.medians.append(median(process.lead(self.pair, self.message_bytes, repetitions)))
        self.spent_s += time.perf_counter() - begin
        self.count += repetitions

    def share_done(self, precision: float) -> float:
        """From 0 to 1, which is: precise enough, or out of time."""
        bursts = len(self.medians)
        precise = bursts >= TRUSTED_BURSTS and error_of_median(self.medians) <= precision
        out_of_time = bursts >= MIN_BURSTS and self.spent_s >= self.cap_s
        too_slow = bursts >= FEWEST_BURSTS and self.spent_s >= FAR_BEYOND * self.cap_s
        if precise or out_of_time or too_slow:
            return 1.0
        return min(0.99, max(bursts / TRUSTED_BURSTS, self.spent_s / self.cap_s))

    def point(self) -> LinkPoint:
        """What was measured, as a link file has it."""
        return LinkPoint(
            message_bytes=self.message_bytes,
            seconds=median(self.medians),
            error=error_of_median(self.medians),
            repetitions=self.count,
        )


def lead(
    process: Process,
    processes: int,
    settings: LinkSettings,
    progress: Progress,
    backend: str,
) -> LinkTimes:
    """Measure everything; for process 0. `backend`: what messages go by."""
    pairs = range(processes - 1)
    shares = {pair: settings.cap_s / len(pairs) for pair in pairs} | {ALL_REDUCE: settings.cap_s}
    cells = [
        TimedOperation(pair, size, cap_s)
        for size in settings.message_bytes
        for pair, cap_s in shares.items()
    ]
    for cell in cells:
        # Connect, allocate and fill caches; the times don't count.
        for _ in range(2):
            process.lead(cell.pair, cell.message_bytes, 1)
    # Burst by burst, until no cell needs more. A cell that has enough is left out.
    shown, left = 0.0, cells
    while left:
        for cell in left:
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                done = fmean(c.share_done(settings.precision) for c in cells)
                progress(format_bytes(cell.message_bytes), int(1000 * done), 1000)
            cell.burst(process)
        left = [cell for cell in left if cell.share_done(settings.precision) < 1]
    points = {pair: tuple(c.point() for c in cells if c.pair == pair) for pair in shares}
    found = LinkTimes(
        processes=processes,
        device=settings.device,
        backend=backend,
        pairs=tuple(points[pair] for pair in pairs),
        all_reduce=points[ALL_REDUCE],
    )
    process.end()
    return found
