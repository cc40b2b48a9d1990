"""A run's workers on this machine: all in this process, or each in one that it launches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ...planner.plan import Plan
from ...profiles.target import kept_numbers
from ...profiles.tasks.objects import as_bytes
from ..checkpoint.logs import rewind_logs
from ..prepare.devices import device_kind
from ..prepare.prepared import Prepared
from ..prepare.workers import workers_of
from ..processes.launcher import launch
from ..processes.locks import alone
from ..processes.start import WORKER, load_ahead, slow_libraries
from ..records.metrics import StageReport
from ..records.progress import Observer
from ..records.run_dir import RunDir
from ..settings import RunSettings
from .train import train_inline


class InlineWorkers:
    """All workers in this process, in simulated order.

    Attributes:
        here: the workers that this process starts, or is.
        open_to_all: a line that nobody has given the workers a secret; empty: none is needed.
    """

    def __init__(self, plan: Plan, settings: RunSettings) -> None:
        self.plan, self.settings = plan, settings
        self.here = workers_of(plan)
        self.open_to_all = ""

    def load_ahead(self) -> None:
        """Begin to load what workers in processes of their own need."""

    def wait(self, what: str) -> None:
        """Wait for the other processes of the run, where `what` is done."""

    def lock(self, where: RunDir) -> AbstractContextManager[None]:
        """Have the directory for this run. Raises as `alone`."""
        return alone(where.path)

    def train(self, prepared: Prepared, where: RunDir, observer: Observer) -> list[StageReport]:
        """Train, in a run directory that is ready. Returns the reports of all replicas, by
        number."""
        # As where processes train copies of it: what is trained next begins with the same weights.
        put_back = kept_numbers(prepared.model.whole)
        try:
            return train_inline(prepared, where, observer)
        finally:
            if put_back is not None:
                put_back()


class LocalWorkers(InlineWorkers):
    """Each worker in a process that this one launches."""

    def __init__(self, plan: Plan, settings: RunSettings) -> None:
        super().__init__(plan, settings)
        self._folder = os.getcwd()

    def load_ahead(self) -> None:
        load_ahead(WORKER, self._libraries())

    def _libraries(self) -> Sequence[str]:
        """Those of this process that all workers will load, where they are loaded once for all."""
        # A GPU's driver, which some of them look for, can't be forked.
        return slow_libraries() if device_kind(self.plan, self.settings) == "cpu" else ()

    def train(self, prepared: Prepared, where: RunDir, observer: Observer) -> list[StageReport]:
        # Workers begin where this process has begun, whatever the task's code did here.
        os.chdir(self._folder)
        # What is told of progress is read from its end on.
        for replica in prepared.replicas:
            if replica.is_reporter:
                rewind_logs(where, self.settings, replica)
        labels = [worker.label for worker in prepared.workers]
        launch(where, labels, observer, as_bytes(self.settings.task), self._libraries())
        return where.read_reports(prepared.replicas)
