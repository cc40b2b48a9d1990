"""The options that describe a cluster: a file, or equal devices by flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from ..runtime.settings import OptimizerChoice


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


# tp-run's options that name an optimizer --------------------------------------------------------


def optimizer_choice(name: str | None, options: dict[str, Any]) -> OptimizerChoice | None:
    """The optimizer that is named, with what is given of its options. Raises UserError."""
    from ..runtime.settings import OptimizerChoice

    given = {option: value for option, value in options.items() if value is not None}
    if name is None:
        if given:
            extra = ", ".join(f"--{option.replace('_', '-')}" for option in given)
            raise UserError(f"{extra}: name the --optimizer too")
        return None
    if "lr" not in given:
        raise UserError(f"--optimizer {name}: give its --lr too")
    return OptimizerChoice(name=name, **given)


def betas_in(text: str | None) -> tuple[float, float] | None:
    """``"0.9,0.999"`` → (0.9, 0.999). Raises UserError."""
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise UserError(f"--betas {text!r}: give two numbers from 0 to 1, like 0.9,0.999") from None
    return first, second
