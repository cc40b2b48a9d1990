"""A worker process: ``python -m timeprest.runtime.training.worker RUN_DIR LAUNCHER``.

That is the process which the launcher of a local run starts (`processes.launcher`). Under torchrun
or srun, the process that they started is one (`launched`). Which stages' replicas a rank runs,
`workers_of` says.
"""

from __future__ import annotations

import sys

from ...profiles.measuring.process_settings import keep_freed_memory
from ...profiles.tasks.objects import give_bytes
from ..prepare.prepare import prepare
from ..prepare.workers import Worker, workers_of
from ..processes import watchdog
from ..processes.environment import use_interface
from ..processes.locks import as_worker
from ..processes.rendezvous import ENDING_S, Rendezvous, join
from ..processes.store import LaunchingProcess
from ..records.progress import Observer
from ..records.run_dir import RunDir
from ..records.status import StatusFile
from ..settings import RunSettings
from .distributed import train_worker


def main(arguments: list[str]) -> None:
    """Run one worker of a local run, and end the process."""
    run_dir, rendezvous = RunDir(arguments[0]), join(int(arguments[1]))

    def work() -> None:
        plan, settings = run_dir.read()
        launching = LaunchingProcess(rendezvous.store, rendezvous.rank, settings.timeout_s)
        task = launching.task()
        if task is not None:
            give_bytes(settings.task, task)
        status = status_for(run_dir, workers_of(plan)[rendezvous.rank], settings, rendezvous)
        keep_freed_memory()
        use_interface(rendezvous.launched)
        with as_worker(run_dir.path):
            observer = launching if launching.is_asked() else Observer()
            train_worker(prepare(plan, settings), run_dir, rendezvous, status, observer)

    rendezvous.run(work)


def status_for(
    where: RunDir, worker: Worker, settings: RunSettings, rendezvous: Rendezvous
) -> StatusFile:
    """The status of this worker, which the others are told from now on; in a run over several hosts
    a watchdog looks at it too. Raises FileError."""
    status = StatusFile(where.status(worker), worker.rank, worker.name)
    # Who waits for a message finds out first.
    rendezvous.begin(lambda: status.now, where.statuses, settings.timeout_s + ENDING_S)
    if not rendezvous.launched.one_host:
        watchdog.watch(settings.timeout_s + watchdog.SLACK_S)
    return status


if __name__ == "__main__":
    main(sys.argv[1:])
