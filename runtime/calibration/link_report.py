"""Measured links, ours and others': what was fitted to them, and the cluster file that says it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from ...planner.cluster.cluster import Cluster, Device
from ...planner.cluster.cluster_toml import cluster_toml, write_bandwidth, write_latency
from ...planner.cluster.link_fit import LinkFit, fit_link, typical_pair
from ...planner.cluster.links import AllReduce, Network
from ...planner.cluster.sailor_links import cluster_of_bandwidths
from ...profiles.files import Kind, check_output, write_bytes

if TYPE_CHECKING:
    from .links import LinkTimes


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


def write_published_links(target: str, machines: str, path: str) -> Cluster:
    """Write the cluster file of machines whose bandwidths others publish.

    Raises UserError for a bad path, and as `cluster_of_bandwidths`.
    """
    check_output(path, Kind.CLUSTER)
    cluster = cluster_of_bandwidths(target, machines)
    note = f"{machines}, of {target}: polynomials, by size."
    write_bytes(path, cluster_toml(cluster, [note]).encode())
    return cluster


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


def write_links(times: LinkTimes, path: str) -> LinkReport:
    """Write what was measured as a cluster file. Raises RunError as `fit_link`, and FileError."""
    report = report_of(times, path)
    write_bytes(path, cluster_text(report).encode())
    return report


def cluster_text(report: LinkReport) -> str:
    """The cluster file: the fits as its fields, or the times where they are off; all points as
    comments."""
    machines = report.machines or (None,) * report.processes
    cluster = Cluster(
        devices=tuple(
            Device(name=f"{report.device}{k}", machine=home) for k, home in enumerate(machines)
        ),
        network=Network(**(report.link or report.pairs[0]).costs),
        all_reduce=AllReduce(processes=report.processes, **report.all_reduce.costs),
        between_machines=None if report.between is None else Network(**report.between.costs),
    )
    return cluster_toml(cluster, _notes(report))


def _notes(report: LinkReport) -> list[str]:
    machines = len(set(report.machines))
    where = f"processes on {machines} machines" if machines else "local processes"
    lines = [
        f"Measured by tp-profile --links: {report.processes} {where} on {report.device}, by "
        f"{report.backend}.",
        "Fitted: seconds = latency + bytes / bandwidth. Times are medians.",
    ]
    for fit, whose in kinds_of(report):
        lines += ["", *_rows(f"Half a round trip between {whose}:", fit)]
    if report.link is None:
        lines += ["", "No machine had two processes: links in a machine were not measured."]
    lines += ["", *_rows(f"All-reduce over {report.processes} processes:", report.all_reduce)]
    if len(report.pairs) > 1:
        lines += ["", "Each pair of neighbours:"]
        lines += [
            f"  {k} and {k + 1}{' (two machines)' * report.crosses(k)}: {formula(fit)}"
            for k, fit in enumerate(report.pairs)
        ]
    return lines


def kinds_of(report: LinkReport) -> list[tuple[LinkFit, str]]:
    """The fits of links that there are, and between whom."""
    found = []
    for fit, far in ((report.link, False), (report.between, True)):
        if fit is not None:
            count = sum(report.crosses(k) == far for k in range(len(report.pairs)))
            where = ""
            if report.machines:
                where = " on different machines" if far else " on one machine"
            pairs = f"{count} pair{'s' * (count != 1)}"
            median = f"neighbours{where} (the median of {pairs})"
            found.append((fit, f"the two{where}" if count == len(report.pairs) == 1 else median))
    return found


def _rows(title: str, fit: LinkFit) -> list[str]:
    rows = [
        f"{p.message_bytes:>11}{p.seconds:>15.4g}{fit.seconds(p.message_bytes):>15.4g}{ratio:>19.2f}"
        for p, ratio in zip(fit.points, fit.ratios, strict=True)
    ]
    return [title, f"{'bytes':>11}{'seconds':>15}{'fitted':>15}{'measured/fitted':>19}", *rows]


def formula(fit: LinkFit) -> str:
    latency, bandwidth = fit.latency_s, fit.bandwidth_bytes_per_s
    return f"{write_latency(latency)} + bytes / {write_bandwidth(bandwidth)}"
