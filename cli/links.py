"""tp-profile --links: measure the links between processes → a cluster file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group

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
from .tables.layout import Column, counted, fitted, fixed

if TYPE_CHECKING:
    from ..runtime.calibration.links import LinkTimes
    from ..runtime.processes.rendezvous import Rendezvous


# Measured / fitted, above which a fit promises clearly too much.
_SLOW = 1.25


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted links, as --json prints them.

    Attributes:
        cluster: the file that was written.
        link: the median pair's times on one machine, the cluster's network; None: no machine has
            two processes.
        between: the same of pairs on two machines; None: there is one machine.
        pairs: each pair of neighbouring processes, (0, 1), (1, 2), ….
        all_reduce: over all processes; its bytes are those of the tensor that is summed.
        machines: name of each process's; empty: all are on one.
    """

    cluster: str
    processes: int
    device: str
    backend: str
    link: LinkFit | None
    pairs: tuple[LinkFit, ...]
    all_reduce: LinkFit
    between: LinkFit | None = None
    machines: tuple[str, ...] = ()

    def crosses(self, pair: int) -> bool:
        """Whether two neighbours are on two machines."""
        return bool(self.machines) and self.machines[pair] != self.machines[pair + 1]


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
        path: the cluster file to write.
        processes: how many local processes; neighbours are measured in pairs.
        device: "cpu" or "cuda".
        rendezvous: of the processes that torchrun or srun has started: it is measured between
            them, and the first of them writes and prints.

    Raises:
        UserError: a bad path, too few processes or GPUs.
        RunError: a worker died, got stuck, or failed. Nothing is written then.
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
    report = report_of(times, path)
    write_bytes(path, cluster_text(report).encode())
    if as_json:
        print_json(report)
    elif not quiet:
        command = f"tp-plan solve PROFILE --cluster {shlex.quote(path)}"
        for part in (*_tables(report, output().width), *_fit_lines(report)):
            output().print(part)
        output().print(f"wrote {path}; next: {command}", soft_wrap=True)


def report_of(times: LinkTimes, path: str) -> LinkReport:
    """Fit latency and bandwidth to measured times. Raises RunError as `fit_link`."""
    here = [a == b for a, b in pairwise(times.machines)] or [True] * len(times.pairs)
    near = [points for points, same in zip(times.pairs, here, strict=True) if same]
    far = [points for points, same in zip(times.pairs, here, strict=True) if not same]
    return LinkReport(
        cluster=path,
        processes=times.processes,
        device=times.device,
        backend=times.backend,
        link=fit_link(typical_pair(near)) if near else None,
        pairs=tuple(fit_link(points) for points in times.pairs),
        all_reduce=fit_link(times.all_reduce),
        between=fit_link(typical_pair(far)) if far else None,
        machines=times.machines,
    )


def cluster_text(report: LinkReport) -> str:
    """The cluster file: the fits as its fields, the points as comments."""
    all_reduce = report.all_reduce
    return measured_cluster(
        report.device,
        _network(report.link),
        AllReduce(
            processes=report.processes,
            bandwidth_bytes_per_s=all_reduce.bandwidth_bytes_per_s,
            latency_s=all_reduce.latency_s,
        ),
        _notes(report),
        report.machines,
        _network(report.between),
    )


def _network(fit: LinkFit | None) -> Network | None:
    if fit is None:
        return None
    return Network(bandwidth_bytes_per_s=fit.bandwidth_bytes_per_s, latency_s=fit.latency_s)


def _notes(report: LinkReport) -> list[str]:
    lines = [
        f"Measured by tp-profile --links: {_processes(report)}, by {report.backend}.",
        "Fitted: seconds = latency + bytes / bandwidth. Times are medians.",
    ]
    for fit, whose in _kinds(report):
        lines += ["", *_rows(f"Half a round trip between {whose}:", fit)]
    if report.link is None:
        lines += ["", "No machine had two processes: links in a machine were not measured."]
    lines += ["", *_rows(f"All-reduce over {report.processes} processes:", report.all_reduce)]
    if len(report.pairs) > 1:
        lines += ["", "Each pair of neighbours:"]
        lines += [
            f"  {k} and {k + 1}{' (two machines)' * report.crosses(k)}: {_formula(fit)}"
            for k, fit in enumerate(report.pairs)
        ]
    return lines


def _processes(report: LinkReport) -> str:
    where = "local processes"
    if report.machines:
        where = f"processes on {len(set(report.machines))} machines"
    return f"{report.processes} {where} on {report.device}"


def _kinds(report: LinkReport) -> list[tuple[LinkFit, str]]:
    """The fits of links that there are, and between whom."""
    found = []
    for fit, far in ((report.link, False), (report.between, True)):
        if fit is not None:
            count = sum(report.crosses(k) == far for k in range(len(report.pairs)))
            where = ""
            if report.machines:
                where = " on different machines" if far else " on one machine"
            median = f"neighbours{where} (the median of {counted(count, 'pair')})"
            found.append((fit, f"the two{where}" if count == len(report.pairs) == 1 else median))
    return found


def _rows(title: str, fit: LinkFit) -> list[str]:
    rows = [
        f"{p.message_bytes:>11}{p.seconds:>15.4g}{fit.seconds(p.message_bytes):>15.4g}{ratio:>19.2f}"
        for p, ratio in zip(fit.points, fit.ratios, strict=True)
    ]
    return [title, f"{'bytes':>11}{'seconds':>15}{'fitted':>15}{'measured/fitted':>19}", *rows]


def _tables(report: LinkReport, width: int) -> list[Group]:
    """For each kind of link one, the all-reduce beside the first."""
    tables = []
    several = len(report.pairs) > 1
    for k, (fit, whose) in enumerate(_kinds(report)):
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
    names = (
        (report.link, "link", "network"),
        (report.between, "between machines", "between_machines"),
    )
    lines = []
    for fit, name, field in names:
        if fit is not None:
            lines.append(f"{name}: {_formula(fit)}; {_span(fit.ratios)}")
            lines += _of_large_messages(fit, field)
    lines.append(
        f"all-reduce of {report.processes}: {_formula(report.all_reduce)}; "
        f"{_span(report.all_reduce.ratios)}"
    )
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


def _of_large_messages(fit: LinkFit, where: str) -> list[str]:
    """A line where the largest messages take clearly longer than fitted: what to write instead."""
    slow = list(takewhile(lambda k: fit.ratios[k] > _SLOW, reversed(range(len(fit.points)))))
    if not slow:
        return []
    first = fit.points[slow[-1]]
    bandwidth = write_bandwidth(first.message_bytes / first.seconds)
    return [
        f"  messages from {format_bytes(first.message_bytes)} on take up to "
        f"{max(fit.ratios[k] for k in slow):.1f} × that; for plans of such, [{where}] "
        f'bandwidth = "{bandwidth}"'
    ]


def _largest_s(fit: LinkFit) -> float:
    return fit.points[-1].seconds
