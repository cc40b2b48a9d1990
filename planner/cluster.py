"""The cluster: devices with their memory and speed, and the links between them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..profiles.errors import FileError
from ..profiles.units import parse_bandwidth, parse_bytes, parse_seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What gloo gives between two processes of one machine.
DEFAULT_BANDWIDTH = "4GB/s"
DEFAULT_LATENCY = "50us"

MAX_DEVICES = 65536


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device; a stage runs on it."""

    name: str
    memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    """None: no limit."""
    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Relative to the device that was profiled: 2 halves every time."""


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The link between any two devices; full duplex, and transfers overlap computing."""

    bandwidth_bytes_per_s: Annotated[float, Meta(gt=0)]
    latency_s: Annotated[float, Meta(ge=0)]

    def wire_s(self, count: float) -> float:
        """Seconds that `count` bytes keep the wire busy, latency left out."""
        return count / self.bandwidth_bytes_per_s


class AllReduce(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sum over processes as measured: latency + bytes of the tensor / bandwidth."""

    processes: Annotated[int, Meta(ge=2)]
    """How many took part; other numbers of processes take other times."""
    latency_s: Annotated[float, Meta(ge=0)]
    bandwidth_bytes_per_s: Annotated[float, Meta(gt=0)]


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Devices in the order in which stages are laid over them."""

    devices: Annotated[tuple[Device, ...], Meta(min_length=1)]
    network: Network
    all_reduce: AllReduce | None = None
    """None: not measured."""


def uniform_cluster(
    devices: int,
    memory: str | None = None,
    bandwidth: str = DEFAULT_BANDWIDTH,
    latency: str = DEFAULT_LATENCY,
) -> Cluster:
    """A cluster of equal devices, from amounts as people write them.

    Raises UserError naming the amount that can't be read.
    """
    memory_bytes = parse_bytes(memory, "memory") if memory else None
    if memory_bytes is not None and memory_bytes < 1:
        raise FileError(f"memory: must be more than 0, not {memory!r}")
    return Cluster(
        devices=tuple(Device(name=f"device{k}", memory_bytes=memory_bytes) for k in range(devices)),
        network=Network(
            bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
            latency_s=parse_seconds(latency, "latency"),
        ),
    )


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from TOML (docs/files.md has an example).

    Raises FileError or UserError naming the file and the field.
    """
    path = Path(path)
    found = _read_toml(path)
    known = ("devices", "network", "all_reduce")
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise FileError(f"{path}: unknown table {unknown[0]!r}; known: {', '.join(known)}")
    built: dict[str, Any] = {"devices": _devices(path, found.get("devices"))}
    network = _table(path, "network", found.get("network", {}), {"bandwidth", "latency"})
    defaults = {"bandwidth": DEFAULT_BANDWIDTH, "latency": DEFAULT_LATENCY}
    built["network"] = _link(path, "network", defaults | network)
    if "all_reduce" in found:
        built["all_reduce"] = _all_reduce(path, found["all_reduce"])
    try:
        return msgspec.convert(built, Cluster)
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; describe the cluster there, or use flags") from None
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None


def _devices(path: Path, listed: Any) -> list[dict[str, Any]]:
    if not isinstance(listed, list) or not listed:
        raise FileError(f"{path}: [[devices]]: give one or more devices")
    devices: list[dict[str, Any]] = []
    for k, entry in enumerate(listed):
        fields = _table(path, f"devices[{k}]", entry, {"name", "memory", "speed", "count"})
        device: dict[str, Any] = {"speed": fields.get("speed", 1.0)}
        if "memory" in fields:
            where = f"{path}: devices[{k}].memory"
            device["memory_bytes"] = parse_bytes(str(fields["memory"]), where)
        count = fields.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MAX_DEVICES:
            raise FileError(f"{path}: devices[{k}].count: give a whole number from 1")
        for _ in range(count):
            name = str(fields.get("name", "device"))
            if count > 1 or "name" not in fields:
                name += str(len(devices))
            devices.append({**device, "name": name})
    return devices


def _all_reduce(path: Path, value: Any) -> dict[str, Any]:
    needed = ("processes", "latency", "bandwidth")
    fields = _table(path, "all_reduce", value, set(needed))
    missing = [name for name in needed if name not in fields]
    if missing:
        raise FileError(f"{path}: all_reduce.{missing[0]}: is missing; or leave all_reduce out")
    processes = fields["processes"]
    if type(processes) is not int or processes < 2:
        raise FileError(f"{path}: all_reduce.processes: give a whole number from 2")
    return {"processes": processes, **_link(path, "all_reduce", fields)}


def _link(path: Path, where: str, fields: dict[str, Any]) -> dict[str, float]:
    return {
        "bandwidth_bytes_per_s": parse_bandwidth(
            str(fields["bandwidth"]), f"{path}: {where}.bandwidth"
        ),
        "latency_s": parse_seconds(str(fields["latency"]), f"{path}: {where}.latency"),
    }


def _table(path: Path, where: str, value: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{path}: {where}: must be a table")
    unknown = sorted(set(value) - known)
    if unknown:
        raise FileError(
            f"{path}: {where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    return value


def measured_cluster(
    device: str, network: Network, all_reduce: AllReduce, notes: Sequence[str]
) -> str:
    """The TOML of a cluster whose links were measured, as `read_cluster` takes it.

    Args:
        device: what the devices are called, up to their numbers: "cpu". There is one for each
            process of the all-reduce.
        notes: lines for the comment at the top.
    """
    lines = [
        *(f"# {note}".rstrip() for note in notes),
        "",
        "[[devices]]",
        f'name = "{device}"',
        f"count = {all_reduce.processes}",
        '# Memory was not measured. Say what each device has: memory = "..."',
        "",
        "[network]",
        f'bandwidth = "{write_bandwidth(network.bandwidth_bytes_per_s)}"',
        f'latency = "{write_latency(network.latency_s)}"',
        "",
        "[all_reduce]",
        f"processes = {all_reduce.processes}",
        f'bandwidth = "{write_bandwidth(all_reduce.bandwidth_bytes_per_s)}"',
        f'latency = "{write_latency(all_reduce.latency_s)}"',
    ]
    return "\n".join(lines) + "\n"


def write_bandwidth(bytes_per_s: float) -> str:
    """Bytes per second to three digits, as `parse_bandwidth` reads them: ``"4.31GB/s"``."""
    units = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    return _three_digits(bytes_per_s, units)


def write_latency(seconds: float) -> str:
    """Seconds to three digits, as `parse_seconds` reads them: ``"52.1us"``."""
    return _three_digits(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def _three_digits(value: float, units: Sequence[tuple[float, str]]) -> str:
    # Rounded before the unit is chosen: 999.6us is 1ms.
    value = float(f"{value:.3g}")
    factor, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / factor:g}{name}"
