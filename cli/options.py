"""The options that describe a cluster: a file, or equal devices by flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..planner.cluster.cluster import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    MAX_DEVICES,
    Cluster,
    read_cluster,
    uniform_cluster,
)
from ..profiles.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT_DEVICES = 2

_FLAGS = (
    "devices",
    "memory",
    "bandwidth",
    "latency",
    "per_machine",
    "between_bandwidth",
    "between_latency",
    "half_duplex",
    "no_overlap",
    "cores",
)


def cluster_options(function: F) -> F:
    """--cluster, or --devices and what they and their links are like."""
    for option in reversed(
        (
            click.option(
                "--cluster", "cluster_path", metavar="TOML", help="Devices and links from a file."
            ),
            click.option(
                "--devices",
                type=click.IntRange(1, MAX_DEVICES),
                help=f"Number of equal devices.  [default: {_DEFAULT_DEVICES}]",
            ),
            click.option("--memory", help="Limit of each device, like 16GiB.  [default: none]"),
            click.option("--bandwidth", help=f"Between devices.  [default: {DEFAULT_BANDWIDTH}]"),
            click.option("--latency", help=f"Of a message.  [default: {DEFAULT_LATENCY}]"),
            click.option(
                "--per-machine",
                type=click.IntRange(1, MAX_DEVICES),
                help="Devices in a machine.  [default: all]",
            ),
            click.option("--between-bandwidth", help="Between machines.  [default: --bandwidth]"),
            click.option("--between-latency", help="Between machines.  [default: --latency]"),
            click.option(
                "--half-duplex", is_flag=True, help="A link carries one direction at a time."
            ),
            click.option(
                "--no-overlap", is_flag=True, help="Devices don't compute while they transfer."
            ),
            click.option(
                "--cores",
                type=click.IntRange(1, MAX_DEVICES),
                help="Devices of a machine that compute at once: they take turns.  [default: all]",
            ),
        )
    ):
        function = option(function)
    return function


def cluster_of(options: dict[str, Any]) -> Cluster:
    """The cluster that the options describe; takes them out of `options`. Raises UserError."""
    path = options.pop("cluster_path")
    given = {name: value for name in _FLAGS if (value := options.pop(name)) not in (None, False)}
    if path is not None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise UserError(f"--cluster: leave out {flag}; the file says it")
        return read_cluster(path)
    if "per_machine" not in given and {"between_bandwidth", "between_latency"} & set(given):
        raise UserError("--between-bandwidth, --between-latency: say --per-machine too")
    return uniform_cluster(
        given.get("devices", _DEFAULT_DEVICES),
        given.get("memory"),
        given.get("bandwidth", DEFAULT_BANDWIDTH),
        given.get("latency", DEFAULT_LATENCY),
        per_machine=given.get("per_machine"),
        between_bandwidth=given.get("between_bandwidth"),
        between_latency=given.get("between_latency"),
        half_duplex=given.get("half_duplex", False),
        overlap=not given.get("no_overlap", False),
        cores=given.get("cores"),
    )
