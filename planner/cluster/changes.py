"""Changes of a cluster as people ask for them, and the cluster after them: what if it had more?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from ...profiles.errors import UserError
from ...profiles.files import converted
from ...profiles.units import parse_bandwidth, parse_memory, parse_seconds
from .cluster import Cluster, Device, LinkBetween
from .links import MAX_DEVICES, AllReduce, Network

_EXAMPLE = "write it like bandwidth=2x,memory=24GiB"
_TIMES = re.compile(r"(\d+(?:\.\d*)?|\.\d+)[x×]")


@dataclass(frozen=True)
class Change:
    """What holds of a cluster besides what it was; fields are texts as people write them.

    "2x" is twice what there is, "24GiB" an amount. `bandwidth` and `latency` are of links in a
    machine, or of all where links between machines aren't others; what an all-reduce was measured
    to take changes as the links do that it went over. `memory` is that of every device, `speed` a
    factor.
    """

    bandwidth: str | None = None
    latency: str | None = None
    between_bandwidth: str | None = None
    between_latency: str | None = None
    memory: str | None = None
    speed: str | None = None
    devices: int | None = None


def parse_change(text: str, what: str = "what_if") -> Change:
    """``"bandwidth=2x,memory=24GiB"`` → all of it at once.

    Raises UserError naming `what` and the part that can't be read.
    """
    change = Change()
    for part in text.split(","):
        name, given, value = (each.strip() for each in part.partition("="))
        field = name.replace("-", "_")
        if not given or not value:
            raise UserError(f"{what} {text!r}: {_EXAMPLE}")
        if field not in Change.__dataclass_fields__:
            known = ", ".join(each.replace("_", "-") for each in Change.__dataclass_fields__)
            raise UserError(f"{what} {text!r}: {name!r} can't be changed; give {known}")
        if getattr(change, field) is not None:
            raise UserError(f"{what} {text!r}: {name} is given twice")
        number = int(value) if re.fullmatch(r"\d{1,6}", value) else 0
        if field == "devices" and not 1 <= number <= MAX_DEVICES:
            raise UserError(
                f"{what} {text!r}: devices: give a whole number from 1 to {MAX_DEVICES}"
            )
        if field == "speed" and not _TIMES.fullmatch(value):
            raise UserError(f"{what} {text!r}: speed: say how many times as fast, as in speed=2x")
        more: dict[str, Any] = {field: number if field == "devices" else value}
        change = replace(change, **more)
    return change


def changed(cluster: Cluster, change: Change, what: str = "what_if") -> Cluster:
    """The cluster after a change.

    More devices are as the last one is, in machines as full as the first; with fewer, those that
    are listed last go.

    Raises:
        UserError: names `what` for an amount that can't be read or is too large, for twice a
            memory that has no limit, and for links between machines where there is one machine.
    """
    devices = _so_many(cluster, change.devices or len(cluster.devices))
    devices = tuple(_device(device, change, what) for device in devices)
    near = partial(_network, bandwidth=change.bandwidth, latency=change.latency, what=f"{what}: ")
    far = partial(
        _network,
        bandwidth=change.between_bandwidth,
        latency=change.between_latency,
        what=f"{what}: between-",
    )
    network, between = near(cluster.network), cluster.between_machines
    if change.between_bandwidth or change.between_latency:
        if len({device.machine for device in devices}) < 2:
            raise UserError(
                f"{what}: between-bandwidth, between-latency: there is one machine; say "
                "--per-machine, or give each device its machine in the cluster file"
            )
        between = far(between or cluster.network)
    links = tuple(
        msgspec.structs.replace(
            each, network=(near if _inside(each, cluster) else far)(each.network)
        )
        for each in cluster.links
    )
    found = msgspec.structs.replace(
        cluster, devices=devices, network=network, between_machines=between, links=links
    )
    sums = tuple(_sum(each, cluster, found) for each in cluster.sums)
    several = isinstance(cluster.all_reduce, tuple)
    found = msgspec.structs.replace(found, all_reduce=sums if several else next(iter(sums), None))
    # As it would be read again from a plan.
    return converted(msgspec.to_builtins(found), Cluster, what)


def _so_many(cluster: Cluster, count: int) -> tuple[Device, ...]:
    devices = list(cluster.devices)
    first = sum(device.machine == devices[0].machine for device in devices)
    last = devices[-1]
    names = {device.name for device in devices}
    stem = last.name.rstrip("0123456789") or last.name
    while len(devices) < count:
        home = devices[-1].machine
        if home is not None and sum(device.machine == home for device in devices) >= first:
            home = _next_name(home.rstrip("0123456789"), {d.machine or "" for d in devices})
        name = _next_name(stem, names)
        names.add(name)
        devices.append(msgspec.structs.replace(last, name=name, machine=home))
    return tuple(devices[:count])


def _next_name(stem: str, taken: set[str]) -> str:
    number = len(taken)
    while f"{stem}{number}" in taken:
        number += 1
    return f"{stem}{number}"


def _device(device: Device, change: Change, what: str) -> Device:
    if change.memory is not None:
        if _TIMES.fullmatch(change.memory) and device.memory_bytes is None:
            raise UserError(f"{what}: memory={change.memory}: {device.name} has no limit of memory")
        memory = _amount(change.memory, device.memory_bytes or 0, parse_memory, f"{what}: memory")
        if memory < 1:
            raise UserError(f"{what}: memory: must be more than 0, not {change.memory!r}")
        device = msgspec.structs.replace(device, memory_bytes=int(memory))
    if change.speed is not None:
        factor = _factor(change.speed, f"{what}: speed")
        device = msgspec.structs.replace(device, speed=device.speed * factor)
    return device


def _network(network: Network, bandwidth: str | None, latency: str | None, what: str) -> Network:
    """`what`: stands before the field's name in messages."""
    if bandwidth is not None:
        now = network.bandwidth_bytes_per_s
        found = _amount(bandwidth, now, parse_bandwidth, f"{what}bandwidth")
        network = network.with_costs(found, network.latency_s)
    if latency is not None:
        found = _amount(latency, network.latency_s, parse_seconds, f"{what}latency")
        network = network.with_costs(network.bandwidth_bytes_per_s, found)
    return network


def _inside(link: LinkBetween, cluster: Cluster) -> bool:
    """Whether what it names is in one machine."""
    homes = [
        {device.machine for device in cluster.devices if end in (device.name, device.machine)}
        for end in link.between
    ]
    alone = len({device.machine for device in cluster.devices}) == 1
    return alone or (all(homes) and len(set().union(*homes)) == 1)


def _sum(measured: AllReduce, before: Cluster, after: Cluster) -> AllReduce:
    """An all-reduce after a change of the links that it went over."""
    was, now = before.network, after.network
    fullest = max(Counter(device.machine for device in before.devices).values())
    if measured.processes > fullest:
        # Its slowest steps were between machines.
        was, now = before.between_machines or was, after.between_machines or now
    faster = now.bandwidth_bytes_per_s / was.bandwidth_bytes_per_s
    later = now.latency_s / was.latency_s if was.latency_s else 1.0
    return measured.with_costs(measured.bandwidth_bytes_per_s * faster, measured.latency_s * later)


def _amount(text: str, now: float, parse: Callable[[str, str], float], what: str) -> float:
    return now * _factor(text, what) if _TIMES.fullmatch(text) else parse(text, what)


def _factor(text: str, what: str) -> float:
    factor = float(text[:-1])
    if not 1e-6 <= factor <= 1e6:
        raise UserError(f"{what}: {text!r} isn't between 1e-6 and 1e6 times what there is")
    return factor
