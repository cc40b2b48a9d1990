"""A cluster as a file that `read_cluster` takes: TOML, as people write it (docs/cluster.md)."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from itertools import groupby

import msgspec

from .cluster import Cluster, Device
from .links import AllReduce, Network


def cluster_toml(cluster: Cluster, notes: Sequence[str]) -> str:
    """The cluster as TOML that `read_cluster` takes.

    Args:
        notes: lines for the comment at the top.
    """
    lines = [f"# {note}".rstrip() for note in notes]
    if any(device.memory_bytes is None for device in cluster.devices):
        lines += ["", '# Memory isn\'t known. Say what each device has: memory = "..."']

    def alike(numbered: tuple[int, Device]) -> tuple[Hashable, ...]:
        k, device = numbered
        stem = device.name.removesuffix(str(k))
        same = msgspec.structs.replace(device, name=stem)
        return (same, None) if stem != device.name else (same, k)

    for (device, _), group in groupby(enumerate(cluster.devices), alike):
        assert isinstance(device, Device)
        members = [*group]
        name = device.name if len(members) > 1 else members[0][1].name
        lines += ["", "[[devices]]", f"name = {json.dumps(name)}", f"count = {len(members)}"]
        speed = device.speed / (device.kind_speed or 1.0)
        lines += [f"speed = {speed!r}"] if speed != 1 else []
        for field, value in (
            ("memory", device.memory_bytes),
            ("reserved", device.reserved_bytes),
            ("reserved", device.reserved_share and f"{device.reserved_share:.10%}"),
            ("machine", device.machine),
            ("group", device.group),
            ("kind", device.kind),
        ):
            text = f"{value}B" if isinstance(value, int) else value
            lines += [f"{field} = {json.dumps(text)}"] if text is not None else []
    sums = "[all_reduce]" if len(cluster.sums) == 1 else "[[all_reduce]]"
    tables: list[tuple[str, list[str], Network | AllReduce]] = [
        ("[network]", [], cluster.network),
        *(("[between_machines]", [], each) for each in [cluster.between_machines] if each),
        *(
            ("[[links]]", [f"between = {json.dumps(each.between)}"], each.network)
            for each in cluster.links
        ),
        *((sums, [f"processes = {each.processes}"], each) for each in cluster.sums),
    ]
    for title, first, timed in tables:
        lines += ["", title, *first, *_timed_toml(timed)]
    return "\n".join(lines) + "\n"


def _timed_toml(timed: Network | AllReduce) -> list[str]:
    # In a table times differ from the latency by little.
    latency = f'latency = "{write_latency(timed.latency_s, 9 if timed.times else 3)}"'
    if timed.times:
        rows = [f'    [{size:.0f}, "{write_latency(s, 9)}"],' for size, s in timed.times]
        lines = [latency, "times = [", *rows, "]"]
    else:
        lines = [f'bandwidth = "{write_bandwidth(timed.bandwidth_bytes_per_s)}"', latency]
    if isinstance(timed, Network):
        lines += ["half_duplex = true"] * timed.half_duplex
        lines += ["overlap = false"] * (not timed.overlap)
    return lines


def write_bandwidth(bytes_per_s: float) -> str:
    """Bytes per second to three digits, as `parse_bandwidth` reads them: ``"4.31GB/s"``."""
    units = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    return _with_digits(bytes_per_s, units)


def write_latency(seconds: float, digits: int = 3) -> str:
    """Seconds to so many digits, as `parse_seconds` reads them: ``"52.1us"``."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    return _with_digits(seconds, units, digits)


def _with_digits(value: float, units: Sequence[tuple[float, str]], digits: int = 3) -> str:
    # Rounded before the unit is chosen: 999.6us is 1ms.
    value = float(f"{value:.{digits}g}")
    factor, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / factor:.{max(digits, 6)}g}{name}"
