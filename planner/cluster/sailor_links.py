"""Bandwidths that Sailor's authors publish (SOSP'25), as a cluster: of machines that are named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from ...profiles.errors import FileError, UserError
from ...profiles.files import read_limited
from .cluster import Cluster, Device, LinkBetween
from .links import MAX_DEVICES, Network, costs_by_size

INSIDE = "intra_node_bandwidths.json"
"""Of devices in a machine, beside the file of those between machines."""

_MOST_BYTES = 64 * 2**20
_MEGABYTE, _SIZES = 1e6, range(-6, 11)
"""What the polynomials' logarithms to base 2 are of, and where they are taken."""

_PART = re.compile(
    r"(?P<gpu>[^:@+]+):(?P<count>\d{1,6})(?:x(?P<machines>\d{1,6}))?(?:@(?P<zone>[^:@+]+))?"
)
_HOW = (
    "write GPU:N, GPU:NxM or GPU:NxM@ZONE, N devices in each of M machines, and + between several"
)


@dataclass(frozen=True)
class _Machines:
    gpu: str
    count: int
    machines: int
    zone: str

    @property
    def group(self) -> str:
        return f"{self.zone} {self.gpu}"


def cluster_of_bandwidths(path: str, machines: str) -> Cluster:
    """The cluster of some machines.

    Args:
        path: zone → GPU → ranks → zone → GPU → ranks → [coefficients, most]: of GB/s by the
            logarithm of megabytes, and bytes per second.
        machines: as ``GH-96:4x2@us-central1-a``.

    Raises FileError and UserError naming the file, and what isn't there.
    """
    table = _read(Path(path))
    asked = _asked(machines, table, path)
    beside = Path(path).with_name(INSIDE)
    inside = _read(beside) if beside.exists() else {}
    devices, links, networks = list[Device](), list[LinkBetween](), dict[str, Network]()
    for part in asked:
        for _ in range(part.machines):
            home = f"machine{len({device.machine for device in devices})}"
            names = (f"{part.gpu}-{len(devices) + k}" for k in range(part.count))
            devices += [Device(name=name, machine=home, group=part.group) for name in names]
            if part.count > 1:
                networks[home] = _inside(inside, part, str(beside))
    if len(devices) > MAX_DEVICES:
        raise UserError(f"--machines: {len(devices)} devices; {MAX_DEVICES} at most")
    first = next(iter(networks.values()), None)
    links += [
        LinkBetween(between=(home, home), network=network)
        for home, network in networks.items()
        if network != first
    ]
    whole = {part.group: part for part in asked}
    for a, b in combinations_with_replacement(whole.values(), 2):
        if a is not b or sum(part.machines for part in asked if part.group == a.group) > 1:
            network = _network(_between(table, a, b, path), f"{path}: {a.group}, {b.group}")
            links.append(LinkBetween(between=(a.group, b.group), network=network))
    if first is None and not links:
        raise UserError(f"--machines {machines}: one device has no links")
    return Cluster(devices=tuple(devices), network=first or links[0].network, links=tuple(links))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_limited(path, "give a file of bandwidths", most=_MOST_BYTES))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise FileError(f"{path}: isn't a file of bandwidths by zone and GPU")
    return found


def _asked(text: str, table: Mapping[str, Any], path: str) -> list[_Machines]:
    found = []
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None or not int(match["count"]) or not int(match["machines"] or 1):
            raise UserError(f"--machines {text!r}: {_HOW}")
        zones = [zone for zone, gpus in table.items() if match["gpu"] in gpus]
        zone = match["zone"] or next(iter(zones), "")
        if zone not in zones:
            known = sorted({gpu for gpus in table.values() for gpu in gpus})
            raise UserError(
                f"--machines {text!r}: {path} has no {match['gpu']}"
                f"{f' in {zone}' * bool(zone)}; zones: {', '.join(table)}; GPUs: {', '.join(known)}"
            )
        sizes = int(match["count"]), int(match["machines"] or 1)
        found.append(_Machines(match["gpu"], *sizes, zone))
    return found


def _between(table: Mapping[str, Any], a: _Machines, b: _Machines, path: str) -> object:
    """Of one device in each of two machines."""
    for one, other in ((a, b), (b, a)):
        found: Any = table
        for key in (one.zone, one.gpu, "1", other.zone, other.gpu, "1"):
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None:
            return found
    raise UserError(f"--machines: {path} has no bandwidth between {a.group} and {b.group}")


def _inside(table: Mapping[str, Any], part: _Machines, path: str) -> Network:
    counts = table.get(part.gpu, {})
    # Of pairs; of more devices, where pairs weren't measured, the fewest.
    count = min(map(str, counts), key=lambda n: (len(n), n), default=None)
    if count is None:
        raise UserError(
            f"--machines: {path} has no bandwidth between several {part.gpu} of a machine; give "
            f"{part.gpu}:1"
        )
    return _network(counts[count], f"{path}: {part.gpu}")


def _network(entry: Any, where: str) -> Network:
    """Raises FileError for what is no polynomial, or gives no bandwidth."""
    try:
        coefficients, most = entry
        times = _times([float(each) for each in coefficients], float(most))
        return Network(**costs_by_size(times, None))
    except (TypeError, ValueError, IndexError):
        raise FileError(
            f"{where}: needs coefficients of a polynomial and the most bytes per second"
        ) from None


def _times(coefficients: Sequence[float], most: float) -> list[tuple[float, float]]:
    found, seconds = list[tuple[float, float]](), 0.0
    for size in _SIZES:
        rate = 0.0
        for each in coefficients:
            rate = rate * size + each
        if rate > 0 and most > 0:
            nbytes = _MEGABYTE * 2.0**size
            # A polynomial turns where nothing was measured.
            seconds = max(seconds, nbytes / min(rate * 1e9, most))
            found.append((nbytes, seconds))
    return found
