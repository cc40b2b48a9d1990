"""Before training: what is checked of a run, what is warned of, and what observers are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten

from ..planner.plan import Plan
from .checkpoint.initial_weights import check_start
from .checkpoint.logs import check_logs, noted_sizes
from .checkpoint.start import check_task, check_unfinished, left_out
from .checkpoint.trial import try_kept
from .prepare.prepare import prepare
from .prepare.prepared import Prepared
from .prepare.workers import Replica
from .records.callbacks import ToldBefore
from .records.events import EvaluationDone, RunBegun
from .records.metric_logs import check_logs_at_hand
from .records.progress import Observer
from .records.run_dir import RunDir
from .settings import RunSettings, without_effect
from .stage.optimizer import hook_warnings


def checked(
    where: RunDir,
    plan: Plan,
    settings: RunSettings,
    observer: Observer,
    replicas: Sequence[Replica],
) -> tuple[Prepared, list[str]]:
    """The run made ready, and lines to warn of. Raises for what makes it impossible.

    Args:
        replicas: those that are trained here.
    """
    if any(replica.is_reporter for replica in replicas):
        check_logs_at_hand(settings)
    if settings.resumed:
        check_logs(where, settings, replicas)
    prepared = prepare(plan, settings, observer.starting)
    lines = try_kept(prepared)
    if settings.resumed:
        check_unfinished(prepared, where)
        lines += check_task(prepared, where)
    if settings.start_from is not None and not settings.resume_at:
        lines += check_start(prepared, Path(settings.start_from))
    return prepared, lines


def lost(where: RunDir, settings: RunSettings) -> Iterator[str]:
    """Lines on what a run that is resumed doesn't keep."""
    if later := where.checkpoints.later(settings):
        yield (
            f"{where.path}: the run goes on after mini-batch {settings.resume_at}; later "
            f"checkpoints are removed: {', '.join(map(str, later))}"
        )
    if names := left_out(where, settings):
        yield (
            f"{shorten(', '.join(names), 300, placeholder=' …')}: changed in training and "
            "begins anew: checkpoints have what the model, the optimizer and the scheduler "
            "keep as their state alone (docs/checkpoints.md)"
        )


def cautions(prepared: Prepared, open_to_all: str, *, inline: bool) -> Iterator[str]:
    """Lines on what may be otherwise than was meant, when training begins.

    Args:
        open_to_all: that anybody could be a worker; empty: nobody could.
    """
    yield from hook_warnings(prepared)
    yield from filter(None, (*prepared.cautions, open_to_all))
    settings, model = prepared.settings, prepared.model
    yield from without_effect(settings, prepared.plan, prepared.length.steps, inline=inline)
    if settings.deferred_batch_norm and not model.has_statistics:
        yield (
            "--deferred-batch-norm: does nothing in this model, which has no running statistics "
            "(BatchNorm)"
        )


def begun(prepared: Prepared, where: RunDir) -> RunBegun:
    """What observers are told when training begins, where one reports. Raises FileError."""
    settings, last = prepared.settings, prepared.segments[-1]
    reporter = next(replica for replica in prepared.replicas if replica.is_reporter)
    # What came after the checkpoint is cut off, and may be damaged.
    size = noted_sizes(where, settings, reporter).get(where.metrics.name, 0)
    told = ToldBefore(where.metrics, size, last.whole_epoch)
    return RunBegun(
        plan=prepared.plan,
        settings=settings,
        run_dir=where.path,
        mini_batches=last.end,
        epoch_mini_batches=last.whole_epoch,
        epoch_samples=min(prepared.samples, last.whole_epoch * prepared.plan.mini_batch),
        resumed_at=settings.resume_at or 0,
        before=tuple(event for event in told if isinstance(event, EvaluationDone)),
        told_before=told,
    )
