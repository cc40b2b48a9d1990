"""tp-run's training: by workers started here, or as one of those that torchrun or srun started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...planner.plan import Plan
from ...profiles.measuring.process_settings import keep_freed_memory
from ...runtime.prepare.workers import workers_of
from ...runtime.processes.rendezvous import Rendezvous
from ...runtime.records.metrics import RunSummary
from ...runtime.settings import RunSettings
from ...runtime.trainer import Trainer
from ..errors import output, print_json
from ..progress import Bar
from ..tables.plan import operations
from ..tables.run import summary_lines, summary_table
from ..tables.stages import stage_table
from .checks import device_lines, warn_of_memory
from .progress import TrainingProgress
from .resume import naming_checkpoint, place_of


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A run as the command line asks for it, in the directory `where`, by workers that torchrun or
    srun has started (`rendezvous`), or by those that are started here. `resumed`: arguments of
    `resume`; None: a new run."""

    plan: Plan
    settings: RunSettings
    where: Path
    rendezvous: Rendezvous | None
    inline: bool
    resumed: Mapping[str, Any] | None
    max_restarts: int


def train(job: TrainingJob, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Train, show how it goes on, and print the summary. Raises as `naming_checkpoint`
    and `run`."""
    plan, where, inline = job.plan, job.where, job.inline
    if inline:
        # As the stages' own processes do.
        keep_freed_memory()
    with Bar(plan.variant, quiet=quiet or as_json) as bar:
        opening = partial(_opening, job, verbose=verbose)
        progress = TrainingProgress(bar, plan, None if inline else where, opening)
        with naming_checkpoint(where):
            summary = _trained(job, progress)
    if job.rendezvous is not None and not workers_of(plan)[job.rendezvous.rank].is_reporter:
        return
    if as_json:
        print_json(summary)
    elif not quiet:
        console = output()
        console.print(summary_table(plan, summary, console.width))
        for line in summary_lines(plan, summary):
            console.print(line)
        console.print(f"weights, metrics and summary are in {where}")


def _trained(job: TrainingJob, progress: TrainingProgress) -> RunSummary:
    if job.rendezvous is None:
        warn_of_memory(job.plan, job.settings)
    trainer = Trainer(
        job.plan,
        job.where,
        job.settings,
        callbacks=[progress],
        inline=job.inline,
        max_restarts=job.max_restarts,
        rendezvous=job.rendezvous,
    )
    return trainer.run() if job.resumed is None else trainer.resume(**job.resumed)


def _opening(job: TrainingJob, *, verbose: bool) -> Iterator[Any]:
    plan, settings, inline = job.plan, job.settings, job.inline
    workers = plan.workers
    how = "inline" if inline else f"{workers} process{'es' * (workers > 1)}"
    line = f"training {settings.task} with {plan.variant}, {how}, in {job.where}"
    if job.resumed is not None:
        line += f", from {place_of(job.where, job.resumed['at'])}"
    yield line
    one_host = job.rendezvous is None or job.rendezvous.launched.one_host
    yield from device_lines(plan, settings, workers, inline=inline, one_host=one_host)
    profiled = plan.profile.autocast or "off"
    if settings.autocast not in ("profiled", profiled):
        yield f"predictions are for autocast {profiled}; this is another"
    if verbose:
        yield stage_table(plan, output().width)
        yield operations(plan, 16)
