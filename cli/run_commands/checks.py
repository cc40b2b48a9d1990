"""What tp-run does instead of training: --check and --dry-run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ...profiles.errors import UserError
from ..errors import output, print_json, tell
from ..progress import Bar

if TYPE_CHECKING:
    from ...planner.plan import Plan
    from ...runtime.processes.rendezvous import Meeting
    from ...runtime.settings import RunSettings


def device_lines(
    plan: Plan, settings: RunSettings, workers: int, *, inline: bool = False, one_host: bool = True
) -> list[str]:
    """What a run says of its devices before it trains.

    Args:
        workers: of the whole run.
        inline: all of them in this process.
        one_host: all of them on this one.
    """
    from ...runtime.communication.transport import transport_here
    from ...runtime.prepare.devices import device_kind, gpu_count
    from ...runtime.verify.dry_run import unplanned_turns, usable_cores

    kind, lines = device_kind(plan, settings), []
    if kind == "cpu" and one_host and not inline:
        cores, planned = usable_cores(), plan.cluster.cores
        turns = unplanned_turns(workers, settings.threads, cores, planned)
        if turns is not None:
            lines.append(turns)
    if kind == "cuda":
        gpus = gpu_count()
        if inline:
            lines.append("all stages compute on the first GPU")
        elif one_host:
            how = transport_here(kind, workers, gpus)
            lines.append(
                f"stages compute on {min(workers, gpus)} of {gpus} GPUs; messages by {how}"
            )
        else:
            lines.append("stages compute on GPUs: local rank r on cuda:(r mod GPUs) of its host")
    if plan.profile.device != kind:
        lines.append(
            f"predictions are for {plan.profile.device}; this runs on "
            f"{'the CPU' if kind == 'cpu' else 'GPUs'}"
        )
    return lines


def warn_of_memory(plan: Plan, settings: RunSettings) -> None:
    """Say so where the plan needs more memory than is free. On GPUs the workers find out."""
    from ...runtime.communication.transport import free_bytes, shortage_here
    from ...runtime.prepare.devices import CPU, device_kind

    if device_kind(plan, settings) != "cpu":
        return
    stages = zip(plan.stages, plan.predicted.stages, strict=True)
    planned = [len(stage.devices) * predicted.memory_bytes for stage, predicted in stages]
    warning = shortage_here(planned, free_bytes(CPU))
    if warning is not None:
        tell(f"warning: {warning}")


def show_dry_run(
    plan: Plan,
    settings: RunSettings,
    run_dir: str,
    meeting: Meeting | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what a run needs. Ends with code 2 when there is a problem."""
    from ...runtime.verify.dry_run import dry_run
    from .dry_run_tables import cut_table, dry_run_lines, worker_table

    found = dry_run(plan, settings, run_dir, meeting)
    if found is None:
        return
    if as_json:
        print_json(found)
    elif not quiet:
        console = output()
        console.print(worker_table(found))
        if found.cuts:
            console.print(cut_table(found))
        for line in dry_run_lines(found):
            console.print(line, markup=False)
    if found.problems:
        raise UserError(f"not ready: {'; '.join(found.problems)}")


def show_check(
    plan: Plan,
    settings: RunSettings,
    run_dir: str | None,
    *,
    inline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Hold the run against plain training. Ends with code 1 when something differs."""
    from ...runtime.records.progress import Silent
    from ...runtime.verify.check import check
    from .check_tables import check_lines, check_table

    class Phases(Silent):
        """Says what is done before the training that is held against another."""

        def starting(self, what: str) -> None:
            bar.doing(what)

        def mini_batch(self, epoch: int, done: int, of: int, loss: float) -> None:
            bar("training", done, of)

    with Bar("checking", quiet=quiet or as_json) as bar:
        report = check(plan, settings, run_dir=run_dir, inline=inline, observer=Phases())
    if as_json:
        print_json(report)
    elif not quiet:
        console = output()
        console.print(check_table(report))
        for line in check_lines(report):
            console.print(line, markup=False)
    if report.verdict != "same":
        sys.exit(1)
