"""tp-profile --links: measure the links between local processes → a cluster file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from ..planner.cluster.cluster import (
    AllReduce,
    Network,
    measured_cluster,
    write_bandwidth,
    write_latency,
)
from ..planner.cluster.link_fit import LinkFit, fit_link, typical_pair
from ..profiles.files import Kind, check_output, write_bytes
from ..profiles.units import format_bytes, format_seconds
from .errors import output, print_json
from .progress import Bar
from .tables.layout import compact_table, counted

if TYPE_CHECKING:
    from ..runtime.calibration.links import LinkTimes


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted links, as --json prints them.

    Attributes:
        cluster: the file that was written.
        link: the median pair's times; the cluster's network.
        pairs: each pair of neighbouring processes, (0, 1), (1, 2), ….
        all_reduce: over all processes; its bytes are those of the tensor that is summed.
    """

    cluster: str
    processes: int
    device: str
    backend: str
    link: LinkFit
    pairs: tuple[LinkFit, ...]
    all_reduce: LinkFit


def links_command(path: str, *, processes: int, device: str, quiet: bool, as_json: bool) -> None:
    """Measure, write the cluster file, and print what was found.

    Args:
        path: the cluster file to write.
        processes: how many local processes; neighbours are measured in pairs.
        device: "cpu" or "cuda".

    Raises:
        UserError: a bad path, too few processes or GPUs.
        RunError: a worker died, got stuck, or failed. Nothing is written then.
    """
    check_output(path, Kind.CLUSTER)
    # Torch takes its time; bad paths needn't wait for it.
    from ..runtime.calibration.links import measure_links

    with Bar("measuring links", quiet=quiet or as_json) as bar:
        times = measure_links(processes, device, progress=bar)
    report = report_of(times, path)
    write_bytes(path, cluster_text(report).encode())
    if as_json:
        print_json(report)
    elif not quiet:
        command = f"tp-plan solve PROFILE --cluster {shlex.quote(path)}"
        for part in (_table(report), *_fit_lines(report)):
            output().print(part)
        output().print(f"wrote {path}; next: {command}", soft_wrap=True)


def report_of(times: LinkTimes, path: str) -> LinkReport:
    """Fit latency and bandwidth to measured times. Raises RunError as `fit_link`."""
    return LinkReport(
        cluster=path,
        processes=times.processes,
        device=times.device,
        backend=times.backend,
        link=fit_link(typical_pair(times.pairs)),
        pairs=tuple(fit_link(points) for points in times.pairs),
        all_reduce=fit_link(times.all_reduce),
    )


def cluster_text(report: LinkReport) -> str:
    """The cluster file: the fits as its fields, the points as comments."""
    link, all_reduce = report.link, report.all_reduce
    return measured_cluster(
        report.device,
        Network(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
        ),
        AllReduce(
            processes=report.processes,
            bandwidth_bytes_per_s=all_reduce.bandwidth_bytes_per_s,
            latency_s=all_reduce.latency_s,
        ),
        _notes(report),
    )


def _notes(report: LinkReport) -> list[str]:
    lines = [
        f"Measured by tp-profile --links: {report.processes} local processes on "
        f"{report.device}, by {report.backend}.",
        "Fitted: seconds = latency + bytes / bandwidth. Times are medians.",
        "",
        *_rows(f"Half a round trip between {_neighbours(report)}:", report.link),
        "",
        *_rows(f"All-reduce over {report.processes} processes:", report.all_reduce),
    ]
    if len(report.pairs) > 1:
        lines += ["", "Each pair of neighbours:"]
        lines += [f"  {k} and {k + 1}: {_formula(fit)}" for k, fit in enumerate(report.pairs)]
    return lines


def _rows(title: str, fit: LinkFit) -> list[str]:
    rows = [
        f"{p.message_bytes:>11}{p.seconds:>15.4g}{fit.seconds(p.message_bytes):>15.4g}{ratio:>19.2f}"
        for p, ratio in zip(fit.points, fit.ratios, strict=True)
    ]
    return [title, f"{'bytes':>11}{'seconds':>15}{'fitted':>15}{'measured/fitted':>19}", *rows]


def _table(report: LinkReport) -> Table:
    title = f"{report.processes} processes on {report.device}, by {report.backend}"
    if len(report.pairs) > 1:
        title += f"; messages between {_neighbours(report)}"
    table = compact_table(
        title,
        [],
        [
            "size",
            "half trip",
            "±",
            "bandwidth",
            "meas./fit",
            "all-reduce",
            "±",
            "meas./fit",
        ],
    )
    link, all_reduce = report.link, report.all_reduce
    for k, (one, of_all) in enumerate(zip(link.points, all_reduce.points, strict=True)):
        table.add_row(
            format_bytes(one.message_bytes),
            format_seconds(one.seconds),
            f"{one.error:.0%}",
            write_bandwidth(one.message_bytes / one.seconds),
            f"{link.ratios[k]:.2f}",
            format_seconds(of_all.seconds),
            f"{of_all.error:.0%}",
            f"{all_reduce.ratios[k]:.2f}",
        )
    return table


def _fit_lines(report: LinkReport) -> list[str]:
    lines = [
        f"link: {_formula(report.link)}; {_span(report.link.ratios)}",
        f"all-reduce of {report.processes}: {_formula(report.all_reduce)}; "
        f"{_span(report.all_reduce.ratios)}",
    ]
    if len(report.pairs) > 1:
        slowest = max(range(len(report.pairs)), key=lambda k: _largest_s(report.pairs[k]))
        lines.append(
            f"slowest pair, {slowest} and {slowest + 1}: {_formula(report.pairs[slowest])}"
        )
    return lines


def _formula(fit: LinkFit) -> str:
    latency, bandwidth = fit.latency_s, fit.bandwidth_bytes_per_s
    return f"{write_latency(latency)} + bytes / {write_bandwidth(bandwidth)}"


def _span(ratios: Sequence[float]) -> str:
    return f"measured / fitted {min(ratios):.2f} to {max(ratios):.2f}"


def _largest_s(fit: LinkFit) -> float:
    return fit.points[-1].seconds


def _neighbours(report: LinkReport) -> str:
    if len(report.pairs) == 1:
        return "the two"
    return f"neighbours (the median of {counted(len(report.pairs), 'pair', 'pairs')})"
