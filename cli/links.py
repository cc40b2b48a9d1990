"""tp-profile --links: measure the links between processes → a cluster file."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Group

from ..planner.cluster.cluster_toml import write_bandwidth
from ..planner.cluster.link_fit import LinkFit
from ..profiles.files import Kind, check_output
from ..profiles.units import format_bytes, format_seconds
from ..runtime.calibration.link_report import (
    LinkReport,
    formula,
    kinds_of,
    write_links,
    write_published_links,
)
from .errors import output, print_json
from .progress import Bar
from .tables.layout import Column, fitted, fixed

if TYPE_CHECKING:
    from ..runtime.processes.rendezvous import Rendezvous


def links_command(
    path: str,
    *,
    processes: int,
    device: str,
    quiet: bool,
    as_json: bool,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Measure, write the cluster file, and print what was found.

    Args:
        processes: how many local ones; neighbours are measured in pairs.
        rendezvous: of the processes that torchrun or srun has started: it is measured between
            them, and the first of them writes and prints.

    Raises UserError: a bad path, too few processes or GPUs; RunError: a worker died, got stuck, or
    failed. Nothing is written then.
    """
    follows = rendezvous is not None and rendezvous.rank > 0
    if not follows:
        check_output(path, Kind.CLUSTER)
    with Bar("measuring links", quiet=quiet or as_json or follows) as bar:
        # Torch takes its time; bad paths needn't wait for it.
        if rendezvous is None:
            from ..runtime.calibration.links import measure_links

            times = measure_links(processes, device, progress=bar)
        else:
            from ..runtime.calibration.link_worker import measure_here

            found = measure_here(rendezvous, device, bar)
            if found is None:
                return
            times = found
    report = write_links(times, path)
    if as_json:
        print_json(report)
    elif not quiet:
        command = f"tp-plan solve PROFILE --cluster {shlex.quote(path)}"
        for part in (*_tables(report, output().width), *_fit_lines(report)):
            output().print(part)
        output().print(f"wrote {path}; next: {command}", soft_wrap=True)


def read_links(target: str, machines: str, path: str, *, as_json: bool, quiet: bool) -> None:
    """A cluster file of machines whose bandwidths others publish. Raises FileError and UserError,
    as `write_published_links`."""
    cluster = write_published_links(target, machines, path)
    if as_json:
        print_json(cluster)
    elif not quiet:
        command = f"tp-plan solve PROFILE --cluster {shlex.quote(path)}"
        output().print(f"wrote {path}; next: {command}", soft_wrap=True)


def _tables(report: LinkReport, width: int) -> list[Group]:
    """For each kind of link one, the all-reduce beside the first."""
    tables = []
    several = len(report.pairs) > 1
    for k, (fit, whose) in enumerate(kinds_of(report)):
        title = f"{report.processes} processes on {report.device}, by {report.backend}"
        title = f"{title}; messages between {whose}" if several else title
        sizes = fixed("size", [format_bytes(one.message_bytes) for one in fit.points])
        rates = [write_bandwidth(one.message_bytes / one.seconds) for one in fit.points]
        trips = _measured("half trip", fit)
        columns = [*trips[:2], fixed("bandwidth", rates), *trips[2:]]
        columns += [] if k else _measured("all-reduce", report.all_reduce)
        tables.append(fitted(f"messages between {whose}" if k else title, sizes, columns, width))
    return tables


def _measured(name: str, fit: LinkFit) -> list[Column]:
    """Columns of times, how sure they are, and what of them is fitted."""
    return [
        fixed(name, [format_seconds(one.seconds) for one in fit.points]),
        fixed("±", [f"{one.error:.0%}" for one in fit.points]),
        fixed("meas./fit", [f"{ratio:.2f}" for ratio in fit.ratios]),
    ]


def _fit_lines(report: LinkReport) -> list[str]:
    lines = []
    for fit, name in ((report.link, "link"), (report.between, "between machines")):
        if fit is not None:
            lines.append(f"{name}: {formula(fit)}; {_span(fit)}")
    lines.append(
        f"all-reduce of {report.processes}: {formula(report.all_reduce)}; "
        f"{_span(report.all_reduce)}"
    )
    if len(report.pairs) > 1:
        slowest = max(range(len(report.pairs)), key=lambda k: report.pairs[k].points[-1].seconds)
        lines.append(f"slowest pair, {slowest} and {slowest + 1}: {formula(report.pairs[slowest])}")
    return lines


def _span(fit: LinkFit) -> str:
    span = f"measured / fitted {min(fit.ratios):.2f} to {max(fit.ratios):.2f}"
    return f"{span}: the file has the times by size" if fit.is_off else span
