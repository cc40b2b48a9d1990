"""A run's worker in a process that torchrun or srun has started."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from ... import __version__
from ...planner.plan import Plan
from ...profiles.measuring.process_settings import keep_freed_memory
from ..prepare.prepared import Prepared
from ..prepare.workers import workers_of
from ..processes.environment import use_interface
from ..processes.locks import alone, as_worker
from ..processes.rendezvous import Rendezvous
from ..records.metrics import StageReport, decode
from ..records.progress import Observer
from ..records.run_dir import RunDir
from ..settings import RunSettings
from .distributed import train_worker
from .worker import status_for


class LaunchedWorker:
    """The worker that this process is, where torchrun or srun has started one for each.

    Attributes and methods as of `InlineWorkers`.
    """

    def __init__(self, rendezvous: Rendezvous, plan: Plan, settings: RunSettings) -> None:
        """Raises UserError, on all workers, where they aren't of the same run."""
        self._rendezvous = rendezvous
        self.settings = settings
        self.here = workers_of(plan)[rendezvous.rank : rendezvous.rank + 1]
        self.open_to_all = rendezvous.open_to_all
        keep_freed_memory()
        use_interface(rendezvous.launched)
        rendezvous.check_same(
            {
                "plan": _digest(plan),
                "checkpoint": str(settings.resume_at),
                "version of timeprest": __version__,
                "version of torch": torch.__version__,
                **{f"setting {name}": str(v) for name, v in msgspec.to_builtins(settings).items()},
            }
        )

    def load_ahead(self) -> None:
        """Nothing: this process has loaded it."""

    def wait(self, what: str) -> None:
        """Wait for the other workers, where `what` is done. Raises PeerError."""
        self._rendezvous.gather(what)

    @contextmanager
    def lock(self, where: RunDir) -> Iterator[None]:
        """Have the directory for this run; of workers that share it, the first holds its lock."""
        with alone(where.path, self._rendezvous.share("lock", uuid.uuid4().hex)):
            self.wait("locked")
            with as_worker(where.path):
                yield

    def train(self, prepared: Prepared, where: RunDir, observer: Observer) -> list[StageReport]:
        """Train with the others. Returns the reports of all replicas, by number."""
        status = status_for(where, self.here[0], self.settings, self._rendezvous)
        reports = train_worker(prepared, where, self._rendezvous, status, observer)
        found = self._rendezvous.gather("reports", msgspec.json.encode(reports))
        every = [report for text in found for report in decode(text, list[StageReport])]
        return sorted(every, key=lambda report: (report.stage, report.replica))


def _digest(value: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
