"""tp-run --check and --dry-run, and what is checked of devices and memory before training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from ...profiles.errors import UserError
from ...profiles.units import format_bytes
from ...runtime.verify.check import CheckReport
from ...runtime.verify.compare import Difference
from ...runtime.verify.findings import DryRun
from ..errors import log, output, print_json
from ..progress import Bar
from ..tables.layout import compact_table, counted
from ..tables.plan import warn_if_edited

if TYPE_CHECKING:
    from ...planner.plan import Plan
    from ...runtime.processes.rendezvous import Rendezvous
    from ...runtime.settings import RunSettings


def device_lines(
    plan: Plan, settings: RunSettings, workers: int, *, inline: bool = False, one_host: bool = True
) -> list[str]:
    """Lines on the devices that a run of so many workers computes on, printed before it trains.
    `inline`: all in this process; `one_host`: all on this one."""
    from ...runtime.communication.transport import between_processes, transport_of
    from ...runtime.prepare.devices import device_kind, gpu_count, turns_warning, usable_cores

    kind, lines = device_kind(plan, settings), []
    if kind == "cpu" and one_host and not inline:
        turns = turns_warning(workers, usable_cores(), "core", settings.threads)
        if turns is not None:
            lines.append(turns)
    if kind == "cuda":
        gpus = gpu_count()
        if inline:
            lines.append("all stages compute on the first GPU")
        elif one_host:
            varying = plan.profile.varying is not msgspec.UNSET
            how = transport_of(("", str(rank % gpus)) for rank in range(workers))
            how = between_processes(how, settings.transport, one_host=True, varying=varying)
            lines.append(
                f"stages compute on {min(workers, gpus)} of {gpus} GPUs; messages by {how}"
            )
            turns = turns_warning(workers, gpus, "GPU")
            if turns is not None:
                lines.append(turns)
        else:
            lines.append("stages compute on GPUs: local rank r on cuda:(r mod GPUs) of its host")
    if plan.profile.device != kind:
        lines.append(
            f"predictions are for {plan.profile.device}; this runs on "
            f"{'the CPU' if kind == 'cpu' else 'GPUs'}"
        )
    return lines


def warn_of_memory(plan: Plan, settings: RunSettings) -> None:
    """Warn where the plan needs more memory than is free. On GPUs the workers find out."""
    from ...runtime.communication.transport import free_bytes, shortage_here
    from ...runtime.prepare.devices import CPU, device_kind

    if device_kind(plan, settings) != "cpu":
        return
    stages = zip(plan.stages, plan.predicted.stages, strict=True)
    planned = [len(stage.devices) * predicted.memory_bytes for stage, predicted in stages]
    warning = shortage_here(planned, free_bytes(CPU))
    if warning is not None:
        log(f"warning: {warning}")


def show_dry_run(
    plan: Plan,
    plan_path: str,
    settings: RunSettings,
    run_dir: str,
    rendezvous: Rendezvous | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check and print what a run needs. Raises UserError when there is a problem."""
    from ...runtime.verify.dry_run import dry_run

    found = dry_run(plan, settings, run_dir, rendezvous)
    if found is None:
        return
    warn_if_edited(plan, plan_path)
    if as_json:
        print_json(found)
    elif not quiet:
        cuts = [cut_table(found)] if found.cuts else []
        for part in (worker_table(found), *cuts, *dry_run_lines(found)):
            output().print(part)
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
    """Compare the run with plain training. Exits with code 1 when something differs."""
    from ...runtime.records.progress import Observer
    from ...runtime.verify.check import check

    class Phases(Observer):
        """Shows the phases before the training that is compared."""

        def starting(self, what: str) -> None:
            bar.doing(what)

        def mini_batch(self, epoch: int, done: int, of: int, *more: object) -> None:
            bar("training", done, of)

    with Bar("checking", quiet=quiet or as_json) as bar:
        report = check(plan, settings, run_dir=run_dir, inline=inline, observer=Phases())
    if as_json:
        print_json(report)
    elif not quiet:
        for part in (check_table(report), *check_lines(report)):
            output().print(part)
    if report.verdict != "same":
        sys.exit(1)


# Report of a check --------------------------------------------------------------------------------


