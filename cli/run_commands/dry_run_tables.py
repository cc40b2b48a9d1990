"""What a dry run found, as people read it."""

from __future__ import annotations

from rich.table import Table

from ...profiles.units import format_bytes
from ...runtime.verify.dry_run import DryRun
from ..tables.layout import compact_table, counted

MOST_CUTS = 12
"""Rows shown of the tensors that cross cuts."""


def worker_table(found: DryRun) -> Table:
    """One row per worker."""
    table = compact_table(
        f"{found.variant}: {counted(found.world_size, 'worker', 'workers')}",
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
    """One row per tensor that crosses a cut."""
    table = compact_table(
        "one micro-batch over every cut", ["tensor", "from", "to", "shape"], ["bytes"]
    )
    for cut in found.cuts[:MOST_CUTS]:
        shape = f"{list(cut.shape)} {cut.dtype}"
        table.add_row(cut.tensor, cut.source, cut.target, shape, format_bytes(cut.bytes))
    return table


def dry_run_lines(found: DryRun) -> list[str]:
    """The rest, and the verdict."""
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
    trained = counted(found.mini_batches, "mini-batch", "mini-batches")
    ready = "not ready" if found.problems else "ready"
    lines.append(f"{ready} to train {trained}; nothing was written")
    return lines
