"""Training of a process's runners, and the files that they leave: logs, weights, reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, compress
from operator import attrgetter

from ...profiles.errors import FileError
from ...profiles.measuring.process_settings import one_at_a_time
from ...profiles.tasks.optimizers import for_use
from ..checkpoint.checkpoint import Agree, CheckpointWriter
from ..checkpoint.gradients import GradientFiles
from ..prepare.devices import peak_bytes, used_bytes
from ..prepare.prepared import Prepared
from ..records.metrics import StageReport, summed_counts, training_times, worker_epochs
from ..records.operation_log import read_stage_epochs
from ..records.progress import MetricsFile, Observer
from ..records.run_dir import RunDir, save_tensors
from ..stage.runner import StageRunner
from .loop import Course
from .runners import load_samples, local_runners
from .warm_up import capture_graphs


def train(
    where: RunDir,
    runners: Sequence[StageRunner],
    observer: Observer,
    agree: Agree = bool,
    replicas_agree: Agree = bool,
) -> list[StageReport]:
    """Take the runners of this process through the whole training, and write what they leave.

    Args:
        observer: is told of progress, where one of them is the one that reports.
        agree, replicas_agree: as of `Course`.
    """
    prepared = runners[0].prepared
    more = prepared.settings.resumed
    reporting = any(runner.replica.is_reporter for runner in runners)
    metrics = MetricsFile(where.metrics, observer, more=more) if reporting else None
    files = {}
    for runner in runners:
        if prepared.settings.keep_gradients and runner.replica.leads:
            GradientFiles(
                where.gradients(runner.number),
                runner.stage.piece.module,
                runner.stage.updates.optimizer,
                prepared.model.names,
            )
        written = (
            runner.notes.log,
            runner.epoch_file,
            metrics if runner.replica.is_reporter else None,
        )
        files[runner.replica.number] = [file for file in written if file is not None]
    checkpoints = CheckpointWriter(where, prepared, agree, files)
    try:
        course = Course(runners, metrics or Observer(), agree, replicas_agree, checkpoints)
        course.run()
    except BaseException:
        for file in chain(*files.values()):
            # Why the run failed is known, and mustn't be hidden by a second error of a full disk.
            with suppress(FileError):
                file.close()
        raise
    for file in chain(*files.values()):
        file.close()
    reports = _reports(where, runners, course.periods_s)
    for runner, report in zip(runners, reports, strict=True):
        if runner.replica.leads:
            with for_use(runner.stage.updates.optimizer):
                own, model = where.weights(runner.number), runner.prepared.model
                save_tensors(own, model.state(runner.number), model.tied_names(runner.number))
        where.write_report(runner.replica, report)
    return reports


@one_at_a_time
def train_inline(prepared: Prepared, where: RunDir, observer: Observer) -> list[StageReport]:
    """Train all workers in this process, in simulated order. Returns and raises as `train`."""
    observer.starting("loading the data")
    runners = local_runners(prepared, where)
    load_samples(runners)
    for runner in runners:
        capture_graphs(runner)
    return train(where, runners, observer)


def _reports(
    where: RunDir, runners: Sequence[StageRunner], periods_s: Sequence[Sequence[float]]
) -> list[StageReport]:
    """What each runner measured. `periods_s`: of its segments. Raises FileError."""
    # There may be many: none is kept in memory until the end.
    every = [list(read_stage_epochs(where.stage_metrics(runner.replica))) for runner in runners]
    # Only where one can train is it there; reports of runs are read elsewhere, too.
    import resource

    rss_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = []
    for runner, own, epochs in zip(runners, periods_s, every, strict=True):
        rank = runner.replica.rank
        of_worker = [r.replica.rank == rank for r in runners]
        together = worker_epochs([*compress(every, of_worker)])
        peaks = [r.stage.account.peak for r in compress(runners, of_worker)]
        found.append(
            StageReport(
                stage=runner.number,
                replica=runner.replica.index,
                worker=rank,
                **training_times(epochs)._asdict(),
                wall_s=training_times(together).wall_s,
                sent_bytes=runner.messages.sent_bytes,
                periods_s=list(own),
                peak=max(filter(None, peaks), key=attrgetter("total"), default=None),
                rss_peak_bytes=rss_peak * (1 if sys.platform == "darwin" else 1024),
                device=str(runner.device),
                transport=runner.messages.transport,
                not_by_ipc=runner.messages.not_by_ipc,
                device_peak_bytes=peak_bytes(runner.device),
                device_used_bytes=used_bytes(runner.device),
                versions_held=max((e.versions_held for e in epochs), default=1),
                version_differences=summed_counts(e.version_differences for e in epochs),
                weight_distance=max((e.weight_distance for e in epochs), default=0.0),
                not_finite=runner.gradients.not_finite.mini_batches,
                beyond_profile=runner.data.beyond_profile,
                not_compiled=runner.stage.piece.compute.why_not,
                graphs=runner.stage.graphs.line,
                epochs=epochs,
            )
        )
    return found