def check_table(report: CheckReport) -> Table:
    """Table of the differences: a row for each figure and each training compared with."""
    table = compact_table(
        f"{report.variant}, {report.mode}, "
        f"{counted(report.mini_batches, 'mini-batch')} of {report.dtype}: "
        "largest differences",
        ["from", "figure", "where"],
        ["absolute", "relative", "allowed", ""],
    )
    for against in report.against:
        label = against.what
        for difference in against.differences:
            counts = against.counts and difference.counts
            table.add_row(
                label,
                difference.what,
                _where(difference),
                f"{difference.absolute:.1e}",
                f"{difference.relative:.1e}",
                f"{difference.allowed:.1e}" if counts else "-",
                ("same" if difference.same else "differs") if counts else "-",
            )
            label = ""
    return table


def check_lines(report: CheckReport) -> list[str]:
    """Notes and verdict of a check."""
    lines = [f"note: {note}" for note in report.notes]
    missing = sorted({n for a in report.against for d in a.differences for n in d.missing})
    if missing:
        shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        lines.append(f"gradients on one side only: {shown}")
    names = " and ".join(against.what for against in report.against if against.counts)
    how = "in one process, without a pipeline" if report.plain else "in one process"
    lines.append(
        f"{report.verdict}: {names} {how}; allowed for rounding in {report.dtype}: "
        f"{report.tolerance:g} of a tensor's largest number"
    )
    return lines


def _where(difference: Difference) -> str:
    parts = [difference.name] if difference.name else []
    if difference.mini_batch is not None:
        parts.append(f"mini-batch {difference.mini_batch}")
    return ", ".join(parts)


# Report of a dry run ------------------------------------------------------------------------------

MOST_CUTS = 12
"""Rows shown of the tensors that cross cuts."""


def worker_table(found: DryRun) -> Table:
    """Table of the workers: devices and memory."""
    table = compact_table(
        f"{found.variant}: {counted(found.world_size, 'worker')}",
        ["rank", "worker", "device", "on", "host"],
        ["memory planned", "limit"],
    )
    for worker in found.workers:
        limit = "-" if worker.limit_bytes is None else format_bytes(worker.limit_bytes)
        table.add_row(
            str(worker.rank),
            worker.name,
            worker.device,
            worker.computes_on,
            worker.host,
            format_bytes(worker.planned_bytes),
            limit,
        )
    return table


def cut_table(found: DryRun) -> Table:
    """Table of the messages of one micro-batch: a row per tensor that crosses a cut."""
    table = compact_table(
        "one micro-batch over every cut", ["tensor", "from", "to", "shape"], ["bytes"]
    )
    for cut in found.cuts[:MOST_CUTS]:
        shape = f"{list(cut.shape)} {cut.dtype}"
        table.add_row(cut.tensor, cut.source, cut.target, shape, format_bytes(cut.bytes))
    return table


def dry_run_lines(found: DryRun) -> list[str]:
    """Hosts, transport, warnings and verdict of a dry run."""
    lines = []
    more = len(found.cuts) - MOST_CUTS
    if more > 0:
        lines.append(f"and {more} more messages")
    lines.append(f"task {found.task}, model {found.fingerprint}: the plan's own")
    for host in found.hosts:
        lines.append(
            f"{host.host} ({host.address}): {format_bytes(host.free_bytes)} free for "
            f"{format_bytes(host.planned_bytes)} planned; {host.run_dir} can be written"
        )
    for gpu in found.gpus:
        lines.append(
            f"{gpu.gpu} of {gpu.host}: {format_bytes(gpu.free_bytes)} free for "
            f"{format_bytes(gpu.planned_bytes)} planned"
        )
    lines.append(f"messages go by {found.transport}")
    lines.append(
        f"the workers meet at {found.meets_at}, and a message went over every cut"
        if found.meets_at
        else "workers are started on this host, at free ports of 127.0.0.1"
    )
    lines += [f"warning: {warning}" for warning in found.warnings]
    lines += [f"problem: {problem}" for problem in found.problems]
    trained = counted(found.mini_batches, "mini-batch")
    ready = "not ready" if found.problems else "ready"
    lines.append(f"{ready} to train {trained}; nothing was written")
    return lines
