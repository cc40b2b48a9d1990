"""Progress of a run on the terminal: mini-batches, samples/s, loss, and how busy its stages are."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...planner.plan import Plan
from ...profiles.errors import StoppedError
from ...profiles.units import format_rate
from ...runtime.prepare.workers import workers_of
from ...runtime.records.callbacks import Callback
from ...runtime.records.events import EpochDone, EvaluationDone, MiniBatchDone, RestartDue, RunBegun
from ...runtime.records.status import WorkerStatus, read_statuses
from ..errors import F, log, why_unprinted
from ..progress import Bar
from ..tables.plan import warn_if_edited
from ..tables.run import epoch_line, evaluation_line

_WINDOW_S = 5.0
_LOOKS_APART_S = 0.05


def _stopping(show: F) -> F:
    """End the run (StoppedError) when its progress can't be printed: nobody would learn of it."""

    @functools.wraps(show)
    def shown(*args: Any, **kwargs: Any) -> Any:
        try:
            return show(*args, **kwargs)
        except OSError as error:
            why = why_unprinted(error)
            if why is None:
                raise
            raise StoppedError(f"stopped: {why}") from None

    return shown  # type: ignore[return-value]


class TrainingProgress(Callback):
    """Shows a run on the terminal: a bar for the epoch, and a line for each that is done."""

    waited_for = False

    def __init__(
        self, bar: Bar, plan: Plan, run_dir: Path | None, opening: Callable[[], Iterable[Any]]
    ) -> None:
        """`run_dir`: where the workers' processes write their status; None: there are none.
        `opening`: makes the lines to print when training begins."""
        self._bar = bar
        self._opening = opening
        self._rate: Rate
        self._total = 0
        self._within = False
        self._busy: BusyShares | None = None
        if run_dir is not None:
            workers = workers_of(plan)
            lanes = sorted({worker.stages for worker in workers})
            devices = [lanes.index(worker.stages) for worker in workers]
            self._busy = BusyShares(run_dir / "status", devices)

    @_stopping
    def on_starting(self, what: str) -> None:
        self._bar.doing(what)

    @_stopping
    def on_begin(self, event: RunBegun) -> None:
        self._total = event.mini_batches
        # Of a restarted run, too, which is at an earlier mini-batch.
        self._rate = Rate(event.epoch_samples / event.epoch_mini_batches)
        warn_if_edited(event.plan, str(event.run_dir / "plan.json"))
        if not self._bar.quiet:
            self._bar.print(*self._opening())

    @_stopping
    def on_mini_batch(self, event: MiniBatchDone) -> None:
        if self._busy is not None and self._bar.shown:
            self._busy.start()
        self._within = event.done < event.of
        rate = self._rate(event.mini_batch, time.monotonic())
        shares = self._busy.shares() if self._busy is not None else []
        self._bar(training_text(event, rate, shares), event.mini_batch, self._total)

    @_stopping
    def on_evaluation(self, event: EvaluationDone) -> None:
        """As `Callback`. That of an epoch's end comes in the epoch's own line."""
        if self._within and not self._bar.quiet:
            self._bar.print(evaluation_line(event))

    @_stopping
    def on_epoch(self, event: EpochDone) -> None:
        if not self._bar.quiet:
            self._bar.print(epoch_line(event.record))

    def on_restart(self, event: RestartDue) -> None:
        log(str(event))


class Rate:
    """Samples per second over the last few seconds."""

    def __init__(self, mini_batch: float) -> None:
        """`mini_batch`: samples in one, in the mean."""
        self._mini_batch = mini_batch
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, done: int, now: float) -> float | None:
        """After so many mini-batches; None: too early to say."""
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        (then, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) * self._mini_batch / (last - then) if last > then else None


class BusyShares:
    """Busy shares of the devices: in how many samples of their workers' status these compute.

    Workers note what they do and whom they wait for where others can read it
    (`runtime.records.status`): looking costs them nothing.
    """

    def __init__(self, statuses: Path, devices: Sequence[int]) -> None:
        """`devices`: the number of each rank's; replicas of a stage have one."""
        self._folder = statuses
        self._devices = devices
        self._looks: deque[tuple[float, dict[int, bool]]] = deque()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while True:
            time.sleep(_LOOKS_APART_S)
            self.look(read_statuses(self._folder), time.monotonic())

    def look(self, found: dict[int, WorkerStatus], now: float) -> None:
        """Add a sample: who is at an operation and waits for nobody."""
        busy = {rank: bool(of.at) and not of.waits_for for rank, of in found.items()}
        with self._lock:
            self._looks.append((now, busy))
            while now - self._looks[0][0] > _WINDOW_S:
                self._looks.popleft()

    def shares(self) -> list[float]:
        """Per device; empty before all of them have been seen."""
        counts = [[0, 0] for _ in range(1 + max(self._devices))]
        with self._lock:
            for _, look in self._looks:
                for rank, busy in look.items():
                    if rank < len(self._devices):
                        counts[self._devices[rank]][0] += busy
                        counts[self._devices[rank]][1] += 1
        if not all(seen for _, seen in counts):
            return []
        return [busy / seen for busy, seen in counts]

    def start(self) -> None:
        """Sample from now on, in a thread that ends with the process."""
        if not self._thread.is_alive():
            self._thread.start()


def busy_text(shares: Sequence[float]) -> str:
    """``busy 78 92%``; of many stages the least, the mean and the most."""
    if not shares:
        return ""
    if len(shares) <= 8:
        return "busy " + " ".join(f"{100 * share:.0f}" for share in shares) + "%"
    mean = sum(shares) / len(shares)
    return f"busy {min(shares):.0%} to {max(shares):.0%}, mean {mean:.0%}"


def training_text(at: MiniBatchDone, rate: float | None, shares: Sequence[float]) -> str:
    """One line; what matters most comes first, since a narrow terminal cuts its end."""
    parts = [f"epoch {at.epoch + 1}: {at.done}/{at.of}"]
    if rate:
        parts.append(format_rate(rate, "samples"))
    parts.append(f"loss {at.loss:.4f}")
    parts.append(busy_text(shares))
    return ", ".join(filter(None, parts))
