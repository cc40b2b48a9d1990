"""The cluster: devices with their memory and speed, and the links between them."""

from __future__ import annotations

import sys
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


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Devices in the order in which stages are laid over them."""

    devices: Annotated[tuple[Device, ...], Meta(min_length=1)]
    network: Network


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

    Raises FileError naming the file and the field.
    """
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; describe the cluster there, or use flags") from None
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None
    unknown = set(found) - {"devices", "network"}
    if unknown:
        raise FileError(f"{path}: unknown table {sorted(unknown)[0]!r}; known: devices, network")
    listed = found.get("devices")
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
    network = _table(path, "network", found.get("network", {}), {"bandwidth", "latency"})
    bandwidth = str(network.get("bandwidth", DEFAULT_BANDWIDTH))
    latency = str(network.get("latency", DEFAULT_LATENCY))
    built = {
        "devices": devices,
        "network": {
            "bandwidth_bytes_per_s": parse_bandwidth(bandwidth, f"{path}: network.bandwidth"),
            "latency_s": parse_seconds(latency, f"{path}: network.latency"),
        },
    }
    try:
        return msgspec.convert(built, Cluster)
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: {error}") from None


def _table(path: Path, where: str, value: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{path}: {where}: must be a table")
    unknown = sorted(set(value) - known)
    if unknown:
        raise FileError(
            f"{path}: {where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    return value
